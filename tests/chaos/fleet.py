"""Fleet: worker processes that are restarted whenever they exit, with a record of when and how each ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.journal import read_journal
from tests.chaos.worker import POISONED_EXIT_CODE

WORKER_SCRIPT = Path(__file__).with_name("worker.py")
STOP_TIMEOUT_SECONDS = 40.0


@dataclass
class ProcessRecord:
    """One process, from start to end."""

    who: str
    process: subprocess.Popen[bytes]
    started_at: float
    ended_at: float | None = None
    #: killed, poisoned, no server at its start, in good order, or the exit code of an unexpected exit.
    ending: str = ""
    was_killed: bool = False


class ProcessSlot:
    """A slot for one process after the other; the fault injector holds its lock during a fault."""

    def __init__(self, number: int, flavour: str) -> None:
        self.number = number
        self.flavour = flavour
        self.lock = threading.Lock()
        self.records: list[ProcessRecord] = []

    @property
    def current(self) -> ProcessRecord:
        return self.records[-1]


class Fleet:
    """One worker for each of *flavours*; *options* become command-line options of the worker."""

    def __init__(
        self, folder: Path, flavours: list[str], *, dsn: str, options: dict[str, str], script: Path = WORKER_SCRIPT
    ) -> None:
        self.folder = folder
        self._script = script
        self.slots = [ProcessSlot(number, flavour) for number, flavour in enumerate(flavours)]
        self._dsn = dsn
        self._options = options
        self._stopping = threading.Event()
        self._supervisor = threading.Thread(target=self._restart_exited, name="fleet", daemon=True)

    @property
    def records(self) -> list[ProcessRecord]:
        return [record for slot in self.slots for record in slot.records]

    def start(self) -> None:
        for slot in self.slots:
            self._launch(slot)
        self._supervisor.start()

    def end(self) -> None:
        """Ask all to exit cleanly, and wait until they have."""
        self._stopping.set()
        self._supervisor.join()
        for slot in self.slots:
            if slot.current.process.poll() is None:
                slot.current.process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        for slot in self.slots:
            try:
                slot.current.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                slot.current.ending = "did not end"
            self._classify_exit(slot.current)

    def kill(self) -> None:
        """Kill all processes."""
        self._stopping.set()
        for record in self.records:
            if record.process.poll() is None:
                record.process.kill()
                record.process.wait()

    def journal(self, record: ProcessRecord) -> Path:
        return self.folder / f"{record.who}.journal"

    def read_stderr(self, record: ProcessRecord) -> str:
        """Return the end of the process's stderr."""
        return (self.folder / f"{record.who}.err").read_text(errors="replace")[-1500:]

    def _has_begun(self, record: ProcessRecord) -> bool:
        path = self.journal(record)
        return path.exists() and bool(read_journal(path))

    def _launch(self, slot: ProcessSlot) -> None:
        who = f"{slot.flavour}-{slot.number}-{len(slot.records)}"
        command = [sys.executable, str(self._script), slot.flavour, "--who", who]
        separator = "&" if "?" in self._dsn else "?"
        command += ["--dsn", f"{self._dsn}{separator}application_name={who}"]
        command += ["--journal", str(self.folder / f"{who}.journal")]
        command += [argument for option, value in self._options.items() for argument in (f"--{option}", value)]
        with (self.folder / f"{who}.err").open("wb") as stderr_file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr_file, stderr=stderr_file)
        slot.records.append(ProcessRecord(who, process, time.time()))

    def _restart_exited(self) -> None:
        while not self._stopping.wait(0.02):
            for slot in self.slots:
                if slot.current.process.poll() is None:
                    continue
                # Recorded immediately, also while the fault injector still holds the slot.
                self._classify_exit(slot.current)
                if slot.lock.acquire(blocking=False):
                    try:
                        if not self._stopping.is_set():
                            self._launch(slot)
                    finally:
                        slot.lock.release()

    def _classify_exit(self, record: ProcessRecord) -> None:
        record.ended_at = record.ended_at or time.time()
        if record.ending:
            return
        exit_code = record.process.poll()
        if record.was_killed and exit_code == -signal.SIGKILL:
            record.ending = "killed"
        elif exit_code == POISONED_EXIT_CODE:
            record.ending = "poisoned"
        elif exit_code == -signal.SIGTERM and not self._has_begun(record):
            # Stopped before it could listen: it held nothing.
            record.ending = "in good order"
        elif (
            exit_code == 1
            and len(read_journal(self.journal(record))) == 1
            and "ConnectionLostError" in self.read_stderr(record).splitlines()[-1]
        ):
            # It had not begun: a worker that cannot reach the server at its start reports that and is restarted.
            record.ending = "no server at its start"
        else:
            record.ending = "in good order" if exit_code == 0 else f"by itself with {exit_code}"


def send_signal(record: ProcessRecord, signal_number: signal.Signals) -> bool:
    """Signal a process that is still running; False if it has exited."""
    if record.process.poll() is not None:
        return False
    os.kill(record.process.pid, signal_number)
    return True
