"""History: what is known of one piece of work wherever something was kept of it, without what it carried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

from ergon_framework.errors import ConfigurationError
from ergon_framework.failure import EDITED, Attempt, Deferral

#: The longest id that is asked for: as long as a header or a fact may have it.
LONGEST = 256

Value: TypeAlias = str | int | float


class Kind(StrEnum):
    """What kind of work it is."""

    TRANSACTION = "transaction"
    JOB = "job"
    CALL = "provider call"
    FACT = "fact"


class State(StrEnum):
    """Where a piece of work is now."""

    READY = "ready"
    #: It waits for its time, or for its next attempt.
    DELAYED = "delayed"
    #: It waits for the one before it that has the same key.
    BEHIND = "behind"
    #: A worker has it.
    HELD = "held"
    #: It is in its queue, which can say no more.
    QUEUED = "queued"
    DEAD = "dead letter"
    #: Its id is among those that have succeeded.
    DONE = "done"
    PENDING = "pending"
    RUNNING = "running"
    RETRYING = "retrying"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    KILLED = "killed"
    #: It may have been carried out, and nobody knows.
    DOUBTFUL = "doubtful"
    STORED = "stored"
    #: Only its id is still known.
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened; *at* is in seconds since the epoch, None where nobody wrote it down.

    *values* are the numbers that it was decided by: delays, limits, what was left of a quota. *traceback* says
    where the error was raised, if it was kept.
    """

    at: float | None
    what: str
    verdict: str = ""
    words: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)
    traceback: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where it is now: since when, until when, and in whose hands, as far as somebody has written it down."""

    state: State
    since: float | None = None
    until: float | None = None
    holder: str | None = None
    #: The store's own handle, where one id may be there more than once.
    handle: str | None = None
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One piece of work: what happened to it, the oldest first, and where it is.

    *where* is its queue, its kind of executors, its provider or its zones. *about* says whose it is and by
    which rules it was handled.
    """

    kind: Kind
    id: str
    where: str
    place: Place
    about: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for: an *id*, and the *correlations* that are known to be the same business process.

    *tenants* are those of the transactions of that id, as far as they say one: nobody else's are to be told of.
    """

    id: str
    correlations: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.id) <= LONGEST or not self.id.isprintable():
            raise ConfigurationError(
                f"an id has 1 to {LONGEST} characters that can be printed; this one has {len(self.id)}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The id, and each correlation that is another one: without one of its own, a transaction's id is its own."""
        return tuple(dict.fromkeys((self.id, *self.correlations)))


class Source(Protocol):
    """Where something may be known."""

    @property
    def name(self) -> str:
        """What it is, in the words of whoever reads the answer."""

    def ask(self, question: Question) -> Sequence[History]:
        """All that it knows of it, which may be nothing; an ErgonError where it cannot answer."""


@runtime_checkable
class Traceable(Protocol):
    """A connector that knows more of a transaction than whether it is there."""

    def trace(self, transaction_id: str) -> Sequence[History]:
        """What its queue knows of it."""


def tried(attempts: Sequence[Attempt]) -> tuple[Event, ...]:
    """The attempts that travel with a transaction, as events; the first one is number 1."""
    return tuple(
        Event(
            at=past.at or None,
            what="edited" if past.code == EDITED else f"attempt {past.attempt + 1}",
            verdict="" if past.code == EDITED else past.category.value,
            words=f"{past.code}: {past.error}" if past.code and past.code != EDITED else past.error,
            values={} if past.delay is None else {"delay": past.delay},
        )
        for past in attempts
    )


def deferral_events(deferral: Deferral | None) -> tuple[Event, ...]:
    """The latest deferral because of an unavailable service, with how many there were, since when and until when."""
    if deferral is None:
        return ()
    words = f"{deferral.code}: {deferral.error}" if deferral.code else deferral.error
    values: dict[str, Value] = {
        "times": deferral.count,
        "since": _format_time(deferral.since),
        "at the latest until": _format_time(deferral.until),
    }
    return (Event(at=deferral.at, what="deferred", words=words, values=values),)


def _format_time(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):  # another program wrote it
        return str(at)


def in_order(events: Sequence[Event]) -> tuple[Event, ...]:
    """By their time; what has none stays behind what it was told after."""
    last, placed = float("-inf"), []
    for number, event in enumerate(events):
        last = last if event.at is None else event.at
        placed.append((last, number, event))
    return tuple(event for *_, event in sorted(placed, key=lambda one: one[:2]))
