"""Clocks, the random source and the blocking primitives of threads, as parameters of the code that uses them.

Tests can therefore run real threads in virtual time: the driver that runs handlers on threads blocks only in an Inbox
or a Wakeup.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

#: Block the calling thread for a number of seconds; the default of parameters such as *sleep* of a retry.
block: Final = time.sleep


@dataclass(frozen=True, slots=True)
class Clock:
    """A monotonic clock, a wall clock, and a random source that returns numbers in [0, 1)."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    random: Callable[[], float] = random.random


class Inbox(Protocol):
    """A queue on which a worker thread waits for work."""

    def put(self, item: Any) -> None: ...

    def get(self) -> Any: ...


class Wakeup(Protocol):
    """A flag on which a thread waits; any thread and any signal handler may set it."""

    def set(self) -> None: ...

    def wait(self, seconds: float | None) -> None:
        """Wait until the flag is set or *seconds* have passed; None waits without limit. Waiting resets the flag."""


class ThreadClock(Protocol):
    """A clock, and the primitives that wait by it."""

    @property
    def time_source(self) -> Clock: ...

    def create_inbox(self) -> Inbox: ...

    def create_wakeup(self) -> Wakeup: ...

    def start(self, thread: threading.Thread) -> None:
        """Start *thread*; a virtual clock counts the running threads, because it advances when all of them wait."""

    def thread_ended(self) -> None:
        """Record that the calling thread is about to end."""


class _Latch:
    """The Wakeup of ``RealTime``: a lock that ``set`` releases; a wait acquires it and so resets the flag.

    It takes a third of the time of a threading.Event, and is safe in signal handlers.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        # Setting it twice has the effect of setting it once.
        with suppress(RuntimeError):
            self._lock.release()

    def wait(self, seconds: float | None) -> None:
        # A lock cannot wait longer than TIMEOUT_MAX; the wait then ends early, and the caller waits again.
        self._lock.acquire(timeout=-1 if seconds is None else min(max(0.0, seconds), threading.TIMEOUT_MAX))


class RealTime:
    """The ThreadClock of production: real clocks, queues and threads."""

    time_source = Clock()

    def create_inbox(self) -> Inbox:
        return queue.SimpleQueue()

    def create_wakeup(self) -> Wakeup:
        return _Latch()

    def start(self, thread: threading.Thread) -> None:
        thread.start()

    def thread_ended(self) -> None: ...
