"""One ``ergon run`` of the matrix: brought into a state, ended, and inspected afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ergon_framework.connectors.postgres.queue import PostgresQueue
from ergon_framework.errors import ConnectionLostError
from ergon_framework.transaction import Transaction
from tests.servers.postgres import PrivatePostgres
from tests.signals.file_queue import LEASE_SECONDS, FileQueue

ROOT = Path(__file__).parents[2]
ERGON = [sys.executable, "-P", "-c", "from ergon_framework.cli.main import main; main()"]
WAIT_TIMEOUT_SECONDS = 30.0
MARK_VARIABLE = "SIGNALS_MARK"
DATABASE = "signals"


class EventTimeout(AssertionError):
    """An expected event did not happen in time."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One line of the journal."""

    event: str
    pid: int
    subject: str
    count: int


class MatrixRun:
    """A folder with a queue and a journal, and the processes that work on it."""

    def __init__(
        self, *, flavour: str, processes: int, state: str, drain: float, server: PrivatePostgres | None = None
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ergon-signals-"))
        self.processes = processes
        self._mark = uuid.uuid4().hex
        self._server = server
        self.queue: FileQueue | PostgresQueue
        if server is None:
            self.queue = FileQueue(self.folder)
        else:
            self.queue = PostgresQueue(f"signals-{self._mark}", dsn=server.dsn(DATABASE), lease=LEASE_SECONDS)
        self.queue.open()
        self.ids: set[str] = set()
        self._task = "handle" if flavour == "sync" else "handle_async"
        self._environ = os.environ | {
            MARK_VARIABLE: self._mark,
            "SIGNALS_FOLDER": str(self.folder),
            "SIGNALS_STATE": state,
            "SIGNALS_DRAIN": str(drain),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
        }
        if server is not None:
            self._environ |= {"SIGNALS_DSN": server.dsn(DATABASE), "SIGNALS_QUEUE": self.queue.name}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.list_processes():
            os.kill(pid, signal.SIGKILL)
        self.restart_queue()
        self.queue.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def dispatch(self, count: int) -> None:
        orders = [Transaction({}, id=f"order-{number:03}") for number in range(1, count + 1)]
        self.ids = {order.id for order in orders}
        self.queue.dispatch(orders)

    def start(self) -> None:
        with (self.folder / "said").open("ab") as output_file:
            self.process = subprocess.Popen(
                [*ERGON, "run", f"tests.signals.app:{self._task}", "--processes", str(self.processes), "--json"],
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output_file,
                stderr=subprocess.STDOUT,
                # A separate process group, so that all of it can be signalled, as a terminal does.
                start_new_session=True,
            )

    # -- inspection ------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        return (self.folder / "said").read_text(encoding="utf-8", errors="replace")

    @property
    def journal(self) -> list[JournalEntry]:
        path = self.folder / "journal"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        parts = [line.split() for line in text.splitlines()]
        return [JournalEntry(event, int(pid), subject, int(count)) for event, pid, subject, count in parts]

    def list_pids(self, event: str) -> set[int]:
        """Return the processes that have written *word*."""
        return {line.pid for line in self.journal if line.event == event}

    def list_subjects(self, event: str) -> list[str]:
        return [line.subject for line in self.journal if line.event == event]

    def list_processes(self) -> list[int]:
        """Return every process that descends from this run, also if it has another parent by now."""
        mark = f"{MARK_VARIABLE}={self._mark}".encode()
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                is_descendant = mark in path.read_bytes().split(b"\0")
            except OSError:  # it has just ended, or is not readable
                continue
            if is_descendant:
                pids.append(int(path.parent.name))
        return pids

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, event: str, condition: Callable[[], bool], timeout: float = WAIT_TIMEOUT_SECONDS) -> float:
        """Return once *true* returns True; return how long that took."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > timeout:
                recent = " ".join(f"{line.event}:{line.subject}" for line in self.journal[-12:])
                raise EventTimeout(f"never {event}; journal: {recent}; said: {self.output[-600:]}")
            time.sleep(0.005)
        return time.monotonic() - start

    def wait_until_reached(self, event: str) -> None:
        """Return once every process has written *word*."""
        self.wait(f"all {event}", lambda: len(self.list_pids(event)) >= self.processes)

    def create_file(self, name: str) -> None:
        (self.folder / name).touch()

    def take_queue_down(self) -> None:
        """Make the queue unavailable: kill its server."""
        if self._server is None:
            self.create_file("down")
        else:
            self._server.kill()

    def restart_queue(self) -> None:
        (self.folder / "down").unlink(missing_ok=True)
        if self._server is not None and not self._server.is_running:
            self._server.start()
            # Earlier connections are broken, and each one must detect that once.
            self.wait("back", self._is_available)

    def _is_available(self) -> bool:
        try:
            return self.queue.depth() is not None
        except ConnectionLostError:
            return False

    def list_queued(self) -> set[str]:
        """Return the orders that are still in the queue."""
        return set(self.queue.find_queued(self.ids))

    # -- ending ---------------------------------------------------------------------------------

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.process.pid, number)

    def wait_for_signal_message(self) -> None:
        self.wait("heard the signal", lambda: "to finish; a second signal" in self.output)

    def wait_for_exit(self) -> int:
        try:
            return self.process.wait(WAIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise EventTimeout(f"never ended; said: {self.output[-600:]}") from None

    def fetch_again(self, expected: set[str], timeout: float) -> dict[str, int]:
        """Take *expected* out of the queue; return the number of each delivery, by id."""
        delivery_numbers: dict[str, int] = {}

        def has_all() -> bool:
            # Taken deliveries stay taken: only the first number of each shows what was counted.
            for delivery in self.queue.fetch_transactions(1000):
                delivery_numbers.setdefault(delivery.transaction.id, delivery.deliveries)
            return set(delivery_numbers) >= expected

        self.wait("delivered again", has_all, timeout)
        return delivery_numbers
