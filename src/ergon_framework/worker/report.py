"""Outcomes of transactions, and the report of a consume loop or a produce call.

The lifecycle of a transaction calls the handlers of its task: ``process()``, then the success handler; if one of them
fails, the exception handler. A delivery may also be settled without a lifecycle: rejected, or deferred.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ergon_framework.connectors.base import Settlement
from ergon_framework.errors import Category, ErgonError
from ergon_framework.failure import Attempt, describe_error, trim_history
from ergon_framework.transaction import MAX_HISTORY, Transaction

if TYPE_CHECKING:
    from ergon_framework.engine.effects import Call
    from ergon_framework.engine.retry import FailedAttempt

#: Number of the last failures that the report of one process keeps.
MAX_FAILURES = 20


class OutcomeKind(StrEnum):
    """The five kinds of outcome of a transaction in a loop."""

    #: The handlers returned.
    SUCCEEDED = "succeeded"
    #: A handler failed, and the exception handler returned.
    FAILED = "failed"
    #: A handler failed, and then the exception handler failed too.
    EXCEPTION_HANDLER_FAILED = "handler_failed"
    #: The broker redelivers the transaction after a delay, for example for a retry whose delay is long.
    DEFERRED = "deferred"
    #: The lifecycle did not end, because the loop ended or the claim was lost: the broker delivers it again.
    RELEASED = "released"


class StopReason(StrEnum):
    """Why a loop ended."""

    #: The queue was empty.
    EMPTY = "empty"
    #: A produce call has an outcome for each of its transactions.
    DONE = "done"
    #: The maximum number of transactions was started.
    LIMIT = "limit"
    #: The caller stopped the loop, for example after a signal.
    STOP = "stop"
    #: The timeout of the loop expired.
    TIMEOUT = "timeout"
    #: Every slot was occupied by a call that had timed out and did not exit.
    STALLED = "stalled"
    #: Fetching failed after all retries.
    FETCH = "fetch"


class Outcome:
    """The outcome of one transaction: exactly one for each that was fetched or passed to a produce call.

    It is RELEASED until the lifecycle sets another kind, so that a transaction whose lifecycle is interrupted returns
    to its queue.

    ``attempts`` counts the calls of ``process()``, including those of earlier deliveries. ``processed`` means that one
    of them succeeded, whatever came after. ``still_running`` means that a call that timed out has not exited.
    ``reason`` names the cause of an outcome that has no error of its own. ``started`` means that process or produce
    was called; a released transaction that was not started is safe to send again, one that was started may have had
    its effect.
    """

    __slots__ = (
        "abandoned_calls",
        "attempts",
        "durations",
        "error",
        "failed_attempts",
        "handler_error",
        "kind",
        "processed",
        "reason",
        "result",
        "settlement",
        "started",
        "tracebacks",
        "transaction",
    )

    def __init__(
        self, transaction: Transaction, kind: OutcomeKind = OutcomeKind.RELEASED, *, reason: str | None = None
    ) -> None:
        self.transaction = transaction
        self.kind = kind
        self.attempts = transaction.attempts
        self.started = False
        self.processed = False
        self.result: Any = None
        self.error: ErgonError | None = None
        #: The last error of the exception handler, if that failed too.
        self.handler_error: ErgonError | None = None
        self.settlement: Settlement | None = None
        self.durations: dict[str, float] = {}
        self.failed_attempts: list[FailedAttempt] = []
        #: Calls that timed out or were interrupted, of process and of a handler; each may still run.
        self.abandoned_calls: tuple[Call, ...] = ()
        self.reason = reason
        #: Redacted tracebacks of ``error`` and ``handler_error``; None until they are formatted.
        self.tracebacks: tuple[str | None, str | None] | None = None

    @property
    def category(self) -> Category | None:
        return None if self.error is None else self.error.category

    @property
    def still_running(self) -> bool:
        return any(not call.exited for call in self.abandoned_calls)

    @property
    def failed_step(self) -> str | None:
        """The step that raised ``error``; never the exception handler, whose error is ``handler_error``."""
        return next(
            (
                failed_attempt.step
                for failed_attempt in reversed(self.failed_attempts)
                if failed_attempt.step != "exception"
            ),
            None,
        )

    @property
    def succeeded_steps(self) -> tuple[str, ...]:
        """The steps that succeeded: process or produce, and success."""
        if not self.processed:
            return ()
        first = next(iter(self.durations), "process")
        return (first, "success") if self.kind is OutcomeKind.SUCCEEDED else (first,)

    def __repr__(self) -> str:
        return f"Outcome({self.transaction.id!r}, {self.kind.value}, attempts={self.attempts}, error={self.error!r})"


@dataclass(slots=True)
class Report:
    """The results of a consume loop; updated while the loop runs, and complete when it returns."""

    stop_reason: StopReason | None = None
    started: int = 0
    fetches: int = 0
    empty_fetches: int = 0
    counts: dict[OutcomeKind, int] = field(default_factory=lambda: dict.fromkeys(OutcomeKind, 0))
    #: Deliveries settled without a lifecycle, by reason: ``done`` (processed before, a duplicate), ``undecodable``,
    #: ``max_deliveries`` (delivered too often), ``expired``, ``missing_key`` (encrypted with a key that is missing).
    rejected: dict[str, int] = field(default_factory=dict)
    #: Settlements by the result that the broker reported: ``settled``, ``lost`` (the claim was lost) or ``failed``;
    #: ``kept`` counts deliveries for which no settlement was sent.
    settled: dict[str, int] = field(default_factory=dict)
    failures: deque[Outcome] = field(default_factory=lambda: deque(maxlen=MAX_FAILURES))
    #: Calls that were still running when the loop ended.
    still_running: int = 0
    #: Calls that returned after their timeout; their results were discarded.
    late_results: int = 0
    #: Released transactions that had been started: their effect may have happened.
    released_started: int = 0
    #: Why the loop does not fetch at the moment, if a gate pauses it.
    paused: str | None = None

    @property
    def finished(self) -> int:
        """The number of transactions that have their outcome."""
        return sum(self.counts.values())

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.kind] += 1
        if outcome.kind is OutcomeKind.FAILED or outcome.kind is OutcomeKind.EXCEPTION_HANDLER_FAILED:
            self.failures.append(outcome)
        elif outcome.kind is OutcomeKind.RELEASED and outcome.started:
            self.released_started += 1


@dataclass(slots=True)
class ProduceReport:
    """The results of a produce call: one outcome per input transaction, in input order.

    ``still_running`` and ``late_results`` have the same meaning as in ``Report``.
    """

    outcomes: list[Outcome]
    stop_reason: StopReason = StopReason.DONE
    still_running: int = 0
    late_results: int = 0

    def count(self, kind: OutcomeKind) -> int:
        """Count the outcomes of *kind*, one for each position of the input."""
        return sum(outcome.kind == kind for outcome in self.outcomes)

    @property
    def released_started(self) -> int:
        """The number of released transactions whose call had started: their effect may have happened."""
        return sum(outcome.kind is OutcomeKind.RELEASED and outcome.started for outcome in self.outcomes)


def attempt_history(outcome: Outcome) -> tuple[Attempt, ...]:
    """Return the last attempts, including those of earlier deliveries, as the message of a redelivery stores them."""
    new = tuple(
        Attempt(
            attempt=failed_attempt.attempt,
            category=failed_attempt.error.category,
            code=failed_attempt.error.code,
            error=describe_error(failed_attempt.error),
            at=failed_attempt.occurred_at,
            delay=failed_attempt.delay,
        )
        for failed_attempt in outcome.failed_attempts
        if failed_attempt.step not in ("success", "exception")
    )
    return trim_history(outcome.transaction.history + new, MAX_HISTORY)
