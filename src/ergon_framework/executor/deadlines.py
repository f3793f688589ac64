"""Deadlines of many keys with one timer.

Nearly every key is removed long before its deadline, so a timer for each key would be created, sorted and
discarded for nothing. The one timer is set again only for a deadline before all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")


class DeadlineHeap(Generic[K]):
    """Calls *on_expired* with each key whose deadline has passed; belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expired: Callable[[K], object]) -> None:
        self._loop = loop
        self._on_expired = on_expired
        self._deadlines: dict[K, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_deadline = 0.0

    def add(self, key: K, seconds: float) -> None:
        """Expire *key* after *seconds*, unless it is removed first."""
        due = self._deadlines[key] = self._loop.time() + seconds
        if self._timer is None or due < self._next_deadline:
            self._set_timer(due)

    def remove(self, key: K) -> None:
        self._deadlines.pop(key, None)

    def clear(self) -> None:
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_deadline = due
        self._timer = self._loop.call_at(due, self._expire_due)

    def _expire_due(self) -> None:
        self._timer = None
        now = self._loop.time()
        for key in [key for key, due in self._deadlines.items() if due <= now]:
            # A callback for an earlier key of this batch may have removed it.
            if self._deadlines.pop(key, None) is not None:
                self._on_expired(key)
        if self._deadlines and self._timer is None:
            self._set_timer(min(self._deadlines.values()))
