"""Cron entries: what is submitted or sent at scheduled times, as it is declared and as it is stored.

A schedule is a cron expression in a time zone; it has no clock of its own. To fire an entry is to submit the job of one
of its scheduled times, which the code also calls ticks; or, for an entry of a queue, to send a transaction. A tick that
was not fired within the grace is a misfire.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from typing import Any, Final
from zoneinfo import ZoneInfo

from ergon_framework.errors import ConfigurationError, ErgonError, require_extra
from ergon_framework.executors.decision import EXECUTOR_SEPARATOR
from ergon_framework.jobs.model import DEFAULT_RETENTION_SECONDS, QUEUE_PREFIX, JobRequest, job_parameters

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
            raise ConfigurationError(f"the cron expression {self.expression!r} matches no time: no such day exists")

    def after(self, moment: datetime) -> datetime | None:
        """Return the first scheduled time after *moment*; None if there is none in 50 years."""
        for tick in self._ticks(moment):
            # In an hour that occurs twice, the times of its first occurrence may be repeated.
            if tick > moment:
                return tick
        return None

    def to_local(self, tick: datetime) -> datetime:
        """Return the scheduled time *tick* in the zone of the schedule."""
        return tick.astimezone(_load_zone(self.zone))

    def between(self, since: datetime, until: datetime, *, limit: int) -> list[datetime]:
        """Return the last *limit* scheduled times from *since* to *until*, both included, oldest first.

        *since* is always one of them: the caller has stored it as due. A long interval takes as long as a short one.
        """
        # Backward iteration only finds the time to begin at: around a clock change it may omit some. The forward
        # iteration below returns them all, and the deque keeps the last ones.
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
            begin -= _SECOND  # iteration begins after its start
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
                f"invalid cron expression {self.expression!r}: {error}; it has minute, hour, day, month and day of the "
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


# -- entries ----------------------------------------------------------------------------------------

#: Default seconds after which a scheduled time that has passed is a misfire.
DEFAULT_GRACE_SECONDS: Final = 60.0
_MAX_NAME_CHARS: Final = 200
#: The kind of the entries that send to a queue; no executor can have it. Orchestrators do not fire them.
QUEUE_KIND: Final = f"{EXECUTOR_SEPARATOR}queue"
_MAX_GRACE_SECONDS: Final = 10 * 365 * 86_400.0


class Misfire(StrEnum):
    """The handling of scheduled times that passed without a submission, in an outage longer than the grace."""

    #: Submit nothing for them; only future times.
    SKIP = "skip"
    #: Submit one job, for the last of them.
    ONCE = "once"
    #: Submit a job for each; of more than 1,000, for the last 1,000.
    ALL = "all"


class CronNotFound(ErgonError):
    """There is no entry of that name."""

    final = True
    code = "cron_not_found"


@dataclass(frozen=True, slots=True)
class CronTiming:
    """The name and the scheduled times of an entry, and what happens to times that passed."""

    name: str
    expression: str
    zone: str = "UTC"
    misfire: Misfire | str = Misfire.ONCE
    grace: float = DEFAULT_GRACE_SECONDS

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= _MAX_NAME_CHARS or not self.name.isprintable():
            raise ConfigurationError(
                f"the name of a cron entry has 1 to {_MAX_NAME_CHARS} printable characters, not {self.name[:50]!r}"
            )
        if self.misfire not in set(Misfire):
            raise ConfigurationError(f"a misfire policy is {', '.join(Misfire)}, not {self.misfire!r}")
        if not 0 <= self.grace <= _MAX_GRACE_SECONDS:
            raise ConfigurationError(f"a grace is 0 to {_MAX_GRACE_SECONDS:g} seconds, not {self.grace!r}")
        _ = self.schedule

    @property
    def schedule(self) -> CronSchedule:
        """The schedule of the entry."""
        return CronSchedule(self.expression, self.zone)


@dataclass(frozen=True, slots=True)
class Cron:
    """An entry: submit *function*, as a job, at the scheduled times of *expression* in *zone*.

    The expression has five fields, or six, of which the first is seconds. The name identifies an entry: another
    declaration with the same name changes it. The other fields are those of every job.
    """

    name: str
    expression: str
    function: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    zone: str = "UTC"
    misfire: Misfire | str = Misfire.ONCE
    grace: float = DEFAULT_GRACE_SECONDS
    priority: int = 0
    max_attempts: int | None = None
    timeout: float | None = None
    tenant: str | None = None
    retention: float = DEFAULT_RETENTION_SECONDS

    def __post_init__(self) -> None:
        # Timing and request are validated here, where they are declared, and not later in an orchestrator.
        _ = self.timing, self.to_request()

    @property
    def timing(self) -> CronTiming:
        """The name and the scheduled times of the entry."""
        return CronTiming(self.name, self.expression, zone=self.zone, misfire=self.misfire, grace=self.grace)

    def to_request(self, scheduled_at: datetime | None = None) -> JobRequest:
        """Return the job request of the time *scheduled_at*; repeated calls for one time mean the same job."""
        key = None if scheduled_at is None else tick_id(self.name, scheduled_at)
        return JobRequest(
            function=self.function,
            args=self.args,
            kwargs=self.kwargs,
            id=key,
            unique_key=key,
            priority=self.priority,
            max_attempts=self.max_attempts,
            timeout=self.timeout,
            tenant=self.tenant,
            retention=self.retention,
        )


def tick_id(name: str, scheduled_at: datetime) -> str:
    """Return the id of an entry's job or transaction for the time *scheduled_at*; a job has it as its unique key too.

    The id depends on nothing else: all processes derive the same one.
    """
    return f"cron:{name}:{scheduled_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def cron_columns(cron: Cron, *, default: str | None, executors: Collection[str] | None) -> dict[str, Any]:
    """Return the table row of *cron*, with a digest that shows a changed declaration; raise an error if it is invalid.

    *executors* are the kinds that exist, None if they are unknown; *default* is the kind of a function without one.
    """
    prefix, separator, _ = cron.function.partition(EXECUTOR_SEPARATOR)
    kind = prefix if separator else default
    if executors is not None and kind not in executors:
        known = ", ".join(sorted(executors))
        raise ConfigurationError(f"the cron entry {cron.name!r} is for {kind!r}; known executors: {known}")
    job = job_parameters(cron.to_request(), default=default, executors=None)
    row: dict[str, Any] = {
        **_timing_columns(cron.timing),
        "kind": job["queue"].removeprefix(QUEUE_PREFIX),
        "function": job["function"],
        "arguments": json.dumps([list(cron.args), dict(cron.kwargs)], allow_nan=False),
        "priority": cron.priority,
        "max_attempts": cron.max_attempts,
        "timeout": cron.timeout,
        "tenant": cron.tenant,
        "retention": cron.retention,
    }
    return _with_digest(row)


def queue_columns(timing: CronTiming, *, queue: str, tenant: str | None) -> dict[str, Any]:
    """Return the table row of an entry that sends to *queue* at the times of *timing*, with its digest.

    The row has no payload: the process that fires the entry creates it.
    """
    row: dict[str, Any] = {
        **_timing_columns(timing),
        "kind": QUEUE_KIND,
        "function": queue,
        "arguments": "[[], {}]",
        "priority": 0,
        "max_attempts": None,
        "timeout": None,
        "tenant": tenant,
        "retention": 0.0,
    }
    return _with_digest(row)


def _timing_columns(timing: CronTiming) -> dict[str, Any]:
    return {
        "name": timing.name,
        "expression": timing.expression,
        "zone": timing.zone,
        "misfire": Misfire(timing.misfire).value,
        "grace": timing.grace,
    }


def _with_digest(row: dict[str, Any]) -> dict[str, Any]:
    content = json.dumps(row, sort_keys=True).encode()
    return row | {"digest": hashlib.sha256(content).digest()}


@dataclass(frozen=True, slots=True)
class CronEntry:
    """An entry as it is stored; its arguments are omitted."""

    name: str
    expression: str
    zone: str
    kind: str
    function_name: str
    misfire: Misfire
    grace: float
    #: False while it is paused.
    enabled: bool
    #: The first scheduled time that was not fired; None if there are no more.
    next_at: datetime | None
    #: The last scheduled time that was fired.
    last_at: datetime | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "misfire", Misfire(self.misfire))
