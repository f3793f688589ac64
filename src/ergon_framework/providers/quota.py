"""The quota of a window (a minute, hour, day or month): the rules for the row that all processes share; no I/O.

Times are aware datetimes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Self

from ergon_framework.providers.errors import ProviderQuotaExceededError


class WindowKind(StrEnum):
    """The length of a window."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class Window:
    """The time from *start* to just before *end*, in UTC; the windows of one kind are contiguous."""

    kind: WindowKind
    start: datetime
    end: datetime

    def __contains__(self, moment: datetime) -> bool:
        return self.start <= moment < self.end


def window_at(kind: WindowKind, moment: datetime) -> Window:
    """Return the window of *kind* that contains *moment*; raise ValueError for a time without a zone.

    >>> str(window_at(WindowKind.MONTH, datetime(2028, 2, 29, 12, tzinfo=UTC)).end)
    '2028-03-01 00:00:00+00:00'
    """
    if moment.tzinfo is None:
        raise ValueError(f"{moment.isoformat()} has no time zone: pass tzinfo=UTC")
    minute = moment.astimezone(UTC).replace(second=0, microsecond=0)
    if kind is WindowKind.MINUTE:
        return Window(kind, minute, minute + timedelta(minutes=1))
    hour = minute.replace(minute=0)
    if kind is WindowKind.HOUR:
        return Window(kind, hour, hour + timedelta(hours=1))
    day = hour.replace(hour=0)
    if kind is WindowKind.DAY:
        return Window(kind, day, day + timedelta(days=1))
    month = day.replace(day=1)
    # Any day of the next month will do: no month has more than 31.
    return Window(kind, month, (month + timedelta(days=31)).replace(day=1))


@dataclass(frozen=True, slots=True)
class QuotaBlock:
    """Calls reserved from a window in one step, which a process makes without further requests.

    They count as used from the moment of the reservation, so that a killed process leaves quota unused but never
    allows extra calls. The block expires at *until*.
    """

    window: Window
    left: int
    until: datetime

    def take(self, now: datetime) -> QuotaBlock | None:
        """Return the block with one call less; None if it is empty or expired."""
        return replace(self, left=self.left - 1) if self.left > 0 and now < self.until else None


@dataclass(frozen=True, slots=True)
class QuotaState:
    """The limit of one window and the calls used; used and remaining always add up to the limit.

    Without a configured limit there is no state. ``remaining_count`` is negative only
    after the limit was lowered below the used count.
    """

    window: Window
    limit_count: int
    used_count: int = 0
    last_exhausted_at: datetime | None = None

    def __post_init__(self) -> None:
        if self.limit_count < 0 or self.used_count < 0:
            raise ValueError(f"quota counts must be >= 0: limit {self.limit_count}, used {self.used_count}")

    @classmethod
    def new(cls, kind: WindowKind, limit_count: int, *, now: datetime) -> Self:
        """Return the unused window that contains *now*."""
        return cls(window_at(kind, now), limit_count)

    @property
    def remaining_count(self) -> int:
        return self.limit_count - self.used_count

    def at(self, now: datetime) -> QuotaState:
        """Return the state at *now*: this state, or that of the next window, unused.

        A clock that is behind stays in this window; going back would reopen an exhausted one.
        """
        if now < self.window.end:
            return self
        return replace(self, window=window_at(self.window.kind, now), used_count=0)

    def reserve(self, n: int = 1, *, now: datetime) -> QuotaState:
        """Charge *n* calls, all or none; raise ProviderQuotaExceededError if fewer calls remain."""
        if n < 1:
            raise ValueError(f"calls to reserve must be >= 1, got {n}")
        state = self.at(now)
        if state.remaining_count < n:
            raise ProviderQuotaExceededError(
                f"quota of {state.limit_count} a {state.window.kind} is exhausted until {state.window.end.isoformat()}",
                retry_after=(state.window.end - now).total_seconds(),
            )
        return replace(state, used_count=state.used_count + n)

    def mark_exhausted(self, now: datetime) -> QuotaState:
        """Return the state after a reservation was rejected at *now*."""
        return replace(self.at(now), last_exhausted_at=now)

    def refund(self, n: int = 1, *, window: Window) -> QuotaState:
        """Refund *n* calls that were reserved in *window* and never sent; another window is not changed."""
        if window != self.window:
            return self
        if not 1 <= n <= self.used_count:
            raise ValueError(f"cannot refund {n} calls of {self.used_count} used; check for a double refund")
        return replace(self, used_count=self.used_count - n)

    def with_limit(self, limit_count: int) -> QuotaState:
        """Return the same window with another limit."""
        return replace(self, limit_count=limit_count)

    def lease(self, size: int, *, now: datetime, seconds: float) -> tuple[QuotaState, QuotaBlock]:
        """Reserve a block of 1 to *size* calls; return the new state and the block, or raise if no call remains."""
        state = self.at(now)
        granted = max(1, min(size, state.remaining_count))
        state = state.reserve(granted, now=now)
        until = min(now + timedelta(seconds=seconds), state.window.end)
        return state, QuotaBlock(state.window, granted, until)

    def release_block(self, block: QuotaBlock, *, now: datetime) -> QuotaState:
        """Refund the remaining calls of a block; an expired block stays counted as used."""
        if block.left < 1 or now >= block.until:
            return self
        return self.refund(block.left, window=block.window)
