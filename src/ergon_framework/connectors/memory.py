"""MemoryConnector: a queue in this process, with all features of a broker's queue except durability.

A fetch claims messages: the receiver has the exclusive right to settle a message until its lease, a time limit, ends.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain
from threading import Lock
from typing import Any, Final, TypeAlias

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
    MissingKeyError,
    Release,
    Settlement,
    SettlementRequest,
    SettleResult,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec, UnencodableError, decode, remove_progress
from ergon_framework.connectors.dead_letters import (
    DeadLetterQuery,
    DeadLetterRecord,
    DeadLetterResult,
    ReplayResult,
    paginate,
)
from ergon_framework.connectors.encryption import hide_record, reveal_record, select_codec, write_envelope
from ergon_framework.connectors.wakeup import WakeupHub
from ergon_framework.transaction import Transaction

#: Added to the delay of a dispatched transaction: its clock may differ a little from that which set the time.
_ROUNDING_SECONDS: Final = 0.001
_Content: TypeAlias = tuple[bytes, dict[str, str]]


class _MemoryMessage:
    """A message in the queue; *content* is its body and headers.

    *order* is its position in the queue, *since* the time at which it became ready. *readable* is false if the codec
    could not decode it at its last claim: it is then redelivered, replayed and dead-lettered with its bytes unchanged.
    """

    __slots__ = ("content", "deliveries", "lease_until", "order", "readable", "since")

    def __init__(self, content: _Content, order: int, since: float) -> None:
        self.content = content
        self.order = order
        self.since = since
        self.deliveries = 0
        self.lease_until = 0.0
        self.readable = True


class MemoryConnector(Connector, AsyncConnector):
    """A queue for tests, examples and single processes: nothing outlives the process.

    *codec*, JSON by default, encodes and decodes every transaction, as it does for a broker. A delayed transaction
    sends no signal when it becomes due: a waiting fetch polls again at that moment, and so does a polling consumer.
    ``clock`` is for leases and delays, ``wall`` for the times in dead letters.
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        lease: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        codec: Codec | None = None,
    ) -> None:
        if not 0 < lease < float("inf"):
            raise ValueError(f"a lease must be a finite number of seconds > 0, not {lease!r}")
        self._name = name
        self._clock = clock
        self._wall = wall
        self._codec = select_codec(codec)
        self._lease = lease
        self._capabilities = Capabilities(
            mode="queue",
            renewable=True,
            lease=lease,
            release_uncounted=True,
            delays=True,
            dead_letters=True,
            fenced_by="token",
            durable=False,
            max_payload=self._codec.max_bytes,
        )
        self._lock = Lock()
        self._arrivals = WakeupHub()
        self._order = 0
        self._token = 0
        # Messages that were never claimed, in order, and messages that returned to their old position. Messages are
        # claimed from the front, so every returned message is older than all unclaimed ones.
        self._unclaimed: deque[_MemoryMessage] = deque()
        self._returned: list[tuple[int, _MemoryMessage]] = []
        self._delayed: list[tuple[float, int, _MemoryMessage]] = []
        # All leases have the same length, so the order of claiming is the order of expiry. An OrderedDict because
        # a plain dict scans its deleted entries to find the first.
        self._claims: OrderedDict[Any, _MemoryMessage] = OrderedDict()
        self._last_handle = 0
        #: By handle, the oldest first: the record that is listed, and the message that a replay puts back.
        self._dead: dict[str, tuple[DeadLetterRecord, _MemoryMessage]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def listen(self, listener: Listener) -> Unlisten:
        return self._arrivals.listen(listener)

    def interrupt(self) -> None:
        """End the wait of every fetch that is waiting."""
        self._arrivals.interrupt()

    def close(self) -> None:
        """End every waiting fetch; claimed messages are redelivered when their leases end."""
        self.interrupt()

    # -- dispatch -----------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Append all, or none if one cannot be encoded; the same id twice makes two messages.

        Each gets this queue as its source and the current trace, unless it has its own.
        """
        transactions = [self.prepare(transaction) for transaction in transactions]
        encode, now = self._codec.encode, self._wall()
        delays = [transaction.compute_delay(now) for transaction in transactions]
        self._append([encode(transaction) for transaction in transactions], delays)
        return [Confirmation(transaction.id) for transaction in transactions]

    def inject(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Append a message of another producer, decodable or not."""
        self._append([(body, dict(headers))], [0.0])

    def _append(self, contents: Sequence[_Content], delays: Sequence[float]) -> None:
        if not contents:
            return
        with self._lock:
            self._add(contents, delays)
        self._arrivals.notify()

    def _add(self, contents: Sequence[_Content], delays: Sequence[float]) -> None:
        now, order, append = self._clock(), self._order, self._unclaimed.append
        for content, delay in zip(contents, delays, strict=True):
            order += 1
            if delay > 0:
                due = now + delay + _ROUNDING_SECONDS
                heappush(self._delayed, (due, order, _MemoryMessage(content, order, due)))
            else:
                append(_MemoryMessage(content, order, now))
        self._order = order

    # -- fetch --------------------------------------------------------------------------------

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        """Return ready transactions, the oldest first; a priority is ignored."""
        deliveries = self._claim(batch_size)
        if deliveries or wait <= 0 or batch_size < 1:
            return deliveries
        return self._arrivals.wait(lambda: self._claim(batch_size), wait, next_due=self.next_due)

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        deliveries = self._claim(batch_size)
        if deliveries or wait <= 0 or batch_size < 1:
            return deliveries
        return await self._arrivals.wait_async(lambda: self._claim(batch_size), wait, next_due=self.next_due)

    def next_due(self) -> float | None:
        """Return the seconds until a delay or a lease ends; None if nothing becomes ready by time."""
        with self._lock:
            due_times = [self._delayed[0][0]] if self._delayed else []
            if self._claims:
                due_times.append(next(iter(self._claims.values())).lease_until)
            return max(0.0, min(due_times) - self._clock()) if due_times else None

    def _claim(self, batch_size: int) -> list[Delivery]:
        """Claim ready messages: first those that returned to their place, then those that were never claimed."""
        batch: list[Delivery] = []
        with self._lock:
            now = self._clock()
            expired = self._refresh(now)
            until, token, codec = now + self._lease, self._token, self._codec
            unclaimed, returned, claims = self._unclaimed, self._returned, self._claims
            for _ in range(min(batch_size, len(unclaimed) + len(returned))):
                message = heappop(returned)[1] if returned else unclaimed.popleft()
                token += 1
                message.deliveries = deliveries = message.deliveries + 1
                message.lease_until = until
                claims[token] = message
                body, headers = message.content
                transaction, error = decode(codec, body, headers, source=self._name)
                message.readable = error is None
                batch.append(Delivery(transaction, token, deliveries, until, error))
            self._token = token
        self._notify_expired(expired)
        return batch

    def _refresh(self, now: float) -> list[Any]:
        """Return expired claims to the queue and move due messages to it; return the lost receipts."""
        expired: list[Any] = []
        claims = self._claims
        while claims and next(iter(claims.values())).lease_until <= now:
            token, message = claims.popitem(last=False)
            expired.append(token)
            heappush(self._returned, (message.order, message))
        while self._delayed and self._delayed[0][0] <= now:
            due, _, message = heappop(self._delayed)
            self._move_to_back(message, due)
        return expired

    def _move_to_back(self, message: _MemoryMessage, since: float) -> None:
        self._order += 1
        message.order, message.since = self._order, since
        self._unclaimed.append(message)

    def _notify_expired(self, expired: list[Any]) -> None:
        if expired:
            self._arrivals.notify_lost(expired)
            self._arrivals.notify()

    # -- settle -------------------------------------------------------------------------------

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        results: list[SettleResult] = []
        settled, lost = SettleResult.SETTLED, SettleResult.LOST
        with self._lock:
            expired = self._refresh(self._clock())
            claims, ready = self._claims, len(self._unclaimed) + len(self._returned)
            for delivery, settlement in requests:
                try:
                    if type(settlement) is not Ack:
                        result = self._settle(delivery, settlement)
                    else:
                        result = lost if claims.pop(delivery.receipt, None) is None else settled
                except Exception:  # noqa: BLE001 - the boundary of one item: its failure must not affect the others
                    result = SettleResult.FAILED
                results.append(result)
            has_new = len(self._unclaimed) + len(self._returned) > ready
        self._notify_expired(expired)
        if has_new:
            self._arrivals.notify()
        return results

    def _settle(self, delivery: Delivery, settlement: Settlement) -> SettleResult:
        message = self._claims.get(delivery.receipt)
        if message is None:
            return SettleResult.LOST
        match settlement:
            case Defer():
                if not self._defer(message, delivery, defer=settlement):
                    return SettleResult.FAILED
            case Release():
                message.deliveries -= 1
                heappush(self._returned, (message.order, message))
            case DeadLetter():
                self._add_dead_letter(message, delivery, settlement=settlement)
            case _:
                return SettleResult.FAILED
        del self._claims[delivery.receipt]
        return SettleResult.SETTLED

    def _defer(self, message: _MemoryMessage, delivery: Delivery, *, defer: Defer) -> bool:
        """Store the progress and delay the message; return False if the transaction cannot be encoded."""
        try:
            if isinstance(delivery.error, MissingKeyError):
                body, headers = message.content
                message.content = body, remove_progress(headers) | write_envelope(self._codec, delivery, defer)
            elif message.readable:  # an undecodable message is redelivered unchanged
                message.content = self._codec.encode(defer.apply(delivery.transaction))
        except UnencodableError:
            return False
        message.deliveries -= 1
        now = self._clock()
        if defer.delay > 0:
            self._order += 1
            heappush(self._delayed, (now + defer.delay, self._order, message))
        else:
            self._move_to_back(message, now)
        return True

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        results: list[float | None] = []
        with self._lock:
            now = self._clock()
            expired = self._refresh(now)
            until = now + self._lease
            for delivery in deliveries:
                message = self._claims.get(delivery.receipt)
                if message is None:
                    results.append(None)
                    continue
                message.lease_until = until
                self._claims.move_to_end(delivery.receipt)
                results.append(until)
        self._notify_expired(expired)
        return results

    # -- state -------------------------------------------------------------------------------

    def depth(self) -> Depth:
        with self._lock:
            now = self._clock()
            expired = self._refresh(now)
            heads = [self._unclaimed[0]] if self._unclaimed else []
            if self._returned:
                heads.append(self._returned[0][1])
            depth = Depth(
                ready=len(self._unclaimed) + len(self._returned),
                delayed=len(self._delayed),
                in_flight=len(self._claims),
                dead=len(self._dead),
                oldest_age=max((now - message.since for message in heads), default=None),
            )
        self._notify_expired(expired)
        return depth

    def find_queued(self, ids: Collection[str]) -> Collection[str]:
        with self._lock:
            expired = self._refresh(self._clock())
            known_ids = {self._read_id(message) for message in self._iter_messages()}
        self._notify_expired(expired)
        return known_ids.intersection(ids)

    def _iter_messages(self) -> Iterator[_MemoryMessage]:
        yield from chain(self._unclaimed, self._claims.values())
        yield from (message for _, message in self._returned)
        yield from (message for _, _, message in self._delayed)

    def _read_id(self, message: _MemoryMessage) -> str:
        body, headers = message.content
        return decode(self._codec, body, headers, source=self._name)[0].id

    # -- dead letters -------------------------------------------------------------------------

    @property
    def dead_letters(self) -> Sequence[DeadLetterRecord]:
        """All dead letters, the oldest first."""
        with self._lock:
            records = [record for record, _ in self._dead.values()]
        return [reveal_record(self._codec, record) for record in records]

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return paginate(self.dead_letters, query, after=after, limit=limit)

    def replay_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        with self._lock:
            results = [self._replay(handle) for handle in handles]
        if any(result.outcome is DeadLetterResult.REPLAYED for result in results):
            self._arrivals.notify()
        return results

    def discard_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        with self._lock:
            gone = [self._dead.pop(handle, None) is None for handle in handles]
        return [
            ReplayResult(handle, DeadLetterResult.GONE if missing else DeadLetterResult.DISCARDED)
            for handle, missing in zip(handles, gone, strict=True)
        ]

    def replace_dead(self, handle: str, transaction: Transaction) -> ReplayResult:
        content = self._codec.encode(self._prepare_replacement(transaction))
        with self._lock:
            if self._dead.pop(handle, None) is None:
                return ReplayResult(handle, DeadLetterResult.GONE)
            self._add([content], [0.0])
        self._arrivals.notify()
        return ReplayResult(handle, DeadLetterResult.REPLAYED)

    def _add_dead_letter(self, message: _MemoryMessage, delivery: Delivery, *, settlement: DeadLetter) -> None:
        self._last_handle += 1
        handle, headers = str(self._last_handle), None if message.readable else message.content[1]
        record = DeadLetterRecord.from_delivery(
            delivery, settlement, queue=self._name, at=self._wall(), headers=headers, handle=handle
        )
        self._dead[handle] = hide_record(self._codec, record), message

    def _replay(self, handle: str) -> ReplayResult:
        """Put one dead letter back at the end of the queue; the caller holds the lock."""
        if handle not in self._dead:
            return ReplayResult(handle, DeadLetterResult.GONE)
        record, message = self._dead[handle]
        if message.readable:
            try:
                message.content = self._codec.encode(reveal_record(self._codec, record).to_new_transaction())
            except UnencodableError as error:
                return ReplayResult(handle, DeadLetterResult.FAILED, str(error))
        else:  # an undecodable message is replayed unchanged
            body, headers = message.content
            message.content = body, remove_progress(headers)
        del self._dead[handle]
        message.deliveries = 0
        self._move_to_back(message, self._clock())
        return ReplayResult(handle, DeadLetterResult.REPLAYED)

    # -- the async variant: none of these calls waits, so it is the same code ------------------------

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        return self.settle(requests)

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self.extend(deliveries)

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return self.dispatch(transactions)

    async def depth_async(self) -> Depth:
        return self.depth()

    async def find_queued_async(self, ids: Collection[str]) -> Collection[str]:
        return self.find_queued(ids)

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self.list_dead(query, after=after, limit=limit)

    async def replay_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self.replay_dead(handles)

    async def discard_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self.discard_dead(handles)

    async def replace_dead_async(self, handle: str, transaction: Transaction) -> ReplayResult:
        return self.replace_dead(handle, transaction)

    async def close_async(self) -> None:
        self.close()
