"""What became of each transaction, and of the loop: results as data."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ergon_framework.connectors.base import Settlement
from ergon_framework.errors import Category, ErgonError
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:
    from ergon_framework.engine.attempts import Note
    from ergon_framework.engine.effects import Call

#: How many of the last failures a report keeps.
FAILURES = 20


class Kind(StrEnum):
    """The five ways in which a transaction's stay here can end."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    HANDLER_FAILED = "handler_failed"
    DEFERRED = "deferred"
    RELEASED = "released"


class End(StrEnum):
    """Why a loop ended."""

    EMPTY = "empty"
    DONE = "done"
    LIMIT = "limit"
    STOP = "stop"
    TIMEOUT = "timeout"
    STALLED = "stalled"
    FETCH = "fetch"


class Outcome:
    """How one transaction ended: exactly one is made for each that was fetched or given.

    ``attempts`` counts the process attempts, those of earlier deliveries included. ``processed``
    says that process had succeeded, whatever came after. ``still_running`` says that a body which
    timed out had not left. ``reason`` is a word for outcomes without an error of their own. ``started``
    says that process or produce was called; a released transaction that was not started is safe to send
    again, one that was started may have had its effect.
    """

    __slots__ = (
        "attempts",
        "body",
        "durations",
        "error",
        "handler_error",
        "kind",
        "notes",
        "processed",
        "reason",
        "result",
        "settlement",
        "started",
        "tracebacks",
        "transaction",
    )

    def __init__(self, transaction: Transaction, kind: Kind = Kind.RELEASED, *, reason: str | None = None) -> None:
        self.transaction = transaction
        self.kind = kind
        self.attempts = transaction.attempts
        self.started = False
        self.processed = False
        self.result: Any = None
        self.error: ErgonError | None = None
        #: The last error of an exception handler that was exhausted too.
        self.handler_error: ErgonError | None = None
        self.settlement: Settlement | None = None
        self.durations: dict[str, float] = {}
        self.notes: list[Note] = []
        self.body: Call | None = None
        self.reason = reason
        #: Redacted tracebacks of the two errors; None until they are formatted.
        self.tracebacks: tuple[str | None, str | None] | None = None

    @property
    def category(self) -> Category | None:
        return None if self.error is None else self.error.category

    @property
    def still_running(self) -> bool:
        return self.body is not None and not self.body.left

    @property
    def failed_step(self) -> str | None:
        """The step whose error ``error`` is; the exception handler has an error of its own."""
        return next((note.step for note in reversed(self.notes) if note.step != "exception"), None)

    @property
    def succeeded_steps(self) -> tuple[str, ...]:
        """Which steps had succeeded: process or produce, and success."""
        if not self.processed:
            return ()
        first = next(iter(self.durations), "process")
        return (first, "success") if self.kind is Kind.SUCCEEDED else (first,)

    def __repr__(self) -> str:
        return f"Outcome({self.transaction.id!r}, {self.kind.value}, attempts={self.attempts}, error={self.error!r})"


@dataclass(slots=True)
class Report:
    """What a consume loop did. It is filled while the loop runs, and complete when it returns."""

    end: End | None = None
    started: int = 0
    fetches: int = 0
    empty_fetches: int = 0
    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    #: Settled before the lifecycle, by reason: done, undecodable, max_deliveries, expired, missing_key.
    refused: dict[str, int] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    failures: deque[Outcome] = field(default_factory=lambda: deque(maxlen=FAILURES))
    #: Bodies that were still running when the loop ended.
    abandoned: int = 0
    #: Bodies that came back after nobody waited for them any more.
    fenced: int = 0
    #: How many of the released had been started: their effect may be there.
    released_started: int = 0
    #: Why the loop does not fetch at the moment, if a gate holds it.
    paused: str | None = None

    @property
    def finished(self) -> int:
        """How many transactions have their outcome."""
        return sum(self.counts.values())

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.kind] += 1
        if outcome.kind is Kind.FAILED or outcome.kind is Kind.HANDLER_FAILED:
            self.failures.append(outcome)
        elif outcome.kind is Kind.RELEASED and outcome.started:
            self.released_started += 1


@dataclass(slots=True)
class ProduceReport:
    """What a produce call did: one outcome per input transaction, in input order."""

    outcomes: list[Outcome]
    end: End = End.DONE
    abandoned: int = 0
    fenced: int = 0

    def count(self, kind: Kind) -> int:
        """Count the outcomes of *kind*, one for each position of the input."""
        return sum(outcome.kind == kind for outcome in self.outcomes)

    @property
    def released_started(self) -> int:
        """Count the released transactions whose call had begun: their effect may be there."""
        return sum(outcome.kind is Kind.RELEASED and outcome.started for outcome in self.outcomes)
