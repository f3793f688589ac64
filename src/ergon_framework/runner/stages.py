"""The four stages of a shutdown, in this order; a shutdown never returns to an earlier one."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class ShutdownStage(StrEnum):
    """Every stage with its meaning; a shutdown without anything to wait for passes through all of them immediately."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    DRAINING = "draining", "nothing more is fetched, running work may finish; for `drain_timeout` at most"
    RELEASING = "releasing", "what has no running body goes back to the queue, the last settlements are sent"
    LEAVING = "leaving", "the loop has ended; connector and lifespan are closed, telemetry is flushed"
    KILLED = "killed", "it did not leave in time, and was ended without being asked"

    def is_after(self, other: ShutdownStage | None) -> bool:
        """Return whether this stage is after *other*."""
        order = list(ShutdownStage)
        return other is None or order.index(self) > order.index(other)
