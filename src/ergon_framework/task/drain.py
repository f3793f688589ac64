"""How long a loop that ends waits for the work that is running."""

from __future__ import annotations

from typing import Protocol

from ergon_framework.task.report import End


class DrainRules(Protocol):
    """The part of a loop's policy that is read here."""

    @property
    def drain_timeout(self) -> float: ...
    @property
    def timeout_drain(self) -> float: ...


def drain_end(loop: DrainRules, end: End, *, now: float, deadline: float) -> float:
    """Return the end of the drain that begins at *now* because of *end*.

    *deadline* is the end of the loop's timeout, which bounds the drain of a stop too.
    """
    bound = deadline + loop.timeout_drain
    return bound if end is End.TIMEOUT else min(now + loop.drain_timeout, bound)
