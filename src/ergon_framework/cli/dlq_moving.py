"""Move dead letters: select them first, then move them in batches, so that a stop leaves no batch half moved."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, DeadLetterResult, ReplayResult
from ergon_framework.errors import ErgonError, error_message

#: Records per page; each record includes its payload.
PAGE_SIZE = 200
#: Maximum number of failures that are named.
MAX_NAMED_FAILURES = 20
#: Number of batches per second that a rate limit is divided into.
_BATCHES_PER_SECOND = 5


class StopReason(StrEnum):
    """Why some of the selected letters were not moved."""

    SIGNAL = "signal"
    CANARY = "canary"
    ERROR = "error"


class SelectedLetter(NamedTuple):
    """The fields of a selected dead letter that moving it requires."""

    handle: str
    id: str
    dead_at: float
    reason: str


@dataclass(slots=True)
class CanaryResult:
    """The outcome of the canary; ``waiting`` counts transactions that had not ended when the wait expired."""

    succeeded: int = 0
    failed: int = 0
    waiting: int = 0


@dataclass(slots=True)
class MoveProgress:
    """The progress of a move."""

    selected: int
    counts: Counter[DeadLetterResult] = field(default_factory=Counter)
    #: The first failures with their messages.
    failures: list[tuple[SelectedLetter, str]] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str = ""
    canary_result: CanaryResult | None = None
    #: Letters that were replayed or discarded.
    moved: list[SelectedLetter] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """The number of selected letters that were not tried."""
        return self.selected - self.counts.total()

    def add(self, letters: Sequence[SelectedLetter], results: Sequence[ReplayResult]) -> None:
        for letter, result in zip(letters, results, strict=True):
            self.counts[result.outcome] += 1
            if result.outcome in (DeadLetterResult.REPLAYED, DeadLetterResult.DISCARDED):
                self.moved.append(letter)
            if result.outcome is DeadLetterResult.FAILED and len(self.failures) < MAX_NAMED_FAILURES:
                self.failures.append((letter, result.message))


class RateLimit:
    """Limits moves to a number per second."""

    def __init__(self, rate: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._due = clock()

    def batch_size(self, batch: int) -> int:
        """Return the number of letters to move in one batch."""
        return batch if self._rate is None else max(1, min(batch, int(self._rate / _BATCHES_PER_SECOND)))

    def reserve_delay(self, count: int) -> float:
        """Return the seconds to wait before the next *count* letters."""
        if self._rate is None:
            return 0.0
        now = self._clock()
        # Time spent in the broker is not caught up: the rate must protect the systems after the queue.
        due = max(self._due, now)
        self._due = due + count / self._rate
        return due - now


class StopFlag:
    """Whether a signal arrived; a plain flag without a lock, because a signal handler may interrupt a lock holder."""

    def __init__(
        self, *, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_set = False
        self._sleep = sleep
        self._clock = clock

    def wait(self, seconds: float) -> None:
        """Sleep for *seconds*, or until a signal arrives."""
        deadline = self._clock() + seconds
        while not self.is_set and (remaining := deadline - self._clock()) > 0:
            self._sleep(min(remaining, 0.1))


def iter_dead(connector: Connector, query: DeadLetterQuery, *, limit: int | None = None) -> Iterator[DeadLetterRecord]:
    """Yield the records that match *query*, oldest first, page by page."""
    after: str | None = None
    remaining = sys.maxsize if limit is None else limit
    while remaining > 0:
        page_limit = min(PAGE_SIZE, remaining)
        records = connector.list_dead(query, after=after, limit=page_limit)
        yield from records
        if len(records) < page_limit:
            return
        after, remaining = records[-1].handle, remaining - len(records)


def select_letters(
    connector: Connector, query: DeadLetterQuery, *, limit: int | None, stop: StopFlag
) -> list[SelectedLetter]:
    """Return all letters that match *query* now, oldest first.

    The selection ends before anything moves: otherwise a replayed transaction that is dead-lettered again would be
    selected again without end.
    """
    records = takewhile(lambda _: not stop.is_set, iter_dead(connector, query, limit=limit))
    return [SelectedLetter(record.handle, record.id, record.at, record.reason) for record in records]


MoveBatch = Callable[[Sequence[str]], Sequence[ReplayResult]]


def move_letters(
    letters: Sequence[SelectedLetter],
    move_batch: MoveBatch,
    *,
    move_progress: MoveProgress,
    batch_size: int,
    rate_limit: RateLimit,
    stop: StopFlag,
    on_batch_end: Callable[[MoveProgress], None],
) -> None:
    """Move *letters* in batches; call *on_batch_end* after each."""
    for chunk in _split_batches(letters, rate_limit.batch_size(batch_size)):
        stop.wait(rate_limit.reserve_delay(len(chunk)))
        if stop.is_set:
            move_progress.stop_reason = StopReason.SIGNAL
            return
        try:
            results = move_batch([letter.handle for letter in chunk])
        except ErgonError as error:
            move_progress.stop_reason, move_progress.error = StopReason.ERROR, error_message(error)
            return
        move_progress.add(chunk, results)
        on_batch_end(move_progress)


def _split_batches(letters: Sequence[SelectedLetter], size: int) -> Iterator[Sequence[SelectedLetter]]:
    return (letters[start : start + size] for start in range(0, len(letters), size))
