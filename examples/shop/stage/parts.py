"""Parts: the processes of both sites, each restarted when it has ended, as a service manager would do it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Seconds that a part has to exit cleanly.
EXIT_GRACE_SECONDS = 15.0
#: Seconds after which a probe file is stale: it is rewritten every second.
PROBE_FRESH_SECONDS = 5.0


def read_start_time(pid: int) -> str | None:
    """Return the start time of a process as the kernel states it, None if it has exited. A pid may be reused."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def iter_processes(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text(encoding="ascii").split():
                yield from iter_processes(int(child))


def describe_process(pid: int) -> str:
    """Return a short name of a process."""
    with contextlib.suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
        return " ".join(Path(argument).name for argument in arguments[:4] if argument and not argument.startswith("-"))[
            :60
        ]
    return "gone"


@dataclass
class Part:
    """One part of a site; it runs one process at a time."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: Path
    ready: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = None
    start_count: int = 0
    #: Held while a fault is applied.
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, folder: Path) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=folder, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.start_count += 1

    def read_log_tail(self) -> str:
        """Return the end of its output."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-1500:] if self.log.exists() else ""


def create_probe_check(path: Path) -> Callable[[], bool]:
    """Return a function that checks whether the probe file says ready and is fresh."""

    def ready() -> bool:
        try:
            probe = json.loads(path.read_text(encoding="utf-8"))
            return bool(probe["ready"]) and time.time() - path.stat().st_mtime < PROBE_FRESH_SECONDS
        except (OSError, ValueError):
            return False

    return ready


class Parts:
    """All parts of both sites."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: list[Part] = []
        #: Every process seen below a part, by pid and start: those that outlive their parent are ended too.
        self.seen_processes: set[tuple[int, str]] = set()
        #: How often each part was found ended, by its exit code.
        self.exit_counts: Counter[str] = Counter()
        self._stopped = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="keeper", daemon=True)

    def start(self, timeout: float) -> None:
        """Start all, and return when all are ready."""
        for part in self.all:
            part.start(self._folder)
        self._supervisor.start()
        deadline = time.monotonic() + timeout
        for part in self.all:
            while not part.ready():
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{part.name} was not ready within {timeout:g} s; it said: {part.read_log_tail()}"
                    )
                time.sleep(0.1)

    def record_processes(self) -> None:
        """Remember the running processes."""
        for part in self.all:
            if part.process is not None and part.is_running:
                for pid in iter_processes(part.process.pid):
                    if (start_time := read_start_time(pid)) is not None:
                        self.seen_processes.add((pid, start_time))

    def stop(self) -> None:
        """Stop every process, and kill those that remain."""
        self._stopped.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        self.record_processes()
        self._signal_all(signal.SIGCONT)
        processes = [part.process for part in self.all if part.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + EXIT_GRACE_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        while (
            any(read_start_time(pid) == start_time for pid, start_time in self.seen_processes)
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        self._signal_all(signal.SIGKILL)
        for process in processes:
            process.wait()

    def _signal_all(self, number: signal.Signals) -> None:
        """Signal every process that was ever seen and is still running."""
        for pid, start_time in self.seen_processes:
            if read_start_time(pid) == start_time:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _supervise(self) -> None:
        while not self._stopped.wait(0.2):
            self.record_processes()
            for part in self.all:
                if part.is_running or not part.lock.acquire(blocking=False):
                    continue
                try:
                    code = None if part.process is None else part.process.returncode
                    if code != -signal.SIGKILL:
                        self.exit_counts[f"{part.name} ended with {code}"] += 1
                        if self._stopped.wait(0.5):  # it may have failed at the start, so do not restart it immediately
                            return
                    part.start(self._folder)
                finally:
                    part.lock.release()
