"""Attempts: how one begins and how it ends in the database, for many jobs in one statement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from ergon_framework.connectors.postgres.receipt import Receipt
from ergon_framework.errors import Category
from ergon_framework.executor.jobs import statements
from ergon_framework.executor.jobs.model import JobState
from ergon_framework.executor.verdict import KILLED, Again, Blame, Bury, Complete
from ergon_framework.schema.operation import Operation, Query, Text

#: What is said of a job whose orchestrators have died until it had no attempt left.
EXHAUSTED: Final = "orchestrator_died"
_EXHAUSTED_WORDS: Final = "every attempt was begun, and none came back: what ran it died, or the job killed it"
_KILLED_WORDS: Final = "killed, as somebody asked for"
#: ASCII, so that a database of any encoding keeps it, and no NUL, because JSON escapes it.
_WRITER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class Decision(StrEnum):
    """What becomes of a message that was claimed, by what the row of its job says."""

    #: The attempt has begun and is counted: send it.
    RUN = "run"
    #: It had begun before, by this very claim, and nobody could be told.
    BEGUN = "begun"
    #: It had failed and somebody has replayed its dead letter: begun, with its attempts counted anew.
    REPLAYED = "replayed"
    #: The job has its end: the message goes.
    OVER = "over"
    #: The job has failed and its message was to be buried: that was not done yet.
    BURIED = "buried"
    #: Its attempts were begun and never ended, so it has failed now: bury the message.
    EXHAUSTED = "exhausted"
    #: Somebody wanted it killed and its orchestrator died: it is killed now.
    KILLED = "killed"
    #: It is to wait still.
    EARLY = "early"
    #: There is no such job.
    UNKNOWN = "unknown"
    #: The claim is gone: somebody else has, or will have, the message.
    STALE = "stale"


class Claim(NamedTuple):
    """A message in hand, and the job that it is for."""

    job_id: str
    receipt: Receipt


class Started(NamedTuple):
    """What is to be done with a message, and what is known for it."""

    decision: Decision
    attempt_number: int = 0
    max_attempts: int = 0
    timeout: float | None = None
    delay: float = 0.0
    blame: Blame | None = None


class GiveBack(NamedTuple):
    """Nothing was sent, or it was interrupted for somebody else's sake: the attempt does not count."""

    #: Seconds before the job is tried again.
    delay: float = 0.0
    words: str = "nothing was sent, or it was interrupted for another job's sake"
    code: str = "given_back"


class Kill(NamedTuple):
    """The executor was ended by a request to kill before an outcome arrived."""

    message: str = _KILLED_WORDS


Conclusion: TypeAlias = Complete | Again | Bury | GiveBack | Kill


class End(NamedTuple):
    """How an attempt ended, to be written by the claim that it began with."""

    claim: Claim
    verdict: Conclusion


_GONE: Final = Started(Decision.STALE)


def start(claims: Sequence[Claim], *, max_attempts: int, timeout: float | None) -> Operation[list[Started]]:
    """Begin an attempt for each of *claims*, durably, or say why there is none; in order.

    *max_attempts* and *timeout* are for those that do not say it themselves.
    """
    # In one order for everybody: those who lock the same must not meet crosswise.
    given = [
        {"id": job_id, "message": receipt.id, "worker": receipt.worker, "token": receipt.token}
        for job_id, receipt in sorted(claims, key=_by_id)
    ]
    rest = (str(max_attempts), None if timeout is None else repr(timeout), EXHAUSTED, _EXHAUSTED_WORDS, _KILLED_WORDS)
    ((answer,),) = yield Text(statements.START, (_WRITER.encode(given), *rest))
    found = {row[0]: _started(*row[1:]) for row in json.loads(answer or "[]")}
    return [found.get(claim.job_id, _GONE) for claim in claims]


def _started(  # noqa: PLR0917 - the columns of a row
    decision: str,
    attempts: int | None,
    most: int | None,
    timeout: float | None,
    delay: float | None,
    category: str | None,
    code: str | None,
    words: str | None,
) -> Started:
    blame = None if code is None else Blame(Category(category or "SYSTEM"), code, words or "", final=True)
    return Started(Decision(decision), attempts or 0, most or 0, timeout, delay or 0.0, blame)


def finish(ends: Sequence[End]) -> Operation[list[JobState | None]]:
    """Write how attempts ended; where each job is now, None for one whose claim was not the last."""
    given = [_written(end) for end in sorted(ends, key=_by_job)]
    ((answer,),) = yield Text(statements.FINISH, (_WRITER.encode(given), _KILLED_WORDS))
    found = json.loads(answer or "{}")
    states = [found.get(end.claim.job_id) for end in ends]
    return [None if state is None else JobState(state) for state in states]


_by_id: Final = attrgetter("job_id")
_by_job: Final = attrgetter("claim.job_id")


def _written(end: End) -> dict[str, Any]:
    """What is to be written; what is not named is null there."""
    (job_id, receipt), verdict = end
    told: dict[str, Any] = {"id": job_id, "worker": receipt.worker, "token": receipt.token, "uncounted": 0}
    if isinstance(verdict, Complete):
        return told | {"state": "succeeded", "result": _WRITER.encode(verdict.result)}
    if isinstance(verdict, GiveBack):
        return told | {"state": "pending", "delay": verdict.delay, "uncounted": 1}
    if isinstance(verdict, Kill):
        return told | {"state": "killed", "category": "BUSINESS", "code": KILLED, "words": verdict.message}
    blame = verdict.blame
    told |= {"category": blame.category.value, "code": _fit(blame.code), "type": _fit(blame.error_type)}
    told |= {"words": _fit(blame.message), "traceback": _fit(blame.traceback)}
    if isinstance(verdict, Again):
        return told | {"state": "pending", "delay": verdict.delay}
    return told | {"state": "failed"}


def _fit(text: str | None) -> str | None:
    """What a text column can hold: an executor may write anything."""
    return None if text is None else text.replace("\0", "\ufffd").encode(errors="replace").decode()


def kills() -> Operation[set[str]]:
    """The running jobs that somebody wants killed, of all orchestrators."""
    rows = yield Query(statements.KILLS)
    return {row[0] for row in rows}


def swept(most: int) -> Operation[int]:
    """Throw away at most *most* jobs whose retention is over; how many were looked at."""
    ((count,),) = yield Query(statements.SWEEP, {"most": most})
    return int(count)
