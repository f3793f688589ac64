"""One ``ergon run`` of the matrix: how it is brought into a state, ended, and looked at afterwards."""

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
from ergon_framework.errors import ConnectionLost
from ergon_framework.transaction import Transaction
from tests.servers.postgres import PrivatePostgres
from tests.signals.file_queue import LEASE, FileQueue

ROOT = Path(__file__).parents[2]
ERGON = [sys.executable, "-P", "-c", "from ergon_framework.cli.main import main; main()"]
PATIENCE = 30.0
MARK = "SIGNALS_MARK"
DATABASE = "signals"


class Missed(AssertionError):
    """Something that was waited for did not happen."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the journal."""

    word: str
    pid: int
    what: str
    count: int


class World:
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
            self.queue = PostgresQueue(f"signals-{self._mark}", dsn=server.dsn(DATABASE), lease=LEASE)
        self.queue.open()
        self.ids: set[str] = set()
        self._task = "handle" if flavour == "sync" else "handle_async"
        self._environ = os.environ | {
            MARK: self._mark,
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
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.up()
        self.queue.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def dispatch(self, count: int) -> None:
        orders = [Transaction(f"order-{number:03}", {}) for number in range(1, count + 1)]
        self.ids = {order.id for order in orders}
        self.queue.dispatch(orders)

    def start(self) -> None:
        with (self.folder / "said").open("ab") as said:
            self.process = subprocess.Popen(
                [*ERGON, "run", f"tests.signals.app:{self._task}", "--processes", str(self.processes), "--json"],
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                # A group of its own, so that the whole of it can be signalled, as a terminal does.
                start_new_session=True,
            )

    # -- looking --------------------------------------------------------------------------------

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text(encoding="utf-8", errors="replace")

    @property
    def journal(self) -> list[Line]:
        path = self.folder / "journal"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        parts = [line.split() for line in text.splitlines()]
        return [Line(word, int(pid), what, int(count)) for word, pid, what, count in parts]

    def pids(self, word: str) -> set[int]:
        """Who has said *word*."""
        return {line.pid for line in self.journal if line.word == word}

    def named(self, word: str) -> list[str]:
        return [line.what for line in self.journal if line.word == word]

    def alive(self) -> list[int]:
        """Every process that descends from this run, whoever its parent is by now."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                marked = mark in path.read_bytes().split(b"\0")
            except OSError:  # it has just ended, or is not ours to look at
                continue
            if marked:
                found.append(int(path.parent.name))
        return found

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, what: str, true: Callable[[], bool], patience: float = PATIENCE) -> float:
        """Return once it is *true*; how long that took."""
        began = time.monotonic()
        while not true():
            if time.monotonic() - began > patience:
                words = " ".join(f"{line.word}:{line.what}" for line in self.journal[-12:])
                raise Missed(f"never {what}; journal: {words}; said: {self.said[-600:]}")
            time.sleep(0.005)
        return time.monotonic() - began

    def reached(self, word: str) -> None:
        """Return once every process has said *word*."""
        self.wait(f"all {word}", lambda: len(self.pids(word)) >= self.processes)

    def sign(self, name: str) -> None:
        (self.folder / name).touch()

    def down(self) -> None:
        """Take the queue away: its server dies."""
        if self._server is None:
            self.sign("down")
        else:
            self._server.kill()

    def up(self) -> None:
        (self.folder / "down").unlink(missing_ok=True)
        if self._server is not None and not self._server.is_running:
            self._server.start()
            # Lines from before are broken, and each has to find that out once.
            self.wait("back", self._answers)

    def _answers(self) -> bool:
        try:
            return self.queue.depth() is not None
        except ConnectionLost:
            return False

    def left(self) -> set[str]:
        """The orders that are still in the queue."""
        return set(self.queue.queued(self.ids))

    # -- ending ---------------------------------------------------------------------------------

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.process.pid, number)

    def heard(self) -> None:
        self.wait("heard the signal", lambda: "to finish; a second signal" in self.said)

    def ended(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise Missed(f"never ended; said: {self.said[-600:]}") from None

    def delivered_again(self, expected: set[str], patience: float) -> dict[str, int]:
        """Take what is *expected* out of the queue: the number of each delivery, by id."""
        found: dict[str, int] = {}

        def all_there() -> bool:
            # What was taken stays taken: only the first number of each says what it has cost.
            for delivery in self.queue.fetch_transactions(1000):
                found.setdefault(delivery.transaction.id, delivery.deliveries)
            return set(found) >= expected

        self.wait("delivered again", all_there, patience)
        return found
