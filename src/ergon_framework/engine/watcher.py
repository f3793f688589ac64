"""The deadline timer: one per driver, for everything that has a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergon_framework.engine.effects import NEVER

if TYPE_CHECKING:
    from ergon_framework.engine.slots import Scheduler


class DeadlineTimer:
    """Tracks the nearest deadline; a script with an earlier deadline reschedules it.

    ``wakes_at`` is the time of the next wakeup. It is infinity while the timer runs, so that a call that starts
    at that moment reschedules it instead of being missed.
    """

    __slots__ = ("wakes_at",)

    def __init__(self) -> None:
        self.wakes_at = NEVER

    def fire_due(self, scheduler: Scheduler) -> float:
        """Answer every effect that is due, and return the time of the next wakeup."""
        self.wakes_at = NEVER
        scheduler.expire_due()
        with scheduler.lock:
            due = min((slot.due for slot in scheduler.live_slots), default=NEVER)
        self.wakes_at = due
        return due
