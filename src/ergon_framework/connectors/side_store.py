"""SideStore: what a log cannot keep for its consumers, kept beside it.

A log remembers one position per partition. How often a record was delivered, which records are
to come again later and which are dead is kept here, for one consumer group of one log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, page
from ergon_framework.transaction import Transaction


class Place(NamedTuple):
    """Where a record is in a log."""

    partition: int
    offset: int


class Kept(NamedTuple):
    """A transaction that is to come again at *due*, instead of the record at *place*."""

    due: float
    place: Place
    transaction: Transaction


class SideStore(Protocol):
    """Counts, delays and dead letters of one consumer group.

    Its user calls it under a lock, one partition's calls only from that partition's owner. A
    durable one has written when it returns.
    """

    def count(self, place: Place) -> int:
        """Count one more delivery, and say how many there were with it."""

    def uncount(self, place: Place) -> None:
        """Take one delivery back."""

    def keep(self, kept: Kept) -> None:
        """Keep a transaction for later, in place of what was kept for its place."""

    def kept(self, partition: int) -> Sequence[Kept]:
        """Everything kept for *partition*; asked when a consumer takes the partition over."""

    def forget(self, place: Place) -> None:
        """The record is settled: neither its count nor its delay is needed any more."""

    def bury(self, record: DeadLetterRecord) -> None:
        """Keep a dead letter, at a place of its own behind all others."""

    def dead(self, place: str) -> DeadLetterRecord | None:
        """The dead letter at *place*, if there still is one."""

    def exhume(self, place: str) -> bool:
        """Keep the one at *place* no longer; False if there was none."""

    def list_dead(self, query: DeadLetterQuery, *, after: str | None, limit: int) -> Sequence[DeadLetterRecord]:
        """As the connector's."""

    @property
    def dead_count(self) -> int:
        """How many dead letters there are."""


class MemorySideStore:
    """A side store that lives as long as this process."""

    def __init__(self) -> None:
        self._counts: dict[Place, int] = {}
        self._kept: dict[Place, Kept] = {}
        self._buried = 0
        self._dead: dict[str, DeadLetterRecord] = {}

    def count(self, place: Place) -> int:
        self._counts[place] = count = self._counts.get(place, 0) + 1
        return count

    def uncount(self, place: Place) -> None:
        self._counts[place] -= 1

    def keep(self, kept: Kept) -> None:
        self._kept[kept.place] = kept

    def kept(self, partition: int) -> Sequence[Kept]:
        return [kept for kept in self._kept.values() if kept.place.partition == partition]

    def forget(self, place: Place) -> None:
        self._counts.pop(place, None)
        self._kept.pop(place, None)

    def bury(self, record: DeadLetterRecord) -> None:
        self._buried += 1
        place = str(self._buried)
        self._dead[place] = record.model_copy(update={"place": place})

    def dead(self, place: str) -> DeadLetterRecord | None:
        return self._dead.get(place)

    def exhume(self, place: str) -> bool:
        return self._dead.pop(place, None) is not None

    def list_dead(self, query: DeadLetterQuery, *, after: str | None, limit: int) -> Sequence[DeadLetterRecord]:
        return page(self._dead.values(), query, after=after, limit=limit)

    @property
    def dead_count(self) -> int:
        return len(self._dead)
