"""An event queue of the main thread that misses no event, signals included."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class SignalQueue(Generic[T]):
    """A queue over a pipe.

    A thread that waits for a lock can miss a signal: a signal between its last instruction and the beginning of the
    wait is only handled when the wait ends. The system writes signals into the pipe itself, so every signal ends a
    wait for the pipe.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._read_fd, self.wakeup_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self.wakeup_fd, False)

    def put(self, item: T) -> None:
        """Add *item*; safe on any thread, and between any two instructions of the main thread."""
        self._items.append(item)
        # A full pipe wakes the reader too.
        with suppress(BlockingIOError):
            os.write(self.wakeup_fd, b".")

    def get(self, timeout: float | None) -> T | None:
        """Return the next item; None after *timeout* seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._items:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._read_fd], [], [], remaining)[0]:
                return None
            with suppress(BlockingIOError):
                os.read(self._read_fd, 4096)
        return self._items.popleft()

    def __del__(self) -> None:
        # Not closed earlier: a thread that outlives the wait may still put an item.
        os.close(self._read_fd)
        os.close(self.wakeup_fd)
