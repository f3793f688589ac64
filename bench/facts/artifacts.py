"""The cost of storing an artifact: 2 MiB at a time, and one of a gigabyte in bounded memory.

    python bench/facts/artifacts.py             files and S3, one line of JSON at the end, exit 1 if a target is missed
    python bench/facts/artifacts.py --quick     a tenth of it: to see that it runs, not for figures

Files are on the disk of --folder. S3 is a SeaweedFS on this machine, so both ends share its processors. The bare
figure is the same bytes written to one file and synced, without hash, name or folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.s3 import S3ContentStore
from tests.servers.seaweed import CREDENTIALS, PrivateSeaweed

SMALL_BYTES, LARGE_BYTES = 2 * 1024 * 1024, 1024 * 1024 * 1024
#: Milliseconds within which 2 MiB are stored (FAC-22), and megabytes by which a process may grow on a gigabyte.
BAR_MS, BAR_MB = 500.0, 20.0


def generate_chunks(size, seed):
    """Yield unique bytes for each artifact, without a second copy of them in memory."""
    block = bytearray(os.urandom(CHUNK_BYTES))
    for number in range(size // CHUNK_BYTES):
        block[:16] = f"{seed:08d}{number:08d}".encode()
        yield bytes(block)


def store_artifact(contents, size, seed, name=None):
    with contents.begin_upload(name) as upload:
        for chunk in generate_chunks(size, seed):
            upload.add(chunk)
        return upload.commit()


def measure_small(contents, count):
    """Return the milliseconds of each of *count* artifacts of 2 MiB."""
    store_artifact(contents, SMALL_BYTES, 0)
    durations_ms = []
    for seed in range(1, count + 1):
        began = time.perf_counter()
        store_artifact(contents, SMALL_BYTES, seed)
        durations_ms.append((time.perf_counter() - began) * 1e3)
    durations_ms.sort()
    return {
        "p50_ms": round(statistics.median(durations_ms), 2),
        "p99_ms": round(durations_ms[int(len(durations_ms) * 0.99)], 2),
    }


def measure_large(contents, size, name=None):
    """Return megabytes per second, and the maximum growth of the process in megabytes."""
    store_artifact(contents, 4 * SMALL_BYTES, 1_000_000)
    gc.collect()
    process = psutil.Process()
    before, max_rss, received_at = process.memory_info().rss, 0, 0
    began = time.perf_counter()
    with contents.begin_upload(name) as upload:
        for number, chunk in enumerate(generate_chunks(size, 2_000_000)):
            upload.add(chunk)
            if number % 64 == 0:
                max_rss = max(max_rss, process.memory_info().rss)
        received_at = time.perf_counter()
        stored = upload.commit()
    max_rss = max(max_rss, process.memory_info().rss)
    seconds = time.perf_counter() - began
    read_start = time.perf_counter()
    for number, _ in enumerate(contents.read(stored.digest)):
        if number % 64 == 0:
            max_rss = max(max_rss, process.memory_info().rss)
    return {
        "MB_per_s": round(size / seconds / 1e6, 1),
        "seal_s": round(time.perf_counter() - received_at - (time.perf_counter() - read_start), 2),
        "read_MB_per_s": round(size / (time.perf_counter() - read_start) / 1e6, 1),
        "grown_MB": round((max_rss - before) / 1e6, 1),
    }


def measure_bare(folder, size):
    began = time.perf_counter()
    with (folder / "bare").open("wb") as file:
        for chunk in generate_chunks(size, 3_000_000):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return round(size / (time.perf_counter() - began) / 1e6, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    options = parser.parse_args()
    divisor = 10 if options.quick else 1
    folder = Path(tempfile.mkdtemp(prefix="ergon-artifacts-", dir=options.folder))
    result = {"quick": options.quick}
    server = PrivateSeaweed(folder / "seaweed")
    try:
        files = FileContentStore(folder / "files")
        result["files"] = {"durable": files.durable, **measure_small(files, 200 // divisor)}
        result["bare_MB_per_s"] = measure_bare(folder, LARGE_BYTES // divisor)
        result["files_1GiB"] = measure_large(files, LARGE_BYTES // divisor)
        result["files_1GiB_resumable"] = measure_large(files, LARGE_BYTES // divisor, "resumable")
        shutil.rmtree(folder / "files")
        os.environ.update(CREDENTIALS)
        server.start()
        server.create_bucket("bench")
        s3 = S3ContentStore("bench", endpoint=server.endpoint)
        result["s3"] = measure_small(s3, 100 // divisor)
        result["s3_256MiB"] = measure_large(s3, LARGE_BYTES // 4 // divisor)
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    result["wrong"] = [
        *(
            f"{name}: 2 MiB took {result[name]['p99_ms']} ms"
            for name in ("files", "s3")
            if result[name]["p99_ms"] > BAR_MS
        ),
        *(
            f"{name}: grown by {result[name]['grown_MB']} MB"
            for name in ("files_1GiB", "files_1GiB_resumable")
            if result[name]["grown_MB"] > BAR_MB
        ),
    ]
    result["ok"] = not result["wrong"]
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
