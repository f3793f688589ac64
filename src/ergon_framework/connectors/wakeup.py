"""Wake up the threads and tasks of this process that wait for a transaction.

A fetch claims what is ready, and otherwise waits until a notification of the broker, or until something becomes due.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from ergon_framework.connectors.base import Delivery, Listener, Unlisten

#: Claims what is ready now; an empty result means that the caller waits.
ClaimCallback: TypeAlias = Callable[[], Sequence[Delivery]]
#: Returns the seconds until something becomes due without a signal; None when nothing will.
NextDueCallback: TypeAlias = Callable[[], float | None]

#: The shortest pause between two polls, for something that is due but was taken by another caller.
_MIN_PAUSE_SECONDS = 0.001


class WakeupHub:
    """The listeners and waiting fetches of a connector, of threads and of event loops alike.

    It starts no thread: what becomes due by its time sends no signal, but a wait polls again at that time. The length
    of a wait is measured in real time (the event loop's own time in asyncio), independent of the connector's clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Tuples are replaced and never changed, so that notifying needs no lock.
        self._listeners: tuple[Listener, ...] = ()
        self._callbacks: tuple[Callable[[], object], ...] = ()
        #: The number of calls of interrupt(): a wait has been interrupted if it has changed since the wait began.
        self._interruptions = 0

    def listen(self, listener: Listener) -> Unlisten:
        """Notify *listener* until the returned function is called."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def unlisten() -> None:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)

        return unlisten

    def notify(self) -> None:
        """Wake all waiters. Do not call this under a connector's lock: listeners may call back."""
        for listener in self._listeners:
            listener.wake()
        for callback in self._callbacks:
            callback()

    def notify_lost(self, receipts: Sequence[Any]) -> None:
        """Notify listeners that these claims are lost. Do not call this under a connector's lock."""
        for listener in self._listeners:
            listener.on_lost(receipts)

    def interrupt(self) -> None:
        """End every wait that has begun."""
        with self._lock:
            self._interruptions += 1
        for callback in self._callbacks:
            callback()

    def wait(self, take: ClaimCallback, seconds: float, *, next_due: NextDueCallback) -> Sequence[Delivery]:
        """Return what *take* claims within *seconds*; empty after that time, or at an interruption."""
        with self.waiter() as waiter:
            end = time.monotonic() + seconds
            while True:
                # Cleared before polling: what arrives after the poll sets it again.
                waiter.clear()
                if waiter.is_interrupted:
                    return ()
                deliveries = take()
                remaining = end - time.monotonic()
                if deliveries or remaining <= 0:
                    return deliveries
                waiter.wait(_limit_pause(remaining, next_due()))

    @contextmanager
    def waiter(self) -> Iterator[Waiter]:
        """Yield a waiter for a thread that polls on its own."""
        event = threading.Event()
        with self._subscribe(event.set) as interruptions:
            yield Waiter(event, lambda: self._interruptions != interruptions)

    @contextmanager
    def waiter_async(self) -> Iterator[AsyncWaiter]:
        """Yield a waiter on the running event loop, for a connector that has to await what it takes."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def set_event() -> None:
            with suppress(RuntimeError):  # the loop has closed: no task waits there any more
                loop.call_soon_threadsafe(event.set)

        with self._subscribe(set_event) as interruptions:
            yield AsyncWaiter(event, lambda: self._interruptions != interruptions)

    async def wait_async(self, take: ClaimCallback, seconds: float, *, next_due: NextDueCallback) -> Sequence[Delivery]:
        """Wait without blocking the event loop; when it is cancelled, it has claimed nothing."""
        loop = asyncio.get_running_loop()
        with self.waiter_async() as waiter:
            end = loop.time() + seconds
            while True:
                waiter.clear()
                if waiter.is_interrupted:
                    return ()
                deliveries = take()
                remaining = end - loop.time()
                if deliveries or remaining <= 0:
                    return deliveries
                await waiter.wait(_limit_pause(remaining, next_due()))

    @contextmanager
    def _subscribe(self, callback: Callable[[], object]) -> Iterator[int]:
        """Call *callback* at every signal while the context is open; yield the number of earlier interruptions."""
        with self._lock:
            self._callbacks = (*self._callbacks, callback)
            interruptions = self._interruptions
        try:
            yield interruptions
        finally:
            with self._lock:
                self._callbacks = tuple(other for other in self._callbacks if other is not callback)


class Waiter:
    """A flag that every arrival sets; cleared before polling, so that what arrives after the poll sets it again."""

    def __init__(self, event: threading.Event, is_interrupted: Callable[[], bool]) -> None:
        self._event = event
        self._is_interrupted = is_interrupted

    @property
    def is_interrupted(self) -> bool:
        """Whether the wait was interrupted."""
        return self._is_interrupted()

    def clear(self) -> None:
        self._event.clear()

    def wait(self, seconds: float) -> None:
        """Wait for the next signal, *seconds* at most."""
        self._event.wait(seconds)


class AsyncWaiter:
    """The async variant of Waiter, on an event loop."""

    def __init__(self, event: asyncio.Event, is_interrupted: Callable[[], bool]) -> None:
        self._event = event
        self._is_interrupted = is_interrupted

    @property
    def is_interrupted(self) -> bool:
        return self._is_interrupted()

    def clear(self) -> None:
        self._event.clear()

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()


def _limit_pause(remaining: float, next_due: float | None) -> float:
    return remaining if next_due is None else min(remaining, max(next_due, _MIN_PAUSE_SECONDS))
