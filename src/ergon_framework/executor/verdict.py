"""Verdict: what the orchestrator does about an outcome. It decides, as data; somebody else acts.

An executor only reports. Whatever it says, retries and dead letters are decided here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ergon_framework.errors import Category
from ergon_framework.executor.protocol import BadLine, ErrorType, ExecutionOutcome, Status
from ergon_framework.redaction import redact_text
from ergon_framework.task.mixins.policies import RetryPolicy

#: The longest delay that an executor may ask for unless policy says otherwise: a day.
LONGEST_DELAY: Final = 86_400.0

#: What an orchestrator reports of executors that did not report by themselves.
HARD_TIMEOUT: Final = "hard_timeout"
EXECUTOR_DIED: Final = "executor_died"
BAD_OUTCOME: Final = "bad_outcome"
KILLED: Final = "killed"


@dataclass(frozen=True, slots=True)
class Complete:
    """The job is done: the result is stored, durably, and then the job is over."""

    result: Any


@dataclass(frozen=True, slots=True)
class Blame:
    """Why an attempt did not succeed."""

    category: Category
    code: str
    message: str
    error_type: str | None = None
    traceback: str | None = None
    #: No number of attempts would help.
    final: bool = False


@dataclass(frozen=True, slots=True)
class Again:
    """The job waits *delay* seconds and is tried once more."""

    delay: float
    blame: Blame


@dataclass(frozen=True, slots=True)
class Bury:
    """The job becomes a dead letter; *fatal* if no number of attempts would have helped."""

    blame: Blame
    fatal: bool = False


Verdict: TypeAlias = Complete | Again | Bury


def judge(
    outcome: ExecutionOutcome,
    *,
    attempt_number: int,
    policy: RetryPolicy,
    longest_delay: float = LONGEST_DELAY,
    dice: Callable[[], float] | None = None,
) -> Verdict:
    """What becomes of a job whose attempt *attempt_number*, the first being 1, ended with *outcome*."""
    if attempt_number < 1:
        raise ValueError(f"attempts count from 1 on the wire, so {attempt_number} is none")
    if outcome.status is Status.SUCCESS:
        return Complete(outcome.result)
    blame = blamed(outcome)
    if blame.final:
        return Bury(blame, fatal=True)
    # A requested retry is an attempt like any other: a job that asks for ever is not run for ever.
    if attempt_number >= policy.max_attempts:
        return Bury(blame)
    asked = asked_delay(outcome, longest_delay)
    return Again(policy.delay(attempt_number - 1, dice) if asked is None else asked, blame)


def asked_delay(outcome: ExecutionOutcome, longest: float = LONGEST_DELAY) -> float | None:
    """The delay that a retry asks for, within what is allowed; None if it asks for none."""
    asked = outcome.retry_after_seconds if outcome.status is Status.RETRY else None
    return None if asked is None else clamped(asked, longest)


def clamped(seconds: float, longest: float) -> float:
    """*seconds* within 0 and *longest*; what is no number asks for nothing.

    >>> [clamped(asked, 60) for asked in (5, -1, 1e300, float("inf"), float("nan"))]
    [5.0, 0.0, 60.0, 60.0, 0.0]
    """
    return 0.0 if math.isnan(seconds) else float(min(max(seconds, 0.0), longest))


_CODES: Final = {Status.RETRY: "retry_requested", Status.TIMEOUT: "executor_timeout", Status.ERROR: "executor_error"}
#: Error types that are codes themselves; any other is the name of what went wrong in a handler.
_OWN: Final = frozenset({HARD_TIMEOUT, EXECUTOR_DIED, BAD_OUTCOME, *(kind.value for kind in ErrorType)})


def blamed(outcome: ExecutionOutcome) -> Blame:
    """Why *outcome* is no success, in the words of our own errors."""
    kind = outcome.error_type
    return Blame(
        category=Category.TIMEOUT if outcome.status is Status.TIMEOUT else Category.SYSTEM,
        code=kind if kind in _OWN else _CODES[outcome.status],
        message=redact_text(outcome.error_message or "") or f"the executor reported {outcome.status.value}",
        error_type=kind,
        traceback=None if outcome.error_traceback is None else redact_text(outcome.error_traceback),
        # The only fatal error type of the protocol, whatever the status.
        final=kind == ErrorType.HANDLER_NOT_FOUND.value,
    )


# -- outcomes that the orchestrator reports by itself ----------------------------------------------


def timed_out(job_id: str, *, after: float) -> ExecutionOutcome:
    """The hard timeout struck; the process is killed."""
    message = f"no outcome within {after:g} s; the executor was killed"
    return ExecutionOutcome(job_id=job_id, status=Status.TIMEOUT, error_type=HARD_TIMEOUT, error_message=message)


def died(job_id: str, *, how: str) -> ExecutionOutcome:
    """The executor ended without an answer; *how* is its exit code or signal in words."""
    message = f"the executor ended without an outcome: {how}"
    return ExecutionOutcome(job_id=job_id, status=Status.ERROR, error_type=EXECUTOR_DIED, error_message=message)


def unreadable(job_id: str, line: BadLine) -> ExecutionOutcome:
    """The executor answered for this job, with a line that is no outcome."""
    message = f"the executor's answer is no outcome: {line.message}"
    return ExecutionOutcome(job_id=job_id, status=Status.ERROR, error_type=BAD_OUTCOME, error_message=message)


def killed(job_id: str) -> ExecutionOutcome:
    """Somebody asked for the kill of the job; the process is killed."""
    message = "killed, as somebody asked for"
    return ExecutionOutcome(job_id=job_id, status=Status.ERROR, error_type=KILLED, error_message=message)
