"""Query and control jobs: operations of clients, for either variant."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from ergon_framework.audit import create_entry
from ergon_framework.connectors.postgres import audit, burials
from ergon_framework.connectors.postgres.statements import NOTIFY_LISTENERS
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.executor.jobs import statements
from ergon_framework.executor.jobs.model import (
    QUEUE_PREFIX,
    Job,
    JobError,
    JobNotFound,
    JobState,
    NotReplayable,
    queue_name,
)
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

#: Maximum number of jobs in one list.
MAX_LISTED_JOBS: Final = 10_000
#: Seconds before the first further poll of a wait, and the maximum that later pauses grow to.
FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 1.0


def get_job(job_id: str) -> Operation[Job]:
    """Return the job; raise JobNotFound if there is none."""
    rows = yield Query(statements.GET_JOB, {"id": job_id})
    if not rows:
        raise _not_found_error(job_id)
    return row_to_job(*rows[0])


def find_finished(job_ids: Sequence[str]) -> Operation[list[Job]]:
    """Return those of *job_ids* that are final, in any order; JobNotFound if none is final and one does not exist."""
    rows = yield Query(statements.FIND_FINISHED, {"ids": list(job_ids)})
    if not rows:
        missing = yield Query(statements.FIND_MISSING, {"ids": list(job_ids)})
        if missing:
            raise _not_found_error(missing[0][0])
    return [row_to_job(*row) for row in rows]


def get_state(job_id: str) -> Operation[JobState]:
    """Return the state of the job."""
    rows = yield Query(statements.GET_STATE, {"id": job_id})
    if not rows:
        raise _not_found_error(job_id)
    return JobState(rows[0][0])


def list_jobs(
    *,
    states: Collection[JobState | str] | None = None,
    kind: str | None = None,
    function: str | None = None,
    tenant: str | None = None,
    before: int | None = None,
    limit: int = 100,
) -> Operation[list[Job]]:
    """Return jobs that match all filters, newest first; *before* is the number of the last job of the previous page."""
    if not 0 < limit <= MAX_LISTED_JOBS:
        raise ConfigurationError(f"1 to {MAX_LISTED_JOBS:,} jobs are listed at once, not {limit}")
    selected_states = list(JobState) if states is None else [_parse_state(each) for each in states]
    parameters = {
        "states": [each.value for each in selected_states],
        "queue": None if kind is None else queue_name(kind),
        "prefix": QUEUE_PREFIX,
        "function": function,
        "tenant": tenant,
        "before": before,
        "limit": limit,
    }
    rows = yield Query(statements.LIST_JOBS, parameters)
    return [row_to_job(*row) for row in rows]


def cancel(job_id: str) -> Operation[bool]:
    """Cancel the job if it waits, also for its due time or a retry; return False if it has begun or is final."""
    yield BEGIN
    rows = yield Query(statements.CANCEL, {"id": job_id})
    if rows:
        yield from _record_audit("job.cancel", rows[0][1], job_id)
    yield COMMIT
    if rows:
        return True
    return (yield from get_state(job_id)) is JobState.CANCELLED


def kill(job_id: str) -> Operation[JobState]:
    """Cancel the job if it waits, request its kill if it runs; return its state.

    The orchestrator of a running job kills it within about a second. An outcome that arrives before is applied.
    """
    yield BEGIN
    rows = yield Query(statements.KILL, {"id": job_id})
    if rows:
        yield from _record_audit("job.kill", rows[0][1], job_id)
    yield COMMIT
    if rows:
        return JobState(rows[0][0])
    return (yield from get_state(job_id))


def replay(job_id: str) -> Operation[None]:
    """Run a failed job again, with its attempts counted from the beginning."""
    yield BEGIN
    rows = yield Query(statements.LOCK_FOR_REPLAY, {"id": job_id})
    old_state, queue, handle = rows[0] if rows else (None, None, None)
    if old_state != JobState.FAILED or handle is None:
        yield ROLLBACK
        raise _not_replayable_error(job_id, old_state)
    yield from burials.replay_dead(queue, [str(handle)])
    yield Query(statements.RESET_JOB, {"id": job_id})
    yield Query(NOTIFY_LISTENERS, {"queue": queue})
    ((name,),) = yield Query("select name from ergon.queue where id = %(queue)s", {"queue": queue})
    yield from _record_audit("job.replay", name, job_id)
    yield COMMIT


def _record_audit(action: str, queue: str, job_id: str) -> Operation[None]:
    entry = create_entry(action, queue, [job_id])
    yield from audit.write_entry(None if entry is None else entry.end(count=1))


def poll_intervals() -> Iterator[float]:
    """Yield the seconds to wait before each further poll."""
    pause = FIRST_POLL_SECONDS
    while True:
        yield pause
        pause = min(pause * 1.5, MAX_POLL_SECONDS)


def _parse_state(value: str) -> JobState:
    try:
        return JobState(value)
    except ValueError:
        raise ConfigurationError(f"{value!r} is no state of a job; they are {', '.join(JobState)}") from None


def _not_replayable_error(job_id: str, old_state: str | None) -> JobNotFound | NotReplayable:
    if old_state is None:
        return _not_found_error(job_id)
    if old_state != JobState.FAILED:
        return NotReplayable(f"the job {job_id!r} is {old_state}; only one that has failed can be replayed")
    return NotReplayable(
        f"the dead letter of the job {job_id!r} is not there: it was discarded, or is being written just now"
    )


def _not_found_error(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id!r}, or no longer: jobs are thrown away when their retention is over")


def row_to_job(*row: Any) -> Job:
    """Return the job of a row of the ``COLUMNS`` statement part."""
    job_id, queue, function, state_value, *columns = row
    result, category, code, message, error_type, traceback, number = columns[13:]
    error = None if code is None else JobError(Category(category), code, message or "", error_type, traceback)
    value = None if result is None else json.loads(result)
    names = (
        *("attempts", "max_attempts", "timeout", "priority", "tenant", "correlation", "unique_key", "created_at"),
        *("due_at", "started_at", "ended_at", "expires_at", "kill_asked"),
    )
    fields: dict[str, Any] = dict(zip(names, columns[:13], strict=True))
    return Job(
        id=job_id,
        kind=queue.removeprefix(QUEUE_PREFIX),
        function_name=function,
        state=JobState(state_value),
        result=value,
        error=error,
        number=number,
        **fields,
    )
