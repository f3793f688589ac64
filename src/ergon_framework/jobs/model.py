"""Jobs: the request to submit one, its parameters in the database, its stored state, and the errors of job requests.

A job is a stored call of a handler, which an executor of its kind runs. Its states are pending, running, and the final
ones: succeeded, failed, cancelled and killed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.errors import Category, ConfigurationError, ErgonError
from ergon_framework.executors.decision import EXECUTOR_SEPARATOR, UnroutableJob, route_job
from ergon_framework.telemetry.context import with_current_trace
from ergon_framework.transaction import Transaction

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
    #: The job has failed; its message is dead-lettered, unless the orchestrator's policy acks failures.
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
    #: Attempts that were begun and count.
    attempts: int
    #: None if the orchestrator's policy decides; the same for the timeout of an attempt.
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
    #: When the job may be deleted; None before its end.
    expires_at: datetime | None
    #: Whether a kill was requested while the job was running.
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


# -- job requests -----------------------------------------------------------------------------------

#: The default executors of jobs whose function names none, unless the client sets others.
DEFAULT_KIND: Final = "python"
#: Maximum size of a body; together with the rest of a request it fits into a line of the protocol.
MAX_BODY_BYTES: Final = 15 * 1024 * 1024
#: The number of priority levels above 0, and below it; as in every PostgreSQL queue.
PRIORITY_LEVELS: Final = 100
_MAX_DELAY_SECONDS: Final = 10 * 365 * 86_400.0
_MAX_KEY_CHARS: Final = 1024

CODEC: Final = JsonCodec(max_bytes=MAX_BODY_BYTES)
_CANONICAL_ENCODER: Final = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """One job for an executor.

    *function* is ``handler`` or ``executor#handler``. The job is due after *delay* seconds, or *at* a time. Defaults of
    *max_attempts* and *timeout*, the seconds of one attempt, come from the orchestrator's policy. Inside a handler its
    id is derived from the transaction of that handler, so that a second run of the handler submits the same job;
    *name* distinguishes several jobs of one function.
    """

    function: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    name: str | None = None
    unique_key: str | None = None
    delay: float = 0.0
    at: datetime | None = None
    priority: int = 0
    max_attempts: int | None = None
    timeout: float | None = None
    tenant: str | None = None
    correlation: str | None = None
    retention: float = DEFAULT_RETENTION_SECONDS

    def __post_init__(self) -> None:
        self._check_times()
        if not -PRIORITY_LEVELS <= self.priority <= PRIORITY_LEVELS:
            raise ConfigurationError(
                f"a priority is between -{PRIORITY_LEVELS} and {PRIORITY_LEVELS}, not {self.priority}"
            )
        if self.max_attempts is not None and not 1 <= self.max_attempts < 2**31:
            raise ConfigurationError(f"a job has at least 1 attempt, not {self.max_attempts}")
        if self.unique_key is not None and not 0 < len(self.unique_key) <= _MAX_KEY_CHARS:
            raise ConfigurationError(
                f"a unique key must have 1 to {_MAX_KEY_CHARS} characters, not {len(self.unique_key)}"
            )

    def _check_times(self) -> None:
        if self.at is not None and (self.delay or self.at.tzinfo is None):
            raise ConfigurationError("a job is due after a delay or at a time with a time zone, not both")
        if not 0 <= self.delay <= _MAX_DELAY_SECONDS:
            raise ConfigurationError(f"a delay is between 0 and {_MAX_DELAY_SECONDS:g} seconds, not {self.delay!r}")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ConfigurationError(f"a timeout is a finite number of seconds > 0, not {self.timeout!r}")
        if not 0 <= self.retention <= _MAX_DELAY_SECONDS:
            raise ConfigurationError(f"a retention is 0 to {_MAX_DELAY_SECONDS:g} seconds, not {self.retention!r}")


def job_parameters(request: JobRequest, *, default: str | None, executors: Collection[str] | None) -> dict[str, Any]:
    """Return the parameters of ``ergon.submit_job`` for *request*; raise an error if it cannot be written.

    An executor outside *executors*, if those are known, is not rejected here: the orchestrator of the default executor
    dead-letters the job, so that it is not lost.
    """
    kind, handler = _select_queue(request.function, default=default, executors=executors)
    queue = queue_name(kind)
    fields: dict[str, Any] = {
        "tenant": request.tenant,
        "correlation": request.correlation,
        "id": request.id,
    }
    payload = {"function": request.function, "args": list(request.args), "kwargs": dict(request.kwargs)}
    transaction = with_current_trace(
        Transaction.new(
            payload,
            name=request.name or f"{queue}/{handler}",
            source=queue,
            **{name: value for name, value in fields.items() if value is not None},
        )
    )
    body, headers = CODEC.encode(transaction)
    return {
        "queue": queue,
        "id": transaction.id,
        "function": handler,
        "headers": json.dumps(headers),
        "body": body,
        "digest": _digest(kind, handler, payload),
        "delay": request.delay if request.at is None else max(0.0, (request.at - datetime.now(UTC)).total_seconds()),
        "priority": request.priority,
        "tenant": transaction.tenant,
        "correlation": transaction.correlation,
        "unique_key": request.unique_key,
        "max_attempts": request.max_attempts,
        "timeout": request.timeout,
        "retention": request.retention,
    }


def _select_queue(function: str, *, default: str | None, executors: Collection[str] | None) -> tuple[str, str]:
    """Return the kind whose queue the job goes to, and the handler name under which it is listed."""
    prefix, separator, _ = function.partition(EXECUTOR_SEPARATOR)
    known = {prefix if separator else str(default)} if executors is None else executors
    routing = route_job(function, default=default, executors=known)
    if not isinstance(routing, UnroutableJob):
        return routing.executor, routing.handler
    # An orchestrator dead-letters a job for an executor that does not exist; any other fault is the caller's error.
    is_misnamed = isinstance(
        route_job(function, default=default, executors={prefix if separator else str(default)}), UnroutableJob
    )
    if is_misnamed or default is None:
        raise ConfigurationError(routing.message)
    return default, function


def _digest(kind: str, handler: str, payload: Mapping[str, Any]) -> bytes:
    # Sorted: jobs that differ only in the order of keys are equal.
    content = [kind, handler, payload["args"], payload["kwargs"]]
    try:
        return hashlib.sha256(_CANONICAL_ENCODER.encode(content).encode()).digest()
    except TypeError:
        raise UnencodableError("the names of keyword arguments, and all keys in their values, must be text") from None
