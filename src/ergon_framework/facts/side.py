"""FactSide: what a boundary does not keep for the consumers of its facts, kept beside it.

Each call is about one reader of one pair of zones. It is made by a script, so that a side in a database can be asked
by threads and by asyncio.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from ergon_framework.connectors.base import DeadLetter, Delivery
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord
from ergon_framework.connectors.side_store import Kept, MemorySideStore, Place
from ergon_framework.errors import ErgonError
from ergon_framework.facts.errors import EpochChanged
from ergon_framework.facts.model import Cursor, Pair
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import Field

_log = logging.getLogger(__name__)

#: The one partition that a pair of zones is.
ONLY = 0
#: Why something is dead that was due later when its epoch ended.
OUTDATED = "epoch_changed"


@dataclass(frozen=True, slots=True)
class Reading:
    """Who reads what: whom a side is kept for."""

    pair: Pair
    reader: str
    #: What its connector is called.
    queue: str
    codec: Codec
    #: Whether the facts outlive this process, as far as it is known.
    lasts: Callable[[], bool]

    def recognise(self, known: str | None, epoch: str) -> None:
        """Refuse to read in *epoch* what was read in *known*."""
        if known is not None and known != epoch:
            raise EpochChanged(
                f"{self.reader!r} has read {self.queue!r} in epoch {known!r} and the store is in {epoch!r}: it was put "
                "back from a backup, and offsets may mean other facts; compare the two, then: ergon facts epoch "
                "accept, or forget_epoch() of the reader's side"
            )


class Taken(NamedTuple):
    """What an owner begins with: its generation, and what those before have left beside the log."""

    generation: int
    #: Settled beyond the cursor.
    beyond: Collection[int]
    kept: Sequence[Kept]
    #: The number of the last replay, which is among them.
    replays: int = 0


class Claiming(NamedTuple):
    """What an owner is about to hand out."""

    generation: int
    #: Which one of this owner's accounts of all that it holds; a later one has the higher number.
    turn: int
    held: Sequence[int]
    new: Sequence[int]
    #: The number of the last replay that it knows.
    replays: int
    #: The one of the facts that were read; None while there were none.
    epoch: str | None


class Claimed(NamedTuple):
    """How often each was delivered with this time, of as many as could be counted; and what was replayed meanwhile."""

    counts: Sequence[int]
    replayed: Sequence[Kept]
    #: The number of the last of them: told again until the owner says that it knows.
    replays: int = 0


class Acked(NamedTuple):
    """A fact is done with; *aside* if it was delivered from beside the log."""

    offset: int
    aside: bool


class Freed(NamedTuple):
    """It was given back, and this delivery does not count."""

    offset: int
    aside: bool


class Delayed(NamedTuple):
    """It comes again later, and this delivery does not count."""

    offset: int
    aside: bool
    kept: Kept


class Buried(NamedTuple):
    """It is a dead letter."""

    offset: int
    aside: bool
    record: DeadLetterRecord


Change: TypeAlias = Acked | Freed | Delayed | Buried


class Settled(NamedTuple):
    """What an owner settles, all or nothing; *confirmed* is the offset that the boundary knows."""

    generation: int
    turn: int
    #: What it holds afterwards.
    held: Sequence[int]
    changes: Sequence[Change]
    confirmed: int


@dataclass(frozen=True, slots=True)
class SideCalls:
    """What of a side is called, of either flavour, for one reader. Whatever changes something is there when it returns.

    Calls of an owner that is none any more change nothing, and are answered None or False.
    """

    #: (Cursor) -> Taken. Begin a new generation; whoever had the one before has lost its claims.
    take_over: Callable[..., Any]
    #: (Claiming) -> Claimed | None. Count deliveries, before anybody has them in hand.
    claim: Callable[..., Any]
    #: (Settled) -> bool. The same settled again, because nobody knew whether it was, changes nothing.
    settle: Callable[..., Any]
    #: (generation, offsets) -> bool. An orderly end: remember what was settled beyond the cursor; nothing is held.
    leave: Callable[..., Any]
    #: (generation) -> bool. Whether it is the one that holds.
    holds: Callable[..., Any]
    #: (place) -> DeadLetterRecord | None
    dead: Callable[..., Any]
    #: (place, Kept) -> bool. Deliver it in place of the dead letter, also by an owner who is running; False if gone.
    replay: Callable[..., Any]
    #: (place) -> bool
    discard: Callable[..., Any]
    #: (DeadLetterQuery, after, limit) -> Sequence[DeadLetterRecord]
    list_dead: Callable[..., Any]
    #: () -> int
    dead_count: Callable[..., Any]
    #: (generation, Cursor) -> bool. Where side and facts are in one place: confirm to the boundary, if it holds.
    confirm: Callable[..., Any] | None = None


class FactSide(Protocol):
    """Counts, delays and dead letters of consumers of facts, and who of a reader's name has the facts in hand."""

    def calls(self, reading: Reading) -> SideCalls:
        """For threads."""

    def calls_async(self, reading: Reading) -> SideCalls:
        """For asyncio."""


