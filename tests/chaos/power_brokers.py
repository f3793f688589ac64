"""Power loss at brokers: checks that confirmed dispatches survive when the machine loses power in the middle of them.

As with PostgreSQL (power.py): the broker's folder is on an XFS image; while dispatchers are at work the broker is
frozen and the image copied below the filesystem. The copy takes the place of the original and the broker is started
on it: everything it had confirmed before it was frozen must be there.

With the settings that the connector calls durable nothing may be lost. With weaker ones the connector must have
warned; losses are shown then, not forbidden.

One line of JSON per broker. The exit code is 1 if a confirmed dispatch was lost where the connector had called it
durable, if the connector did not warn where it is not, or if too few were confirmed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework import ErgonError, Transaction
from ergon_framework.connectors import registry
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.bridge import as_sync
from tests.chaos.power import CONFIRM_TIMEOUT_SECONDS, DISPATCHER_THREADS, Disk
from tests.chaos.power_servers import SETUPS, Setup

QUEUE = "power"
MIN_CONFIRMED = 3_000


class WarningLog(logging.Handler):
    """Records the warnings of connectors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.getMessage()}: {getattr(record, 'words', '')}")

    def __enter__(self) -> Self:
        logging.getLogger("ergon_framework.connectors").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ergon_framework.connectors").removeHandler(self)


class Dispatchers:
    """Threads that dispatch one by one and record the confirmed ids."""

    def __init__(self, queue: Connector) -> None:
        self._queue = queue
        self.confirmed: list[str] = []
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._dispatch, args=(thread_number,), daemon=True)
            for thread_number in range(DISPATCHER_THREADS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(CONFIRM_TIMEOUT_SECONDS)

    def _dispatch(self, thread_number: int) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            try:
                [confirmation] = self._queue.dispatch([Transaction({"number": number}, id=f"{thread_number}-{number}")])
            except ErgonError:
                if self._stopping.wait(0.01):
                    return
            else:
                self.confirmed.append(confirmation.transaction_id)


@dataclass(frozen=True)
class PowerLossResult:
    """One run: what the connector reported, how much was confirmed, and how much of that was lost."""

    setting: str
    durable: bool | None
    warned: tuple[str, ...]
    confirmed: int
    found: int
    lost: int


def freeze(folder: Path) -> list[int]:
    """Stop every process with an open file below *folder*, and wait: nothing is written after that."""
    pids = [pid for pid in _list_pids() if pid != os.getpid() and _has_open_file(pid, folder)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat")
            while stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] not in "TZ":
                time.sleep(0.001)
    if not pids:
        raise SystemExit(f"no process has an open file in {folder}: check the folder of the broker")
    return pids


def kill_processes(pids: list[int]) -> None:
    """Kill *pids*: a frozen helper does not notice that its broker is gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _list_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _has_open_file(pid: int, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(str(entry.readlink()).startswith(f"{folder}/") for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False


def lose_power(folder: Path, setup: Setup, min_confirmed: int) -> PowerLossResult:
    folder.mkdir()
    folder.chmod(0o755)
    disk_folder = folder / "disk"
    disk = Disk(folder / "before.img", disk_folder)
    disk.create()
    with WarningLog() as warning_log, disk.mount() as mount_point:
        server = setup.create_server(mount_point / "server")
        dispatchers: Dispatchers | None = None
        frozen_pids: list[int] = []
        queue: Connector | None = None
        try:
            server.start()
            queue = as_sync(registry.create_connector(QUEUE, server.url, setup.make_options(server)))
            queue.open()
            durable = queue.capabilities.durable
            # A power loss before the start is not tested.
            os.sync()
            dispatchers = Dispatchers(queue)
            dispatchers.start()
            _wait_until(lambda: len(dispatchers.confirmed) >= min_confirmed)
            frozen_pids = freeze(mount_point)
            # Confirmations that arrive from now on were in flight before and count: the broker is frozen.
            time.sleep(0.2)
            confirmed = set(dispatchers.confirmed)
            copy = disk.copy_to(folder / "after")
        finally:
            server.kill()
            kill_processes(frozen_pids)
            if dispatchers is not None:
                dispatchers.stop()
            if queue is not None:
                queue.close()
    # Mounted where the original was: a broker may store the path of its folder.
    with Disk(copy.image, disk_folder).mount():
        try:
            server.start()
            ids = _read_ids(server.url, setup.make_options(server))
        finally:
            server.kill()
    return PowerLossResult(
        setup.setting, durable, tuple(warning_log.messages[:1]), len(confirmed), len(ids), len(confirmed - ids)
    )


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CONFIRM_TIMEOUT_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _read_ids(url: str, options: Mapping[str, Any]) -> set[str]:
    """Return the ids that a consumer receives."""
    queue = as_sync(registry.create_connector(QUEUE, url, options))
    queue.open()
    ids: set[str] = set()
    try:
        while deliveries := queue.fetch_transactions(1000, wait=3.0):
            ids.update(delivery.transaction.id for delivery in deliveries)
    finally:
        queue.close()
    return ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broker", action="append", choices=sorted(SETUPS), help="which; all but postgres by default")
    parser.add_argument(
        "--confirmed", type=int, default=MIN_CONFIRMED, help="dispatches confirmed before the power goes"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each setting")
    options = parser.parse_args()
    summaries = [
        _run_broker(name, options) for name in options.broker or [name for name in SETUPS if name != "postgres"]
    ]
    for summary in summaries:
        print(json.dumps(summary))
    return 0 if all(summary["ok"] for summary in summaries) else 1


def _run_broker(name: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix=f"ergon-power-{name}-"))
    folder.chmod(0o755)
    results: list[PowerLossResult] = []
    try:
        for number in range(options.rounds):
            for setup in SETUPS[name]:
                run_folder = folder / f"{setup.setting}-{number}"
                results.append(lose_power(run_folder, setup, options.confirmed))
                print(f"{name}: {results[-1]}", file=sys.stderr, flush=True)
                shutil.rmtree(run_folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _summarize(name, results, options.confirmed)


def _summarize(name: str, results: list[PowerLossResult], min_confirmed: int) -> dict[str, Any]:
    durable_settings = {setup.setting for setup in SETUPS[name] if setup.durable}
    problems = [
        f"{result.setting}: only {result.confirmed} were confirmed"
        for result in results
        if result.confirmed < min_confirmed
    ]
    for result in results:
        if result.durable and result.lost:
            problems.append(f"{result.setting}: {result.lost} lost that were called durable")
        if result.setting in durable_settings and not result.durable:
            problems.append(f"{result.setting}: not called durable, though it is")
        if result.setting not in durable_settings and result.durable:
            problems.append(f"{result.setting}: called durable, though it is not")
        if result.setting not in durable_settings and not result.warned:
            problems.append(f"{result.setting}: the connector did not warn")
    settings = {
        result.setting: {"confirmed": 0, "lost": 0, "durable": result.durable, "warned": list(result.warned)}
        for result in results
    }
    for result in results:
        settings[result.setting]["confirmed"] += result.confirmed
        settings[result.setting]["lost"] += result.lost
    return {"broker": name, "ok": not problems, "wrong": problems, "settings": settings}


if __name__ == "__main__":
    sys.exit(main())
