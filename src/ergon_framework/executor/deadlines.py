"""Deadlines: when each of many must be over, with one timer for all of them.

Nearly everything is over long before its deadline. A timer for each would be made, sorted in and
thrown away for nothing; this one is set anew only for a deadline before all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")


class Deadlines(Generic[K]):
    """Calls *strike* with each key whose time has passed; it belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, strike: Callable[[K], object]) -> None:
        self._loop = loop
        self._strike = strike
        self._due: dict[K, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0

    def add(self, key: K, seconds: float) -> None:
        """Strike *key* in so many seconds, unless it is removed."""
        due = self._due[key] = self._loop.time() + seconds
        if self._timer is None or due < self._next:
            self._set(due)

    def remove(self, key: K) -> None:
        self._due.pop(key, None)

    def clear(self) -> None:
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = due
        self._timer = self._loop.call_at(due, self._passed)

    def _passed(self) -> None:
        self._timer = None
        now = self._loop.time()
        for key in [key for key, due in self._due.items() if due <= now]:
            # Whoever was struck before it in this round may have removed it.
            if self._due.pop(key, None) is not None:
                self._strike(key)
        if self._due and self._timer is None:
            self._set(min(self._due.values()))
