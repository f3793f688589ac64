"""Decisions about a job: the executor that it goes to, and what the orchestrator does about its outcome.

An executor is a process that runs handlers, in any language. The orchestrator sends it a job as a request, and receives
an outcome.

A decision is data; the caller acts on it. An executor only reports: retries and dead letters are decided here and
nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ergon_framework.errors import Category
from ergon_framework.executors.protocol import MAX_NAME_CHARS, ErrorType, ExecutionOutcome, InvalidMessage, Status
from ergon_framework.redaction import redact_text
from ergon_framework.worker.policies import RetryPolicy

#: Ends the executor's name; only the first occurrence does, so that a handler's name may contain it.
EXECUTOR_SEPARATOR = "#"


@dataclass(frozen=True, slots=True)
class Route:
    """An executor that exists, and the handler's name as it is sent."""

    executor: str
    handler: str


@dataclass(frozen=True, slots=True)
class UnroutableJob:
    """No executor can run the job: it is dead-lettered with *message* as the reason."""

    message: str
    code: str = "no_route"


def route_job(function_name: str, *, default: str | None, executors: Collection[str]) -> Route | UnroutableJob:
    """Return the route of *function_name*, which is ``handler`` or ``executor#handler``.

    >>> route_job("rust#send_email", default="python", executors=["python", "rust"])
    Route(executor='rust', handler='send_email')
    >>> route_job("send_email", default="python", executors=["python", "rust"])
    Route(executor='python', handler='send_email')
    """
    if not 1 <= len(function_name) <= MAX_NAME_CHARS:
        return UnroutableJob(f"a function name has 1 to {MAX_NAME_CHARS} characters, not {len(function_name)}")
    prefix, separator, rest = function_name.partition(EXECUTOR_SEPARATOR)
    executor, handler = (prefix, rest) if separator else (default, function_name)
    if not handler:
        return UnroutableJob(f"{function_name!r} names no handler; write executor{EXECUTOR_SEPARATOR}handler")
    if executor is None:
        return UnroutableJob(
            f"{function_name!r} names no executor and no default is configured; write "
            f"executor{EXECUTOR_SEPARATOR}handler"
        )
    if executor not in executors:
        known = ", ".join(sorted(executors)) or "none"
        return UnroutableJob(f"{function_name!r} names the executor {executor!r}, which does not exist; known: {known}")
    return Route(executor, handler)


# -- decisions about an outcome ---------------------------------------------------------------------

#: Maximum delay that an executor may request unless the policy sets another: one day.
MAX_DELAY_SECONDS: Final = 86_400.0

#: Error types of outcomes that the orchestrator itself reports, because the executor reported none or an invalid one.
HARD_TIMEOUT: Final = "hard_timeout"
EXECUTOR_DIED: Final = "executor_died"
BAD_OUTCOME: Final = "bad_outcome"
KILLED: Final = "killed"


@dataclass(frozen=True, slots=True)
class Complete:
    """The job is done: its result is stored durably, and then the job is final."""

    result: Any


@dataclass(frozen=True, slots=True)
class FailureCause:
    """The reason why an attempt did not succeed."""

    category: Category
    code: str
    message: str
    error_type: str | None = None
    traceback: str | None = None
    #: Whether no number of attempts would help.
    final: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    """The job waits *delay* seconds and is retried."""

    delay: float
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class Fail:
    """The job is dead-lettered; *fatal* if no number of attempts would have helped."""

    cause: FailureCause
    fatal: bool = False


OutcomeDecision: TypeAlias = Complete | Retry | Fail


