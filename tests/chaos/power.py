"""Power loss: checks that confirmed dispatches survive when the machine loses power in the middle of them.

The server's folder is on an XFS image. While dispatchers are at work the server is frozen and the image
is copied below the filesystem: the copy holds what had reached the device, and nothing that only the
kernel had. A server that is started on the copy is the one after the power loss; it must have everything that was
confirmed before the server was frozen.

Twice: with the settings that the connector calls durable, where nothing may be lost, and with
synchronous_commit off, where the connector must have reported it and losses are shown, not forbidden.

The last line is JSON. The exit code is 1 if a confirmed dispatch was lost where the connector had called
it durable, if the connector reported nothing where it is not, or if too few were confirmed.
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
from ergon_framework.database.migrate import upgrade
from tests.servers.postgres import PrivatePostgres

QUEUE = "power"
MIN_CONFIRMED = 5_000
DISPATCHER_THREADS = 8
#: Seconds after which a run without enough confirmations is given up.
CONFIRM_TIMEOUT_SECONDS = 120.0
#: Seconds for which killed processes may keep a disk busy.
UNMOUNT_TIMEOUT_SECONDS = 20.0
IMAGE_BYTES = 640 * 1024 * 1024


class Disk:
    """A separate filesystem in a file, mounted at *folder*."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image = image
        self.folder = folder

    def create(self, size: int = IMAGE_BYTES) -> None:
        with self.image.open("wb") as file:
            file.truncate(size)
        _run_command("mkfs.xfs", "-q", str(self.image))

    @contextlib.contextmanager
    def mount(self) -> Iterator[Path]:
        self.folder.mkdir(parents=True, exist_ok=True)
        # A copy has the identity of its original, which XFS would not mount twice.
        _run_command("mount", "-o", "loop,nouuid", str(self.image), str(self.folder))
        try:
            yield self.folder
        finally:
            self._unmount()

    def _unmount(self) -> None:
        """Unmount the disk; killed processes may take a moment to close their files."""
        deadline = time.monotonic() + UNMOUNT_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if subprocess.run(["umount", str(self.folder)], capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.1)
        _run_command("umount", str(self.folder))

    def copy_to(self, folder: Path) -> Disk:
        """Copy what has reached the device so far to another disk; every writer to this one must be frozen."""
        image = folder.with_suffix(".img")
        _run_command("cp", "--sparse=always", str(self.image), str(image))
        return Disk(image, folder)


def _run_command(*command: str) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is missing; install xfsprogs and util-linux") from None
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {result.stderr.strip()} (this rig needs root, loop devices and XFS)")


class DurabilityLog(logging.Handler):
    """Records what the connector logs about durability."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[tuple[str, Any, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reports.append((record.levelname, getattr(record, "durable", None), getattr(record, "summary", None)))


class PostgresDispatchers:
    """Threads that dispatch one by one and record the confirmed ids."""

    def __init__(self, dsn: str) -> None:
        self.queue = PostgresQueue(QUEUE, dsn=dsn)
        self.confirmed: list[str] = []
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._dispatch, args=(thread_number,), daemon=True)
            for thread_number in range(DISPATCHER_THREADS)
        ]

    def start(self) -> None:
        self.queue.open()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _dispatch(self, thread_number: int) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            try:
                [confirmation] = self.queue.dispatch([Transaction({"number": number}, id=f"{thread_number}-{number}")])
            except ErgonError:
                if self._stopping.wait(0.01):
                    return
            else:
                self.confirmed.append(confirmation.transaction_id)


def _list_processes(postmaster: int) -> list[int]:
    """Return the server's process and all its children."""
    pids = [postmaster]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == postmaster:
                pids.append(int(stat.parent.name))
    return pids


def freeze(postmaster: int) -> None:
    """Stop all of its processes, and wait until they have stopped: nothing is written any more."""
    pids = _list_processes(postmaster)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat")
            while stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] not in "TZ":
                time.sleep(0.001)


