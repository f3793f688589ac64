"""Virtual time for the real drivers: nothing sleeps, and time jumps ahead as soon as all threads and tasks wait.

A driver runs the scripts of loops, on threads or on asyncio. The driver on threads blocks only in an inbox (a queue of
work for its threads) and in a wakeup (a flag on which one thread waits), so virtual versions of these suffice.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from ergon_framework.clock import Clock, Inbox, Wakeup
from ergon_framework.errors import ErgonError

R = TypeVar("R")

#: Wall clock time at which virtual time starts.
START_UNIX_SECONDS = 1_700_000_000.0

#: Real seconds that a virtual event loop waits for an external thread.
EXTERNAL_WAIT_SECONDS = 30.0


class DeadlockError(ErgonError):
    """All threads or tasks wait and nothing is due: in real time this would hang forever."""

    code = "deadlock"
    final = True


class _Waiter:
    """One waiting thread; the waker counts it as busy from the moment of the wakeup."""

    __slots__ = ("_gate", "error", "is_woken", "item", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._gate = threading.Lock()
        self._gate.acquire()
        self.is_woken = False
        self.item: Any = None
        self.error: DeadlockError | None = None

    def release(self) -> None:
        self.is_woken = True
        self._gate.release()

    def wait(self) -> Any:
        self._gate.acquire()
        if self.error is not None:
            raise self.error
        return self.item


class VirtualTime:
    """Virtual time for real threads: it stops while any thread is busy, then jumps to the next due time.

    Pass it to the thread driver as its *waiting*. It must know every thread and every wait, so user code sleeps with
    ``sleep`` of this object; a thread that waits for anything else counts as busy, and time stops meanwhile. The
    thread that created this object counts as busy too.
    """

    def __init__(self, seed: int = 0, *, start: float = 0.0) -> None:
        seeded = random.Random(seed)  # noqa: S311 - not a secret
        self.time_source = Clock(
            monotonic=self.clock, wall=lambda: START_UNIX_SECONDS + self._now, random=seeded.random
        )
        self._now = start
        self._lock = threading.Lock()
        #: The number of known threads that do not wait; time stands still unless it is 0.
        self._busy_threads = 1
        self._owner_thread = threading.get_ident()
        #: What is due at which time: a waiting thread or an action; the numbers keep the order of equal times.
        self._timers: list[tuple[float, int, _Waiter | Callable[[], object]]] = []
        self._sequence = itertools.count()
        #: Threads that wait for a flag: if nothing is due, they would wait forever, and get a DeadlockError.
        self._wakeup_waiters: set[_Waiter] = set()
        #: Threads in run_until_idle(), which end their wait when nothing is due.
        self._idle_waiters: list[_Waiter] = []

    def clock(self) -> float:
        return self._now

    # -- interface for the thread driver ---------------------------------------------------------

    def create_inbox(self) -> Inbox:
        return _VirtualInbox(self)

    def create_wakeup(self) -> Wakeup:
        return _VirtualWakeup(self)

    def start(self, thread: threading.Thread) -> None:
        with self._lock:
            self._busy_threads += 1
        thread.start()

    def thread_ended(self) -> None:
        with self._lock:
            self._busy_threads -= 1
        self._advance()

    # -- interface for tests ---------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Sleep in virtual time, which takes no real time."""
        with self._lock:
            waiter = self._register_waiter(self._now + seconds)
        self._advance()
        waiter.wait()

    def call_at(self, moment: float, action: Callable[[], object]) -> None:
        """Schedule *action* at *moment*; any thread may call it, and it must not wait."""
        with self._lock:
            heapq.heappush(self._timers, (moment, next(self._sequence), action))

    def run_until_idle(self) -> None:
        """Let time pass until nothing is due, so that all calls that can exit have exited."""
        with self._lock:
            waiter = self._register_waiter(None)
            self._idle_waiters.append(waiter)
        self._advance()
        waiter.wait()

    # -- internals -------------------------------------------------------------------------------

    def _register_waiter(self, until: float | None) -> _Waiter:
        """Register the calling thread as waiting; the caller holds the lock."""
        waiter = _Waiter()
        self._busy_threads -= 1
        if until is not None:
            heapq.heappush(self._timers, (until, next(self._sequence), waiter))
        return waiter

    def _wake(self, waiter: _Waiter) -> None:
        """Wake *waiter*; the caller holds the lock."""
        self._busy_threads += 1
        self._wakeup_waiters.discard(waiter)
        waiter.release()

    def _advance(self) -> None:
        """Advance the time if no thread is busy: to the first due entry, and only to that one."""
        while True:
            with self._lock:
                if self._busy_threads:
                    return
                action = self._take_next()
                if action is None:
                    return
                # The calling thread counts as busy, so that threads woken by the action do not see the time advance.
                self._busy_threads += 1
            try:
                action()
            finally:
                with self._lock:
                    self._busy_threads -= 1

    def _take_next(self) -> Callable[[], object] | None:
        """Wake the waiter that is due first, or return the action that is due; the caller holds the lock."""
        while self._timers:
            moment, _, due = heapq.heappop(self._timers)
            if isinstance(due, _Waiter) and due.is_woken:
                continue
            self._now = max(self._now, moment)
            if not isinstance(due, _Waiter):
                return due
            self._wake(due)
            return None
        self._wake_idle_or_fail()
        return None

    def _wake_idle_or_fail(self) -> None:
        """Wake a thread in run_until_idle(); without one, no wait can end any more, which is an error."""
        if self._idle_waiters:
            self._wake(self._idle_waiters.pop())
            return
        # The owner thread gets the error: an error on a driver's thread would be lost.
        for waiter in [waiter for waiter in self._wakeup_waiters if waiter.thread == self._owner_thread] or list(
            self._wakeup_waiters
        ):
            waiter.error = DeadlockError(
                f"at {self._now:.6f} virtual seconds every thread waits and nothing is due; "
                "look for a wait that nothing ends"
            )
            self._wake(waiter)


