"""MemoryLog: a partitioned log in this process, read by a consumer group that keeps a watermark."""

from __future__ import annotations

import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ergon_framework.connectors.arrivals import Arrivals
from ergon_framework.connectors.base import (
    Ack,
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    DeadLetter,
    Delivery,
    Depth,
    Later,
    Listener,
    Release,
    Settlement,
    SettleResult,
    Settling,
    Unlisten,
)
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.partition import Commit, Partition, Receipt
from ergon_framework.connectors.side_store import Kept, MemorySideStore, Place, SideStore
from ergon_framework.errors import ConnectionLost, ErgonError, text
from ergon_framework.transaction import Transaction


class Records:
    """The log itself: what survives a consumer. Records are never removed."""

    def __init__(self, partitions: int = 1) -> None:
        if partitions < 1:
            raise ValueError(f"a log has at least 1 partition, not {partitions!r}")
        self.lock = threading.Lock()
        self.arrivals = Arrivals()
        self.partitions: list[list[tuple[Transaction, float]]] = [[] for _ in range(partitions)]
        self.commits: defaultdict[tuple[str, int], Commit] = defaultdict(Commit)
        self.generations: defaultdict[tuple[str, int], int] = defaultdict(int)

    def append(self, transaction: Transaction, now: float) -> Place:
        """Append to the partition of its key, or of its id where it has none."""
        text = transaction.id if transaction.key is None else transaction.key
        # hash() differs from process to process; a key must not.
        number = zlib.crc32(text.encode()) % len(self.partitions)
        self.partitions[number].append((transaction, now))
        return Place(number, len(self.partitions[number]) - 1)


