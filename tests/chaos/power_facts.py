"""Power loss: checks that confirmed facts and artifacts survive when the machine loses power while storing them.

The folder of the artifacts is on an XFS image, and so are the folders of the servers with the facts. While they are at
work they are frozen, and the image is copied below the filesystem: the copy holds what had reached the device, and
nothing that only the kernel had. Everything that was confirmed before must be on the copy, with a matching digest;
everything that can be read there under a digest must match it, confirmed or not; and a named upload in progress must
continue.

Each half of the rig is a class with five steps (``begin``, ``enough``, ``freeze``, ``left``, ``wrong``). The last line
is JSON, and the exit code is 1 on a miss.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.facts.model import StoredArtifact
from ergon_framework.facts.stores import file_uploads
from ergon_framework.facts.stores.file_uploads import SYNC_INTERVAL_BYTES
from ergon_framework.facts.stores.files import FileContentStore
from tests.chaos.power import Disk
from tests.chaos.power_store import Facts, UndurableFacts

MIN_ARTIFACTS = 500
MIN_FACTS = 5_000
WRITERS = 6
#: Two servers, and more artifacts than are requested.
IMAGE_BYTES = 2 * 1024**3
#: Seconds after which a run without enough confirmations is given up.
CONFIRM_TIMEOUT_SECONDS = 240.0
#: A named upload that is in progress at the power loss.
LONG_UPLOAD_KEY = "long"
LONG_BYTES = 256 * 1024 * 1024


def make_content(number: int) -> bytes:
    """Return the bytes of one artifact, which are unique; some have several pieces."""
    rng = random.Random(number)
    return str(number).encode() + rng.randbytes(rng.choice((0, 1, 5_000, 60_000, 300_000, 700_000)))


# -- the process that is frozen -------------------------------------------------------------------------


def write_artifacts(folder: Path) -> None:
    """Store artifacts without end, and print one line with the digest of each confirmed one."""
    contents = FileContentStore(folder)
    print_lock = threading.Lock()
    # One piece of the long upload for each other artifact, so that it is in the middle when they are enough.
    permits = threading.Semaphore(0)

    def emit(*values: object) -> None:
        with print_lock:
            print(*values, flush=True)

    def store_artifacts(writer: int) -> None:
        for number in range(writer, sys.maxsize, WRITERS):
            data = make_content(number)
            # Every other upload could be resumed.
            with contents.begin_upload(f"upload{number}" if number % 2 else None) as upload:
                for start in range(0, len(data), 100_000):
                    upload.add(data[start : start + 100_000])
                emit("stored", upload.commit().digest)
            permits.release()

    def store_long_upload() -> None:
        long_rng = random.Random(LONG_UPLOAD_KEY)
        with contents.begin_upload(LONG_UPLOAD_KEY) as upload:
            for _ in range(LONG_BYTES // 65_536):
                permits.acquire()
                upload.add(long_rng.randbytes(65_536))
                emit("under-way", upload.size)

    threads = [threading.Thread(target=store_artifacts, args=(writer,), daemon=True) for writer in range(WRITERS)]
    threads.append(threading.Thread(target=store_long_upload, daemon=True))
    for thread in threads:
        thread.start()
    emit("durable", contents.durable)
    for thread in threads:
        thread.join()


# -- the halves -----------------------------------------------------------------------------------------


class Artifacts:
    """Artifacts in a folder on the disk."""

    def __init__(self, disk: Path) -> None:
        self._folder = disk / "artifacts"
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.durable: str | None = None
        self.confirmed: set[str] = set()
        self._uploaded_bytes = 0

    def begin(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--write", str(self._folder)], stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def _read_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, value = line.split()
            if kind == "stored":
                self.confirmed.add(value)
            elif kind == "under-way":
                self._uploaded_bytes = int(value)
            else:
                self.durable = value

    def has_enough(self, count: int) -> bool:
        # The long upload also needs a synced stretch, and half of the next one.
        return (
            len(self.confirmed) >= count
            and self._uploaded_bytes % SYNC_INTERVAL_BYTES > SYNC_INTERVAL_BYTES // 2
            and self._uploaded_bytes > SYNC_INTERVAL_BYTES
        )

    def freeze(self) -> None:
        """Stop it, and wait until it has stopped: nothing is written any more."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        while stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.001)

    def end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join()

    def inspect(self, disk: Path) -> dict[str, Any]:
        """Return what is there after the power loss."""
        intact_by_digest = {
            f"sha256:{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() == path.name
            for path in (disk / "artifacts" / "objects").glob("*/*/*")
        }
        return {
            "durable": self.durable,
            "confirmed": len(self.confirmed),
            "found": len(intact_by_digest),
            "lost": sum(digest not in intact_by_digest for digest in self.confirmed),
            "damaged": sum(not is_intact for is_intact in intact_by_digest.values()),
            "went on at": self._resume_upload(disk),
        }

    def find_problems(self, state: dict[str, Any], min_confirmed: int) -> list[str]:
        problems = []
        if state["confirmed"] < min_confirmed:
            problems.append(f"only {state['confirmed']} artifacts were confirmed")
        if state["lost"]:
            problems.append(f"{state['lost']} confirmed artifacts are lost")
        if state["damaged"]:
            problems.append(f"{state['damaged']} artifacts can be read and are not what their digest says")
        if state["durable"] != "True":
            problems.append(f"XFS was called durable: {state['durable']}")
        if state["went on at"] == 0:
            problems.append("nothing was left of the upload that was under way")
        return problems

    def _resume_upload(self, disk: Path) -> int:
        """Return the offset at which the upload in progress resumes after the restart: unsynced bytes are gone."""
        file_uploads.boot_id = lambda: "another run of the machine"
        contents = FileContentStore(disk / "artifacts")
        offset = contents.uploaded_bytes(LONG_UPLOAD_KEY)
        long_rng = random.Random(LONG_UPLOAD_KEY)
        data = b"".join(long_rng.randbytes(65_536) for _ in range(offset // 65_536 + 8))
        expected = StoredArtifact(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
        with contents.begin_upload(LONG_UPLOAD_KEY, begin=offset) as upload:
            upload.add(data[offset:])
            upload.commit(expected)
        contents.close()
        return offset


HALVES = (Artifacts, Facts, UndurableFacts)


def lose_power(folder: Path, min_confirmed: dict[str, int]) -> dict[str, Any]:
    """Do one run over all halves; return what was confirmed, how much of that was lost, and what is wrong."""
    folder.mkdir()
    folder.chmod(0o755)
    disk = Disk(folder / "before.img", folder / "before")
    disk.create(IMAGE_BYTES)
    with disk.mount() as mounted:
        halves = {half.__name__: half(mounted) for half in HALVES}
        try:
            for half in halves.values():
                half.begin()
            deadline = time.monotonic() + CONFIRM_TIMEOUT_SECONDS
            while (
                not all(half.has_enough(min_confirmed[name]) for name, half in halves.items())
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            for half in halves.values():
                half.freeze()
            # Confirmations that are still in a pipe were sent before; they count.
            time.sleep(0.2)
            copy = disk.copy_to(folder / "after")
        finally:
            for half in halves.values():
                half.end()
    with copy.mount() as mounted:
        states = {name: half.inspect(mounted) for name, half in halves.items()}
    problems = [
        problem for name, half in halves.items() for problem in half.find_problems(states[name], min_confirmed[name])
    ]
    return states | {"wrong": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--confirmed", type=int, default=MIN_ARTIFACTS, help="artifacts to be confirmed before the power goes"
    )
    parser.add_argument("--facts", type=int, default=MIN_FACTS, help="facts to be confirmed before the power goes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write_artifacts(options.write)
        return 0
    min_confirmed = {"Artifacts": options.confirmed, "Facts": options.facts, "UndurableFacts": options.facts}
    folder = Path(tempfile.mkdtemp(prefix="ergon-power-"))
    folder.chmod(0o755)
    runs: list[dict[str, Any]] = []
    try:
        for number in range(options.rounds):
            runs.append(lose_power(folder / f"{number}", min_confirmed))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            shutil.rmtree(folder / f"{number}", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    summary = _summarize(runs)
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


def _summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    def sum_counts(half: type, count: str) -> int:
        return sum(run[half.__name__][count] for run in runs)

    problems = [problem for run in runs for problem in run["wrong"]]
    return {
        "ok": not problems,
        "wrong": problems,
        "cuts": len(runs),
        "artifacts confirmed": sum_counts(Artifacts, "confirmed"),
        "artifacts lost": sum_counts(Artifacts, "lost"),
        "artifacts damaged": sum_counts(Artifacts, "damaged"),
        "facts confirmed": sum_counts(Facts, "confirmed"),
        "facts lost": sum_counts(Facts, "lost"),
        "facts confirmed with synchronous_commit off": sum_counts(UndurableFacts, "confirmed"),
        "facts lost with synchronous_commit off": sum_counts(UndurableFacts, "lost"),
    }


if __name__ == "__main__":
    sys.exit(main())
