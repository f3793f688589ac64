"""Stopping: a stop that is not lost when it comes before the loop has begun."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import Protocol

from ergon_framework.task.gates import Pause


class Stoppable(Protocol):
    """A task, as far as stopping goes."""

    def stop(self) -> None: ...


class Stopping:
    """Hands stops to a task's loop; one that came early waits at the loop's gate."""

    def __init__(self, task: Stoppable) -> None:
        self._task = task
        self._lock = Lock()
        self._begun = False
        self._asked = 0
        self._told = 0

    def ask(self) -> None:
        """Stop; asked again, hurry."""
        with self._lock:
            self._asked += 1
            if self._begun:
                self._tell()

    def gate(self) -> Pause | None:
        """Asked by the loop before every fetch: after a stop there is none."""
        with self._lock:
            self._begun = True
            if not self._asked:
                return None
            if not self._told:
                self._tell()
            return Pause("the process is stopping", 0.05)

    def _tell(self) -> None:
        self._told += 1
        # An event loop that has just been closed refuses; then there is nothing left to stop.
        with suppress(RuntimeError):
            self._task.stop()
