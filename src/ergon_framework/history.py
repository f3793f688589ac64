"""History: the recorded events and the location of one piece of work, without its payload.

``ergon why`` looks up an id in every store (queues, jobs, provider calls, facts); each answers with histories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

from ergon_framework.errors import ConfigurationError
from ergon_framework.failure import EDITED_CODE, Attempt, Deferral

#: Maximum length of an id in a query, the same as in a header or a fact.
MAX_ID_CHARS = 256

Value: TypeAlias = str | int | float


class WorkKind(StrEnum):
    """The kind of a piece of work."""

    TRANSACTION = "transaction"
    JOB = "job"
    CALL = "provider call"
    FACT = "fact"


class WorkState(StrEnum):
    """The current state of a piece of work."""

    READY = "ready"
    #: It waits for its due time, or for its next attempt.
    DELAYED = "delayed"
    #: It waits for an earlier one with the same key.
    BLOCKED_BY_KEY = "blocked by key"
    #: A worker has claimed it.
    CLAIMED = "claimed"
    #: It is in its queue, and the queue reports no details.
    QUEUED = "queued"
    DEAD = "dead letter"
    #: Its id is in the inbox of processed ids.
    DONE = "done"
    # The states of a job; an attempt that failed may be retried while the job is pending.
    PENDING = "pending"
    RUNNING = "running"
    RETRYING = "retrying"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    KILLED = "killed"
    #: Its outcome is unknown: it may have been carried out.
    UNKNOWN = "outcome unknown"
    #: A fact that its store holds.
    STORED = "stored"
    #: A fact that its store has deleted: only its id is still known.
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEvent:
    """One event; *at* is in seconds since the epoch, None if no time was recorded.

    *result* is the error category of a failed attempt, or the outcome of a provider call. *values* are the numbers
    behind the decision: delays, limits, remaining quota. *traceback* shows where the error was raised, if it was
    stored.
    """

    at: float | None
    event: str
    result: str = ""
    details: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)
    traceback: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The current location: since when, until when and with which holder, as far as recorded."""

    state: WorkState
    since: float | None = None
    until: float | None = None
    holder: str | None = None
    #: The store's own handle, for stores that may hold one id more than once.
    handle: str | None = None
    details: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One piece of work: its events, the oldest first, and its location.

    *where* is its queue, its kind of executors, its provider, or its zones (the sites between which a fact moves).
    *attributes* hold its owner and the rules it was handled by.
    """

    kind: WorkKind
    id: str
    where: str
    location: Location
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[HistoryEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """A lookup of an *id*, and of the *correlations* that are known to belong to the same business process.

    *tenants* are the known tenants of the transactions with that id: work of other tenants is not returned.
    """

    id: str
    correlations: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.id) <= MAX_ID_CHARS or not self.id.isprintable():
            raise ConfigurationError(
                f"id is invalid: expected 1 to {MAX_ID_CHARS} printable characters, got {len(self.id)}"
            )

    @property
    def ids(self) -> tuple[str, ...]:
        """The id and each other correlation; a transaction without a correlation uses its id as correlation."""
        return tuple(dict.fromkeys((self.id, *self.correlations)))


class Source(Protocol):
    """A store or service that may have records of a piece of work."""

    @property
    def name(self) -> str:
        """The name of the source in a report."""

    def lookup(self, query: HistoryQuery) -> Sequence[History]:
        """Return all records that match *query*, possibly none; ErgonError if the source is unavailable."""


@runtime_checkable
class SupportsLookup(Protocol):
    """A connector that can look up a transaction and its state."""

    def lookup(self, transaction_id: str) -> Sequence[History]:
        """Return the queue's records of a transaction."""


def attempt_events(attempts: Sequence[Attempt]) -> tuple[HistoryEvent, ...]:
    """Return the attempts that a message stores as events; the first one is number 1."""
    return tuple(
        HistoryEvent(
            at=attempt.at or None,
            event="edited" if attempt.code == EDITED_CODE else f"attempt {attempt.attempt + 1}",
            result="" if attempt.code == EDITED_CODE else attempt.category.value,
            details=f"{attempt.code}: {attempt.error}"
            if attempt.code and attempt.code != EDITED_CODE
            else attempt.error,
            values={} if attempt.delay is None else {"delay": attempt.delay},
        )
        for attempt in attempts
    )


def deferral_events(deferral: Deferral | None) -> tuple[HistoryEvent, ...]:
    """Return the latest deferral for an unavailable service, with the number of deferrals, their start and limit."""
    if deferral is None:
        return ()
    description = f"{deferral.code}: {deferral.error}" if deferral.code else deferral.error
    values: dict[str, Value] = {
        "times": deferral.count,
        "since": _format_time(deferral.since),
        "at the latest until": _format_time(deferral.until),
    }
    return (HistoryEvent(at=deferral.at, event="deferred", details=description, values=values),)


def _format_time(timestamp: float) -> str:
    try:
        return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):  # a third-party program wrote an invalid time
        return str(timestamp)


def sort_events(events: Sequence[HistoryEvent]) -> tuple[HistoryEvent, ...]:
    """Sort events by time; an event without a time stays after its predecessor."""
    last, sortable = float("-inf"), []
    for number, event in enumerate(events):
        last = last if event.at is None else event.at
        sortable.append((last, number, event))
    return tuple(event for *_, event in sorted(sortable, key=lambda item: item[:2]))
