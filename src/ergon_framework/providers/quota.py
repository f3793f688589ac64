"""How many calls a window still has; a pure model of the shared row. Moments are aware datetimes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Self

from ergon_framework.providers.errors import ProviderQuotaExceededError


class WindowKind(StrEnum):
    """How long a window is."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class Window:
    """From *start* to just before *end*, in UTC; the windows of one kind tile time."""

    kind: WindowKind
    start: datetime
    end: datetime

    def __contains__(self, moment: datetime) -> bool:
        return self.start <= moment < self.end


def window_at(kind: WindowKind, moment: datetime) -> Window:
    """The window of that kind that *moment* falls into; a moment without a zone is refused.

    >>> str(window_at(WindowKind.MONTH, datetime(2028, 2, 29, 12, tzinfo=UTC)).end)
    '2028-03-01 00:00:00+00:00'
    """
    if moment.tzinfo is None:
        raise ValueError(f"{moment.isoformat()} names no zone, so it is no moment; give it tzinfo=UTC")
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
class Block:
    """Calls taken out of a window at once, for one process to spend without asking again.

    They count as used from the moment they are taken, so that a process that dies with some left
    makes the window poorer and never richer. At *until* the block is worth nothing.
    """

    window: Window
    left: int
    until: datetime

    def take(self, now: datetime) -> Block | None:
        """The block with one call less; None where it has none to give any more."""
        return replace(self, left=self.left - 1) if self.left > 0 and now < self.until else None


@dataclass(frozen=True, slots=True)
class QuotaState:
    """What one window allows and what is used of it; used and remaining make up the limit at any time.

    Where no limit is configured there is no state at all. ``remaining_count`` is below 0 only
    after the limit was lowered to less than what had been used.
    """

    window: Window
    limit_count: int
    used_count: int = 0
    last_exhausted_at: datetime | None = None

    def __post_init__(self) -> None:
        if self.limit_count < 0 or self.used_count < 0:
            raise ValueError(f"a quota counts from 0; limit is {self.limit_count}, used is {self.used_count}")

    @classmethod
    def new(cls, kind: WindowKind, limit_count: int, *, now: datetime) -> Self:
        """The untouched window of *now*."""
        return cls(window_at(kind, now), limit_count)

    @property
    def remaining_count(self) -> int:
        return self.limit_count - self.used_count

    def at(self, now: datetime) -> QuotaState:
        """The state that *now* belongs to: this one, or the next window's, untouched.

        A clock that is behind stays in this window; going back would open a spent one again.
        """
        if now < self.window.end:
            return self
        return replace(self, window=window_at(self.window.kind, now), used_count=0)

    def reserve(self, n: int = 1, *, now: datetime) -> QuotaState:
        """The state after *n* calls are charged, all or none; ProviderQuotaExceededError if there are not so many."""
        if n < 1:
            raise ValueError(f"at least one call is reserved, not {n}")
        state = self.at(now)
        if state.remaining_count < n:
            raise ProviderQuotaExceededError(
                f"the quota of {state.limit_count} a {state.window.kind} is spent until {state.window.end.isoformat()}",
                retry_after=(state.window.end - now).total_seconds(),
            )
        return replace(state, used_count=state.used_count + n)

    def exhausted(self, now: datetime) -> QuotaState:
        """The state after a reservation was refused at *now*."""
        return replace(self.at(now), last_exhausted_at=now)

    def refund(self, n: int = 1, *, window: Window) -> QuotaState:
        """The state after *n* calls reserved in *window* were never sent; those of another window are past."""
        if window != self.window:
            return self
        if not 1 <= n <= self.used_count:
            raise ValueError(f"{n} calls cannot be given back where {self.used_count} are used; was it done twice?")
        return replace(self, used_count=self.used_count - n)

    def with_limit(self, limit_count: int) -> QuotaState:
        """The same window under another limit."""
        return replace(self, limit_count=limit_count)

    def lease(self, size: int, *, now: datetime, seconds: float) -> tuple[QuotaState, Block]:
        """The state without a block of at most *size* calls, and that block; at least one call or an error."""
        state = self.at(now)
        granted = max(1, min(size, state.remaining_count))
        state = state.reserve(granted, now=now)
        until = min(now + timedelta(seconds=seconds), state.window.end)
        return state, Block(state.window, granted, until)

    def give_back(self, block: Block, *, now: datetime) -> QuotaState:
        """The state after a block came back with what is left; after its end it has been booked as used."""
        if block.left < 1 or now >= block.until:
            return self
        return self.refund(block.left, window=block.window)
