"""Daemons: a few threads of our own that never hold up the end of the process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Daemons:
    """Runs jobs on at most *size* daemon threads, started when needed.

    The standard executors join their threads when the interpreter leaves, and one hung call
    would hang the process; these are left behind. A job must not raise.
    """

    def __init__(self, name: str, *, size: int) -> None:
        self._name = name
        self._size = size
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._idle = 0
        self._leaving = False

    def submit(self, job: Callable[[], None]) -> None:
        """Have *job* run soon, in order of submission as far as there are threads."""
        with self._changed:
            self._jobs.append(job)
            if self._idle < len(self._jobs) and self._threads < self._size:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            else:
                self._changed.notify()

    def open(self) -> None:
        """Threads stay for further jobs, as they do from the beginning."""
        with self._changed:
            self._leaving = False

    def close(self) -> None:
        """Threads leave once all jobs are done; a job submitted later still runs."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # an idle thread must not keep the last job's arguments alive

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._jobs:
                if self._leaving:
                    self._threads -= 1
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return self._jobs.popleft()
