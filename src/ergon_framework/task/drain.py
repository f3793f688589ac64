"""How long an ending loop waits for running work."""

from __future__ import annotations

from typing import Protocol

from ergon_framework.task.report import StopReason


class DrainRules(Protocol):
    """The part of a loop's policy that ``drain_end`` reads."""

    @property
    def drain_timeout(self) -> float: ...
    @property
    def timeout_drain(self) -> float: ...


def drain_end(loop: DrainRules, end: StopReason, *, now: float, deadline: float) -> float:
    """Return the end of the drain that begins at *now* because of *end*.

    *deadline* is the end of the loop's timeout, which bounds the drain of a stop too.
    """
    bound = deadline + loop.timeout_drain
    return bound if end is StopReason.TIMEOUT else min(now + loop.drain_timeout, bound)
