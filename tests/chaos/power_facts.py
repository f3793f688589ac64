"""Power loss: what is left of confirmed facts and artifacts when the machine goes dark in the middle of storing them.

The folder of the artifacts is on an XFS image, and so are the folders of the servers with the facts. While they are at
work they are frozen, and the image is copied below the filesystem: the copy holds what had reached the device, and
nothing of what only the kernel knew. Whatever was confirmed before has to be on the copy, with its digest right;
whatever can be read there under a digest has to have it, confirmed or not; and a named upload that was under way has
to go on.

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

from ergon_framework.facts.model import Stored
from ergon_framework.facts.stores import file_uploads
from ergon_framework.facts.stores.file_uploads import SYNC
from ergon_framework.facts.stores.files import FileContents
from tests.chaos.power import Disk
from tests.chaos.power_store import Facts, UndurableFacts

ENOUGH = 500
ENOUGH_FACTS = 5_000
WRITERS = 6
#: Two servers, and more artifacts than are asked for.
IMAGE = 2 * 1024**3
#: Seconds before a run without enough confirmations is given up.
PATIENCE = 240.0
#: A named upload that is under way when the power goes.
LONG = "long"
LONG_BYTES = 256 * 1024 * 1024


def content(number: int) -> bytes:
    """The bytes of one artifact, of which no other has the same; some are of several pieces."""
    dice = random.Random(number)
    return str(number).encode() + dice.randbytes(dice.choice((0, 1, 5_000, 60_000, 300_000, 700_000)))


# -- the process that is frozen -------------------------------------------------------------------------


def write(folder: Path) -> None:
    """Store artifacts for ever, and say of each that it is confirmed: its digest, on a line of its own."""
    contents = FileContents(folder)
    speaking = threading.Lock()
    # A piece of the long one for each of the others, so that it is in the middle when they are enough.
    pace = threading.Semaphore(0)

    def say(*words: object) -> None:
        with speaking:
            print(*words, flush=True)

    def store(writer: int) -> None:
        for number in range(writer, sys.maxsize, WRITERS):
            data = content(number)
            # Every other one could be gone on with.
            with contents.receive(f"upload{number}" if number % 2 else None) as receiving:
                for start in range(0, len(data), 100_000):
                    receiving.add(data[start : start + 100_000])
                say("stored", receiving.seal().digest)
            pace.release()

    def store_slowly() -> None:
        made = random.Random(LONG)
        with contents.receive(LONG) as receiving:
            for _ in range(LONG_BYTES // 65_536):
                pace.acquire()
                receiving.add(made.randbytes(65_536))
                say("under-way", receiving.size)

    threads = [threading.Thread(target=store, args=(writer,), daemon=True) for writer in range(WRITERS)]
    threads.append(threading.Thread(target=store_slowly, daemon=True))
    for thread in threads:
        thread.start()
    say("durable", contents.durable)
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
        self._under_way = 0

    def begin(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--write", str(self._folder)], stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what, word = line.split()
            if what == "stored":
                self.confirmed.add(word)
            elif what == "under-way":
                self._under_way = int(word)
            else:
                self.durable = word

    def enough(self, count: int) -> bool:
        # And of the long one a stretch that was synced, and half of the next.
        return len(self.confirmed) >= count and self._under_way % SYNC > SYNC // 2 and self._under_way > SYNC

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

    def left(self, disk: Path) -> dict[str, Any]:
        """What there is after the power came back."""
        there = {
            f"sha256:{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() == path.name
            for path in (disk / "artifacts" / "objects").glob("*/*/*")
        }
        return {
            "durable": self.durable,
            "confirmed": len(self.confirmed),
            "found": len(there),
            "lost": sum(digest not in there for digest in self.confirmed),
            "damaged": sum(not right for right in there.values()),
            "went on at": self._gone_on_with(disk),
        }

    def wrong(self, left: dict[str, Any], enough: int) -> list[str]:
        found = []
        if left["confirmed"] < enough:
            found.append(f"only {left['confirmed']} artifacts were confirmed")
        if left["lost"]:
            found.append(f"{left['lost']} confirmed artifacts are lost")
        if left["damaged"]:
            found.append(f"{left['damaged']} artifacts can be read and are not what their digest says")
        if left["durable"] != "True":
            found.append(f"XFS was called durable: {left['durable']}")
        if left["went on at"] == 0:
            found.append("nothing was left of the upload that was under way")
        return found

    def _gone_on_with(self, disk: Path) -> int:
        """Where the upload that was under way goes on: the machine has come up anew, and what was not synced is not."""
        file_uploads.boot = lambda: "another run of the machine"
        contents = FileContents(disk / "artifacts")
        here = contents.received(LONG)
        made = random.Random(LONG)
        data = b"".join(made.randbytes(65_536) for _ in range(here // 65_536 + 8))
        expected = Stored(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
        with contents.receive(LONG, begin=here) as receiving:
            receiving.add(data[here:])
            receiving.seal(expected)
        contents.close()
        return here


HALVES = (Artifacts, Facts, UndurableFacts)


def lose_power(folder: Path, enough: dict[str, int]) -> dict[str, Any]:
    """One run over all halves: what was confirmed, how much of that was lost, and what is wrong with it."""
    folder.mkdir()
    folder.chmod(0o755)
    disk = Disk(folder / "before.img", folder / "before")
    disk.make(IMAGE)
    with disk.mounted() as mounted:
        halves = {half.__name__: half(mounted) for half in HALVES}
        try:
            for half in halves.values():
                half.begin()
            until = time.monotonic() + PATIENCE
            while not all(half.enough(enough[name]) for name, half in halves.items()) and time.monotonic() < until:
                time.sleep(0.01)
            for half in halves.values():
                half.freeze()
            # What is still in a pipe was said before; it counts.
            time.sleep(0.2)
            after = disk.copied(folder / "after")
        finally:
            for half in halves.values():
                half.end()
    with after.mounted() as mounted:
        left = {name: half.left(mounted) for name, half in halves.items()}
    wrong = [words for name, half in halves.items() for words in half.wrong(left[name], enough[name])]
    return left | {"wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--confirmed", type=int, default=ENOUGH, help="artifacts to be confirmed before the power goes")
    parser.add_argument("--facts", type=int, default=ENOUGH_FACTS, help="facts to be confirmed before the power goes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write(options.write)
        return 0
    enough = {"Artifacts": options.confirmed, "Facts": options.facts, "UndurableFacts": options.facts}
    folder = Path(tempfile.mkdtemp(prefix="ergon-power-"))
    folder.chmod(0o755)
    runs: list[dict[str, Any]] = []
    try:
        for number in range(options.rounds):
            runs.append(lose_power(folder / f"{number}", enough))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            shutil.rmtree(folder / f"{number}", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    told = _told(runs)
    print(json.dumps(told))
    return 0 if told["ok"] else 1


def _told(runs: list[dict[str, Any]]) -> dict[str, Any]:
    def all_of(half: type, count: str) -> int:
        return sum(run[half.__name__][count] for run in runs)

    wrong = [words for run in runs for words in run["wrong"]]
    return {
        "ok": not wrong,
        "wrong": wrong,
        "cuts": len(runs),
        "artifacts confirmed": all_of(Artifacts, "confirmed"),
        "artifacts lost": all_of(Artifacts, "lost"),
        "artifacts damaged": all_of(Artifacts, "damaged"),
        "facts confirmed": all_of(Facts, "confirmed"),
        "facts lost": all_of(Facts, "lost"),
        "facts confirmed with synchronous_commit off": all_of(UndurableFacts, "confirmed"),
        "facts lost with synchronous_commit off": all_of(UndurableFacts, "lost"),
    }


if __name__ == "__main__":
    sys.exit(main())
