"""Cron entries: jobs that are submitted at scheduled times, as they are declared and as they are stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.executor.jobs.model import DEFAULT_RETENTION_SECONDS, QUEUE_PREFIX
from ergon_framework.executor.jobs.request import JobRequest, job_parameters
from ergon_framework.executor.jobs.timetable import CronSchedule
from ergon_framework.executor.routing import EXECUTOR_SEPARATOR

#: Default seconds after which a scheduled time that has passed is a misfire.
DEFAULT_GRACE_SECONDS: Final = 60.0
_MAX_NAME_CHARS: Final = 200
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
        if not 0 < len(self.name) <= _MAX_NAME_CHARS or not self.name.isprintable():
            raise ConfigurationError(
                f"the name of a cron entry has 1 to {_MAX_NAME_CHARS} printable characters, not {self.name[:50]!r}"
            )
        if self.misfire not in set(Misfire):
            raise ConfigurationError(f"a misfire policy is {', '.join(Misfire)}, not {self.misfire!r}")
        if not 0 <= self.grace <= _MAX_GRACE_SECONDS:
            raise ConfigurationError(f"a grace is 0 to {_MAX_GRACE_SECONDS:g} seconds, not {self.grace!r}")
        # Both are validated here, where they are declared, and not later in an orchestrator.
        _ = self.schedule, self.to_request()

    @property
    def schedule(self) -> CronSchedule:
        """The schedule of the entry."""
        return CronSchedule(self.expression, self.zone)

    def to_request(self, scheduled_at: datetime | None = None) -> JobRequest:
        """Return the job request of the scheduled time *at*; repeated calls for one time mean the same job."""
        key = None if scheduled_at is None else job_key(self.name, scheduled_at)
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


def job_key(name: str, scheduled_at: datetime) -> str:
    """Return the id, which is also the unique key, of an entry's job for the scheduled time *at*."""
    return f"cron:{name}:{scheduled_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def cron_columns(cron: Cron, *, default: str | None, executors: Collection[str] | None) -> dict[str, Any]:
    """Return the table row of *cron*; raise an error if its job could not be written."""
    prefix, separator, _ = cron.function.partition(EXECUTOR_SEPARATOR)
    kind = prefix if separator else default
    if executors is not None and kind not in executors:
        known = ", ".join(sorted(executors))
        raise ConfigurationError(f"the cron entry {cron.name!r} is for {kind!r}; the executors here are {known}")
    job = job_parameters(cron.to_request(), default=default, executors=None)
    row: dict[str, Any] = {
        "name": cron.name,
        "expression": cron.expression,
        "zone": cron.zone,
        "kind": job["queue"].removeprefix(QUEUE_PREFIX),
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