def lose_power(folder: Path, settings: dict[str, str], min_confirmed: int) -> dict[str, Any]:
    """Do one run; return what the connector reported, what was confirmed, and how much of that was lost."""
    folder.mkdir()
    # The server's user needs access.
    folder.chmod(0o755)
    disk = Disk(folder / "before.img", folder / "before")
    disk.create()
    durability_log = DurabilityLog()
    logger = logging.getLogger("ergon_framework.connectors.postgres.client")
    logger.addHandler(durability_log)
    logger.setLevel(logging.INFO)
    with disk.mount() as mount_point:
        server = PrivatePostgres(mount_point / "server", settings=settings)
        dispatchers = PostgresDispatchers(server.dsn())
        try:
            server.start()
            upgrade(server.dsn())
            # initdb does not sync, and a power loss before the start is not tested.
            os.sync()
            dispatchers.start()
            reported = {"durable": dispatchers.queue.capabilities.durable, "words": dispatchers.queue.durability}
            deadline = time.monotonic() + CONFIRM_TIMEOUT_SECONDS
            while len(dispatchers.confirmed) < min_confirmed and time.monotonic() < deadline:
                time.sleep(0.01)
            freeze(server.pid)
            # Confirmations that arrive from now on were in flight before and count: the server is frozen.
            time.sleep(0.2)
            confirmed = list(dispatchers.confirmed)
            copy = disk.copy_to(folder / "after")
        finally:
            server.kill()
            dispatchers.stop()
    logger.removeHandler(durability_log)
    ids = _read_ids(copy, settings)
    lost = sorted(set(confirmed) - ids)
    return {
        "settings": settings,
        "said": reported,
        "told at start": durability_log.reports[:1],
        "confirmed": len(confirmed),
        "found": len(ids),
        "lost": len(lost),
    }


def _read_ids(disk: Disk, settings: dict[str, str]) -> set[str]:
    """Return the ids that a server finds on the copy."""
    with disk.mount() as mount_point:
        pid = mount_point / "server" / "data" / "postmaster.pid"
        pid.unlink(missing_ok=True)
        server = PrivatePostgres(mount_point / "server", settings=settings)
        try:
            server.start()
            with psycopg.connect(server.dsn()) as connection:
                return {row[0] for row in connection.execute("select transaction_id from ergon.ready")}
        finally:
            server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--confirmed", type=int, default=MIN_CONFIRMED, help="dispatches to be confirmed before the power goes"
    )
    parser.add_argument("--rounds", type=int, default=3, help="with synchronous_commit on; as many with off")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ergon-power-"))
    folder.chmod(0o755)
    runs: list[dict[str, Any]] = []
    try:
        for number in range(options.rounds):
            for commit in ("on", "off"):
                # The WAL writer is slow, so unsynced data is certainly not on the device.
                settings = {"synchronous_commit": commit, "wal_writer_delay": "10s"}
                runs.append(lose_power(folder / f"{commit}-{number}", settings, options.confirmed))
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                shutil.rmtree(folder / f"{commit}-{number}", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    summary = _summarize(runs, options.confirmed)
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


def _summarize(runs: list[dict[str, Any]], min_confirmed: int) -> dict[str, Any]:
    durable_runs = [run for run in runs if run["settings"]["synchronous_commit"] == "on"]
    undurable_runs = [run for run in runs if run["settings"]["synchronous_commit"] == "off"]
    problems = [f"only {run['confirmed']} were confirmed" for run in runs if run["confirmed"] < min_confirmed]
    problems += [f"{run['lost']} lost that were called durable" for run in durable_runs if run["lost"]]
    problems += ["a durable server was not called so" for run in durable_runs if run["said"]["durable"] is not True]
    problems += [
        "an undurable server was not called so" for run in undurable_runs if run["said"]["durable"] is not False
    ]
    problems += ["nothing was said at start" for run in runs if not run["told at start"]]
    return {
        "ok": not problems,
        "wrong": problems,
        "confirmed": sum(run["confirmed"] for run in durable_runs),
        "lost": sum(run["lost"] for run in durable_runs),
        "confirmed with synchronous_commit off": sum(run["confirmed"] for run in undurable_runs),
        "lost with synchronous_commit off": sum(run["lost"] for run in undurable_runs),
        "said": sorted({run["said"]["words"] for run in runs}),
    }


if __name__ == "__main__":
    sys.exit(main())
