"""Power loss: what is left of confirmed dispatches when the machine goes dark in the middle of them.

The server's folder is on an XFS image. While dispatchers are at work the server is frozen and the image
is copied below the filesystem: the copy holds what had reached the device, and nothing of what only the
kernel knew. A server that is started on the copy is the one after the power came back; whatever was
confirmed before the server was frozen has to be in it.

Twice: with the settings that the connector calls durable, where nothing may be lost, and with
synchronous_commit off, where the connector has to have said so and losses are shown, not forbidden.

The last line is JSON. The exit code is 1 if anything confirmed was lost where the connector had called
it durable, if the connector was silent where it is not, or if too little had been confirmed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework import ErgonError, Transaction
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.schema.migrate import upgrade
from tests.servers.postgres import PrivatePostgres

QUEUE = "power"
ENOUGH = 5_000
SENDERS = 8
#: Seconds before a run without enough confirmations is given up.
PATIENCE = 120.0
#: Seconds that the dead may keep a disk busy.
LEAVING = 20.0
IMAGE = 640 * 1024 * 1024


class Disk:
    """A filesystem of its own in a file, mounted at *folder*."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image = image
        self.folder = folder

    def make(self, size: int = IMAGE) -> None:
        with self.image.open("wb") as file:
            file.truncate(size)
        _run("mkfs.xfs", "-q", str(self.image))

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        self.folder.mkdir(parents=True, exist_ok=True)
        # A copy has the identity of its original, which XFS would not mount twice.
        _run("mount", "-o", "loop,nouuid", str(self.image), str(self.folder))
        try:
            yield self.folder
        finally:
            self._unmount()

    def _unmount(self) -> None:
        """Whoever was killed may take a moment to let go of its files."""
        end = time.monotonic() + LEAVING
        while time.monotonic() < end:
            if subprocess.run(["umount", str(self.folder)], capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.1)
        _run("umount", str(self.folder))

    def copied(self, to: Path) -> Disk:
        """What has reached the device so far, as another disk; whoever writes to this one must be frozen."""
        image = to.with_suffix(".img")
        _run("cp", "--sparse=always", str(self.image), str(image))
        return Disk(image, to)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is missing; install xfsprogs and util-linux") from None
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()} (this rig needs root, loop devices and XFS)")


class Hearing(logging.Handler):
    """Keeps what the connector says about durability."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, Any, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((record.levelname, getattr(record, "durable", None), getattr(record, "words", None)))


class Senders:
    """Threads that dispatch one by one and keep what was confirmed, with the time at which they knew."""

    def __init__(self, dsn: str) -> None:
        self.queue = PostgresQueue(QUEUE, dsn=dsn)
        self.confirmed: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(n,), daemon=True) for n in range(SENDERS)]

    def start(self) -> None:
        self.queue.open()
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _send(self, sender: int) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                [told] = self.queue.dispatch([Transaction(f"{sender}-{number}", {"number": number})])
            except ErgonError:
                if self._over.wait(0.01):
                    return
            else:
                self.confirmed.append(told.transaction_id)


def _processes(postmaster: int) -> list[int]:
    """The server with all its children."""
    found = [postmaster]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            if int(words[1]) == postmaster:
                found.append(int(stat.parent.name))
    return found


def freeze(postmaster: int) -> None:
    """Stop all of it, and wait until all have stopped: nothing is written any more."""
    pids = _processes(postmaster)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat")
            while stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] not in "TZ":
                time.sleep(0.001)


def lose_power(folder: Path, settings: dict[str, str], enough: int) -> dict[str, Any]:
    """One run: what the connector said, how much was confirmed, and how much of that was lost."""
    folder.mkdir()
    # The server's user has to get to it.
    folder.chmod(0o755)
    disk = Disk(folder / "before.img", folder / "before")
    disk.make()
    hearing = Hearing()
    log = logging.getLogger("ergon_framework.connectors.postgres.home")
    log.addHandler(hearing)
    log.setLevel(logging.INFO)
    with disk.mounted() as mounted:
        server = PrivatePostgres(mounted / "server", settings=settings)
        senders = Senders(server.dsn())
        try:
            server.start()
            upgrade(server.dsn())
            # initdb does not sync, and a power loss before the beginning is not the question.
            os.sync()
            senders.start()
            said = {"durable": senders.queue.capabilities.durable, "words": senders.queue.durability}
            until = time.monotonic() + PATIENCE
            while len(senders.confirmed) < enough and time.monotonic() < until:
                time.sleep(0.01)
            freeze(server.pid)
            # What a sender hears from now on was on its way before, so it counts: the server is silent.
            time.sleep(0.2)
            confirmed = list(senders.confirmed)
            after = disk.copied(folder / "after")
        finally:
            server.kill()
            senders.end()
    log.removeHandler(hearing)
    left = _left(after, settings)
    lost = sorted(set(confirmed) - left)
    return {
        "settings": settings,
        "said": said,
        "told at start": hearing.said[:1],
        "confirmed": len(confirmed),
        "found": len(left),
        "lost": len(lost),
    }


def _left(disk: Disk, settings: dict[str, str]) -> set[str]:
    """The ids that a server finds on what is left."""
    with disk.mounted() as mounted:
        pid = mounted / "server" / "data" / "postmaster.pid"
        pid.unlink(missing_ok=True)
        server = PrivatePostgres(mounted / "server", settings=settings)
        try:
            server.start()
            with psycopg.connect(server.dsn()) as connection:
                return {row[0] for row in connection.execute("select transaction_id from ergon.ready")}
        finally:
            server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--confirmed", type=int, default=ENOUGH, help="dispatches to be confirmed before the power goes"
    )
    parser.add_argument("--rounds", type=int, default=3, help="with synchronous_commit on; as many with off")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ergon-power-"))
    folder.chmod(0o755)
    runs: list[dict[str, Any]] = []
    try:
        for number in range(options.rounds):
            for commit in ("on", "off"):
                # Slow to write by itself: what it has not synced is then surely not on the device.
                settings = {"synchronous_commit": commit, "wal_writer_delay": "10s"}
                runs.append(lose_power(folder / f"{commit}-{number}", settings, options.confirmed))
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                shutil.rmtree(folder / f"{commit}-{number}", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    told = _told(runs, options.confirmed)
    print(json.dumps(told))
    return 0 if told["ok"] else 1


def _told(runs: list[dict[str, Any]], enough: int) -> dict[str, Any]:
    on = [run for run in runs if run["settings"]["synchronous_commit"] == "on"]
    off = [run for run in runs if run["settings"]["synchronous_commit"] == "off"]
    wrong = [f"only {run['confirmed']} were confirmed" for run in runs if run["confirmed"] < enough]
    wrong += [f"{run['lost']} lost that were called durable" for run in on if run["lost"]]
    wrong += ["a durable server was not called so" for run in on if run["said"]["durable"] is not True]
    wrong += ["an undurable server was not called so" for run in off if run["said"]["durable"] is not False]
    wrong += ["nothing was said at start" for run in runs if not run["told at start"]]
    return {
        "ok": not wrong,
        "wrong": wrong,
        "confirmed": sum(run["confirmed"] for run in on),
        "lost": sum(run["lost"] for run in on),
        "confirmed with synchronous_commit off": sum(run["confirmed"] for run in off),
        "lost with synchronous_commit off": sum(run["lost"] for run in off),
        "said": sorted({run["said"]["words"] for run in runs}),
    }


if __name__ == "__main__":
    sys.exit(main())
