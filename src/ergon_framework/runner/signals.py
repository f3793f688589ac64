"""Signals: received in the main thread, handled by its event queue, which misses no event.

Calls that may block run on a background thread instead, in order.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar


class BackgroundCaller:
    """Runs the given calls one after the other. A call may block on its output: the caller does not wait for it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._thread = Thread(target=self._run_calls, name="ergon-teller", daemon=True)
        self._thread.start()

    def call(self, call: Callable[[], Any]) -> None:
        self._calls.put(call)

    def _run_calls(self) -> None:
        while True:
            call = self._calls.get()
            # A closed stream or a failing handler of the user must not stop later calls.
            with suppress(Exception):
                call()


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


#: Both mean the same: drain; a second one means stop now.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def handle_signals(events: SignalQueue[Any]) -> Iterator[None]:
    """Put each stop signal into *events* while the context lasts."""

    def handler(number: int, _frame: object) -> None:
        events.put(signal.Signals(number))

    previous_fd = signal.set_wakeup_fd(events.wakeup_fd, warn_on_full_buffer=False)
    previous_handlers = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, previous in previous_handlers.items():
            # None means that the handler was not installed from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
