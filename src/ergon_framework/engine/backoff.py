"""Delay arithmetic for every policy with a backoff; the random source is a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: A century in seconds, the limit where a policy has no cap: the sleep functions of operating systems
#: reject numbers not much larger, and a failed sleep is worse than a short one.
MAX_DELAY_SECONDS: Final = 100 * 365.25 * 86_400


def backoff_delay(attempt: int, *, backoff: float, multiplier: float, cap: float) -> float:
    """Return the seconds to wait after *attempt*, the first being 0: ``backoff * multiplier**attempt``, at most *cap*.

    A cap of 0 means no cap; the delay then grows up to ``MAX_DELAY_SECONDS``.

    >>> [backoff_delay(attempt, backoff=1, multiplier=3, cap=10) for attempt in range(5)]
    [1.0, 3.0, 9.0, 10.0, 10.0]
    >>> backoff_delay(1_000_000, backoff=1, multiplier=2, cap=0) == MAX_DELAY_SECONDS
    True
    """
    if attempt < 0:
        raise ValueError(f"attempts count from 0, so {attempt} is none; pass the number of the attempt that failed")
    limit = float(cap) if cap > 0 else MAX_DELAY_SECONDS
    if backoff == 0 or multiplier == 1:  # a constant delay must not reach the limit by overflow
        return min(float(backoff), limit)
    try:
        # As a float: an integer to a large power is computed exactly, which may take hours.
        return min(backoff * float(multiplier) ** attempt, limit)
    except OverflowError:
        return limit


def apply_jitter(seconds: float, ratio: float, random: Callable[[], float]) -> float:
    """Return *seconds* plus or minus at most *ratio* of it, uniformly distributed; *random* returns [0, 1).

    Jitter applies after the cap, which spreads a fleet at its cap too: the result may exceed the cap.

    >>> [apply_jitter(10, 0.2, lambda: value) for value in (0.0, 0.5, 0.75)]
    [8.0, 10.0, 11.0]
    """
    return seconds * (1 + ratio * (2 * random() - 1))


def min_or_none(*limits: float | None) -> float | None:
    """Return the smallest of *limits*; None means no limit.

    >>> min_or_none(30.0, None, 5.0), min_or_none(None), min_or_none()
    (5.0, None, None)
    """
    return min((limit for limit in limits if limit is not None), default=None)
