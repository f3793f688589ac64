"""Reading and steering: what people ask of jobs, as operations for either variant."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from ergon_framework.audit import new_entry
from ergon_framework.connectors.postgres import audit, burials
from ergon_framework.connectors.postgres.statements import WAKE
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.executor.jobs import statements
from ergon_framework.executor.jobs.model import (
    PREFIX,
    Job,
    JobError,
    JobNotFound,
    JobState,
    NotReplayable,
    queue_name,
)
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

#: The most that are listed at once.
MOST: Final = 10_000
#: How a wait looks: soon at first, then ever more seldom.
FIRST_LOOK, LAST_LOOK = 0.02, 1.0


def show(job_id: str) -> Operation[Job]:
    """The job; JobNotFound if there is none."""
    rows = yield Query(statements.SHOW, {"id": job_id})
    if not rows:
        raise _missing(job_id)
    return job_of(*rows[0])


def ended(job_ids: Sequence[str]) -> Operation[list[Job]]:
    """Those of *job_ids* that are over, in any order; JobNotFound if none is over and one does not exist."""
    rows = yield Query(statements.ENDED, {"ids": list(job_ids)})
    if not rows:
        missing = yield Query(statements.MISSING, {"ids": list(job_ids)})
        if missing:
            raise _missing(missing[0][0])
    return [job_of(*row) for row in rows]


def state(job_id: str) -> Operation[JobState]:
    """Where the job is."""
    rows = yield Query(statements.STATE, {"id": job_id})
    if not rows:
        raise _missing(job_id)
    return JobState(rows[0][0])


def listed(
    *,
    states: Collection[JobState | str] | None = None,
    kind: str | None = None,
    function: str | None = None,
    tenant: str | None = None,
    before: int | None = None,
    limit: int = 100,
) -> Operation[list[Job]]:
    """Jobs that fit all of it, the newest first; *before* is the number of the last one of the page before."""
    if not 0 < limit <= MOST:
        raise ConfigurationError(f"1 to {MOST:,} jobs are listed at once, not {limit}")
    wanted = list(JobState) if states is None else [_state(each) for each in states]
    given = {
        "states": [each.value for each in wanted],
        "queue": None if kind is None else queue_name(kind),
        "prefix": PREFIX,
        "function": function,
        "tenant": tenant,
        "before": before,
        "limit": limit,
    }
    rows = yield Query(statements.LIST, given)
    return [job_of(*row) for row in rows]


def cancel(job_id: str) -> Operation[bool]:
    """Cancel the job if it waits, also for its time or its next attempt; False if it has begun or is over."""
    yield BEGIN
    found = yield Query(statements.CANCEL, {"id": job_id})
    if found:
        yield from _note("job.cancel", found[0][1], job_id)
    yield COMMIT
    if found:
        return True
    return (yield from state(job_id)) is JobState.CANCELLED


def kill(job_id: str) -> Operation[JobState]:
    """Cancel the job if it waits, have it killed if it runs; where it is now.

    One that runs is killed by its orchestrator within a second or so. An outcome that arrives before is applied.
    """
    yield BEGIN
    found = yield Query(statements.KILL, {"id": job_id})
    if found:
        yield from _note("job.kill", found[0][1], job_id)
    yield COMMIT
    if found:
        return JobState(found[0][0])
    return (yield from state(job_id))


def replay(job_id: str) -> Operation[None]:
    """Have a job that has failed run anew, with its attempts counted from the beginning."""
    yield BEGIN
    rows = yield Query(statements.REPLAYED, {"id": job_id})
    was, queue, place = rows[0] if rows else (None, None, None)
    if was != JobState.FAILED or place is None:
        yield ROLLBACK
        raise _unplayable(job_id, was)
    yield from burials.replayed(queue, [str(place)])
    yield Query(statements.RESET, {"id": job_id})
    yield Query(WAKE, {"queue": queue})
    ((name,),) = yield Query("select name from ergon.queue where id = %(queue)s", {"queue": queue})
    yield from _note("job.replay", name, job_id)
    yield COMMIT


def _note(action: str, queue: str, job_id: str) -> Operation[None]:
    entry = new_entry(action, queue, [job_id])
    yield from audit.note(None if entry is None else entry.end(count=1))


def looks() -> Iterator[float]:
    """Seconds to wait before each further look."""
    pause = FIRST_LOOK
    while True:
        yield pause
        pause = min(pause * 1.5, LAST_LOOK)


def _state(word: str) -> JobState:
    try:
        return JobState(word)
    except ValueError:
        raise ConfigurationError(f"{word!r} is no state of a job; they are {', '.join(JobState)}") from None


def _unplayable(job_id: str, was: str | None) -> JobNotFound | NotReplayable:
    if was is None:
        return _missing(job_id)
    if was != JobState.FAILED:
        return NotReplayable(f"the job {job_id!r} is {was}; only one that has failed can be replayed")
    return NotReplayable(
        f"the dead letter of the job {job_id!r} is not there: it was discarded, or is being written just now"
    )


def _missing(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id!r}, or no longer: jobs are thrown away when their retention is over")


def job_of(*row: Any) -> Job:
    """The job of a row of ``statements.COLUMNS``."""
    job_id, queue, function, where, *plain = row
    result, category, code, words, kind, traceback, number = plain[13:]
    error = None if code is None else JobError(Category(category), code, words or "", kind, traceback)
    value = None if result is None else json.loads(result)
    names = (
        *("attempts", "max_attempts", "timeout", "priority", "tenant", "correlation", "unique_key", "created_at"),
        *("due_at", "started_at", "ended_at", "expires_at", "kill_asked"),
    )
    fields: dict[str, Any] = dict(zip(names, plain[:13], strict=True))
    return Job(
        id=job_id,
        kind=queue.removeprefix(PREFIX),
        function_name=function,
        state=JobState(where),
        result=value,
        error=error,
        number=number,
        **fields,
    )