class _VirtualInbox:
    """A queue of work for the threads of a driver, whose waiting threads do not stop virtual time."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._items: deque[Any] = deque()
        self._waiters: deque[_Waiter] = deque()

    def put(self, item: Any) -> None:
        time = self._time
        with time._lock:  # noqa: SLF001 - inbox and time share their state
            if self._waiters:
                waiter = self._waiters.popleft()
                waiter.item = item
                time._wake(waiter)  # noqa: SLF001 - shared state
            else:
                self._items.append(item)

    def get(self) -> Any:
        time = self._time
        with time._lock:  # noqa: SLF001 - shared state
            if self._items:
                return self._items.popleft()
            waiter = time._register_waiter(None)  # noqa: SLF001 - shared state
            self._waiters.append(waiter)
        time._advance()  # noqa: SLF001 - shared state
        return waiter.wait()


class _VirtualWakeup:
    """A flag on which one thread waits in virtual time."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._is_set = False
        self._waiter: _Waiter | None = None

    def set(self) -> None:
        time = self._time
        with time._lock:  # noqa: SLF001 - wakeup and time share their state
            self._is_set = True
            if self._waiter is not None and not self._waiter.is_woken:
                time._wake(self._waiter)  # noqa: SLF001 - shared state

    def wait(self, seconds: float | None) -> None:
        time = self._time
        with time._lock:  # noqa: SLF001 - shared state
            if self._is_set:
                self._is_set = False
                return
            waiter = self._waiter = time._register_waiter(None if seconds is None else time._now + seconds)  # noqa: SLF001 - shared state
            time._wakeup_waiters.add(waiter)  # noqa: SLF001 - shared state
        time._advance()  # noqa: SLF001 - shared state
        try:
            waiter.wait()
        finally:
            self._waiter = None
            self._is_set = False


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer whenever nothing is ready."""

    def __init__(self, seed: int = 0, *, start: float = 0.0) -> None:
        self._now = start
        #: Running calls on executor threads; time stops while there is one.
        self._external_calls = 0
        super().__init__(_VirtualSelector(self))
        seeded = random.Random(seed)  # noqa: S311 - not a secret
        self.time_source = Clock(monotonic=self.time, wall=lambda: START_UNIX_SECONDS + self._now, random=seeded.random)

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the time; the selector calls this when nothing is ready."""
        self._now += seconds

    @property
    def external_wait(self) -> bool:
        return self._external_calls > 0

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._external_calls += 1
        future.add_done_callback(self._on_external_end)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._external_calls += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._external_calls -= 1

    def _on_external_end(self, _: object) -> None:
        self._external_calls -= 1


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that advances virtual time instead of blocking for a timer."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self._loop.external_wait:
            return super().select(EXTERNAL_WAIT_SECONDS)
        if timeout is None:
            raise DeadlockError(
                f"at {self._loop.time():.6f} virtual seconds every task waits and nothing is due; "
                "look for a wait that nothing ends"
            )
        self._loop.advance(timeout)
        return ready


def run_virtual(main: Coroutine[Any, Any, R], *, seed: int = 0) -> R:
    """Run *main* like ``asyncio.run``, in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(main)
