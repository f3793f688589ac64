"""Stages: the four that a stop goes through, in this order; none is ever gone back to."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Stage(StrEnum):
    """Every stage with what happens in it; a stop that has nothing to wait for passes through them at once."""

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

    def follows(self, before: Stage | None) -> bool:
        """Whether this one lies ahead of *before*."""
        order = list(Stage)
        return before is None or order.index(self) > order.index(before)
