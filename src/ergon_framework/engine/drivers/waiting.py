"""How threads wait: the only two ways in which the thread driver ever blocks.

They are handed in, so that a test can put virtual time under real threads.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import Any, Protocol

from ergon_framework.engine.senses import Senses


class Inbox(Protocol):
    """Where a worker waits for work."""

    def put(self, item: Any) -> None: ...

    def get(self) -> Any: ...


class Alarm(Protocol):
    """Where the watcher waits for the next due time; it can be woken from anywhere, signal handlers included."""

    def ring(self) -> None: ...

    def wait(self, seconds: float | None) -> None:
        """Until somebody rings, or *seconds* are over; None is for ever."""


class Waiting(Protocol):
    """Time, and everything that waits for it."""

    @property
    def senses(self) -> Senses: ...

    def inbox(self) -> Inbox: ...

    def alarm(self) -> Alarm: ...

    def start(self, thread: threading.Thread) -> None:
        """Start *thread*; virtual time must know how many there are."""

    def ended(self) -> None:
        """The calling thread is about to end."""


class _Latch:
    """A lock that is held while nobody has rung: a third of the price of an event, and safe in signal handlers."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        # Rung twice is rung once.
        with suppress(RuntimeError):
            self._lock.release()

    def wait(self, seconds: float | None) -> None:
        # Nobody can wait longer than this; the watcher then looks and waits again.
        self._lock.acquire(timeout=-1 if seconds is None else min(max(0.0, seconds), threading.TIMEOUT_MAX))


class RealTime:
    """Waiting as the machine does it."""

    senses = Senses()

    def inbox(self) -> Inbox:
        return queue.SimpleQueue()

    def alarm(self) -> Alarm:
        return _Latch()

    def start(self, thread: threading.Thread) -> None:
        thread.start()

    def ended(self) -> None: ...
