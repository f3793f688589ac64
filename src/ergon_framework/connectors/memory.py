"""MemoryConnector: a queue in this process, with everything a broker's queue has but durability."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain
from threading import Lock
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
    MissingKeyError,
    Release,
    Settlement,
    SettleResult,
    Settling,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec, UnencodableError, decode, remove_progress
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, DeadLetterRecord, ReplayResult, page
from ergon_framework.connectors.encryption import hide_record, reveal_record, select_codec, write_envelope
from ergon_framework.transaction import Transaction


class _Message:
    """What the queue holds: with a codec a body and headers, without one the transaction itself."""

    __slots__ = ("content", "deliveries", "lease_until", "order", "readable", "since")

    def __init__(self, content: Any, order: int, since: float) -> None:
        self.content = content
        self.order = order
        self.since = since
        self.deliveries = 0
        self.lease_until = 0.0
        self.readable = True


class MemoryConnector(Connector, AsyncConnector):
    """A queue for tests, examples and single processes: nothing outlives the process.

    Without a codec a transaction is handed over as the object it is, so a handler that changes
    its payload changes the queue's; with one it crosses a wire. A delayed transaction wakes
    nobody when it becomes due: a waiting fetch looks again at that moment, and so does whoever
    polls. ``clock`` is for leases and delays, ``wall`` for the times in dead letters.
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
        self._codec = codec = None if codec is None else select_codec(codec)
        self._lease = lease
        self._capabilities = Capabilities(
            mode="queue",
            renewable=True,
            lease=lease,
            release_is_free=True,
            delays=True,
            dead_letters=True,
            fenced_by="token",
            durable=False,
            max_payload=None if codec is None else codec.max_bytes,
        )
        self._lock = Lock()
        self._arrivals = Arrivals()
        self._order = 0
        self._token = 0
        # What was never claimed, in order; and what came back to its old place. Claims are taken
        # from the front, so whatever came back is older than anything in the first.
        self._fresh: deque[_Message] = deque()
        self._returned: list[tuple[int, _Message]] = []
        self._delayed: list[tuple[float, int, _Message]] = []
        # All leases have one length, so the order of claiming is the order of expiry. An
        # OrderedDict because a plain dict walks over all it has forgotten to find its first.
        self._claims: OrderedDict[Any, _Message] = OrderedDict()
        self._buried = 0
        #: By place, the oldest first.
        self._dead: dict[str, tuple[DeadLetterRecord, _Message]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def listen(self, listener: Listener) -> Unlisten:
        return self._arrivals.listen(listener)

    def interrupt(self) -> None:
        """Every fetch that is waiting now returns at once."""
        self._arrivals.interrupt()

    def close(self) -> None:
        """End every waiting fetch; what is claimed comes back when its lease ends."""
        self.interrupt()

    # -- dispatch -----------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Append all, or none if one cannot be encoded; the same id twice is two messages.

        Each gets this queue as its source and the trace that is current here, unless it has its own.
        """
        transactions = [self.stamped(transaction) for transaction in transactions]
        encode = None if self._codec is None else self._codec.encode
        self._append(transactions if encode is None else [encode(transaction) for transaction in transactions])
        return [Confirmation(transaction.id) for transaction in transactions]

    def receive(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Append what some other producer wrote, readable or not; it takes a codec."""
        if self._codec is None:
            raise TypeError(f"the queue {self._name!r} has no codec to read bytes with; give it one: codec=JsonCodec()")
        self._append([(body, dict(headers))])

    def _append(self, contents: Sequence[Any]) -> None:
        if not contents:
            return
        with self._lock:
            self._add(contents)
        self._arrivals.arrived()

    def _add(self, contents: Sequence[Any]) -> None:
        now, order, append = self._clock(), self._order, self._fresh.append
        for content in contents:
            order += 1
            append(_Message(content, order, now))
        self._order = order

    # -- fetch --------------------------------------------------------------------------------

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        """What is ready, the oldest first; a priority means nothing here."""
        found = self._claim(batch_size)
        if found or wait <= 0 or batch_size < 1:
            return found
        return self._arrivals.wait(lambda: self._claim(batch_size), wait, due=self.next_due)

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        found = self._claim(batch_size)
        if found or wait <= 0 or batch_size < 1:
            return found
        return await self._arrivals.wait_async(lambda: self._claim(batch_size), wait, due=self.next_due)

    def next_due(self) -> float | None:
        """Seconds until a delay or a lease ends; None when nothing will become ready by itself."""
        with self._lock:
            moments = [self._delayed[0][0]] if self._delayed else []
            if self._claims:
                moments.append(next(iter(self._claims.values())).lease_until)
            return max(0.0, min(moments) - self._clock()) if moments else None

    def _claim(self, batch_size: int) -> list[Delivery]:
        batch: list[Delivery] = []
        with self._lock:
            now = self._clock()
            expired = self._refresh(now)
            until, token, codec = now + self._lease, self._token, self._codec
            fresh, returned, claims = self._fresh, self._returned, self._claims
            for _ in range(min(batch_size, len(fresh) + len(returned))):
                message = heappop(returned)[1] if returned else fresh.popleft()
                token += 1
                message.deliveries = deliveries = message.deliveries + 1
                message.lease_until = until
                claims[token] = message
                if codec is None:
                    batch.append(Delivery(message.content, token, deliveries, until))
                else:
                    body, headers = message.content
                    transaction, error = decode(codec, body, headers, source=self._name)
                    message.readable = error is None
                    batch.append(Delivery(transaction, token, deliveries, until, error))
            self._token = token
        self._tell(expired)
        return batch

    def _refresh(self, now: float) -> list[Any]:
        """Bring back whose lease has ended and bring up what is due; the receipts that were lost."""
        expired: list[Any] = []
        claims = self._claims
        while claims and next(iter(claims.values())).lease_until <= now:
            token, message = claims.popitem(last=False)
            expired.append(token)
            heappush(self._returned, (message.order, message))
        while self._delayed and self._delayed[0][0] <= now:
            due, _, message = heappop(self._delayed)
            self._to_back(message, due)
        return expired

    def _to_back(self, message: _Message, since: float) -> None:
        self._order += 1
        message.order, message.since = self._order, since
        self._fresh.append(message)

    def _tell(self, expired: list[Any]) -> None:
        if expired:
            self._arrivals.lost(expired)
            self._arrivals.arrived()

    # -- settle -------------------------------------------------------------------------------

    def settle(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        results: list[SettleResult] = []
        settled, lost = SettleResult.SETTLED, SettleResult.LOST
        with self._lock:
            expired = self._refresh(self._clock())
            claims, ready = self._claims, len(self._fresh) + len(self._returned)
            for delivery, settlement in settlings:
                try:
                    if type(settlement) is not Ack:
                        result = self._settle(delivery, settlement)
                    else:
                        result = lost if claims.pop(delivery.receipt, None) is None else settled
                except Exception:  # noqa: BLE001 - the boundary of one item, which must not spoil its neighbours
                    result = SettleResult.FAILED
                results.append(result)
            arrived = len(self._fresh) + len(self._returned) > ready
        self._tell(expired)
        if arrived:
            self._arrivals.arrived()
        return results

    def _settle(self, delivery: Delivery, settlement: Settlement) -> SettleResult:
        message = self._claims.get(delivery.receipt)
        if message is None:
            return SettleResult.LOST
        match settlement:
            case Later():
                if not self._put_later(message, delivery, later=settlement):
                    return SettleResult.FAILED
            case Release():
                message.deliveries -= 1
                heappush(self._returned, (message.order, message))
            case DeadLetter():
                self._bury(message, delivery, settlement=settlement)
            case _:
                return SettleResult.FAILED
        del self._claims[delivery.receipt]
        return SettleResult.SETTLED

    def _put_later(self, message: _Message, delivery: Delivery, *, later: Later) -> bool:
        try:
            if self._codec is not None and isinstance(delivery.error, MissingKeyError):
                body, headers = message.content
                message.content = body, remove_progress(headers) | write_envelope(self._codec, delivery, later)
            elif message.readable:  # what could not be read goes back as it came
                transaction = later.apply(delivery.transaction)
                message.content = transaction if self._codec is None else self._codec.encode(transaction)
        except UnencodableError:
            return False
        message.deliveries -= 1
        now = self._clock()
        if later.delay > 0:
            self._order += 1
            heappush(self._delayed, (now + later.delay, self._order, message))
        else:
            self._to_back(message, now)
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
        self._tell(expired)
        return results

    # -- what is there ------------------------------------------------------------------------

    def depth(self) -> Depth:
        with self._lock:
            now = self._clock()
            expired = self._refresh(now)
            heads = [self._fresh[0]] if self._fresh else []
            if self._returned:
                heads.append(self._returned[0][1])
            depth = Depth(
                ready=len(self._fresh) + len(self._returned),
                delayed=len(self._delayed),
                in_flight=len(self._claims),
                dead=len(self._dead),
                oldest_age=max((now - message.since for message in heads), default=None),
            )
        self._tell(expired)
        return depth

    def queued(self, ids: Collection[str]) -> Collection[str]:
        with self._lock:
            expired = self._refresh(self._clock())
            there = {self._id(message) for message in self._alive()}
        self._tell(expired)
        return there.intersection(ids)

    def _alive(self) -> Iterator[_Message]:
        yield from chain(self._fresh, self._claims.values())
        yield from (message for _, message in self._returned)
        yield from (message for _, _, message in self._delayed)

    def _id(self, message: _Message) -> str:
        if self._codec is None:
            return str(message.content.id)
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
        return page(self.dead_letters, query, after=after, limit=limit)

    def replay_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        with self._lock:
            results = [self._replay(place) for place in places]
        if any(result.became is Became.REPLAYED for result in results):
            self._arrivals.arrived()
        return results

    def discard_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        with self._lock:
            gone = [self._dead.pop(place, None) is None for place in places]
        return [
            ReplayResult(place, Became.GONE if missing else Became.DISCARDED)
            for place, missing in zip(places, gone, strict=True)
        ]

    def replace_dead(self, place: str, transaction: Transaction) -> ReplayResult:
        stamped = self.stamped(transaction)
        content = stamped if self._codec is None else self._codec.encode(stamped)
        with self._lock:
            if self._dead.pop(place, None) is None:
                return ReplayResult(place, Became.GONE)
            self._add([content])
        self._arrivals.arrived()
        return ReplayResult(place, Became.REPLAYED)

    def _bury(self, message: _Message, delivery: Delivery, *, settlement: DeadLetter) -> None:
        self._buried += 1
        place, headers = str(self._buried), None if message.readable else message.content[1]
        record = DeadLetterRecord.of(
            delivery, settlement, queue=self._name, at=self._wall(), headers=headers, place=place
        )
        self._dead[place] = hide_record(self._codec, record), message

    def _replay(self, place: str) -> ReplayResult:
        if place not in self._dead:
            return ReplayResult(place, Became.GONE)
        record, message = self._dead[place]
        if message.readable:
            fresh = reveal_record(self._codec, record).fresh()
            try:
                message.content = fresh if self._codec is None else self._codec.encode(fresh)
            except UnencodableError as error:
                return ReplayResult(place, Became.FAILED, str(error))
        else:  # what could not be read goes back as it came
            body, headers = message.content
            message.content = body, remove_progress(headers)
        del self._dead[place]
        message.deliveries = 0
        self._to_back(message, self._clock())
        return ReplayResult(place, Became.REPLAYED)

    # -- the async flavour: nothing below waits, so it is the same code ------------------------------

    async def settle_async(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        return self.settle(settlings)

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self.extend(deliveries)

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return self.dispatch(transactions)

    async def depth_async(self) -> Depth:
        return self.depth()

    async def queued_async(self, ids: Collection[str]) -> Collection[str]:
        return self.queued(ids)

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self.list_dead(query, after=after, limit=limit)

    async def replay_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self.replay_dead(places)

    async def discard_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self.discard_dead(places)

    async def replace_dead_async(self, place: str, transaction: Transaction) -> ReplayResult:
        return self.replace_dead(place, transaction)

    async def close_async(self) -> None:
        self.close()
