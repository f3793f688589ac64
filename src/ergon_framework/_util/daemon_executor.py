"""A small pool of daemon threads that never delays the exit of the process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class DaemonExecutor:
    """Run jobs on at most *size* daemon threads, started when needed.

    The standard executors join their threads when the interpreter exits, so one hung call would hang the process;
    these threads are abandoned. A job must not raise.
    """

    def __init__(self, name: str, *, size: int) -> None:
        self._name = name
        self._size = size
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._idle = 0
        self._closing = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run *job* soon, in order of submission as far as threads are free."""
        with self._changed:
            self._jobs.append(job)
            if self._idle < len(self._jobs) and self._threads < self._size:
                self._threads += 1
                threading.Thread(target=self._run_jobs, name=self._name, daemon=True).start()
            else:
                self._changed.notify()

    def open(self) -> None:
        """Keep threads for further jobs, as they are from the start."""
        with self._changed:
            self._closing = False

    def close(self) -> None:
        """Let threads exit once all jobs are done; a job submitted later still runs."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _run_jobs(self) -> None:
        while (job := self._take_job()) is not None:
            job()
            del job  # an idle thread must not keep the last job's arguments alive

    def _take_job(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._jobs:
                if self._closing:
                    self._threads -= 1
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return self._jobs.popleft()
