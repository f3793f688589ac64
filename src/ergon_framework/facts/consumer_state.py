"""FactConsumerStore: consumer state of facts that a boundary does not keep itself.

Consumer state is the delivery counts, deferred records and dead letters of a reader, which is a named consumer of the
facts from one zone to another (a zone pair). One connector at a time owns a reader: it has a generation, the number of
its takeover, and claims, the offsets of the facts that it has delivered and not settled. An epoch is the incarnation of
the boundary's store that assigned the offsets; it changes when a backup is restored. A replay is the redelivery of a
dead letter.

Each call concerns one reader of one zone pair. Scripts make the calls, so that threads and asyncio can use a store in
a database.
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
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord
from ergon_framework.connectors.log_consumer import DeferredRecord, LogPosition, MemoryLogConsumerStore
from ergon_framework.errors import ErgonError
from ergon_framework.facts.errors import EpochChanged
from ergon_framework.facts.model import Cursor, ZonePair
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import Field

_log = logging.getLogger(__name__)

#: The number of the single partition of a zone pair.
ONLY_PARTITION = 0
#: Dead-letter reason of a record that was still deferred when its epoch ended.
EPOCH_CHANGED_REASON = "epoch_changed"


@dataclass(frozen=True, slots=True)
class ReaderInfo:
    """The reader that a consumer store keeps state for."""

    pair: ZonePair
    reader: str
    #: The name of the reader's connector.
    queue: str
    codec: Codec
    #: Whether the facts outlive this process, as far as known.
    is_durable: Callable[[], bool]

    def check_epoch(self, known_epoch: str | None, epoch: str) -> None:
        """Raise EpochChanged if the store is in *epoch* and the reader has read in another, known one."""
        if known_epoch is not None and known_epoch != epoch:
            raise EpochChanged(
                f"{self.reader!r} has read {self.queue!r} in epoch {known_epoch!r} and the store is in {epoch!r}: it "
                "was restored from a backup, and offsets may mean other facts; compare them, then: ergon facts epoch "
                "accept, or forget_epoch() of the reader's consumer store"
            )


class Takeover(NamedTuple):
    """The initial state of an owner: its generation, and the state that earlier owners left in the store."""

    generation: int
    #: Offsets settled above the cursor.
    settled_above: Collection[int]
    deferred: Sequence[DeferredRecord]
    #: The number of the last replay included in ``deferred``.
    replays: int = 0


class ClaimRequest(NamedTuple):
    """The facts that an owner is about to deliver."""

    generation: int
    #: Sequence number of this owner's reports of all its claims; a later report has a higher number.
    sequence: int
    claims: Sequence[int]
    new: Sequence[int]
    #: The number of the last replay that the owner knows.
    replays: int
    #: The epoch of the facts that were read; None before the first one.
    epoch: str | None


class ClaimResult(NamedTuple):
    """The delivery count of each fact, including this delivery, as far as counted; and the replays since the last."""

    counts: Sequence[int]
    replayed: Sequence[DeferredRecord]
    #: The number of the last replay; replays are repeated until the owner reports this number.
    replays: int = 0


class AckChange(NamedTuple):
    """A fact is acknowledged; *was_deferred* if it was delivered from a deferred record."""

    offset: int
    was_deferred: bool


class ReleaseChange(NamedTuple):
    """A fact was released, and this delivery does not count."""

    offset: int
    was_deferred: bool


class DeferChange(NamedTuple):
    """A fact is redelivered later, and this delivery does not count."""

    offset: int
    was_deferred: bool
    deferred: DeferredRecord


class DeadLetterChange(NamedTuple):
    """A fact is dead-lettered."""

    offset: int
    was_deferred: bool
    record: DeadLetterRecord


Change: TypeAlias = AckChange | ReleaseChange | DeferChange | DeadLetterChange


class SettleRequest(NamedTuple):
    """The settlements of an owner, all or nothing; *confirmed* is the offset known to the boundary."""

    generation: int
    sequence: int
    #: The claims that remain afterwards.
    claims: Sequence[int]
    changes: Sequence[Change]
    confirmed: int


@dataclass(frozen=True, slots=True)
class ConsumerStoreCalls:
    """The calls of a consumer store for one reader, sync or async. Every change is written when the call returns.

    Calls of a former owner change nothing and return None or False.
    """

    #: (Cursor) -> Takeover. Begin a new generation; the owner of the previous one loses its claims.
    take_over: Callable[..., Any]
    #: (ClaimRequest) -> ClaimResult | None. Count deliveries before they are handed out.
    claim: Callable[..., Any]
    #: (SettleRequest) -> bool. Repeating a request whose outcome was unknown changes nothing.
    settle: Callable[..., Any]
    #: (generation, offsets) -> bool. Clean end: store the offsets settled above the cursor; no claim remains.
    hand_over: Callable[..., Any]
    #: (generation) -> bool. Whether this generation is the owner.
    is_owner: Callable[..., Any]
    #: (handle) -> DeadLetterRecord | None
    get_dead_letter: Callable[..., Any]
    #: (handle, DeferredRecord) -> bool. Deliver it instead of the dead letter, also to a running owner; False if gone.
    replay: Callable[..., Any]
    #: (handle) -> bool
    discard: Callable[..., Any]
    #: (DeadLetterQuery, after, limit) -> Sequence[DeadLetterRecord]
    list_dead: Callable[..., Any]
    #: () -> int
    dead_count: Callable[..., Any]
    #: (generation, Cursor) -> bool. If state and facts share one store: confirm to the boundary, if this is the owner.
    confirm: Callable[..., Any] | None = None


class FactConsumerStore(Protocol):
    """Delivery counts, deferred records and dead letters of fact consumers, and the current owner of each reader."""

    def get_calls(self, reader_info: ReaderInfo) -> ConsumerStoreCalls:
        """Return the calls for threads."""

    def get_calls_async(self, reader_info: ReaderInfo) -> ConsumerStoreCalls:
        """Return the calls for asyncio."""


class MemoryFactConsumerStore(MemoryLogConsumerStore):
    """A store that lives as long as this process, for one reader; connectors with the same reader name share it."""

    def __init__(self) -> None:
        super().__init__()
        self.lock: AbstractContextManager[object] = threading.Lock()
        #: The epoch of the facts read last; None before the first, and after another epoch was accepted.
        self.epoch: str | None = None
        self.generation = 0
        self.settled_above: frozenset[int] = frozenset()
        self._replays: list[DeferredRecord] = []

    def take_over(self) -> int:
        """Begin a new generation and return its number."""
        self.generation += 1
        # The replays are among all deferred records, which the new owner loads.
        self._replays.clear()
        return self.generation

    def replay(self, deferred: DeferredRecord) -> None:
        """Defer a dead letter for immediate delivery, also by a running owner."""
        self.defer(deferred)
        self._replays.append(deferred)

    def take_replays(self) -> Sequence[DeferredRecord]:
        """Return and clear the replays since the last call."""
        replays, self._replays = self._replays, []
        return replays

    def forget_epoch(self) -> int:
        """Let the reader continue in another epoch, where offsets may mean other facts.

        Deferred records become dead letters; return their number.
        """
        with self.lock:
            records = list(self._deferred.values())
            for deferred in records:
                delivery = Delivery(deferred.transaction, None, self._counts.get(deferred.position, 0))
                self.add_dead_letter(
                    DeadLetterRecord.from_delivery(delivery, DeadLetter(EPOCH_CHANGED_REASON), queue="", at=time.time())
                )
            self.epoch, self.settled_above = None, frozenset()
            self._counts.clear()
            self._deferred.clear()
            self._replays.clear()
            # Owners that have claimed facts of the old epoch lose them.
            self.generation += 1
            return len(records)

    def get_calls(self, reader_info: ReaderInfo) -> ConsumerStoreCalls:
        operations = _MemoryStoreCalls(self, reader_info)
        return ConsumerStoreCalls(
            operations.take_over,
            operations.claim,
            operations.settle,
            operations.hand_over,
            operations.is_owner,
            operations.get_dead_letter,
            operations.replay,
            operations.discard,
            operations.list_dead,
            operations.dead_count,
        )

    # No call here blocks.
    get_calls_async = get_calls


class _MemoryStoreCalls:
    """The calls of a store in memory, for one connector."""

    def __init__(self, store: MemoryFactConsumerStore, reader_info: ReaderInfo) -> None:
        self._store = store
        self._reader_info = reader_info

    def take_over(self, cursor: Cursor) -> Takeover:
        store = self._store
        with store.lock:
            self._reader_info.check_epoch(store.epoch, cursor.epoch)
            return Takeover(store.take_over(), store.settled_above, store.deferred(ONLY_PARTITION))

    def claim(self, request: ClaimRequest) -> ClaimResult | None:
        store = self._store
        with store.lock:
            if store.generation != request.generation:
                return None
            store.epoch = request.epoch or store.epoch
            counts: list[int] = []
            for offset in request.new:
                try:
                    counts.append(store.increment(LogPosition(ONLY_PARTITION, offset)))
                except ErgonError:
                    if counts:
                        break  # deliveries that are counted already must be handed out
                    raise
            return ClaimResult(counts, store.take_replays())

    def settle(self, request: SettleRequest) -> bool:
        store = self._store
        with store.lock:
            if store.generation != request.generation:
                return False
            for change in request.changes:
                self._apply(LogPosition(ONLY_PARTITION, change.offset), change)
            return True

    def _apply(self, position: LogPosition, change: Change) -> None:
        store = self._store
        match change:
            case AckChange():
                store.delete(position)
            case ReleaseChange():
                store.decrement(position)
            case DeferChange():
                store.defer(change.deferred)
                store.decrement(position)
            case DeadLetterChange():
                store.add_dead_letter(change.record)
                store.delete(position)
                if self._reader_info.is_durable():
                    # The reader's cursor moves on and this record ends with the process: only the log remains.
                    fields = {"queue": change.record.queue, Field.TRANSACTION_ID: change.record.id}
                    fields |= {Field.CORRELATION_ID: change.record.envelope.correlation or change.record.id}
                    fields |= {"reason": change.record.reason}
                    logs.log_event(logging.WARNING, "dead letter not durable", fields, to=_log)

    def hand_over(self, generation: int, settled_above: Collection[int]) -> bool:
        store = self._store
        with store.lock:
            if store.generation != generation:
                return False
            store.settled_above = frozenset(settled_above)
            return True

    def is_owner(self, generation: int) -> bool:
        return self._store.generation == generation

    def get_dead_letter(self, handle: str) -> DeadLetterRecord | None:
        with self._store.lock:
            return self._store.get_dead_letter(handle)

    def replay(self, handle: str, deferred: DeferredRecord) -> bool:
        store = self._store
        with store.lock:
            if store.get_dead_letter(handle) is None:
                return False
            store.replay(deferred)
            return store.remove_dead_letter(handle)

    def discard(self, handle: str) -> bool:
        with self._store.lock:
            return self._store.remove_dead_letter(handle)

    def list_dead(self, query: DeadLetterQuery, after: str | None, limit: int) -> Sequence[DeadLetterRecord]:
        with self._store.lock:
            return self._store.list_dead(query, after=after, limit=limit)

    def dead_count(self) -> int:
        with self._store.lock:
            return self._store.dead_count
