"""Parts: the processes of both sites, each started again when it has ended, as a service manager would do it."""

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

#: Seconds that a part has to end in good order.
GRACE = 15.0
#: Seconds after which nobody believes a probe file: it is written anew every second.
FRESH = 5.0


def started(pid: int) -> str | None:
    """When a process was started, in the kernel's words; None if it is gone. A number may be given twice."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if told[0] == "Z" else told[19]


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text(encoding="ascii").split():
                yield from family(int(child))


def named(pid: int) -> str:
    """What a process is, in a word or two."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
        return " ".join(Path(word).name for word in words[:4] if word and not word.startswith("-"))[:60]
    return "gone"


@dataclass
class Part:
    """One place for one process after the other."""

    name: str
    words: list[str]
    env: dict[str, str]
    log: Path
    ready: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0
    #: Held by whoever torments it.
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, folder: Path) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.words, cwd=folder, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.lives += 1

    def said(self) -> str:
        """The end of what it wrote."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-1500:] if self.log.exists() else ""


def probed(path: Path) -> Callable[[], bool]:
    """Whether the probe file says that it is ready, and is fresh."""

    def ready() -> bool:
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            return bool(told["ready"]) and time.time() - path.stat().st_mtime < FRESH
        except (OSError, ValueError):
            return False

    return ready


class Parts:
    """All of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: list[Part] = []
        #: Whatever was seen below a part, by pid and start: what outlives its parent is ended too.
        self.seen: set[tuple[int, str]] = set()
        #: How often each was found ended, by its exit code.
        self.ends: Counter[str] = Counter()
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def start(self, patience: float) -> None:
        """Start all, and return when all are ready."""
        for part in self.all:
            part.start(self._folder)
        self._keeper.start()
        until = time.monotonic() + patience
        for part in self.all:
            while not part.ready():
                if time.monotonic() > until:
                    raise TimeoutError(f"{part.name} was not ready within {patience:g} s; it said: {part.said()}")
                time.sleep(0.1)

    def look(self) -> None:
        """Remember who is there."""
        for part in self.all:
            if part.process is not None and part.running:
                for pid in family(part.process.pid):
                    if (when := started(pid)) is not None:
                        self.seen.add((pid, when))

    def end(self) -> None:
        """Ask all to end, and leave nobody behind."""
        self._over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self.look()
        self._send(signal.SIGCONT)
        processes = [part.process for part in self.all if part.process is not None]
        for process in processes:
            process.terminate()
        until = time.monotonic() + GRACE
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        while any(started(pid) == when for pid, when in self.seen) and time.monotonic() < until:
            time.sleep(0.05)
        self._send(signal.SIGKILL)
        for process in processes:
            process.wait()

    def _send(self, number: signal.Signals) -> None:
        """Signal everybody that was ever seen and is still there."""
        for pid, when in self.seen:
            if started(pid) == when:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _keep(self) -> None:
        while not self._over.wait(0.2):
            self.look()
            for part in self.all:
                if part.running or not part.lock.acquire(blocking=False):
                    continue
                try:
                    code = None if part.process is None else part.process.returncode
                    if code != -signal.SIGKILL:
                        self.ends[f"{part.name} ended with {code}"] += 1
                        if self._over.wait(0.5):  # it could not begin, perhaps: not again at once
                            return
                    part.start(self._folder)
                finally:
                    part.lock.release()
