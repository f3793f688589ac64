"""Tokens: how the main thread is told what happened, signals included, without missing any."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Tokens(Generic[T]):
    """A queue over a pipe.

    A thread that waits for a lock can miss a signal: one that comes between its last instruction
    and the beginning of the wait is only seen when the wait ends. The system writes signals into
    the pipe itself, so a wait for the pipe ends for every one of them.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._read, self.wakeup = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self.wakeup, False)

    def put(self, item: T) -> None:
        """Add *item*; safe on any thread, and between any two instructions of the main one."""
        self._items.append(item)
        # A pipe that is full wakes the reader all the same.
        with suppress(BlockingIOError):
            os.write(self.wakeup, b".")

    def get(self, timeout: float | None) -> T | None:
        """The next item; None when *timeout* seconds are over."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._items:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._read], [], [], left)[0]:
                return None
            with suppress(BlockingIOError):
                os.read(self._read, 4096)
        return self._items.popleft()

    def __del__(self) -> None:
        # Not earlier: a thread that outlives the wait may still put.
        os.close(self._read)
        os.close(self.wakeup)
