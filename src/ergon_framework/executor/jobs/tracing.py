"""Tracing: what the row of a job says of it, without its arguments and its result."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from ergon_framework.executor.jobs import statements
from ergon_framework.executor.jobs.model import Job, JobState
from ergon_framework.executor.jobs.reading import job_of
from ergon_framework.executor.jobs.registrations import ServedExecutor, describe_wait, list_executors
from ergon_framework.history import Event, History, Kind, Place, State, Value, in_order
from ergon_framework.schema.operation import Operation, Query

#: The most others that are counted.
_MOST: Final = 1_000


def trace(job_id: str) -> Operation[list[History]]:
    """The job of that id, if there is one."""
    rows = yield Query(statements.SHOW, {"id": job_id})
    company = yield Query(statements.COMPANY, {"id": job_id, "most": _MOST})
    running, before = company[0] if company else (None, None)
    jobs = [job_of(*row) for row in rows]
    # An older schema has no table of executors; it is needed for a job that waits, and for nothing else.
    known = (yield from list_executors()) if any(job.state is JobState.PENDING for job in jobs) else []
    return [_history(job, running=running, before=before, known=known) for job in jobs]


def _history(job: Job, *, running: int | None, before: int | None, known: Sequence[ServedExecutor]) -> History:
    waits = describe_wait(job, known, datetime.now(UTC)) if job.state is JobState.PENDING else None
    told: dict[str, Value | None] = {
        "function": job.function_name,
        "attempts": job.attempts,
        "max attempts": job.max_attempts,
        "timeout": job.timeout,
        "priority": job.priority or None,
        "tenant": job.tenant,
        "correlation": job.correlation,
        "unique key": job.unique_key,
        "running of its kind": running,
        "orchestrator": waits,
        "due before it": before if before is None or before < _MOST else f"{_MOST} or more",
    }
    return History(
        kind=Kind.JOB,
        id=job.id,
        where=job.kind,
        about={name: value for name, value in told.items() if value is not None},
        events=in_order(_events(job)),
        place=_place(job),
    )


def _events(job: Job) -> list[Event]:
    events = [Event(at=job.created_at.timestamp(), what="submitted")]
    if job.started_at is not None:
        events.append(Event(at=job.started_at.timestamp(), what=f"attempt {job.attempts} began"))
    if job.error is not None:
        # An attempt that is to be made again has no end of its own in the row, only what went wrong.
        ended = None if job.ended_at is None else job.ended_at.timestamp()
        delay: dict[str, Value] = {}
        if job.state is JobState.PENDING and job.started_at is not None:
            delay = {"due": _moment(job.due_at)}
        words = f"{job.error.code}: {job.error.message}"
        what = "attempt failed" if ended is None else job.state.value
        verdict, trace = job.error.category.value, job.error.traceback
        events.append(Event(at=ended, what=what, verdict=verdict, words=words, values=delay, traceback=trace))
    elif job.ended_at is not None:
        events.append(Event(at=job.ended_at.timestamp(), what=job.state.value))
    return events


def _place(job: Job) -> Place:
    since = None if job.ended_at is None else job.ended_at.timestamp()
    kept = None if job.expires_at is None else f"its row is kept until {_moment(job.expires_at)}"
    if job.state is JobState.PENDING:
        return Place(state=State.PENDING, until=job.due_at.timestamp())
    if job.state is JobState.RUNNING:
        started = None if job.started_at is None else job.started_at.timestamp()
        return Place(state=State.RUNNING, since=started, words="its kill is asked for" if job.kill_asked else "")
    return Place(state=State(job.state.value), since=since, words=kept or "")


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
