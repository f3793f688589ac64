"""Look up a job: the data of its row, without its arguments and its result.

A job is a stored call of a handler, which executors of its kind run; ``ergon why`` shows the result of a lookup. The
number of jobs ahead of a due job is counted too, up to a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from ergon_framework.database.operation import Operation, Query
from ergon_framework.history import History, HistoryEvent, Location, Value, WorkKind, WorkState, sort_events
from ergon_framework.jobs import sql
from ergon_framework.jobs.model import Job, JobState
from ergon_framework.jobs.registrations import ServedExecutor, describe_wait, list_executors
from ergon_framework.jobs.store import row_to_job

#: Maximum number of other jobs that are counted.
_MAX_COUNTED_JOBS: Final = 1_000


def lookup_job(job_id: str) -> Operation[list[History]]:
    """Return the history of the job with that id, if there is one."""
    rows = yield Query(sql.GET_JOB, {"id": job_id})
    counts = yield Query(sql.JOBS_AHEAD, {"id": job_id, "most": _MAX_COUNTED_JOBS})
    running, due_before = counts[0] if counts else (None, None)
    jobs = [row_to_job(*row) for row in rows]
    # Only a waiting job needs the known executors, and a database at an earlier revision has no table of executors.
    known = (yield from list_executors()) if any(job.state is JobState.PENDING for job in jobs) else []
    return [_to_history(job, running=running, due_before=due_before, known=known) for job in jobs]


def _to_history(job: Job, *, running: int | None, due_before: int | None, known: Sequence[ServedExecutor]) -> History:
    wait_reason = describe_wait(job, known, datetime.now(UTC)) if job.state is JobState.PENDING else None
    fields: dict[str, Value | None] = {
        "function": job.function_name,
        "attempts": job.attempts,
        "max attempts": job.max_attempts,
        "timeout": job.timeout,
        "priority": job.priority or None,
        "tenant": job.tenant,
        "correlation": job.correlation,
        "unique key": job.unique_key,
        "running of this kind": running,
        "orchestrator": wait_reason,
        "due before this job": due_before
        if due_before is None or due_before < _MAX_COUNTED_JOBS
        else f"{_MAX_COUNTED_JOBS} or more",
    }
    return History(
        kind=WorkKind.JOB,
        id=job.id,
        where=job.kind,
        attributes={name: value for name, value in fields.items() if value is not None},
        events=sort_events(_to_events(job)),
        location=_to_location(job),
    )


def _to_events(job: Job) -> list[HistoryEvent]:
    events = [HistoryEvent(at=job.created_at.timestamp(), event="submitted")]
    if job.started_at is not None:
        events.append(HistoryEvent(at=job.started_at.timestamp(), event=f"attempt {job.attempts} started"))
    if job.error is not None:
        # An attempt that will be retried has no end time in the row, only its error.
        ended_at = None if job.ended_at is None else job.ended_at.timestamp()
        delay: dict[str, Value] = {}
        if job.state is JobState.PENDING and job.started_at is not None:
            delay = {"due": _format_time(job.due_at)}
        message = f"{job.error.code}: {job.error.message}"
        title = "attempt failed" if ended_at is None else job.state.value
        category, stack = job.error.category.value, job.error.traceback
        events.append(
            HistoryEvent(at=ended_at, event=title, result=category, details=message, values=delay, traceback=stack)
        )
    elif job.ended_at is not None:
        events.append(HistoryEvent(at=job.ended_at.timestamp(), event=job.state.value))
    return events


def _to_location(job: Job) -> Location:
    since = None if job.ended_at is None else job.ended_at.timestamp()
    retention = None if job.expires_at is None else f"row kept until {_format_time(job.expires_at)}"
    if job.state is JobState.PENDING:
        return Location(state=WorkState.PENDING, until=job.due_at.timestamp())
    if job.state is JobState.RUNNING:
        started = None if job.started_at is None else job.started_at.timestamp()
        return Location(state=WorkState.RUNNING, since=started, details="kill requested" if job.kill_asked else "")
    return Location(state=WorkState(job.state.value), since=since, details=retention or "")


def _format_time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
