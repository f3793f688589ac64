"""State of one consumer group of a log: its partitions, and the store for the state that a log cannot keep.

A log stores one position per partition, the watermark: all records below it are settled. LogConsumerStore keeps the
delivery counts, the deferred records and the dead letters outside the log. Partition is the state of one partition from
its watermark on, in the consumer that owns it. Each change of the owner begins a new generation, which ends the claims
(the rights to settle a delivered record) of the previous one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, paginate
from ergon_framework.transaction import Transaction


class LogPosition(NamedTuple):
    """The position of a record in a log."""

    partition: int
    offset: int


class DeferredRecord(NamedTuple):
    """A transaction that is redelivered at *due*, in seconds of the caller's clock, instead of that at *position*."""

    due: float
    position: LogPosition
    transaction: Transaction


class LogConsumerStore(Protocol):
    """Delivery counts, deferred records and dead letters of one consumer group.

    The caller holds a lock; calls for a partition come only from the partition's owner. A durable store has written
    when the call returns.
    """

    def increment(self, position: LogPosition) -> int:
        """Count one more delivery, and return the new count."""

    def decrement(self, position: LogPosition) -> None:
        """Take one delivery off the count."""

    def defer(self, deferred: DeferredRecord) -> None:
        """Store a deferred transaction, replacing an earlier one of its position."""

    def deferred(self, partition: int) -> Sequence[DeferredRecord]:
        """Return the deferred records of *partition*; called when a consumer takes over the partition."""

    def delete(self, position: LogPosition) -> None:
        """Delete the count and the deferred record of a settled record."""

    def add_dead_letter(self, record: DeadLetterRecord) -> None:
        """Store a dead letter under a new handle, after all others."""

    def get_dead_letter(self, handle: str) -> DeadLetterRecord | None:
        """Return the dead letter with *handle*; None if it does not exist any more."""

    def remove_dead_letter(self, handle: str) -> bool:
        """Remove the dead letter with *handle*; return False if there was none."""

    def list_dead(self, query: DeadLetterQuery, *, after: str | None, limit: int) -> Sequence[DeadLetterRecord]:
        """Return one page of dead letters, as the connector's method does."""

    @property
    def dead_count(self) -> int:
        """The number of dead letters."""


class MemoryLogConsumerStore:
    """A consumer state store that lives as long as this process."""

    def __init__(self) -> None:
        self._counts: dict[LogPosition, int] = {}
        self._deferred: dict[LogPosition, DeferredRecord] = {}
        self._last_handle = 0
        self._dead: dict[str, DeadLetterRecord] = {}

    def increment(self, position: LogPosition) -> int:
        self._counts[position] = count = self._counts.get(position, 0) + 1
        return count

    def decrement(self, position: LogPosition) -> None:
        self._counts[position] -= 1

    def defer(self, deferred: DeferredRecord) -> None:
        self._deferred[deferred.position] = deferred

    def deferred(self, partition: int) -> Sequence[DeferredRecord]:
        return [deferred for deferred in self._deferred.values() if deferred.position.partition == partition]

    def delete(self, position: LogPosition) -> None:
        self._counts.pop(position, None)
        self._deferred.pop(position, None)

    def add_dead_letter(self, record: DeadLetterRecord) -> None:
        self._last_handle += 1
        handle = str(self._last_handle)
        self._dead[handle] = record.model_copy(update={"handle": handle})

    def get_dead_letter(self, handle: str) -> DeadLetterRecord | None:
        return self._dead.get(handle)

    def remove_dead_letter(self, handle: str) -> bool:
        return self._dead.pop(handle, None) is not None

    def list_dead(self, query: DeadLetterQuery, *, after: str | None, limit: int) -> Sequence[DeadLetterRecord]:
        return paginate(self._dead.values(), query, after=after, limit=limit)

    @property
    def dead_count(self) -> int:
        return len(self._dead)


# -- partition --------------------------------------------------------------------------------------


class Commit(NamedTuple):
    """A group's committed progress: all below *watermark* is settled, and so are the offsets in *settled_above*.

    ``settled_above`` is committed only at a clean handover; after a crash it is empty or out of date, and records that
    were settled out of order are redelivered.
    """

    watermark: int = 0
    settled_above: frozenset[int] = frozenset()


class LogReceipt(NamedTuple):
    """The claim on one record, valid in one generation of its partition; *turn* is different for every delivery."""

    partition: int
    offset: int
    generation: int
    turn: int


