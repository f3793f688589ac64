"""The watcher: one look-out per driver for everything that is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergon_framework.engine.effects import NEVER

if TYPE_CHECKING:
    from ergon_framework.engine.slots import Slots


class Watcher:
    """Sleeps until the nearest due time; whoever is due earlier pokes it.

    ``wakes_at`` is what it means to sleep until. While it looks around that is infinity, so that
    a call which begins in that very moment pokes it rather than being overlooked.
    """

    __slots__ = ("wakes_at",)

    def __init__(self) -> None:
        self.wakes_at = NEVER

    def look(self, slots: Slots) -> float:
        """Answer all that is due, and say when to look again."""
        self.wakes_at = NEVER
        slots.expire()
        with slots.lock:
            due = min((slot.due for slot in slots.live), default=NEVER)
        self.wakes_at = due
        return due
