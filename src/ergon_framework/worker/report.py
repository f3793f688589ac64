"""Outcomes of transactions and reports of loops, as data."""

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

#: Number of the last failures that a report keeps.
MAX_FAILURES = 20


class OutcomeKind(StrEnum):
    """The five kinds of outcome of a transaction in a loop."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    HANDLER_FAILED = "handler_failed"
    DEFERRED = "deferred"
    RELEASED = "released"


class StopReason(StrEnum):
    """Why a loop ended."""

    EMPTY = "empty"
    DONE = "done"
    LIMIT = "limit"
    STOP = "stop"
    TIMEOUT = "timeout"
    STALLED = "stalled"
    FETCH = "fetch"


class Outcome:
    """The outcome of one transaction: exactly one for each that was fetched or passed to a produce call.

    ``attempts`` counts the process attempts, including those of earlier deliveries. ``processed`` means that process
    succeeded, whatever came after. ``still_running`` means that a call that timed out has not exited. ``reason``
    names the cause of an outcome that has no error of its own. ``started`` means that process or produce was called;
    a released transaction that was not started is safe to send again, one that was started may have had its effect.
    """

    __slots__ = (
        "abandoned_call",
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
        self.abandoned_call: Call | None = None
        self.reason = reason
        #: Redacted tracebacks of the two errors; None until they are formatted.
        self.tracebacks: tuple[str | None, str | None] | None = None

    @property
    def category(self) -> Category | None:
        return None if self.error is None else self.error.category

    @property
    def still_running(self) -> bool:
        return self.abandoned_call is not None and not self.abandoned_call.exited

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

    end: StopReason | None = None
    started: int = 0
    fetches: int = 0
    empty_fetches: int = 0
    counts: dict[OutcomeKind, int] = field(default_factory=lambda: dict.fromkeys(OutcomeKind, 0))
    #: Settled before the lifecycle, by reason: done, undecodable, max_deliveries, expired, missing_key.
    refused: dict[str, int] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    failures: deque[Outcome] = field(default_factory=lambda: deque(maxlen=MAX_FAILURES))
    #: Calls that were still running when the loop ended.
    abandoned: int = 0
    #: Calls that returned after the loop had stopped waiting for them.
    fenced: int = 0
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
        if outcome.kind is OutcomeKind.FAILED or outcome.kind is OutcomeKind.HANDLER_FAILED:
            self.failures.append(outcome)
        elif outcome.kind is OutcomeKind.RELEASED and outcome.started:
            self.released_started += 1


@dataclass(slots=True)
class ProduceReport:
    """The results of a produce call: one outcome per input transaction, in input order."""

    outcomes: list[Outcome]
    end: StopReason = StopReason.DONE
    abandoned: int = 0
    fenced: int = 0

    def count(self, kind: OutcomeKind) -> int:
        """Count the outcomes of *kind*, one for each position of the input."""
        return sum(outcome.kind == kind for outcome in self.outcomes)

    @property
    def released_started(self) -> int:
        """The number of released transactions whose call had started: their effect may have happened."""
        return sum(outcome.kind is OutcomeKind.RELEASED and outcome.started for outcome in self.outcomes)


def attempt_history(outcome: Outcome) -> tuple[Attempt, ...]:
    """Return the last attempts, including those of earlier deliveries, as they travel with the transaction."""
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
