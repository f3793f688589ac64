"""The schedule of a cron expression in a time zone; it has no clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final
from zoneinfo import ZoneInfo

from ergon_framework.errors import ConfigurationError, require_extra

_MAX_EXPRESSION_CHARS: Final = 200
_SECOND: Final = timedelta(seconds=1)
#: An arbitrary time that is used to validate expressions.
_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class CronSchedule:
    """*expression* has five fields, or six, of which the first is seconds; *zone* is a name such as Europe/Berlin."""

    expression: str
    zone: str = "UTC"

    def __post_init__(self) -> None:
        if len(self.expression) > _MAX_EXPRESSION_CHARS:
            raise ConfigurationError(f"a cron expression has at most {_MAX_EXPRESSION_CHARS} characters")
        if self.after(_ANY_TIME) is None:
            raise ConfigurationError(f"the cron expression {self.expression!r} means no time at all: no such day comes")

    def after(self, moment: datetime) -> datetime | None:
        """Return the first scheduled time after *moment*; None if there is none in 50 years."""
        for tick in self._ticks(moment):
            # In an hour that occurs twice, the times of its first occurrence may be repeated.
            if tick > moment:
                return tick
        return None

    def between(self, since: datetime, until: datetime, *, limit: int) -> list[datetime]:
        """Return the last *limit* scheduled times from *since* to *until*, both included, oldest first.

        *since* is one of them, whatever the expression means. The length of the interval does not matter.
        """
        # Backward iteration only finds the first time: around a clock change it may omit some.
        begin, count = until, 0
        for tick in self._ticks(until + _SECOND, reverse=True):
            if tick < since:
                begin = begin if count else since
                break
            if tick <= until:
                begin, count = min(begin, tick), count + 1
            if count == limit:
                break
        ticks: deque[datetime] = deque(maxlen=limit)
        if begin <= since:
            begin = since
            ticks.append(since)
        else:
            begin -= _SECOND
        for tick in self._ticks(begin):
            if tick > until:
                break
            if tick > begin:
                ticks.append(tick)
        return list(ticks)

    def _ticks(self, moment: datetime, *, reverse: bool = False) -> Iterator[datetime]:
        library = require_extra("cron", "cronsim")
        local_moment = moment.astimezone(_load_zone(self.zone))
        try:
            ticks: Any = library.CronSim(self.expression, local_moment, reverse=reverse)
        except library.CronSimError as error:
            raise ConfigurationError(
                f"{self.expression!r} is no cron expression: {error}; it has minute, hour, day, month and day of the "
                "week, and may have seconds before them, as in '30 8 * * MON-FRI' or '*/10 * * * * *'"
            ) from error
        return (tick.astimezone(UTC) for tick in ticks)


def _load_zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise ConfigurationError(
            f"there is no time zone {name!r} on this machine; give a name such as Europe/Berlin, or install tzdata"
        ) from error
