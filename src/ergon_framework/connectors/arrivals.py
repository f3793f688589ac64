"""Arrivals: how those who wait for a transaction in this process learn that one is there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from ergon_framework.connectors.base import Delivery, Listener, Unlisten

#: Claims what is there now; an empty answer means to wait.
Take: TypeAlias = Callable[[], Sequence[Delivery]]
#: Seconds until something becomes due by itself; None when nothing will.
Due: TypeAlias = Callable[[], float | None]

#: The least pause between two looks, for something that is due but was taken by another.
_PAUSE = 0.001


class Arrivals:
    """Listeners and waiting fetches, of threads and of event loops alike.

    It starts no thread: what becomes due by itself rings no bell, but a wait looks again then.
    How long a wait takes is measured in real time (an event loop's own time in asyncio),
    whatever clock the connector has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Tuples are replaced and never changed, so that signalling needs no lock.
        self._listeners: tuple[Listener, ...] = ()
        self._bells: tuple[Callable[[], object], ...] = ()
        self._interruptions = 0

    def listen(self, listener: Listener) -> Unlisten:
        """Tell *listener* until the returned function is called."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def unlisten() -> None:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)

        return unlisten

    def arrived(self) -> None:
        """Something can be had. Not to be called under a connector's lock: listeners may call back."""
        for listener in self._listeners:
            listener.wake()
        for ring in self._bells:
            ring()

    def lost(self, receipts: Sequence[Any]) -> None:
        """These claims are gone. Not to be called under a connector's lock."""
        for listener in self._listeners:
            listener.lost(receipts)

    def interrupt(self) -> None:
        """Every wait that has begun ends now."""
        with self._lock:
            self._interruptions += 1
        for ring in self._bells:
            ring()

    def wait(self, take: Take, seconds: float, *, due: Due) -> Sequence[Delivery]:
        """What *take* finds within *seconds*; empty when they are over, or at an interruption."""
        with self.bell() as bell:
            end = time.monotonic() + seconds
            while True:
                # Cleared before looking: what arrives after the look rings again.
                bell.clear()
                if bell.interrupted:
                    return ()
                found = take()
                left = end - time.monotonic()
                if found or left <= 0:
                    return found
                bell.rung(_pause(left, due()))

    @contextmanager
    def bell(self) -> Iterator[Bell]:
        """A bell for a thread that looks by itself."""
        event = threading.Event()
        with self._hung(event.set) as began:
            yield Bell(event, lambda: self._interruptions != began)

    @contextmanager
    def bell_async(self) -> Iterator[AsyncBell]:
        """A bell on the running event loop, for a connector that has to await what it takes."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def ring() -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody waits there any more
                loop.call_soon_threadsafe(event.set)

        with self._hung(ring) as began:
            yield AsyncBell(event, lambda: self._interruptions != began)

    async def wait_async(self, take: Take, seconds: float, *, due: Due) -> Sequence[Delivery]:
        """The same without blocking the event loop; cancelled, it has claimed nothing."""
        loop = asyncio.get_running_loop()
        with self.bell_async() as bell:
            end = loop.time() + seconds
            while True:
                bell.clear()
                if bell.interrupted:
                    return ()
                found = take()
                left = end - loop.time()
                if found or left <= 0:
                    return found
                await bell.rung(_pause(left, due()))

    @contextmanager
    def _hung(self, ring: Callable[[], object]) -> Iterator[int]:
        """Have *ring* called at every signal; yields how many interruptions there were before."""
        with self._lock:
            self._bells = (*self._bells, ring)
            began = self._interruptions
        try:
            yield began
        finally:
            with self._lock:
                self._bells = tuple(other for other in self._bells if other is not ring)


class Bell:
    """Rings at every arrival; cleared before looking, so that what comes after the look rings again."""

    def __init__(self, event: threading.Event, interrupted: Callable[[], bool]) -> None:
        self._event = event
        self._interrupted = interrupted

    @property
    def interrupted(self) -> bool:
        """Whether waiting is over."""
        return self._interrupted()

    def clear(self) -> None:
        self._event.clear()

    def rung(self, seconds: float) -> None:
        """Wait until it rings, *seconds* at most."""
        self._event.wait(seconds)


class AsyncBell:
    """The same on an event loop."""

    def __init__(self, event: asyncio.Event, interrupted: Callable[[], bool]) -> None:
        self._event = event
        self._interrupted = interrupted

    @property
    def interrupted(self) -> bool:
        return self._interrupted()

    def clear(self) -> None:
        self._event.clear()

    async def rung(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()


def _pause(left: float, due: float | None) -> float:
    return left if due is None else min(left, max(due, _PAUSE))
