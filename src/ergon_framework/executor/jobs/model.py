"""Jobs: the stored state of one unit of work for an executor, and the errors of job requests."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from ergon_framework.errors import Category, ErgonError

#: Default seconds for which a job is kept after its end: one week.
DEFAULT_RETENTION_SECONDS: Final = 7 * 86_400.0
#: The prefix of a kind's queue name; the kind follows.
QUEUE_PREFIX: Final = "jobs."


def queue_name(kind: str) -> str:
    """Return the queue of the executors *kind*; each kind has its own, so that a slow kind delays no other."""
    return QUEUE_PREFIX + kind


class JobState(StrEnum):
    """The state of a job; all but the first two are final."""

    #: The job waits: in the queue, for its due time, or for its next attempt.
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    #: The job is dead-lettered.
    FAILED = "failed"
    CANCELLED = "cancelled"
    KILLED = "killed"

    @property
    def is_final(self) -> bool:
        """Whether the state is final; a failed job may still be replayed."""
        return self not in {JobState.PENDING, JobState.RUNNING}


@dataclass(frozen=True, slots=True)
class JobError:
    """The cause of the last unsuccessful attempt."""

    category: Category
    code: str
    message: str
    #: The type and the traceback of an error in a handler, if the executor reported them.
    type: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it is stored; its arguments are in its message and are omitted."""

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
    #: The handler's return value, if the job has succeeded.
    result: Any
    error: JobError | None
    #: Its number in the order of submission: the start of the next page of a list.
    number: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """The job that exists now; *created* is False if it existed before."""

    id: str
    created: bool
    state: JobState


class JobConflict(ErgonError):
    """The id or the unique key belongs to a job with another function or other arguments."""

    final = True
    code = "job_conflict"


class JobNotFound(ErgonError):
    """There is no such job, or its retention has expired."""

    final = True
    code = "job_not_found"


class NotReplayable(ErgonError):
    """The job cannot be replayed: only a failed job with an existing dead letter can."""

    final = True
    code = "not_replayable"


class JobWaitTimeout(ErgonError, TimeoutError):
    """The job was not final at the end of the wait; ``state`` is its state then."""

    category = Category.TIMEOUT
    code = "job_wait_timeout"

    def __init__(self, message: str = "", state: JobState | None = None) -> None:
        super().__init__(message)
        self.state = state
