"""Health: what the last hour of calls was like, from counts and histograms by the minute.

A minute is made of rows, and rows may be counted in any order and in any groups: the sums are the
same, so a minute that was added up on the way equals one that is recomputed from its rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import reduce
from itertools import accumulate
from typing import Final

from ergon_framework.providers.circuit_breaker import BreakerState
from ergon_framework.providers.errors import ReasonCode

MINUTE: Final = 60
#: The minutes of an hour: the current one, as far as it has come, and the 59 before it.
MINUTES: Final = 60

#: Upper bounds of the buckets, in milliseconds: ten steps to each power of ten, none more than 1.28
#: times the one before. There is one more bucket above the last.
BOUNDS_MS: Final = (
    *(step * 10.0**power for power in range(5) for step in (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)),
    100_000.0,
)

#: Refused by ourselves before anything was sent: no call, and no word on the provider.
NOT_CALLED: Final = frozenset({ReasonCode.CIRCUIT_OPEN, ReasonCode.QUOTA_EXHAUSTED})


class Outcome(StrEnum):
    """How one attempt ended; ``dead_letter`` is the end of a call whose task was given up."""

    SUCCESS = "success"
    RETRY = "retry"
    FAILED = "failed"
    DEAD_LETTER = "dead_letter"


@dataclass(frozen=True, slots=True)
class Row:
    """One attempt, as far as health reads it; *at* is in seconds since the epoch."""

    at: float
    outcome: Outcome
    duration_ms: float
    reason_code: ReasonCode | None = None


@dataclass(frozen=True, slots=True)
class Calls:
    """Counts of attempts by outcome, and a histogram of how long they took.

    ``refused`` counts those that were never made, ``dead_letter`` the calls that ended in a dead letter, which are no
    attempts of their own: both are in no rate and in no histogram.
    """

    success: int = 0
    retry: int = 0
    failed: int = 0
    dead_letter: int = 0
    refused: int = 0
    buckets: tuple[int, ...] = (0,) * (len(BOUNDS_MS) + 1)
    longest_ms: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Calls:
        """The counts of *rows*."""
        counts, buckets, refused, longest = dict.fromkeys(Outcome, 0), [0] * (len(BOUNDS_MS) + 1), 0, 0.0
        for row in rows:
            if row.outcome is Outcome.DEAD_LETTER:
                counts[row.outcome] += 1
                continue
            if row.reason_code in NOT_CALLED:
                refused += 1
                continue
            counts[row.outcome] += 1
            buckets[bisect_left(BOUNDS_MS, row.duration_ms)] += 1
            longest = max(longest, row.duration_ms)
        return cls(
            success=counts[Outcome.SUCCESS],
            retry=counts[Outcome.RETRY],
            failed=counts[Outcome.FAILED],
            dead_letter=counts[Outcome.DEAD_LETTER],
            refused=refused,
            buckets=tuple(buckets),
            longest_ms=longest,
        )

    @property
    def total(self) -> int:
        return self.success + self.retry + self.failed

    @property
    def success_rate(self) -> float | None:
        """The share of attempts that succeeded; None where there were none."""
        return self.success / self.total if self.total else None

    @property
    def p95_latency_ms(self) -> float | None:
        """The upper bound of the bucket that holds the 95th of each 100 attempts, by nearest rank.

        It is never below the true value. From 1 ms to 100 s it is at most 1.28 times that, below it
        is at most 1 ms, above it is the longest attempt, which it never exceeds.
        """
        if not self.total:
            return None
        rank = (self.total * 95 + 99) // 100  # in whole numbers: a product with 0.95 is rounded
        holds = bisect_left(tuple(accumulate(self.buckets)), rank)
        return min((*BOUNDS_MS, self.longest_ms)[holds], self.longest_ms)

    def merge(self, other: Calls) -> Calls:
        """The counts of both."""
        return Calls(
            success=self.success + other.success,
            retry=self.retry + other.retry,
            failed=self.failed + other.failed,
            dead_letter=self.dead_letter + other.dead_letter,
            refused=self.refused + other.refused,
            buckets=tuple(mine + its for mine, its in zip(self.buckets, other.buckets, strict=True)),
            longest_ms=max(self.longest_ms, other.longest_ms),
        )


@dataclass(frozen=True, slots=True)
class Minute:
    """The attempts of one minute of UTC; *start* is its first second since the epoch."""

    start: int
    calls: Calls = Calls()

    def __post_init__(self) -> None:
        if self.start % MINUTE:
            raise ValueError(f"{self.start} is not the first second of a minute")

    def merge(self, other: Minute) -> Minute:
        """The same minute, counted in two parts."""
        if other.start != self.start:
            raise ValueError(f"the minutes {self.start} and {other.start} are two and stay two")
        return Minute(self.start, self.calls.merge(other.calls))


def minute_of(at: float) -> int:
    """The first second of the minute that *at* falls into."""
    return int(at // MINUTE) * MINUTE


def minutes(rows: Iterable[Row]) -> tuple[Minute, ...]:
    """The minutes that *rows* make up, the earliest first."""
    sorted_out: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        sorted_out[minute_of(row.at)].append(row)
    return tuple(Minute(start, Calls.of(sorted_out[start])) for start in sorted(sorted_out))


@dataclass(frozen=True, slots=True)
class Hour:
    """The last sixty minutes, as they were at the time they were asked for."""

    calls: Calls = Calls()

    @classmethod
    def at(cls, now: float, minutes: Iterable[Minute]) -> Hour:
        """The hour that ends with the minute of *now*; minutes outside of it are left out, parts of one added up."""
        last = minute_of(now)
        within = (minute.calls for minute in minutes if last - MINUTES * MINUTE < minute.start <= last)
        return cls(reduce(Calls.merge, within, Calls()))

    @property
    def success_rate_1h(self) -> float | None:
        return self.calls.success_rate

    @property
    def p95_latency_ms_1h(self) -> float | None:
        return self.calls.p95_latency_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderHealthState:
    """One row of ``provider_health_states``: how a provider and capability are for one tenant."""

    id: int
    tenant_id: str
    provider_name: str
    capability: str
    breaker_state: BreakerState
    consecutive_failures: int
    success_rate_1h: float | None
    p95_latency_ms_1h: float | None
    last_error_code: str | None
    last_error_at: datetime | None
    last_success_at: datetime | None
    updated_at: datetime
