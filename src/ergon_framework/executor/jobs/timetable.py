"""Timetable: the times that a cron expression means in a time zone; it has no clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final
from zoneinfo import ZoneInfo

from ergon_framework.errors import ConfigurationError, extra

_LONGEST: Final = 200
_SECOND: Final = timedelta(seconds=1)
#: A moment to read expressions at, for those who only want to know whether they can be read.
_ANY: Final = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Timetable:
    """*expression* has five fields, or six, of which the first is seconds; *zone* is a name such as Europe/Berlin."""

    expression: str
    zone: str = "UTC"

    def __post_init__(self) -> None:
        if len(self.expression) > _LONGEST:
            raise ConfigurationError(f"a cron expression has at most {_LONGEST} characters")
        if self.after(_ANY) is None:
            raise ConfigurationError(f"the cron expression {self.expression!r} means no time at all: no such day comes")

    def after(self, moment: datetime) -> datetime | None:
        """The first time after *moment*; None if none comes in 50 years."""
        for tick in self._ticks(moment):
            # In an hour that comes twice, those of its first time may be told once more.
            if tick > moment:
                return tick
        return None

    def passed(self, since: datetime, until: datetime, *, most: int) -> list[datetime]:
        """The last *most* times from *since* to *until*, both included, the oldest first; however long that was.

        *since* is one of them, whatever the expression says.
        """
        # Backwards only finds out where to begin: around a change of the clocks it may leave some out.
        begin, seen = until, 0
        for tick in self._ticks(until + _SECOND, reverse=True):
            if tick < since:
                begin = begin if seen else since
                break
            if tick <= until:
                begin, seen = min(begin, tick), seen + 1
            if seen == most:
                break
        found: deque[datetime] = deque(maxlen=most)
        if begin <= since:
            begin = since
            found.append(since)
        else:
            begin -= _SECOND
        for tick in self._ticks(begin):
            if tick > until:
                break
            if tick > begin:
                found.append(tick)
        return list(found)

    def _ticks(self, moment: datetime, *, reverse: bool = False) -> Iterator[datetime]:
        library = extra("cron", "cronsim")
        here = moment.astimezone(_zone(self.zone))
        try:
            found: Any = library.CronSim(self.expression, here, reverse=reverse)
        except library.CronSimError as error:
            raise ConfigurationError(
                f"{self.expression!r} is no cron expression: {error}; it has minute, hour, day, month and day of the "
                "week, and may have seconds before them, as in '30 8 * * MON-FRI' or '*/10 * * * * *'"
            ) from error
        return (tick.astimezone(UTC) for tick in found)


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise ConfigurationError(
            f"there is no time zone {name!r} on this machine; give a name such as Europe/Berlin, or install tzdata"
        ) from error
