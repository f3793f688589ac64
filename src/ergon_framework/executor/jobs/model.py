"""Job: what is known about one piece of work for an executor, and what may be wrong with asking for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from ergon_framework.errors import Category, ErgonError

#: Seconds for which a job is kept after its end, unless it says otherwise: a week.
RETENTION: Final = 7 * 86_400.0
#: The name of a kind's queue is this and the kind.
PREFIX: Final = "jobs."


def queue_name(kind: str) -> str:
    """The queue of the executors called *kind*; each kind has its own, so that a slow one delays no other."""
    return PREFIX + kind


class JobState(StrEnum):
    """Where a job is; all but the first two are its end."""

    #: It waits: for its turn, its time, or its next attempt.
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    #: It is a dead letter.
    FAILED = "failed"
    CANCELLED = "cancelled"
    KILLED = "killed"

    @property
    def over(self) -> bool:
        """Whether it has its end; a failed one may be replayed all the same."""
        return self not in {JobState.PENDING, JobState.RUNNING}


@dataclass(frozen=True, slots=True)
class JobError:
    """Why the last attempt did not succeed."""

    category: Category
    code: str
    message: str
    #: The name of what went wrong in a handler, and where, if the executor has told.
    type: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it is stored; its arguments are in its message and are not shown."""

    id: str
    kind: str
    function_name: str
    state: JobState
    attempts: int
    max_attempts: int | None
    timeout: float | None
    priority: int
    tenant: str | None
    correlation: str | None
    unique_key: str | None
    created_at: datetime
    due_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    expires_at: datetime | None
    kill_asked: bool
    #: What the handler returned, once it has succeeded.
    result: Any
    error: JobError | None
    #: Its place in the order of submission: where the next page of a list begins.
    number: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """The job that there is now; *created* unless it was there before."""

    id: str
    created: bool
    state: JobState


class JobConflict(ErgonError):
    """The id or the unique key is taken by a job with another function or other arguments."""

    final = True
    code = "job_conflict"


class JobNotFound(ErgonError):
    """There is no such job, or its retention is over."""

    final = True
    code = "job_not_found"


class NotReplayable(ErgonError):
    """Only a job that has failed, and whose dead letter is there, can be replayed."""

    final = True
    code = "not_replayable"


class JobWaitTimeout(ErgonError, TimeoutError):
    """The job had no end when the waiting was over; ``state`` is where it was."""

    category = Category.TIMEOUT
    code = "job_wait_timeout"

    def __init__(self, message: str = "", state: JobState | None = None) -> None:
        super().__init__(message)
        self.state = state
