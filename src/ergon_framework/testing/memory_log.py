"""MemoryLog: a partitioned log in this process, read by a consumer group that commits a watermark.

The watermark of a partition is its first offset that is not settled. A claim is the right to process a fetched record;
claims belong to a generation, which begins each time that a consumer takes over the partition. MemoryLog is for tests
of the code that connectors of logs share.
"""

from __future__ import annotations

import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ergon_framework.connectors.base import (
    Ack,
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    DeadLetter,
    Defer,
    Delivery,
    Depth,
    Listener,
    Release,
    Settlement,
    SettlementRequest,
    SettleResult,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, DeadLetterResult, ReplayResult
from ergon_framework.connectors.encryption import select_codec
from ergon_framework.connectors.log_consumer import (
    Commit,
    DeferredRecord,
    LogConsumerStore,
    LogPosition,
    LogReceipt,
    MemoryLogConsumerStore,
    Partition,
)
from ergon_framework.connectors.wakeup import WakeupHub
from ergon_framework.errors import ConnectionLostError, ErgonError, error_message
from ergon_framework.transaction import Transaction


class LogRecords:
    """The log itself, which outlives its consumers. Records are never removed."""

    def __init__(self, partitions: int = 1) -> None:
        if partitions < 1:
            raise ValueError(f"partitions must be at least 1, not {partitions!r}")
        self.lock = threading.Lock()
        self.arrivals = WakeupHub()
        self.partitions: list[list[tuple[Transaction, float]]] = [[] for _ in range(partitions)]
        #: By group and partition: the committed position, and the number of takeovers.
        self.commits: defaultdict[tuple[str, int], Commit] = defaultdict(Commit)
        self.generations: defaultdict[tuple[str, int], int] = defaultdict(int)

    def append(self, transaction: Transaction, now: float) -> LogPosition:
        """Append to the partition of the transaction's key, or of its id if it has none."""
        partition_key = transaction.id if transaction.key is None else transaction.key
        # hash() differs between processes; the partition of a key must not.
        number = zlib.crc32(partition_key.encode()) % len(self.partitions)
        self.partitions[number].append((transaction, now))
        return LogPosition(number, len(self.partitions[number]) - 1)


class MemoryLog(Connector, AsyncConnector):
    """One consumer of a log, and a producer to it; a group has one consumer at a time.

    *codec*, JSON by default, encodes and decodes every transaction when it is dispatched.

    Delivery counts, delays and dead letters are in *store*. Opening another consumer on the same records and group
    takes over its partitions: it continues at the watermarks, and settlements of the older consumer are lost. Records
    that were settled above a watermark are redelivered only if the older consumer was not closed. Later records of the
    same key may overtake a delayed record.
    """

    def __init__(
        self,
        name: str = "memory-log",
        *,
        partitions: int = 1,
        group: str = "default",
        records: LogRecords | None = None,
        store: LogConsumerStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        codec: Codec | None = None,
    ) -> None:
        self._name = name
        self._group = group
        self.records = LogRecords(partitions) if records is None else records
        self.store: LogConsumerStore = MemoryLogConsumerStore() if store is None else store
        self._clock = clock
        self._wall = wall
        self._codec = select_codec(codec)
        #: The partitions that this consumer has taken over; empty before its first call.
        self._partitions: list[Partition] = []
        self._closed = False
        #: The partition from which the next fetch takes records first.
        self._turn = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            mode="log",
            renewable=False,
            lease=None,
            release_uncounted=True,
            delays=True,
            dead_letters=True,
            fenced_by="generation",
            durable=False,
            max_payload=self._codec.max_bytes,
            ordered_by_key=True,
        )

    def listen(self, listener: Listener) -> Unlisten:
        return self.records.arrivals.listen(listener)

    def interrupt(self) -> None:
        """End the wait of every fetch that is waiting."""
        self.records.arrivals.interrupt()

    # -- owning partitions -----------------------------------------------------------------------

    def open(self) -> None:
        """Take over all partitions, at their watermarks."""
        with self.records.lock:
            self._take_over()

    def close(self) -> None:
        """Hand over the partitions cleanly; the next consumer gets the records that are still in flight."""
        with self.records.lock:
            for partition in self._partitions:
                self._commit(partition, orderly=True)
            self._partitions = []
            self._closed = True
        self.interrupt()

    def revoke(self, partition: int) -> None:
        """Simulate a rebalance: the broker revokes *partition* and reassigns it, and all earlier claims are lost."""
        with self.records.lock:
            old = self._ensure_owned()[partition]
            self._commit(old, orderly=True)
            self._partitions[partition] = self._take_partition(partition)
            lost_receipts = old.list_receipts()
        if lost_receipts:
            self.records.arrivals.notify_lost(lost_receipts)
        self.records.arrivals.notify()

    def watermark(self, partition: int) -> int:
        """Return the first offset that is not settled, as committed to the log."""
        with self.records.lock:
            return self.records.commits[self._group, partition].watermark

    def _take_over(self) -> None:
        self._closed = False
        self._partitions = [self._take_partition(number) for number in range(len(self.records.partitions))]

    def _take_partition(self, number: int) -> Partition:
        key = self._group, number
        self.records.generations[key] += 1
        return Partition(
            number,
            generation=self.records.generations[key],
            commit=self.records.commits[key],
            deferred=self.store.deferred(number),
        )

    def _ensure_owned(self) -> list[Partition]:
        if self._closed:
            raise ConnectionLostError(f"the log {self._name!r} was closed; open() it again")
        if not self._partitions:
            self._take_over()
        elif not all(self._is_current(partition) for partition in self._partitions):
            raise ConnectionLostError(
                f"another consumer of group {self._group!r} has taken over the log {self._name!r}; open() takes it back"
            )
        return self._partitions

    def _is_current(self, partition: Partition) -> bool:
        return self.records.generations[self._group, partition.number] == partition.generation

    def _commit(self, partition: Partition, *, orderly: bool) -> None:
        if self._is_current(partition):
            self.records.commits[self._group, partition.number] = partition.commit(orderly=orderly)

    # -- dispatch ---------------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Append all; the same key goes to the same partition, in order.

        Each gets this queue as its source and the current trace, unless it has its own.
        """
        transactions = [self._carry(self.prepare(transaction)) for transaction in transactions]
        with self.records.lock:
            now = self._clock()
            positions = [self.records.append(transaction, now) for transaction in transactions]
        if positions:
            self.records.arrivals.notify()
        return [
            Confirmation(transaction.id, detail=position._asdict())
            for transaction, position in zip(transactions, positions, strict=True)
        ]

    def _carry(self, transaction: Transaction) -> Transaction:
        """Return *transaction* as a consumer receives it from a broker."""
        body, headers = self._codec.encode(transaction)
        return self._codec.decode(body, headers, source=self._name)

    # -- fetch ------------------------------------------------------------------------------------

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        """Return records: delayed ones that are due, released ones and new ones, in order within each partition.

        Partitions take turns, so that a long one does not delay the others.
        """
        deliveries = self._claim(batch_size)
        if deliveries or wait <= 0 or batch_size < 1:
            return deliveries
        return self.records.arrivals.wait(lambda: self._claim(batch_size), wait, next_due=self.next_due)

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        deliveries = self._claim(batch_size)
        if deliveries or wait <= 0 or batch_size < 1:
            return deliveries
        return await self.records.arrivals.wait_async(lambda: self._claim(batch_size), wait, next_due=self.next_due)

    def next_due(self) -> float | None:
        """Return the seconds until a delay ends; None if nothing becomes ready by time."""
        with self.records.lock:
            dues = [due for partition in self._partitions if (due := partition.next_due()) is not None]
            return max(0.0, min(dues) - self._clock()) if dues else None

    def _claim(self, batch_size: int) -> list[Delivery]:
        batch: list[Delivery] = []
        with self.records.lock:
            partitions, now = self._ensure_owned(), self._clock()
            self._turn = (self._turn + 1) % len(partitions)
            for partition in partitions[self._turn :] + partitions[: self._turn]:
                while len(batch) < batch_size:
                    claimed = partition.take(now, self.records.partitions[partition.number])
                    if claimed is None:
                        break
                    offset, transaction = claimed
                    try:
                        count = self.store.increment(partition.to_position(offset))
                    except ErgonError:
                        partition.return_record(offset)
                        if batch:  # deliveries that are claimed already must reach the caller
                            return batch
                        raise
                    # A copy, because the receiver may change the payload.
                    batch.append(Delivery(transaction.isolate(), partition.get_receipt(offset), count))
        return batch

    # -- settle -----------------------------------------------------------------------------------

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        with self.records.lock:
            now = self._clock()
            results = [self._settle(delivery, settlement, now=now) for delivery, settlement in requests]
            for partition in self._partitions:
                self._commit(partition, orderly=False)
        if any(
            isinstance(settlement, Release) or (isinstance(settlement, Defer) and settlement.delay == 0)
            for _, settlement in requests
        ):
            self.records.arrivals.notify()
        return results

    def _find_partition(self, receipt: Any) -> Partition | None:
        """Return the partition of this claim if the claim is still valid."""
        if not isinstance(receipt, LogReceipt) or not 0 <= receipt.partition < len(self._partitions):
            return None
        partition = self._partitions[receipt.partition]
        return partition if partition.has_claim(receipt) and self._is_current(partition) else None

    def _settle(self, delivery: Delivery, settlement: Settlement, *, now: float) -> SettleResult:
        partition = self._find_partition(delivery.receipt)
        if partition is None:
            return SettleResult.LOST
        try:
            return self._settle_claimed(partition, delivery, settlement=settlement, now=now)
        except Exception:  # noqa: BLE001 - an error of the store or an invalid item; the claim is still held
            return SettleResult.FAILED

    def _settle_claimed(
        self, partition: Partition, delivery: Delivery, *, settlement: Settlement, now: float
    ) -> SettleResult:
        """Settle one valid claim: first in the store, then in the partition."""
        position = partition.to_position(delivery.receipt.offset)
        match settlement:
            case Ack():
                self.store.delete(position)
                partition.mark_settled(position.offset)
            case Defer():
                transaction = settlement.apply(delivery.transaction)
                deferred = DeferredRecord(now + settlement.delay, position, transaction)
                # The store is written first: after a crash in between, the record must be in it.
                self.store.defer(deferred)
                self.store.decrement(position)
                partition.defer(deferred)
            case Release():
                self.store.decrement(position)
                partition.return_record(position.offset)
            case DeadLetter():
                self.store.add_dead_letter(
                    DeadLetterRecord.from_delivery(delivery, settlement, queue=self._name, at=self._wall())
                )
                self.store.delete(position)
                partition.mark_settled(position.offset)
            case _:
                return SettleResult.FAILED
        return SettleResult.SETTLED

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        """Return infinity for a valid claim, None for a lost one: a claim ends only with its generation."""
        with self.records.lock:
            return [
                float("inf") if self._find_partition(delivery.receipt) is not None else None for delivery in deliveries
            ]

    # -- state --------------------------------------------------------------------------------------

    def depth(self) -> Depth:
        with self.records.lock:
            now, partitions = self._clock(), self._ensure_owned()
            ready = 0
            oldest: float | None = None
            for partition in partitions:
                records = self.records.partitions[partition.number]
                offsets = partition.list_ready(now, len(records))
                ready += len(offsets)
                if offsets:
                    since = records[min(offsets)][1]
                    oldest = since if oldest is None else min(oldest, since)
            return Depth(
                ready=ready,
                delayed=sum(partition.deferred_count(now) for partition in partitions),
                in_flight=sum(len(partition.held) for partition in partitions),
                dead=self.store.dead_count,
                oldest_age=None if oldest is None else now - oldest,
            )

    # -- dead letters -------------------------------------------------------------------------------

    @property
    def dead_letters(self) -> Sequence[DeadLetterRecord]:
        """All dead letters, the oldest first."""
        return self.list_dead(DeadLetterQuery(), limit=sys.maxsize)

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        with self.records.lock:
            return self.store.list_dead(query, after=after, limit=limit)

    def replay_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        """Append the dead letters to the end of the log again."""
        with self.records.lock:
            results = [_run_move(self._replay, handle) for handle in handles]
        if any(result.outcome is DeadLetterResult.REPLAYED for result in results):
            self.records.arrivals.notify()
        return results

    def discard_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        with self.records.lock:
            return [_run_move(self._discard, handle) for handle in handles]

    def _replay(self, handle: str) -> DeadLetterResult:
        record = self.store.get_dead_letter(handle)
        if record is None:
            return DeadLetterResult.GONE
        # Appended first: a crash in between duplicates the record, the other order would lose it.
        self.records.append(record.to_new_transaction(), self._clock())
        self.store.remove_dead_letter(handle)
        return DeadLetterResult.REPLAYED

    def _discard(self, handle: str) -> DeadLetterResult:
        return DeadLetterResult.DISCARDED if self.store.remove_dead_letter(handle) else DeadLetterResult.GONE

    # -- the async variant: none of these calls waits, so it is the same code --------------------------

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        return self.settle(requests)

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self.extend(deliveries)

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return self.dispatch(transactions)

    async def depth_async(self) -> Depth:
        return self.depth()

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self.list_dead(query, after=after, limit=limit)

    async def replay_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self.replay_dead(handles)

    async def discard_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self.discard_dead(handles)

    async def open_async(self) -> None:
        self.open()

    async def close_async(self) -> None:
        self.close()


def _run_move(move: Callable[[str], DeadLetterResult], handle: str) -> ReplayResult:
    try:
        return ReplayResult(handle, move(handle))
    except ErgonError as error:  # an error of the store, which does not affect the other handles
        return ReplayResult(handle, DeadLetterResult.FAILED, error_message(error))
