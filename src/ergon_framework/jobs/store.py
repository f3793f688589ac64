"""The jobs in the database: submission, attempts, queries and control, as operations for sync and async callers.

A job is a row, which is authoritative, and a message in a queue, which triggers its processing. A claim is an
orchestrator's right to process the message; every statement about an attempt names it, and a claim that was lost in the
meantime changes nothing (fencing). An operation is a generator that yields queries and receives their rows; a
connection pool runs it, on a thread or an event loop, and rolls back a database transaction that it has left open.

Attempts of many jobs are started and finished in one statement. A job is submitted together with its message, on the
framework's connections or on the caller's.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from ergon_framework.audit import create_entry
from ergon_framework.connectors.postgres import audit, dead_letters
from ergon_framework.connectors.postgres.claims import PostgresReceipt
from ergon_framework.connectors.postgres.outbox import ParamStyle, SqlTemplate, render
from ergon_framework.connectors.postgres.sql import NOTIFY_LISTENERS
from ergon_framework.database.operation import BEGIN, COMMIT, ROLLBACK, Operation, PreparedTextQuery, Query
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.executors.decision import KILLED, Complete, Fail, FailureCause, Retry
from ergon_framework.jobs import sql
from ergon_framework.jobs.model import (
    QUEUE_PREFIX,
    Job,
    JobConflict,
    JobError,
    JobNotFound,
    JobState,
    NotReplayable,
    Submitted,
    queue_name,
)

#: The error code of a job whose orchestrators were killed until it had no attempt left.
EXHAUSTED_CODE: Final = "orchestrator_died"
_EXHAUSTED_MESSAGE: Final = (
    "every attempt was started and none ended: the orchestrator was killed, or the job killed it"
)
_KILLED_MESSAGE: Final = "killed on request"
#: ASCII, so that a database of any encoding can store it, and no NUL, because JSON escapes it.
_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class StartDecision(StrEnum):
    """The decision about a claimed message, according to the row of its job; the values are those of START_ATTEMPTS."""

    #: The attempt has begun and is counted: send it.
    RUN = "run"
    #: The attempt had begun before, by this same claim, but the answer was lost.
    ALREADY_STARTED = "begun"
    #: The job had failed and its dead letter was replayed: begun, with its attempts counted from the start.
    REPLAYED = "replayed"
    #: The job is final: ack the message.
    FINAL = "over"
    #: The job has failed, and its message is not dead-lettered yet.
    FAILED = "failed"
    #: Its attempts were begun and never ended, so it has failed now: dead-letter the message.
    EXHAUSTED = "exhausted"
    #: A kill was requested, and the orchestrator ended before it could kill the executor: the job is killed now.
    KILLED = "killed"
    #: The job is not due yet.
    NOT_DUE = "early"
    #: There is no such job.
    UNKNOWN = "unknown"
    #: The claim is lost: another worker has the message or will claim it.
    STALE = "stale"


class JobClaim(NamedTuple):
    """A claimed message and the id of its job; *receipt* has the message, the worker and the token of the claim."""

    job_id: str
    receipt: PostgresReceipt


class StartedAttempt(NamedTuple):
    """The decision about a message, and the job's data that it needs."""

    decision: StartDecision
    attempt_number: int = 0
    max_attempts: int = 0
    timeout: float | None = None
    #: Seconds until the job is due.
    delay: float = 0.0
    #: Why the job has failed; for FAILED and EXHAUSTED.
    cause: FailureCause | None = None


class ReleaseAttempt(NamedTuple):
    """Nothing was sent, or the executor was ended for a reason other than this job: the attempt does not count."""

    #: Seconds before the job is retried.
    delay: float = 0.0
    message: str = "nothing was sent, or the executor was ended for a reason other than this job"
    code: str = "given_back"


class KillAttempt(NamedTuple):
    """The executor was ended by a kill request before an outcome arrived."""

    message: str = _KILLED_MESSAGE


AttemptConclusion: TypeAlias = Complete | Retry | Fail | ReleaseAttempt | KillAttempt


class AttemptEnd(NamedTuple):
    """How an attempt ended; it is written under the claim that the attempt began with."""

    claim: JobClaim
    conclusion: AttemptConclusion


