"""The health of the last hour's calls, from counts and histograms per minute.

An attempt is one try of a provider call. The attempts of a minute may be counted in any order and in any groups: the
sums are the same, so a minute that was added up incrementally equals one that is recomputed from its rows.
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

MINUTE_SECONDS: Final = 60
#: The minutes of an hour: the current one so far, and the 59 before it.
HOUR_MINUTES: Final = 60

#: Upper bounds of the buckets, in milliseconds: ten steps per power of ten, each at most 1.28
#: times the previous one. One more bucket follows the last bound.
BUCKET_BOUNDS_MS: Final = (
    *(step * 10.0**power for power in range(5) for step in (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)),
    100_000.0,
)

#: Reasons of attempts rejected before sending: they are not calls, and say nothing about the provider.
NOT_CALLED_REASONS: Final = frozenset({ReasonCode.CIRCUIT_OPEN, ReasonCode.QUOTA_EXHAUSTED})


class AttemptOutcome(StrEnum):
    """How one attempt ended; ``dead_letter`` is the end of a call whose task was given up."""

    SUCCESS = "success"
    RETRY = "retry"
    FAILED = "failed"
    DEAD_LETTER = "dead_letter"


@dataclass(frozen=True, slots=True)
class AttemptSample:
    """The fields of one attempt that health uses; *at* is in seconds since the epoch."""

    at: float
    outcome: AttemptOutcome
    duration_ms: float
    reason_code: ReasonCode | None = None


@dataclass(frozen=True, slots=True)
class CallStats:
    """Counts of attempts by outcome, and a histogram of their durations.

    ``refused`` counts attempts that were never made, ``dead_letter`` calls that ended in a dead letter, which are
    not attempts themselves: neither is part of a rate or a histogram.
    """

    success: int = 0
    retry: int = 0
    failed: int = 0
    dead_letter: int = 0
    refused: int = 0
    buckets: tuple[int, ...] = (0,) * (len(BUCKET_BOUNDS_MS) + 1)
    longest_ms: float = 0.0

    @classmethod
    def from_rows(cls, rows: Iterable[AttemptSample]) -> CallStats:
        """Return the counts of *rows*."""
        counts, buckets, refused, longest_ms = (
            dict.fromkeys(AttemptOutcome, 0),
            [0] * (len(BUCKET_BOUNDS_MS) + 1),
            0,
            0.0,
        )
        for row in rows:
            if row.outcome is AttemptOutcome.DEAD_LETTER:
                counts[row.outcome] += 1
                continue
            if row.reason_code in NOT_CALLED_REASONS:
                refused += 1
                continue
            counts[row.outcome] += 1
            buckets[bisect_left(BUCKET_BOUNDS_MS, row.duration_ms)] += 1
            longest_ms = max(longest_ms, row.duration_ms)
        return cls(
            success=counts[AttemptOutcome.SUCCESS],
            retry=counts[AttemptOutcome.RETRY],
            failed=counts[AttemptOutcome.FAILED],
            dead_letter=counts[AttemptOutcome.DEAD_LETTER],
            refused=refused,
            buckets=tuple(buckets),
            longest_ms=longest_ms,
        )

    @property
    def total(self) -> int:
        return self.success + self.retry + self.failed

    @property
    def success_rate(self) -> float | None:
        """The share of attempts that succeeded; None without attempts."""
        return self.success / self.total if self.total else None

    @property
    def p95_latency_ms(self) -> float | None:
        """The upper bound of the bucket that holds the 95th percentile, by nearest rank.

        It is never below the true value. From 1 ms to 100 s it is at most 1.28 times the true value, below that range
        at most 1 ms, above it the longest attempt, which it never exceeds.
        """
        if not self.total:
            return None
        rank = (self.total * 95 + 99) // 100  # in integers: a product with 0.95 is rounded
        bucket = bisect_left(tuple(accumulate(self.buckets)), rank)
        return min((*BUCKET_BOUNDS_MS, self.longest_ms)[bucket], self.longest_ms)

    def merge(self, other: CallStats) -> CallStats:
        """Return the sum of both counts."""
        return CallStats(
            success=self.success + other.success,
            retry=self.retry + other.retry,
            failed=self.failed + other.failed,
            dead_letter=self.dead_letter + other.dead_letter,
            refused=self.refused + other.refused,
            buckets=tuple(mine + its for mine, its in zip(self.buckets, other.buckets, strict=True)),
            longest_ms=max(self.longest_ms, other.longest_ms),
        )


@dataclass(frozen=True, slots=True)
class MinuteStats:
    """The attempts of one minute in UTC; *start* is its first second since the epoch."""

    start: int
    calls: CallStats = CallStats()

    def __post_init__(self) -> None:
        if self.start % MINUTE_SECONDS:
            raise ValueError(f"{self.start} is invalid: expected the first second of a minute")

    def merge(self, other: MinuteStats) -> MinuteStats:
        """Merge two counts of the same minute."""
        if other.start != self.start:
            raise ValueError(f"cannot merge different minutes: {self.start} and {other.start}")
        return MinuteStats(self.start, self.calls.merge(other.calls))


def floor_to_minute(at: float) -> int:
    """Return the first second of the minute that contains *at*."""
    return int(at // MINUTE_SECONDS) * MINUTE_SECONDS


def group_by_minute(rows: Iterable[AttemptSample]) -> tuple[MinuteStats, ...]:
    """Group *rows* by minute, the earliest first."""
    rows_by_minute: defaultdict[int, list[AttemptSample]] = defaultdict(list)
    for row in rows:
        rows_by_minute[floor_to_minute(row.at)].append(row)
    return tuple(MinuteStats(start, CallStats.from_rows(rows_by_minute[start])) for start in sorted(rows_by_minute))


@dataclass(frozen=True, slots=True)
class HourStats:
    """The statistics of the last sixty minutes."""

    calls: CallStats = CallStats()

    @classmethod
    def at(cls, now: float, minutes: Iterable[MinuteStats]) -> HourStats:
        """Return the hour that ends with the minute of *now*; other minutes are ignored, equal minutes are merged."""
        last_minute = floor_to_minute(now)
        hour_calls = (
            minute.calls
            for minute in minutes
            if last_minute - HOUR_MINUTES * MINUTE_SECONDS < minute.start <= last_minute
        )
        return cls(reduce(CallStats.merge, hour_calls, CallStats()))

    @property
    def success_rate_1h(self) -> float | None:
        return self.calls.success_rate

    @property
    def p95_latency_ms_1h(self) -> float | None:
        return self.calls.p95_latency_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderHealthState:
    """One row of ``provider_health_states``: the health of a provider and capability for one tenant."""

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
