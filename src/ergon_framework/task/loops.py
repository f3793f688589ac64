"""The loops that a task is running: how they are found, stopped and asked how they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Running(Protocol):
    """A loop in progress, as probes see it."""

    @property
    def live(self) -> bool: ...

    @property
    def trouble(self) -> str | None: ...


class Loops:
    """The loops of one task; they can be stopped from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[object, tuple[Running, Callable[[], None]]] = {}

    @contextmanager
    def entered(self, running: Running, stop: Callable[[], None]) -> Iterator[None]:
        """Known as running for as long as this lasts."""
        token = object()
        with self._lock:
            self._running[token] = running, stop
        try:
            yield
        finally:
            with self._lock:
                del self._running[token]

    def stop(self) -> None:
        """Ask every running loop to drain and end; asked a second time, they end at once."""
        with self._lock:
            stops = [stop for _, stop in self._running.values()]
        for stop in stops:
            stop()

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


def share_loops(task: object, whole: object) -> None:
    """Have the loops of *task* count as those of *whole*, which it is a part of."""
    vars(task)["_ergon_loops"] = loops_of(whole)


def loops_of(task: object) -> Loops:
    """The loops of *task*. They are kept with it, because a mixin has no constructor to make them in.

    By the object and not by its value: two tasks that are equal are still two.
    """
    found: Loops = vars(task).setdefault("_ergon_loops", Loops())
    return found