_CLAIM_GONE: Final = StartedAttempt(StartDecision.STALE)


def start_attempts(
    claims: Sequence[JobClaim], *, max_attempts: int, timeout: float | None
) -> Operation[list[StartedAttempt]]:
    """Begin an attempt for each of *claims*, durably, or return why there is none, in order.

    *max_attempts* and *timeout* apply to jobs that do not set their own.
    """
    # All workers use the same order: locking the same rows in different orders would deadlock.
    claim_rows = [
        {"id": job_id, "message": receipt.id, "worker": receipt.worker, "token": receipt.token}
        for job_id, receipt in sorted(claims, key=_claim_job_id)
    ]
    parameters = (
        str(max_attempts),
        None if timeout is None else repr(timeout),
        EXHAUSTED_CODE,
        _EXHAUSTED_MESSAGE,
        _KILLED_MESSAGE,
    )
    ((answer,),) = yield PreparedTextQuery(sql.START_ATTEMPTS, (_ENCODER.encode(claim_rows), *parameters))
    started_by_id = {row[0]: _row_to_started(*row[1:]) for row in json.loads(answer or "[]")}
    return [started_by_id.get(claim.job_id, _CLAIM_GONE) for claim in claims]


def _row_to_started(  # noqa: PLR0917 - the columns of a row
    decision: str,
    attempts: int | None,
    max_attempts: int | None,
    timeout: float | None,
    delay: float | None,
    category: str | None,
    code: str | None,
    message: str | None,
) -> StartedAttempt:
    cause = None if code is None else FailureCause(Category(category or "SYSTEM"), code, message or "", final=True)
    return StartedAttempt(StartDecision(decision), attempts or 0, max_attempts or 0, timeout, delay or 0.0, cause)


def finish_attempts(ends: Sequence[AttemptEnd]) -> Operation[list[JobState | None]]:
    """Write how attempts ended; return the state of each job, None for a job whose claim was not the last."""
    end_rows = [_end_to_row(end) for end in sorted(ends, key=_end_job_id)]
    ((answer,),) = yield PreparedTextQuery(sql.FINISH_ATTEMPTS, (_ENCODER.encode(end_rows), _KILLED_MESSAGE))
    states_by_id = json.loads(answer or "{}")
    states = [states_by_id.get(end.claim.job_id) for end in ends]
    return [None if state is None else JobState(state) for state in states]


_claim_job_id: Final = attrgetter("job_id")
_end_job_id: Final = attrgetter("claim.job_id")


def _end_to_row(end: AttemptEnd) -> dict[str, Any]:
    """Return the values to write; an omitted column becomes null."""
    (job_id, receipt), conclusion = end
    row: dict[str, Any] = {"id": job_id, "worker": receipt.worker, "token": receipt.token, "attempts_to_uncount": 0}
    if isinstance(conclusion, Complete):
        return row | {"state": "succeeded", "result": _ENCODER.encode(conclusion.result)}
    if isinstance(conclusion, ReleaseAttempt):
        # Counted when the attempt began.
        return row | {"state": "pending", "delay": conclusion.delay, "attempts_to_uncount": 1}
    if isinstance(conclusion, KillAttempt):
        # BUSINESS: an operator's decision is neither a technical failure (SYSTEM) nor a deadline (TIMEOUT).
        return row | {"state": "killed", "category": "BUSINESS", "code": KILLED, "error_message": conclusion.message}
    cause = conclusion.cause
    row |= {"category": cause.category.value, "code": _to_storable(cause.code), "type": _to_storable(cause.error_type)}
    row |= {"error_message": _to_storable(cause.message), "traceback": _to_storable(cause.traceback)}
    if isinstance(conclusion, Retry):
        return row | {"state": "pending", "delay": conclusion.delay}
    return row | {"state": "failed"}


def _to_storable(text: str | None) -> str | None:
    """Return *text* in a form that a text column can store: an executor may write anything."""
    return None if text is None else text.replace("\0", "\ufffd").encode(errors="replace").decode()


def jobs_to_kill() -> Operation[set[str]]:
    """Return the running jobs with a kill request, of all orchestrators."""
    rows = yield Query(sql.JOBS_TO_KILL)
    return {row[0] for row in rows}


