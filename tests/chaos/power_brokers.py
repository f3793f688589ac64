"""Power loss at brokers: what is left of confirmed dispatches when the machine goes dark in the middle of them.

As with PostgreSQL (power.py): the broker's folder is on an XFS image; while dispatchers are at work the broker is
frozen and the image copied below the filesystem. The copy takes the place of the original and the broker is started
on it: whatever it had confirmed before it was frozen has to be there.

With the settings that the connector calls durable nothing may be lost. With weaker ones the connector has to have
warned; losses are shown then, not forbidden.

One line of JSON per broker. The exit code is 1 if anything confirmed was lost where the connector had called it
durable, if the connector was silent where it is not, or if too little had been confirmed.
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
from ergon_framework.connectors import schemes
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.bridge import as_sync
from tests.chaos.power import PATIENCE, SENDERS, Disk
from tests.chaos.power_servers import SETUPS, Setup

QUEUE = "power"
ENOUGH = 3_000


class Hearing(logging.Handler):
    """Keeps what connectors warn of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.getMessage()}: {getattr(record, 'words', '')}")

    def __enter__(self) -> Self:
        logging.getLogger("ergon_framework.connectors").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ergon_framework.connectors").removeHandler(self)


class Senders:
    """Threads that dispatch one by one and keep what was confirmed."""

    def __init__(self, queue: Connector) -> None:
        self._queue = queue
        self.confirmed: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(n,), daemon=True) for n in range(SENDERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _send(self, sender: int) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                [told] = self._queue.dispatch([Transaction(f"{sender}-{number}", {"number": number})])
            except ErgonError:
                if self._over.wait(0.01):
                    return
            else:
                self.confirmed.append(told.transaction_id)


@dataclass(frozen=True)
class Loss:
    """One run: what the connector said, how much was confirmed, and how much of that was lost."""

    setting: str
    durable: bool | None
    warned: tuple[str, ...]
    confirmed: int
    found: int
    lost: int


def freeze(folder: Path) -> list[int]:
    """Stop everybody who has a file below *folder* open, and wait until they have stopped: nothing is written then."""
    pids = [pid for pid in _pids() if pid != os.getpid() and _holds(pid, folder)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat")
            while stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] not in "TZ":
                time.sleep(0.001)
    if not pids:
        raise SystemExit(f"nobody has a file open below {folder}: is the broker's folder another one?")
    return pids


def end(pids: list[int]) -> None:
    """Whoever is frozen does not notice that the broker is gone, as helpers of one do otherwise."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _holds(pid: int, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(str(entry.readlink()).startswith(f"{folder}/") for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False


def lose_power(folder: Path, setup: Setup, enough: int) -> Loss:
    folder.mkdir()
    folder.chmod(0o755)
    place = folder / "disk"
    disk = Disk(folder / "before.img", place)
    disk.make()
    with Hearing() as hearing, disk.mounted() as mounted:
        server = setup.server(mounted / "server")
        senders: Senders | None = None
        frozen: list[int] = []
        queue: Connector | None = None
        try:
            server.start()
            queue = as_sync(schemes.connect(QUEUE, server.url, setup.options(server)))
            queue.open()
            durable = queue.capabilities.durable
            # A power loss before the beginning is not the question.
            os.sync()
            senders = Senders(queue)
            senders.start()
            _until(lambda: len(senders.confirmed) >= enough)
            frozen = freeze(mounted)
            # What a sender hears from now on was on its way before, so it counts: the broker is silent.
            time.sleep(0.2)
            confirmed = set(senders.confirmed)
            copy = disk.copied(folder / "after")
        finally:
            server.kill()
            end(frozen)
            if senders is not None:
                senders.end()
            if queue is not None:
                queue.close()
    # Mounted where the original was: a broker may know its folder by name.
    with Disk(copy.image, place).mounted():
        try:
            server.start()
            left = _left(server.url, setup.options(server))
        finally:
            server.kill()
    return Loss(setup.setting, durable, tuple(hearing.said[:1]), len(confirmed), len(left), len(confirmed - left))


def _until(enough: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not enough() and time.monotonic() < end:
        time.sleep(0.01)


def _left(url: str, options: Mapping[str, Any]) -> set[str]:
    """The ids that a consumer finds."""
    queue = as_sync(schemes.connect(QUEUE, url, options))
    queue.open()
    found: set[str] = set()
    try:
        while deliveries := queue.fetch_transactions(1000, wait=3.0):
            found.update(delivery.transaction.id for delivery in deliveries)
    finally:
        queue.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broker", action="append", choices=sorted(SETUPS), help="which; all but postgres by default")
    parser.add_argument("--confirmed", type=int, default=ENOUGH, help="dispatches confirmed before the power goes")
    parser.add_argument("--rounds", type=int, default=1, help="of each setting")
    options = parser.parse_args()
    told = [_one(name, options) for name in options.broker or [name for name in SETUPS if name != "postgres"]]
    for line in told:
        print(json.dumps(line))
    return 0 if all(line["ok"] for line in told) else 1


def _one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix=f"ergon-power-{name}-"))
    folder.chmod(0o755)
    losses: list[Loss] = []
    try:
        for number in range(options.rounds):
            for setup in SETUPS[name]:
                here = folder / f"{setup.setting}-{number}"
                losses.append(lose_power(here, setup, options.confirmed))
                print(f"{name}: {losses[-1]}", file=sys.stderr, flush=True)
                shutil.rmtree(here, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _told(name, losses, options.confirmed)


def _told(name: str, losses: list[Loss], enough: int) -> dict[str, Any]:
    strong = {setup.setting for setup in SETUPS[name] if setup.durable}
    wrong = [f"{loss.setting}: only {loss.confirmed} were confirmed" for loss in losses if loss.confirmed < enough]
    for loss in losses:
        if loss.durable and loss.lost:
            wrong.append(f"{loss.setting}: {loss.lost} lost that were called durable")
        if loss.setting in strong and not loss.durable:
            wrong.append(f"{loss.setting}: not called durable, though it is")
        if loss.setting not in strong and loss.durable:
            wrong.append(f"{loss.setting}: called durable, though it is not")
        if loss.setting not in strong and not loss.warned:
            wrong.append(f"{loss.setting}: the connector did not warn")
    settings = {
        loss.setting: {"confirmed": 0, "lost": 0, "durable": loss.durable, "warned": list(loss.warned)}
        for loss in losses
    }
    for loss in losses:
        settings[loss.setting]["confirmed"] += loss.confirmed
        settings[loss.setting]["lost"] += loss.lost
    return {"broker": name, "ok": not wrong, "wrong": wrong, "settings": settings}


if __name__ == "__main__":
    sys.exit(main())
