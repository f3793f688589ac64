"""The loops that a task is running: how they are found, stopped and asked how they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol


class Running(Protocol):
    """A loop in progress, as probes see it."""

    @property
    def live(self) -> bool: ...

    @property
    def trouble(self) -> str | None: ...

    @property
    def in_hand(self) -> int: ...


class Loops:
    """The loops of one task; they can be stopped from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[object, tuple[Running, Callable[[], None]]] = {}
        self._wakes: dict[object, Callable[[], None]] = {}
        #: Called once, when a loop has fetched transactions for the first time and has started none of them.
        self.on_first_fetch: Callable[[], None] | None = None

    def note_fetch(self) -> None:
        """Note that a loop has fetched transactions."""
        call, self.on_first_fetch = self.on_first_fetch, None
        if call is not None:
            call()

    @contextmanager
    def entered(
        self, running: Running, stop: Callable[[], None], *, wake: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Known as running for as long as this lasts; *wake* has one that idles look again."""
        token = object()
        with self._lock:
            self._running[token] = running, stop
            if wake is not None:
                self._wakes[token] = wake
        try:
            yield
        finally:
            with self._lock:
                del self._running[token]
                self._wakes.pop(token, None)

    def stop(self) -> None:
        """Ask every running loop to drain and end; asked a second time, they end at once."""
        with self._lock:
            stops = [stop for _, stop in self._running.values()]
        for stop in stops:
            stop()

    def wake(self) -> None:
        """Have every loop that idles ask its gates again."""
        with self._lock:
            wakes = list(self._wakes.values())
        for wake in wakes:
            # An event loop that has just been closed refuses; then there is nobody left to wake.
            with suppress(RuntimeError):
                wake()

    @property
    def live(self) -> bool:
        """Whether every loop can still start something."""
        with self._lock:
            return all(running.live for running, _ in self._running.values())

    @property
    def troubles(self) -> list[str] | None:
        """Why loops bring nothing in, a reason each; None when no loop runs."""
        with self._lock:
            if not self._running:
                return None
            return [said for running, _ in self._running.values() if (said := running.trouble) is not None]

    @property
    def in_hand(self) -> int:
        """How many transactions the loops have fetched and not yet settled."""
        with self._lock:
            return sum(running.in_hand for running, _ in self._running.values())


def share_loops(task: object, whole: object) -> None:
    """Have the loops of *task* count as those of *whole*, which it is a part of."""
    vars(task)["_ergon_loops"] = loops_of(whole)


def loops_of(task: object) -> Loops:
    """The loops of *task*. They are kept with it, because a mixin has no constructor to make them in.

    By the object and not by its value: two tasks that are equal are still two.
    """
    found: Loops = vars(task).setdefault("_ergon_loops", Loops())
    return found