def delete_expired(limit: int) -> Operation[int]:
    """Delete at most *limit* jobs whose retention has expired; return the number of jobs examined.

    A job whose dead letter can be replayed is examined and kept. Call it again while it returns *limit*.
    """
    ((count,),) = yield Query(sql.DELETE_EXPIRED, {"most": limit})
    return int(count)


# -- queries and control ----------------------------------------------------------------------------

#: Maximum number of jobs in one list.
MAX_LISTED_JOBS: Final = 10_000
#: Seconds between the first and the second poll of a wait, and the maximum that later pauses grow to.
FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 1.0


def get_job(job_id: str) -> Operation[Job]:
    """Return the job; raise JobNotFound if there is none."""
    rows = yield Query(sql.GET_JOB, {"id": job_id})
    if not rows:
        raise _not_found_error(job_id)
    return row_to_job(*rows[0])


def find_finished(job_ids: Sequence[str]) -> Operation[list[Job]]:
    """Return those of *job_ids* that are final, in any order; JobNotFound if none is final and one does not exist."""
    rows = yield Query(sql.FIND_FINISHED, {"ids": list(job_ids)})
    if not rows:
        missing = yield Query(sql.FIND_MISSING, {"ids": list(job_ids)})
        if missing:
            raise _not_found_error(missing[0][0])
    return [row_to_job(*row) for row in rows]


def get_state(job_id: str) -> Operation[JobState]:
    """Return the state of the job."""
    rows = yield Query(sql.GET_STATE, {"id": job_id})
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
        raise ConfigurationError(f"limit must be 1 to {MAX_LISTED_JOBS:,} jobs, not {limit}")
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
    rows = yield Query(sql.LIST_JOBS, parameters)
    return [row_to_job(*row) for row in rows]


def cancel(job_id: str) -> Operation[bool]:
    """Cancel the job if it waits, also for its due time or a retry; return whether it is cancelled now."""
    yield BEGIN
    rows = yield Query(sql.CANCEL, {"id": job_id})
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
    rows = yield Query(sql.KILL, {"id": job_id})
    if rows:
        yield from _record_audit("job.kill", rows[0][1], job_id)
    yield COMMIT
    if rows:
        return JobState(rows[0][0])
    return (yield from get_state(job_id))


def replay(job_id: str) -> Operation[None]:
    """Run a failed job again, with its attempts counted from the beginning."""
    yield BEGIN
    rows = yield Query(sql.LOCK_FOR_REPLAY, {"id": job_id})
    old_state, queue, dead_letter_id = rows[0] if rows else (None, None, None)
    if old_state != JobState.FAILED or dead_letter_id is None:
        yield ROLLBACK
        raise _not_replayable_error(job_id, old_state)
    yield from dead_letters.replay_dead(queue, [str(dead_letter_id)])
    yield Query(sql.RESET_JOB, {"id": job_id})
    yield Query(NOTIFY_LISTENERS, {"queue": queue})
    ((name,),) = yield Query("select name from ergon.queue where id = %(queue)s", {"queue": queue})
    yield from _record_audit("job.replay", name, job_id)
    yield COMMIT


def _record_audit(action: str, queue: str, job_id: str) -> Operation[None]:
    # None if the action is part of another one, which has an entry; nothing is written then.
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
        raise ConfigurationError(f"invalid job state {value!r}: expected one of {', '.join(JobState)}") from None


def _not_replayable_error(job_id: str, old_state: str | None) -> JobNotFound | NotReplayable:
    if old_state is None:
        return _not_found_error(job_id)
    if old_state != JobState.FAILED:
        return NotReplayable(f"the job {job_id!r} is {old_state}; only a failed job can be replayed")
    return NotReplayable(
        f"the dead letter of the job {job_id!r} does not exist: it was discarded, or is still being written"
    )


def _not_found_error(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id!r}: its id is wrong, or it was deleted after its retention")


def row_to_job(*row: Any) -> Job:
    """Return the job of a row with the columns of ``jobs.sql.COLUMNS``, in that order."""
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


# -- submission -------------------------------------------------------------------------------------

