"""Cron: a job that is submitted at set times, as it is declared and as it is stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.executor.jobs.model import PREFIX, RETENTION
from ergon_framework.executor.jobs.request import Request, parameters
from ergon_framework.executor.jobs.timetable import Timetable
from ergon_framework.executor.routing import MARK

#: Seconds after which a time that has passed is a misfire, unless an entry says otherwise.
GRACE: Final = 60.0
_LONGEST_NAME: Final = 200
_LONGEST_GRACE: Final = 10 * 365 * 86_400.0


class Misfire(StrEnum):
    """What becomes of times that passed while nobody could submit: an outage longer than the grace."""

    #: Nothing: only times to come.
    SKIP = "skip"
    #: One job, for the last of them.
    ONCE = "once"
    #: A job for each; of more than 1,000, for the last 1,000.
    ALL = "all"


class CronNotFound(ErgonError):
    """There is no entry of that name."""

    final = True
    code = "cron_not_found"


@dataclass(frozen=True, slots=True)
class Cron:
    """An entry: submit *function*, as a job, at the times that *expression* means in *zone*.

    The expression has five fields, or six, of which the first is seconds. The name is what an entry
    is: the same name declared otherwise changes it. All else is as of every job.
    """

    name: str
    expression: str
    function: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    zone: str = "UTC"
    misfire: Misfire | str = Misfire.ONCE
    grace: float = GRACE
    priority: int = 0
    max_attempts: int | None = None
    timeout: float | None = None
    tenant: str | None = None
    retention: float = RETENTION

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= _LONGEST_NAME or not self.name.isprintable():
            raise ConfigurationError(
                f"the name of a cron entry has 1 to {_LONGEST_NAME} printable characters, not {self.name[:50]!r}"
            )
        if self.misfire not in set(Misfire):
            raise ConfigurationError(f"a misfire policy is {', '.join(Misfire)}, not {self.misfire!r}")
        if not 0 <= self.grace <= _LONGEST_GRACE:
            raise ConfigurationError(f"a grace is 0 to {_LONGEST_GRACE:g} seconds, not {self.grace!r}")
        # Both are refused here, where they are written, and not by an orchestrator at night.
        _ = self.timetable, self.request()

    @property
    def timetable(self) -> Timetable:
        """When it is due."""
        return Timetable(self.expression, self.zone)

    def request(self, at: datetime | None = None) -> Request:
        """Its job for the scheduled time *at*: whoever asks for it again gets the same job."""
        key = None if at is None else job_key(self.name, at)
        return Request(
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


def job_key(name: str, at: datetime) -> str:
    """The id and the unique key of an entry's job for the scheduled time *at*."""
    return f"cron:{name}:{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def columns(cron: Cron, *, default: str | None, executors: Collection[str] | None) -> dict[str, Any]:
    """What the table is given for *cron*; errors if its job could not be written."""
    prefix, mark, _ = cron.function.partition(MARK)
    kind = prefix if mark else default
    if executors is not None and kind not in executors:
        known = ", ".join(sorted(executors))
        raise ConfigurationError(f"the cron entry {cron.name!r} is for {kind!r}; the executors here are {known}")
    job = parameters(cron.request(), default=default, executors=None)
    row: dict[str, Any] = {
        "name": cron.name,
        "expression": cron.expression,
        "zone": cron.zone,
        "kind": job["queue"].removeprefix(PREFIX),
        "function": job["function"],
        "arguments": json.dumps([list(cron.args), dict(cron.kwargs)], allow_nan=False),
        "priority": cron.priority,
        "max_attempts": cron.max_attempts,
        "timeout": cron.timeout,
        "tenant": cron.tenant,
        "retention": cron.retention,
        "misfire": Misfire(cron.misfire).value,
        "grace": cron.grace,
    }
    told = json.dumps(row, sort_keys=True).encode()
    return row | {"digest": hashlib.sha256(told).digest()}


@dataclass(frozen=True, slots=True)
class CronEntry:
    """An entry as it is stored; its arguments are not shown."""

    name: str
    expression: str
    zone: str
    kind: str
    function_name: str
    misfire: Misfire
    grace: float
    #: False while somebody has paused it.
    enabled: bool
    #: The first scheduled time that was not fired; None if none comes any more.
    next_at: datetime | None
    #: The last one that was.
    last_at: datetime | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "misfire", Misfire(self.misfire))
