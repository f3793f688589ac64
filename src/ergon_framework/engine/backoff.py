"""The arithmetic of waiting, for every policy that waits; dice are handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: A century of seconds. Where no cap ends the growth this does: the sleeps of the operating system
#: refuse numbers not much larger, and a wait that fails is worse than one that is too short.
LONGEST: Final = 100 * 365.25 * 86_400


def delay(attempt: int, *, backoff: float, multiplier: float, cap: float) -> float:
    """Seconds to wait after *attempt*, the first being 0: ``backoff * multiplier**attempt``, at most *cap*.

    A cap of 0 means none; then the wait ends growing at ``LONGEST``.

    >>> [delay(attempt, backoff=1, multiplier=3, cap=10) for attempt in range(5)]
    [1.0, 3.0, 9.0, 10.0, 10.0]
    >>> delay(1_000_000, backoff=1, multiplier=2, cap=0) == LONGEST
    True
    """
    if attempt < 0:
        raise ValueError(f"attempts count from 0, so {attempt} is none; pass the number of the attempt that failed")
    limit = float(cap) if cap > 0 else LONGEST
    if backoff == 0 or multiplier == 1:  # what does not grow must not reach the limit by overflowing
        return min(float(backoff), limit)
    try:
        # As a float: a whole number to a large power is computed digit by digit and takes for ever.
        return min(backoff * float(multiplier) ** attempt, limit)
    except OverflowError:
        return limit


def jittered(seconds: float, ratio: float, dice: Callable[[], float]) -> float:
    """*seconds*, moved evenly by at most *ratio* of itself to either side; *dice* gives [0, 1).

    It comes after the cap, so that a fleet at its cap is spread too: the result may exceed the cap.

    >>> [jittered(10, 0.2, lambda: rolled) for rolled in (0.0, 0.5, 0.75)]
    [8.0, 10.0, 11.0]
    """
    return seconds * (1 + ratio * (2 * dice() - 1))


def shortest(*limits: float | None) -> float | None:
    """The smallest of *limits*, where None limits nothing.

    >>> shortest(30.0, None, 5.0), shortest(None), shortest()
    (5.0, None, None)
    """
    return min((limit for limit in limits if limit is not None), default=None)