class MemoryLog(Connector, AsyncConnector):
    """One consumer of a log, and a producer to it; a group has one consumer at a time.

    Counts, delays and dead letters are in *side*. Opening another consumer on the same records
    and group takes its partitions over: it goes on at the watermarks, and the older one's
    settlements are lost. What was settled beyond a watermark comes again only if the older one
    was not closed. A delayed record may be passed by later ones of its key.
    """

    def __init__(
        self,
        name: str = "memory-log",
        *,
        partitions: int = 1,
        group: str = "default",
        records: Records | None = None,
        side: SideStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._name = name
        self._group = group
        self.records = Records(partitions) if records is None else records
        self.side: SideStore = MemorySideStore() if side is None else side
        self._clock = clock
        self._wall = wall
        self._mine: list[Partition] = []
        self._closed = False
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
            release_is_free=True,
            delays=True,
            dead_letters=True,
            fenced_by="generation",
            durable=False,
            ordered_by_key=True,
        )

    def listen(self, listener: Listener) -> Unlisten:
        return self.records.arrivals.listen(listener)

    def interrupt(self) -> None:
        """Every fetch that is waiting now returns at once."""
        self.records.arrivals.interrupt()

    # -- owning partitions -----------------------------------------------------------------------

    def open(self) -> None:
        """Take all partitions over, at their watermarks."""
        with self.records.lock:
            self._join()

    def close(self) -> None:
        """Hand the partitions over in order; what is still held goes to the next consumer."""
        with self.records.lock:
            for partition in self._mine:
                self._commit(partition, orderly=True)
            self._mine = []
            self._closed = True
        self.interrupt()

    def revoke(self, partition: int) -> None:
        """The broker takes *partition* away and gives it back: all claims of before are gone."""
        with self.records.lock:
            old = self._owned()[partition]
            self._commit(old, orderly=True)
            self._mine[partition] = self._taken(partition)
            gone = old.receipts()
        if gone:
            self.records.arrivals.lost(gone)
        self.records.arrivals.arrived()

    def watermark(self, partition: int) -> int:
        """The first offset that is not settled, as the log knows it."""
        with self.records.lock:
            return self.records.commits[self._group, partition].watermark

    def _join(self) -> None:
        self._closed = False
        self._mine = [self._taken(number) for number in range(len(self.records.partitions))]

    def _taken(self, number: int) -> Partition:
        where = self._group, number
        self.records.generations[where] += 1
        return Partition(
            number,
            generation=self.records.generations[where],
            commit=self.records.commits[where],
            kept=self.side.kept(number),
        )

    def _owned(self) -> list[Partition]:
        if self._closed:
            raise ConnectionLost(f"the log {self._name!r} was closed; open() it again")
        if not self._mine:
            self._join()
        elif not all(self._current(partition) for partition in self._mine):
            raise ConnectionLost(
                f"another consumer of group {self._group!r} has taken over the log {self._name!r}; open() takes it back"
            )
        return self._mine

    def _current(self, partition: Partition) -> bool:
        return self.records.generations[self._group, partition.number] == partition.generation

    def _commit(self, partition: Partition, *, orderly: bool) -> None:
        if self._current(partition):
            self.records.commits[self._group, partition.number] = partition.commit(orderly=orderly)

    # -- dispatch ---------------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Append all; the same key goes to the same partition, in order.

        Each gets this queue as its source and the trace that is current here, unless it has its own.
        """
        transactions = [self.stamped(transaction) for transaction in transactions]
        with self.records.lock:
            now = self._clock()
            places = [self.records.append(transaction, now) for transaction in transactions]
        if places:
            self.records.arrivals.arrived()
        return [
            Confirmation(transaction.id, detail=place._asdict())
            for transaction, place in zip(transactions, places, strict=True)
        ]

    # -- fetch ------------------------------------------------------------------------------------

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        """What is due, what came back and what is new, each partition in order; partitions take turns."""
        found = self._claim(batch_size)
        if found or wait <= 0 or batch_size < 1:
            return found
        return self.records.arrivals.wait(lambda: self._claim(batch_size), wait, due=self.next_due)

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        found = self._claim(batch_size)
        if found or wait <= 0 or batch_size < 1:
            return found
        return await self.records.arrivals.wait_async(lambda: self._claim(batch_size), wait, due=self.next_due)

    def next_due(self) -> float | None:
        """Seconds until a delay ends; None when nothing will become ready by itself."""
        with self.records.lock:
            dues = [due for partition in self._mine if (due := partition.next_due()) is not None]
            return max(0.0, min(dues) - self._clock()) if dues else None

    def _claim(self, batch_size: int) -> list[Delivery]:
        batch: list[Delivery] = []
        with self.records.lock:
            mine, now = self._owned(), self._clock()
            self._turn = (self._turn + 1) % len(mine)
            for partition in mine[self._turn :] + mine[: self._turn]:
                while len(batch) < batch_size:
                    taken = partition.take(now, self.records.partitions[partition.number])
                    if taken is None:
                        break
                    offset, transaction = taken
                    try:
                        count = self.side.count(partition.place(offset))
                    except ErgonError:
                        partition.back(offset)
                        if batch:  # what is claimed already must reach somebody
                            return batch
                        raise
                    batch.append(Delivery(transaction, partition.receipt(offset), count))
        return batch

    # -- settle -----------------------------------------------------------------------------------

    def settle(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        with self.records.lock:
            now = self._clock()
            results = [self._settle(delivery, settlement, now=now) for delivery, settlement in settlings]
            for partition in self._mine:
                self._commit(partition, orderly=False)
        if any(
            isinstance(settlement, Release) or (isinstance(settlement, Later) and settlement.delay == 0)
            for _, settlement in settlings
        ):
            self.records.arrivals.arrived()
        return results

    def _holder(self, receipt: Any) -> Partition | None:
        """The partition that holds this claim, if it is still good."""
        if not isinstance(receipt, Receipt) or not 0 <= receipt.partition < len(self._mine):
            return None
        partition = self._mine[receipt.partition]
        return partition if partition.holds(receipt) and self._current(partition) else None

    def _settle(self, delivery: Delivery, settlement: Settlement, *, now: float) -> SettleResult:
        partition = self._holder(delivery.receipt)
        if partition is None:
            return SettleResult.LOST
        try:
            return self._settle_held(partition, delivery, settlement=settlement, now=now)
        except Exception:  # noqa: BLE001 - the side store's trouble or an odd item; the claim is still held
            return SettleResult.FAILED

    def _settle_held(
        self, partition: Partition, delivery: Delivery, *, settlement: Settlement, now: float
    ) -> SettleResult:
        place = partition.place(delivery.receipt.offset)
        match settlement:
            case Ack():
                self.side.forget(place)
                partition.settled(place.offset)
            case Later():
                changed = settlement.apply(delivery.transaction)
                kept = Kept(now + settlement.delay, place, changed)
                # Beside the log first: a crash in between must find it there.
                self.side.keep(kept)
                self.side.uncount(place)
                partition.keep(kept)
            case Release():
                self.side.uncount(place)
                partition.back(place.offset)
            case DeadLetter():
                self.side.bury(DeadLetterRecord.of(delivery, settlement, queue=self._name, at=self._wall()))
                self.side.forget(place)
                partition.settled(place.offset)
            case _:
                return SettleResult.FAILED
        return SettleResult.SETTLED

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        """A claim on a log ends with its generation only: infinity while it is good, None once it is gone."""
        with self.records.lock:
            return [float("inf") if self._holder(delivery.receipt) is not None else None for delivery in deliveries]

    # -- what is there ------------------------------------------------------------------------------

    def depth(self) -> Depth:
        with self.records.lock:
            now, mine = self._clock(), self._owned()
            ready = 0
            oldest: float | None = None
            for partition in mine:
                records = self.records.partitions[partition.number]
                offsets = partition.ready(now, len(records))
                ready += len(offsets)
                if offsets:
                    since = records[min(offsets)][1]
                    oldest = since if oldest is None else min(oldest, since)
            return Depth(
                ready=ready,
                delayed=sum(partition.delayed(now) for partition in mine),
                in_flight=sum(len(partition.held) for partition in mine),
                dead=self.side.dead_count,
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
            return self.side.list_dead(query, after=after, limit=limit)

    def replay_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        """Append them to the end of the log again."""
        with self.records.lock:
            results = [_told(self._replay, place) for place in places]
        if any(result.became is Became.REPLAYED for result in results):
            self.records.arrivals.arrived()
        return results

    def discard_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        with self.records.lock:
            return [_told(self._discard, place) for place in places]

    def _replay(self, place: str) -> Became:
        record = self.side.dead(place)
        if record is None:
            return Became.GONE
        # Appended first: a crash in between doubles it, the other way round would lose it.
        self.records.append(record.fresh(), self._clock())
        self.side.exhume(place)
        return Became.REPLAYED

    def _discard(self, place: str) -> Became:
        return Became.DISCARDED if self.side.exhume(place) else Became.GONE

    # -- the async flavour: nothing below waits, so it is the same code --------------------------------

    async def settle_async(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        return self.settle(settlings)

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

    async def replay_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self.replay_dead(places)

    async def discard_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self.discard_dead(places)

    async def open_async(self) -> None:
        self.open()

    async def close_async(self) -> None:
        self.close()


def _told(move: Callable[[str], Became], place: str) -> ReplayResult:
    try:
        return ReplayResult(place, move(place))
    except ErgonError as error:  # the side store's own trouble, which spoils no other place
        return ReplayResult(place, Became.FAILED, text(error))
