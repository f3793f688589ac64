"""Start and finish attempts in the database, for many jobs in one statement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from ergon_framework.connectors.postgres.receipt import PostgresReceipt
from ergon_framework.errors import Category
from ergon_framework.executor.jobs import statements
from ergon_framework.executor.jobs.model import JobState
from ergon_framework.executor.verdict import KILLED, Complete, Fail, FailureCause, Retry
from ergon_framework.schema.operation import Operation, PreparedTextQuery, Query

#: The error code of a job whose orchestrators died until it had no attempt left.
EXHAUSTED_CODE: Final = "orchestrator_died"
_EXHAUSTED_MESSAGE: Final = "every attempt was begun, and none came back: what ran it died, or the job killed it"
_KILLED_MESSAGE: Final = "killed, as somebody asked for"
#: ASCII, so that a database of any encoding can store it, and no NUL, because JSON escapes it.
_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class StartDecision(StrEnum):
    """The decision about a claimed message, according to the row of its job."""

    #: The attempt has begun and is counted: send it.
    RUN = "run"
    #: The attempt had begun before, by this same claim, but the answer was lost.
    ALREADY_STARTED = "begun"
    #: The job had failed and its dead letter was replayed: begun, with its attempts counted from the start.
    REPLAYED = "replayed"
    #: The job is final: ack the message.
    FINAL = "over"
    #: The job has failed, and its message is not dead-lettered yet.
    FAILED = "buried"
    #: Its attempts were begun and never ended, so it has failed now: dead-letter the message.
    EXHAUSTED = "exhausted"
    #: A kill was requested and its orchestrator died: it is killed now.
    KILLED = "killed"
    #: The job is not due yet.
    NOT_DUE = "early"
    #: There is no such job.
    UNKNOWN = "unknown"
    #: The claim is gone: another worker has the message or will claim it.
    STALE = "stale"


class JobClaim(NamedTuple):
    """A claimed message and the id of its job."""

    job_id: str
    receipt: PostgresReceipt


class StartedAttempt(NamedTuple):
    """The decision about a message, and the job's data that it needs."""

    decision: StartDecision
    attempt_number: int = 0
    max_attempts: int = 0
    timeout: float | None = None
    delay: float = 0.0
    cause: FailureCause | None = None


class ReleaseAttempt(NamedTuple):
    """Nothing was sent, or the attempt was interrupted because of another job: it does not count."""

    #: Seconds before the job is retried.
    delay: float = 0.0
    message: str = "nothing was sent, or it was interrupted for another job's sake"
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
    ((answer,),) = yield PreparedTextQuery(statements.START_ATTEMPTS, (_ENCODER.encode(claim_rows), *parameters))
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
    ((answer,),) = yield PreparedTextQuery(statements.FINISH_ATTEMPTS, (_ENCODER.encode(end_rows), _KILLED_MESSAGE))
    states_by_id = json.loads(answer or "{}")
    states = [states_by_id.get(end.claim.job_id) for end in ends]
    return [None if state is None else JobState(state) for state in states]


_claim_job_id: Final = attrgetter("job_id")
_end_job_id: Final = attrgetter("claim.job_id")


def _end_to_row(end: AttemptEnd) -> dict[str, Any]:
    """Return the values to write; an omitted column becomes null."""
    (job_id, receipt), conclusion = end
    row: dict[str, Any] = {"id": job_id, "worker": receipt.worker, "token": receipt.token, "uncounted": 0}
    if isinstance(conclusion, Complete):
        return row | {"state": "succeeded", "result": _ENCODER.encode(conclusion.result)}
    if isinstance(conclusion, ReleaseAttempt):
        return row | {"state": "pending", "delay": conclusion.delay, "uncounted": 1}
    if isinstance(conclusion, KillAttempt):
        return row | {"state": "killed", "category": "BUSINESS", "code": KILLED, "words": conclusion.message}
    cause = conclusion.cause
    row |= {"category": cause.category.value, "code": _to_storable(cause.code), "type": _to_storable(cause.error_type)}
    row |= {"words": _to_storable(cause.message), "traceback": _to_storable(cause.traceback)}
    if isinstance(conclusion, Retry):
        return row | {"state": "pending", "delay": conclusion.delay}
    return row | {"state": "failed"}


def _to_storable(text: str | None) -> str | None:
    """Return *text* in a form that a text column can store: an executor may write anything."""
    return None if text is None else text.replace("\0", "\ufffd").encode(errors="replace").decode()


def jobs_to_kill() -> Operation[set[str]]:
    """Return the running jobs with a kill request, of all orchestrators."""
    rows = yield Query(statements.JOBS_TO_KILL)
    return {row[0] for row in rows}


def delete_expired(limit: int) -> Operation[int]:
    """Delete at most *limit* jobs whose retention has expired; return the number of jobs examined."""
    ((count,),) = yield Query(statements.DELETE_EXPIRED, {"most": limit})
    return int(count)