class Partition:
    """Tracks the next record, the claimed records and the watermark of a partition; it does no I/O."""

    def __init__(self, number: int, *, generation: int, commit: Commit, deferred: Iterable[DeferredRecord]) -> None:
        self.number = number
        self.generation = generation
        #: The first offset that is not settled.
        self.watermark = commit.watermark
        #: The offset of the next record that was never claimed in this generation.
        self.position = commit.watermark
        #: By claimed offset: the deferred record that was claimed; None if the record came from the log.
        self.held: dict[int, DeferredRecord | None] = {}
        #: The number of claims so far, and for each claimed offset the number of its claim, which is in its receipt.
        self._turn = 0
        self._turns: dict[int, int] = {}
        #: Settled offsets above the watermark.
        self._settled = set(commit.settled_above)
        #: Offsets whose claim was undone; they are claimed again before new records.
        self._returned: list[int] = []
        #: Deferred records that are not claimed, the first due one first.
        self._deferred = list(deferred)
        heapify(self._deferred)
        # A deferred record counts as settled, also if a crash came between storing it and committing the watermark.
        self._deferred_offsets = {deferred.position.offset for deferred in self._deferred}

    def take(self, now: float, records: Sequence[tuple[Transaction, float]]) -> tuple[int, Transaction] | None:
        """Claim the next record, return its offset and transaction: due ones first, then returned, then new ones.

        *records* is the whole partition, indexed by offset; a record is a transaction and the time of its append.
        """
        if self._deferred and self._deferred[0].due <= now:
            deferred = heappop(self._deferred)
            self._claim(deferred.position.offset, deferred)
            return deferred.position.offset, deferred.transaction
        if self._returned:
            offset = heappop(self._returned)
        else:
            self.skip_settled(len(records))
            if self.position >= len(records):
                return None
            offset = self.position
            self.position += 1
        self._claim(offset, None)
        return offset, records[offset][0]

    def _claim(self, offset: int, deferred: DeferredRecord | None) -> None:
        self.held[offset] = deferred
        self._turn += 1
        self._turns[offset] = self._turn

    def get_receipt(self, offset: int) -> LogReceipt:
        """Return the claim on a record that is in flight."""
        return LogReceipt(self.number, offset, self.generation, self._turns[offset])

    def has_claim(self, receipt: LogReceipt) -> bool:
        """Return whether this claim is still valid; a claim of an earlier delivery is not."""
        return receipt.offset in self.held and receipt == self.get_receipt(receipt.offset)

    def skip_settled(self, end: int) -> None:
        """Move the position past records that are settled or deferred."""
        while self.position < end and (self.position in self._settled or self.position in self._deferred_offsets):
            if self.position in self._deferred_offsets:
                # Not mark_settled(): the deferred transaction may be claimed, and that claim remains valid.
                self._advance(self.position)
            self.position += 1

    def mark_settled(self, offset: int) -> None:
        """Mark the record as settled; the watermark advances up to the first gap."""
        self.held.pop(offset, None)
        self._turns.pop(offset, None)
        self._advance(offset)

    def _advance(self, offset: int) -> None:
        """Record *offset* as settled, and move the watermark up to the first record that is not."""
        if offset < self.watermark:
            return
        self._settled.add(offset)
        while self.watermark in self._settled:
            self._settled.remove(self.watermark)
            self.watermark += 1
        self.position = max(self.position, self.watermark)

    def defer(self, deferred: DeferredRecord) -> None:
        """Defer the record in the consumer state store; in the log it counts as settled."""
        self.mark_settled(deferred.position.offset)
        heappush(self._deferred, deferred)

    def return_record(self, offset: int) -> None:
        """Undo the claim on the record, so that it can be claimed again."""
        deferred = self.held.pop(offset)
        if deferred is None:
            heappush(self._returned, offset)
        else:
            heappush(self._deferred, deferred)

    def commit(self, *, orderly: bool) -> Commit:
        """Return the progress to commit to the log; with *orderly* also the offsets settled above the watermark."""
        return Commit(self.watermark, frozenset(self._settled) if orderly else frozenset())

    def list_receipts(self) -> list[LogReceipt]:
        """Return the claims that are in flight."""
        return [self.get_receipt(offset) for offset in self.held]

    def to_position(self, offset: int) -> LogPosition:
        return LogPosition(self.number, offset)

    # -- state --------------------------------------------------------------------------------

    def list_ready(self, now: float, end: int) -> list[int]:
        """Return the offsets that could be claimed now."""
        due = [deferred.position.offset for deferred in self._deferred if deferred.due <= now]
        settled = self._settled | self._deferred_offsets
        new = [offset for offset in range(self.position, end) if offset not in settled]
        return due + self._returned + new

    def deferred_count(self, now: float) -> int:
        return sum(deferred.due > now for deferred in self._deferred)

    def next_due(self) -> float | None:
        return self._deferred[0].due if self._deferred else None
