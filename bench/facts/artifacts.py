"""What storing an artifact costs: 2 MiB at a time, and one of a gigabyte in bounded memory.

    python bench/facts/artifacts.py             files and S3, one line of JSON at the end, exit 1 where a bar is missed
    python bench/facts/artifacts.py --quick     a tenth of it: to see that it runs, not to judge by

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

from ergon_framework.facts.boundary import CHUNK
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.s3 import S3Contents
from tests.servers.seaweed import ACCESS, PrivateSeaweed

SMALL, LARGE = 2 * 1024 * 1024, 1024 * 1024 * 1024
#: Milliseconds within which 2 MiB are stored (FAC-22), and megabytes by which a process may grow on a gigabyte.
BAR_MS, BAR_MB = 500.0, 20.0


def pieces(size, seed):
    """Bytes of their own for each artifact, made without a second copy of them in memory."""
    block = bytearray(os.urandom(CHUNK))
    for number in range(size // CHUNK):
        block[:16] = f"{seed:08d}{number:08d}".encode()
        yield bytes(block)


def store(contents, size, seed, name=None):
    with contents.receive(name) as receiving:
        for piece in pieces(size, seed):
            receiving.add(piece)
        return receiving.seal()


def small(contents, count):
    """Milliseconds of each of *count* artifacts of 2 MiB."""
    store(contents, SMALL, 0)
    took = []
    for seed in range(1, count + 1):
        began = time.perf_counter()
        store(contents, SMALL, seed)
        took.append((time.perf_counter() - began) * 1e3)
    took.sort()
    return {"p50_ms": round(statistics.median(took), 2), "p99_ms": round(took[int(len(took) * 0.99)], 2)}


def large(contents, size, name=None):
    """Megabytes a second, and megabytes by which the process has grown at its largest."""
    store(contents, 4 * SMALL, 1_000_000)
    gc.collect()
    process = psutil.Process()
    before, most, at = process.memory_info().rss, 0, 0
    began = time.perf_counter()
    with contents.receive(name) as receiving:
        for number, piece in enumerate(pieces(size, 2_000_000)):
            receiving.add(piece)
            if number % 64 == 0:
                most = max(most, process.memory_info().rss)
        at = time.perf_counter()
        stored = receiving.seal()
    most = max(most, process.memory_info().rss)
    took = time.perf_counter() - began
    read_began = time.perf_counter()
    for number, _ in enumerate(contents.read(stored.digest)):
        if number % 64 == 0:
            most = max(most, process.memory_info().rss)
    return {
        "MB_per_s": round(size / took / 1e6, 1),
        "seal_s": round(time.perf_counter() - at - (time.perf_counter() - read_began), 2),
        "read_MB_per_s": round(size / (time.perf_counter() - read_began) / 1e6, 1),
        "grown_MB": round((most - before) / 1e6, 1),
    }


def bare(folder, size):
    began = time.perf_counter()
    with (folder / "bare").open("wb") as file:
        for piece in pieces(size, 3_000_000):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return round(size / (time.perf_counter() - began) / 1e6, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    options = parser.parse_args()
    share = 10 if options.quick else 1
    folder = Path(tempfile.mkdtemp(prefix="ergon-artifacts-", dir=options.folder))
    told = {"quick": options.quick}
    server = PrivateSeaweed(folder / "seaweed")
    try:
        files = FileContents(folder / "files")
        told["files"] = {"durable": files.durable, **small(files, 200 // share)}
        told["bare_MB_per_s"] = bare(folder, LARGE // share)
        told["files_1GiB"] = large(files, LARGE // share)
        told["files_1GiB_resumable"] = large(files, LARGE // share, "resumable")
        shutil.rmtree(folder / "files")
        os.environ.update(ACCESS)
        server.start()
        server.make_bucket("bench")
        s3 = S3Contents("bench", endpoint=server.endpoint)
        told["s3"] = small(s3, 100 // share)
        told["s3_256MiB"] = large(s3, LARGE // 4 // share)
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    told["wrong"] = [
        *(f"{name}: 2 MiB took {told[name]['p99_ms']} ms" for name in ("files", "s3") if told[name]["p99_ms"] > BAR_MS),
        *(
            f"{name}: grown by {told[name]['grown_MB']} MB"
            for name in ("files_1GiB", "files_1GiB_resumable")
            if told[name]["grown_MB"] > BAR_MB
        ),
    ]
    told["ok"] = not told["wrong"]
    print(json.dumps(told))
    return 0 if told["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
