"""Moving dead letters: the choice first, then part by part, so that a stop in between leaves nothing half done."""

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
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.errors import ErgonError, text

#: How many are asked for at once; each comes with its payload.
PAGE = 200
#: How many of those that failed are named.
NAMED = 20
#: A rate is kept in parts of a second.
_PARTS = 5


class Stopped(StrEnum):
    """Why not all that was chosen was moved."""

    SIGNAL = "signal"
    CANARY = "canary"
    ERROR = "error"


class Letter(NamedTuple):
    """What has to be remembered of a dead letter that was chosen."""

    place: str
    id: str
    at: float
    reason: str


@dataclass(slots=True)
class Trial:
    """How the canary ended; ``waiting`` are those that had not ended when the time was over."""

    succeeded: int = 0
    failed: int = 0
    waiting: int = 0


@dataclass(slots=True)
class Tally:
    """How far it got."""

    chosen: int
    counts: Counter[Became] = field(default_factory=Counter)
    #: The first that failed, with their words.
    failures: list[tuple[Letter, str]] = field(default_factory=list)
    stopped: Stopped | None = None
    error: str = ""
    trial: Trial | None = None
    #: Those that were replayed or discarded.
    moved: list[Letter] = field(default_factory=list)

    @property
    def left(self) -> int:
        """How many of the chosen were not tried."""
        return self.chosen - self.counts.total()

    def add(self, letters: Sequence[Letter], results: Sequence[ReplayResult]) -> None:
        for letter, result in zip(letters, results, strict=True):
            self.counts[result.became] += 1
            if result.became in (Became.REPLAYED, Became.DISCARDED):
                self.moved.append(letter)
            if result.became is Became.FAILED and len(self.failures) < NAMED:
                self.failures.append((letter, result.words))


class Pace:
    """Keeps to so many in a second."""

    def __init__(self, rate: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._due = clock()

    def part(self, batch: int) -> int:
        """How many to move at once."""
        return batch if self._rate is None else max(1, min(batch, int(self._rate / _PARTS)))

    def delay(self, count: int) -> float:
        """Seconds to wait before the next *count*."""
        if self._rate is None:
            return 0.0
        now = self._clock()
        # Time that the broker took is not made up for: a rate is a promise to whoever is behind it.
        due = max(self._due, now)
        self._due = due + count / self._rate
        return due - now


class Stop:
    """Whether a signal came. A plain flag: a handler may interrupt whoever holds a lock."""

    def __init__(
        self, *, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.asked = False
        self._sleep = sleep
        self._clock = clock

    def wait(self, seconds: float) -> None:
        """Sleep that long, or until a signal comes."""
        end = self._clock() + seconds
        while not self.asked and (left := end - self._clock()) > 0:
            self._sleep(min(left, 0.1))


def found(connector: Connector, query: DeadLetterQuery, *, limit: int | None = None) -> Iterator[DeadLetterRecord]:
    """What *query* means, the oldest first, asked for page by page."""
    after: str | None = None
    left = sys.maxsize if limit is None else limit
    while left > 0:
        wanted = min(PAGE, left)
        records = connector.list_dead(query, after=after, limit=wanted)
        yield from records
        if len(records) < wanted:
            return
        after, left = records[-1].place, left - len(records)


def choose(connector: Connector, query: DeadLetterQuery, *, limit: int | None, stop: Stop) -> list[Letter]:
    """All that *query* means now, the oldest first.

    The choice is made before anything moves: what is replayed and dies again would otherwise be
    found again, without end.
    """
    records = takewhile(lambda _: not stop.asked, found(connector, query, limit=limit))
    return [Letter(record.place, record.id, record.at, record.reason) for record in records]


Move = Callable[[Sequence[str]], Sequence[ReplayResult]]


def move(
    letters: Sequence[Letter],
    moving: Move,
    *,
    tally: Tally,
    batch: int,
    pace: Pace,
    stop: Stop,
    moved: Callable[[Tally], None],
) -> None:
    """Move *letters* part by part; *moved* is told after each."""
    for part in _parts(letters, pace.part(batch)):
        stop.wait(pace.delay(len(part)))
        if stop.asked:
            tally.stopped = Stopped.SIGNAL
            return
        try:
            results = moving([letter.place for letter in part])
        except ErgonError as error:
            tally.stopped, tally.error = Stopped.ERROR, text(error)
            return
        tally.add(part, results)
        moved(tally)


def _parts(letters: Sequence[Letter], size: int) -> Iterator[Sequence[Letter]]:
    return (letters[start : start + size] for start in range(0, len(letters), size))
