"""Stop requests that are not lost when they arrive before the loop has begun."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import Protocol

from ergon_framework.task.gates import Pause


class Stoppable(Protocol):
    """A task that can be stopped."""

    def stop(self) -> None: ...


class StopRequest:
    """Passes stop requests to a task's loop; an early request waits at the loop's gate."""

    def __init__(self, task: Stoppable) -> None:
        self._task = task
        self._lock = Lock()
        self._has_begun = False
        self._request_count = 0
        self._stop_count = 0

    def stop(self) -> None:
        """Request a stop; a second request ends the drain."""
        with self._lock:
            self._request_count += 1
            if self._has_begun:
                self._stop_task()

    def gate(self) -> Pause | None:
        """Return a pause after a stop request; the loop calls this before every fetch."""
        with self._lock:
            self._has_begun = True
            if not self._request_count:
                return None
            if not self._stop_count:
                self._stop_task()
            return Pause("the process is stopping", 0.05)

    def _stop_task(self) -> None:
        self._stop_count += 1
        # An event loop that has just been closed raises; then there is nothing left to stop.
        with suppress(RuntimeError):
            self._task.stop()