class MemoryFactSide(MemorySideStore):
    """One that lives as long as this process, for one reader: those who read under one name are given the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.lock: AbstractContextManager[object] = threading.Lock()
        #: The epoch of the facts that were read last; None before the first, and when somebody accepts another one.
        self.epoch: str | None = None
        self.generation = 0
        self.beyond: frozenset[int] = frozenset()
        self._replayed: list[Kept] = []

    def take_over(self) -> int:
        """Begin a new generation, and say which."""
        self.generation += 1
        # They are among all that is kept, which the new owner asks for.
        self._replayed.clear()
        return self.generation

    def replay(self, kept: Kept) -> None:
        """Keep a dead letter for delivery at once, also by an owner who is running."""
        self.keep(kept)
        self._replayed.append(kept)

    def replayed(self) -> Sequence[Kept]:
        """What was replayed since this was last asked."""
        found, self._replayed = self._replayed, []
        return found

    def forget_epoch(self) -> int:
        """Let the reader read in another epoch, where offsets may mean other facts.

        What was due later are dead letters from then on; how many these were.
        """
        with self.lock:
            due = list(self._kept.values())
            for kept in due:
                delivery = Delivery(kept.transaction, None, self._counts.get(kept.place, 0))
                self.bury(DeadLetterRecord.of(delivery, DeadLetter(OUTDATED), queue="", at=time.time()))
            self.epoch, self.beyond = None, frozenset()
            self._counts.clear()
            self._kept.clear()
            self._replayed.clear()
            # Whoever has facts of the old epoch in hand has them no longer.
            self.generation += 1
            return len(due)

    def calls(self, reading: Reading) -> SideCalls:
        asked = _InMemory(self, reading)
        return SideCalls(
            asked.take_over,
            asked.claim,
            asked.settle,
            asked.leave,
            asked.holds,
            asked.dead,
            asked.replay,
            asked.discard,
            asked.list_dead,
            asked.dead_count,
        )

    # Nothing here waits.
    calls_async = calls


class _InMemory:
    """A side in memory, as one of its connectors asks it."""

    def __init__(self, side: MemoryFactSide, reading: Reading) -> None:
        self._side = side
        self._reading = reading

    def take_over(self, cursor: Cursor) -> Taken:
        side = self._side
        with side.lock:
            self._reading.recognise(side.epoch, cursor.epoch)
            return Taken(side.take_over(), side.beyond, side.kept(ONLY))

    def claim(self, claiming: Claiming) -> Claimed | None:
        side = self._side
        with side.lock:
            if side.generation != claiming.generation:
                return None
            side.epoch = claiming.epoch or side.epoch
            counts: list[int] = []
            for offset in claiming.new:
                try:
                    counts.append(side.count(Place(ONLY, offset)))
                except ErgonError:
                    if counts:
                        break  # what is counted already must reach somebody
                    raise
            return Claimed(counts, side.replayed())

    def settle(self, settled: Settled) -> bool:
        side = self._side
        with side.lock:
            if side.generation != settled.generation:
                return False
            for change in settled.changes:
                self._change(Place(ONLY, change.offset), change)
            return True

    def _change(self, place: Place, change: Change) -> None:
        side = self._side
        match change:
            case Acked():
                side.forget(place)
            case Freed():
                side.uncount(place)
            case Delayed():
                side.keep(change.kept)
                side.uncount(place)
            case Buried():
                side.bury(change.record)
                side.forget(place)
                if self._reading.lasts():
                    # The reader's cursor goes on, and this record goes with the process: the log is all that remains.
                    told = {"queue": change.record.queue, "transaction": change.record.id}
                    told |= {Field.CORRELATION_ID: change.record.envelope.correlation or change.record.id}
                    told |= {"reason": change.record.reason}
                    logs.say(logging.WARNING, "dead letter of a fact is in memory only", told, to=_log)

    def leave(self, generation: int, beyond: Collection[int]) -> bool:
        side = self._side
        with side.lock:
            if side.generation != generation:
                return False
            side.beyond = frozenset(beyond)
            return True

    def holds(self, generation: int) -> bool:
        return self._side.generation == generation

    def dead(self, place: str) -> DeadLetterRecord | None:
        with self._side.lock:
            return self._side.dead(place)

    def replay(self, place: str, kept: Kept) -> bool:
        side = self._side
        with side.lock:
            if side.dead(place) is None:
                return False
            side.replay(kept)
            return side.exhume(place)

    def discard(self, place: str) -> bool:
        with self._side.lock:
            return self._side.exhume(place)

    def list_dead(self, query: DeadLetterQuery, after: str | None, limit: int) -> Sequence[DeadLetterRecord]:
        with self._side.lock:
            return self._side.list_dead(query, after=after, limit=limit)

    def dead_count(self) -> int:
        with self._side.lock:
            return self._side.dead_count
