"""Partition: one consumer's view of one partition of a log, from its watermark on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ergon_framework.connectors.side_store import Kept, Place
from ergon_framework.transaction import Transaction


class Commit(NamedTuple):
    """What a group has told the log: all below *watermark* is settled, and so are those *beyond* it.

    ``beyond`` is told only at an orderly handover; after a crash it is empty or out of date, and
    what was settled out of order comes again.
    """

    watermark: int = 0
    beyond: frozenset[int] = frozenset()


class Receipt(NamedTuple):
    """The claim on one record, good for one generation of its partition and for one turn of being handed out."""

    partition: int
    offset: int
    generation: int
    turn: int


class Partition:
    """Which record is next, which are held, and up to where all is settled; it touches no store."""

    def __init__(self, number: int, *, generation: int, commit: Commit, kept: Iterable[Kept]) -> None:
        self.number = number
        self.generation = generation
        self.watermark = commit.watermark
        self.position = commit.watermark
        self.held: dict[int, Kept | None] = {}
        self._turn = 0
        self._turns: dict[int, int] = {}
        self._done = set(commit.beyond)
        self._returned: list[int] = []
        self._kept = list(kept)
        heapify(self._kept)
        # A record that is kept for later counts as settled, also where a crash came between the two.
        self._aside = {kept.place.offset for kept in self._kept}

    def take(self, now: float, records: Sequence[tuple[Transaction, float]]) -> tuple[int, Transaction] | None:
        """Hold the next record and say which it is: what is due first, then what came back, then what is new."""
        if self._kept and self._kept[0].due <= now:
            kept = heappop(self._kept)
            self._hold(kept.place.offset, kept)
            return kept.place.offset, kept.transaction
        if self._returned:
            offset = heappop(self._returned)
        else:
            self.skip(len(records))
            if self.position >= len(records):
                return None
            offset = self.position
            self.position += 1
        self._hold(offset, None)
        return offset, records[offset][0]

    def _hold(self, offset: int, kept: Kept | None) -> None:
        self.held[offset] = kept
        self._turn += 1
        self._turns[offset] = self._turn

    def receipt(self, offset: int) -> Receipt:
        """The claim on a record that is held."""
        return Receipt(self.number, offset, self.generation, self._turns[offset])

    def holds(self, receipt: Receipt) -> bool:
        """Whether that very claim is still held: one of an earlier turn is not."""
        return receipt.offset in self.held and receipt == self.receipt(receipt.offset)

    def skip(self, end: int) -> None:
        """Move the position beyond records that need not be handed out."""
        while self.position < end and (self.position in self._done or self.position in self._aside):
            if self.position in self._aside:
                # Whoever has what is kept for it in hand goes on having it.
                self._pass(self.position)
            self.position += 1

    def settled(self, offset: int) -> None:
        """The record is done with; the watermark moves as far as there is no gap."""
        self.held.pop(offset, None)
        self._turns.pop(offset, None)
        self._pass(offset)

    def _pass(self, offset: int) -> None:
        if offset < self.watermark:
            return
        self._done.add(offset)
        while self.watermark in self._done:
            self._done.remove(self.watermark)
            self.watermark += 1
        self.position = max(self.position, self.watermark)

    def keep(self, kept: Kept) -> None:
        """The record comes again later, from beside the log: in the log it is settled."""
        self.settled(kept.place.offset)
        heappush(self._kept, kept)

    def back(self, offset: int) -> None:
        """The record goes back to its place."""
        kept = self.held.pop(offset)
        if kept is None:
            heappush(self._returned, offset)
        else:
            heappush(self._kept, kept)

    def commit(self, *, orderly: bool) -> Commit:
        """What to tell the log."""
        return Commit(self.watermark, frozenset(self._done) if orderly else frozenset())

    def receipts(self) -> list[Receipt]:
        """The claims that are held."""
        return [self.receipt(offset) for offset in self.held]

    def place(self, offset: int) -> Place:
        return Place(self.number, offset)

    # -- what is there ------------------------------------------------------------------------

    def ready(self, now: float, end: int) -> list[int]:
        """The offsets that could be taken now."""
        due = [kept.place.offset for kept in self._kept if kept.due <= now]
        passed = self._done | self._aside
        new = [offset for offset in range(self.position, end) if offset not in passed]
        return due + self._returned + new

    def delayed(self, now: float) -> int:
        return sum(kept.due > now for kept in self._kept)

    def next_due(self) -> float | None:
        return self._kept[0].due if self._kept else None