def decide(
    outcome: ExecutionOutcome,
    *,
    attempt_number: int,
    policy: RetryPolicy,
    max_delay: float = MAX_DELAY_SECONDS,
    random_source: Callable[[], float] | None = None,
) -> OutcomeDecision:
    """Return the decision about a job whose attempt *attempt_number*, counted from 1, ended with *outcome*."""
    if attempt_number < 1:
        raise ValueError(f"attempt_number must be >= 1, got {attempt_number}")
    if outcome.status is Status.SUCCESS:
        return Complete(outcome.result)
    cause = cause_of(outcome)
    if cause.final:
        return Fail(cause, fatal=True)
    # A requested retry is an attempt like any other: a job that always requests one does not run forever.
    if attempt_number >= policy.max_attempts:
        return Fail(cause)
    requested = requested_delay(outcome, max_delay)
    return Retry(policy.delay(attempt_number - 1, random_source) if requested is None else requested, cause)


def requested_delay(outcome: ExecutionOutcome, max_delay: float = MAX_DELAY_SECONDS) -> float | None:
    """Return the delay that a retry requests, within the maximum; None if it requests none."""
    requested = outcome.retry_after_seconds if outcome.status is Status.RETRY else None
    return None if requested is None else clamp_delay(requested, max_delay)


def clamp_delay(seconds: float, max_delay: float) -> float:
    """Return *seconds* within 0 and *max_delay*; NaN becomes 0.

    >>> [clamp_delay(asked, 60) for asked in (5, -1, 1e300, float("inf"), float("nan"))]
    [5.0, 0.0, 60.0, 60.0, 0.0]
    """
    return 0.0 if math.isnan(seconds) else float(min(max(seconds, 0.0), max_delay))


_CODE_BY_STATUS: Final = {
    Status.RETRY: "retry_requested",
    Status.TIMEOUT: "executor_timeout",
    Status.ERROR: "executor_error",
}
#: Error types that are codes themselves; any other is the name of an error in a handler.
_OWN_CODES: Final = frozenset({HARD_TIMEOUT, EXECUTOR_DIED, BAD_OUTCOME, *(kind.value for kind in ErrorType)})


def cause_of(outcome: ExecutionOutcome) -> FailureCause:
    """Return the cause of an unsuccessful *outcome* in terms of framework errors."""
    kind = outcome.error_type
    return FailureCause(
        category=Category.TIMEOUT if outcome.status is Status.TIMEOUT else Category.SYSTEM,
        code=kind if kind in _OWN_CODES else _CODE_BY_STATUS[outcome.status],
        message=redact_text(outcome.error_message or "") or f"the executor reported {outcome.status.value}",
        error_type=kind,
        traceback=None if outcome.error_traceback is None else redact_text(outcome.error_traceback),
        # The only fatal error type of the protocol, whatever the status.
        final=kind == ErrorType.HANDLER_NOT_FOUND.value,
    )


# -- outcomes that the orchestrator itself reports --------------------------------------------------


def job_timed_out(job_id: str, *, after: float) -> ExecutionOutcome:
    """Return the outcome of a job whose hard timeout expired; the process is killed."""
    message = f"no outcome within {after:g} s; the executor was killed"
    return ExecutionOutcome(job_id=job_id, status=Status.TIMEOUT, error_type=HARD_TIMEOUT, error_message=message)


def executor_died(job_id: str, *, exit_description: str) -> ExecutionOutcome:
    """Return the outcome of a job whose executor exited without an answer; *exit_description* is code or signal."""
    message = f"the executor exited without an outcome: {exit_description}"
    return ExecutionOutcome(job_id=job_id, status=Status.ERROR, error_type=EXECUTOR_DIED, error_message=message)


def invalid_outcome(job_id: str, line: InvalidMessage) -> ExecutionOutcome:
    """Return the outcome of a job whose executor answered with an invalid outcome line."""
    message = f"the executor's answer is not a valid outcome: {line.message}"
    return ExecutionOutcome(job_id=job_id, status=Status.ERROR, error_type=BAD_OUTCOME, error_message=message)


def job_killed(job_id: str) -> ExecutionOutcome:
    """Return the outcome of a job that was killed on request; the process is killed."""
    message = "killed on request"
    return ExecutionOutcome(job_id=job_id, status=Status.ERROR, error_type=KILLED, error_message=message)