#: *digest* is the hash of kind, function and arguments. If the id or the key is taken, *same* says whether the existing
#: job has the same digest. Casts are written out, because some libraries parse a colon as the beginning of a name.
SUBMIT: Final = SqlTemplate("""
select cast(json_build_array(id, created, same, state, job_function) as text) as job from ergon.submit_job(
    cast({queue} as text), cast({id} as text), cast({function} as text), cast(cast({headers} as text) as jsonb),
    cast({body} as bytea), cast({digest} as bytea), cast({delay} as double precision), cast({priority} as smallint),
    cast({tenant} as text), cast({correlation} as text), cast({unique_key} as text), cast({max_attempts} as integer),
    cast({timeout} as double precision), cast({retention} as double precision)
)
""")

#: The same for many jobs. JSON, because the driver's own conversions would take longer than all the rest.
_SUBMIT_MANY: Final = """
select json_agg(
    json_build_array(made.id, made.created, made.same, made.state, made.job_function) order by g.place
)::text
from json_to_recordset($1::json) as g(
    place integer, queue text, id text, function text, headers text, body text, digest text, delay float8,
    priority smallint, tenant text, correlation text, unique_key text, max_attempts integer, timeout float8,
    retention float8
)
cross join lateral ergon.submit_job(
    g.queue, g.id, g.function, g.headers::jsonb, decode(g.body, 'base64'), decode(g.digest, 'base64'), g.delay,
    g.priority, g.tenant, g.correlation, g.unique_key, g.max_attempts, g.timeout, g.retention
) as made
"""
#: Maximum number of jobs in one statement, and approximate maximum of the bytes of their bodies.
_MAX_BATCH_JOBS: Final = 1000
_MAX_BATCH_BYTES: Final = 16 * 1024 * 1024


def submit(parameters: Mapping[str, Any]) -> Operation[Submitted]:
    """Submit a job; it may be one statement of a larger database transaction.

    *parameters* has a value for each placeholder of SUBMIT; ``jobs.model.job_parameters`` creates it.
    """
    rows = yield Query(render(SUBMIT, parameters, ParamStyle.PSYCOPG).sql, parameters)
    return read_submission(parameters, rows)


def submit_many(jobs: Sequence[Mapping[str, Any]]) -> Operation[list[Submitted]]:
    """Submit all of them, in order, or none: JobConflict for the first whose id or key is taken."""
    submissions: list[Submitted] = []
    yield BEGIN
    for batch in _split_batches(jobs):
        ((answer,),) = yield PreparedTextQuery(_SUBMIT_MANY, (_format_batch(batch),))
        try:
            submissions += [_to_submission(job, row) for job, row in zip(batch, json.loads(answer), strict=True)]
        except JobConflict:
            yield ROLLBACK
            raise
    yield COMMIT
    return submissions


def _split_batches(jobs: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield batches of *jobs* that fit into one statement."""
    start = size = 0
    for end, job in enumerate(jobs):
        length = len(job["body"])
        if end > start and (end - start >= _MAX_BATCH_JOBS or size + length > _MAX_BATCH_BYTES):
            yield jobs[start:end]
            start, size = end, 0
        size += length
    if jobs:
        yield jobs[start:]


def _format_batch(batch: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(
        [
            {**job, "place": index, "body": _to_base64(job["body"]), "digest": _to_base64(job["digest"])}
            for index, job in enumerate(batch)
        ]
    )


def _to_base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def read_submission(values: Mapping[str, Any], rows: Sequence[Any]) -> Submitted:
    """Return the database's answer for *values*; raise JobConflict if the existing job is a different one."""
    (row,) = rows
    # One text, because a caller's connection may return a row as a tuple, a mapping, or its only value.
    answer = row if isinstance(row, str) else next(iter(row.values())) if isinstance(row, Mapping) else row[0]
    return _to_submission(values, json.loads(answer))


def _to_submission(values: Mapping[str, Any], answer: Sequence[Any]) -> Submitted:
    existing_id, created, same, state, function = answer
    if not same:
        key = values["unique_key"]
        conflict = f"the unique key {key!r}" if key is not None and existing_id != values["id"] else "this id"
        raise JobConflict(
            f"{conflict} is taken: the job {existing_id!r} ({function}, {state}) has another function or other "
            f"arguments than the job {values['id']!r} ({values['function']}); use another id or key, or check the "
            "existing job"
        )
    return Submitted(existing_id, created, JobState(state))
