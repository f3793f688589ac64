"""Read the facts that one zone (a site with its own store) sends to another as a log; scripts for threads and asyncio.

A script is a generator that yields the calls to make. The boundary, the interface to a zone's store, keeps one cursor
for each reader, a named consumer. Delivery counts, deferred records and dead letters are kept in a consumer state store
(``FactConsumerStore``), which also decides who owns the reader: the instance that took the log over last. An earlier
owner has lost its claims, the delivered facts that it has not settled. A fact that is settled out of order is
redelivered only after a crash. ``LoadedFacts`` are the facts that a consumer has loaded and not yet settled, as
transactions. An epoch is the incarnation of the store that assigned the offsets.

``Partition`` tracks the claims of one owner. Its watermark is the first offset that is not settled, its generation the
number of the takeover, which fences earlier owners, and ``held`` has the deferred record of each claimed offset, None
if it came from the log. A replay is a dead letter that an operator sends back: the answer to a claim brings it to a
running owner as a deferred record that is due. A store in the same database as the facts has ``confirm``, which moves
the cursor only for the current owner; with any other store, the boundary moves it.

A call returns None when the caller was interrupted, for example by a cancellation: the runner raises the interruption
again when the script has ended, and discards the script's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, overload

from ergon_framework.connectors.base import (
    Ack,
    Confirmation,
    DeadLetter,
    Defer,
    Delivery,
    Depth,
    Release,
    Settlement,
    SettlementRequest,
    SettleResult,
)
from ergon_framework.connectors.codec import Codec, encode_unchanged
from ergon_framework.connectors.codec import decode as decoded
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, DeadLetterResult, ReplayResult
from ergon_framework.connectors.log_consumer import Commit, DeferredRecord, LogPosition, LogReceipt, Partition
from ergon_framework.engine.effects import Call, CallResult, Err, Interrupted, Ok, Script, call
from ergon_framework.errors import ConnectionLostError, error_message
from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.consumer_state import (
    ONLY_PARTITION,
    AckChange,
    Change,
    ClaimRequest,
    ClaimResult,
    ConsumerStoreCalls,
    DeadLetterChange,
    DeferChange,
    ReaderInfo,
    ReleaseChange,
    SettleRequest,
    Takeover,
)
from ergon_framework.facts.model import Cursor, Envelope, Fact, FactConfirmation, StoredFact, ZonePair, get_trace
from ergon_framework.transaction import Transaction

#: The predicate of a transaction without a type.
DEFAULT_PREDICATE = "transaction"


class LoadedFacts(Sequence[tuple[Transaction, float]]):
    """Transactions with the time of storing (seconds since the epoch) by offset, as ``Partition.take`` reads a log.

    The length is the last loaded offset plus one; settled facts are missing.
    """

    def __init__(self, begin: int) -> None:
        self._end = begin
        self._loaded: dict[int, tuple[Transaction, float]] = {}

    @property
    def last(self) -> int:
        """The last loaded offset, or the offset before the first one to load."""
        return self._end - 1

    def add(self, facts: Iterable[tuple[StoredFact, Transaction]]) -> None:
        """Add loaded facts; skip those that a concurrent load has already added."""
        for stored, transaction in facts:
            if stored.offset == self._end:
                self._loaded[stored.offset] = transaction, stored.stored_at_unix_ms / 1000
                self._end += 1

    def forget(self, offset: int) -> None:
        """Remove a settled fact."""
        self._loaded.pop(offset, None)

    def stored_at(self, offset: int) -> float | None:
        """Return when a fact was stored; None if it is not loaded."""
        entry = self._loaded.get(offset)
        return None if entry is None else entry[1]

    def __len__(self) -> int:
        return self._end

    @overload
    def __getitem__(self, offset: int) -> tuple[Transaction, float]: ...

    @overload
    def __getitem__(self, offset: slice) -> Sequence[tuple[Transaction, float]]: ...

    def __getitem__(self, offset: int | slice) -> tuple[Transaction, float] | Sequence[tuple[Transaction, float]]:
        if isinstance(offset, slice):
            return [self._loaded[index] for index in range(*offset.indices(self._end)) if index in self._loaded]
        return self._loaded[offset]


def to_fact(transaction: Transaction, pair: ZonePair, codec: Codec, *, now: float) -> tuple[Envelope, Fact]:
    """Convert *transaction* to a fact: the payload becomes the object, its encoded headers become the labels."""
    body, headers = codec.encode(transaction)
    created_at = now if transaction.created_at is None else transaction.created_at
    envelope = Envelope(
        message_id=transaction.id,
        from_zone=pair.from_zone,
        to_zone=pair.to_zone,
        produced_at_unix_ms=int(created_at * 1000),
        correlation_id=transaction.correlation,
        causation_id=transaction.causation,
        labels=headers,
    )
    subject = transaction.id if transaction.key is None else transaction.key
    return envelope, Fact(subject=subject, predicate=transaction.type or DEFAULT_PREDICATE, object_json=body.decode())


def to_transaction(stored: StoredFact, codec: Codec) -> Transaction:
    """Convert a fact to a transaction: a dispatched one to the original, any other to subject, predicate and object.

    Ids are unique within the zone that a fact comes from, so that zone becomes the source. Facts with the same subject
    are handled in order. A dispatched fact that cannot be decoded is converted like any other fact.
    """
    envelope, fact = stored.envelope, stored.fact
    if envelope.labels.get("ergon-id") == envelope.message_id:
        result = decoded(codec, fact.object_json.encode(), envelope.labels, source=envelope.from_zone)
        if result.error is None:
            return result.transaction
    return Transaction(
        {"subject": fact.subject, "predicate": fact.predicate, "object": fact.object},
        id=envelope.message_id,
        source=envelope.from_zone,
        type=fact.predicate,
        key=fact.subject,
        correlation=envelope.correlation_id,
        causation=envelope.causation_id,
        created_at=envelope.produced_at_unix_ms / 1000,
        trace=get_trace(envelope.labels),
    )


#: A fact to deliver next: its offset and its transaction.
_Next: TypeAlias = tuple[int, Transaction]


@dataclass(frozen=True, slots=True)
class BoundaryCalls:
    """The boundary calls that the log makes, sync or async."""

    append_facts: Callable[..., Any]
    get_fact: Callable[..., Any]
    fetch_facts: Callable[..., Any]
    confirm_receipt: Callable[..., Any]
    get_cursor: Callable[..., Any]
    last_offset: Callable[..., Any]


@dataclass(slots=True)
class _Ownership:
    """The state of an owner of the log, until another owner takes over or the log is closed."""

    partition: Partition
    loaded_facts: LoadedFacts
    epoch: str
    #: The offset that was last confirmed to the boundary.
    confirmed: int
    #: The number of the last known replay.
    replays: int
    #: Numbers the reports of all claims to the consumer store, which ignores one that arrives after a later one.
    sequence: int = 0
    #: Claims that are being settled: a second settlement of one is answered with LOST.
    settling: set[int] = field(default_factory=set)
    #: Whether any facts were read, so that their epoch is known.
    has_read: bool = False
    #: Whether another owner is known to have taken over.
    is_lost: bool = False

    def is_unused(self, cursor: Cursor | None) -> bool:
        """Return whether nothing was delivered yet, so that reading can as well begin at *cursor*, further on."""
        is_further = cursor is not None and cursor.offset > self.confirmed
        return is_further and self.loaded_facts.last == self.confirmed and not self.partition.held


class FactLog:
    """One reader of one zone pair, and a producer to it."""

    def __init__(
        self,
        calls: BoundaryCalls,
        store: ConsumerStoreCalls,
        reader_info: ReaderInfo,
        *,
        wall: Callable[[], float],
        lock: AbstractContextManager[object],
    ) -> None:
        self.name = reader_info.queue
        self._calls = calls
        self._store = store
        self._pair = reader_info.pair
        self._reader = reader_info.reader
        self._codec = reader_info.codec
        self._wall = wall
        #: Protects the claims; never held during a call.
        self._lock = lock
        self._ownership: _Ownership | None = None
        self._is_opening = False
        self._is_closed = False

    # -- owning it ------------------------------------------------------------------------------------

    def open(self, *, again: bool = True) -> Script[None]:
        """Take the log over at the reader's cursor; fail if the store is not the one that was read before.

        Without *again*, do nothing if this instance owns the log already when its turn comes.
        """
        cursor = yield from self._get_cursor()
        while not self._begin_opening():
            # Another call here is opening the log. The lookup serves as the wait, and returns a newer cursor.
            cursor = yield from self._get_cursor()
            if cursor is None:
                return
        try:
            if cursor is None or (not again and self._ownership is not None):
                return
            takeover: Takeover | None = _unwrap((yield from call(Call("take_over", self._store.take_over, (cursor,)))))
            if takeover is None:
                return
            with self._lock:
                ownership = self._ownership = _begin_ownership(cursor, takeover)
                self._is_closed = False
        finally:
            self._is_opening = False
        # The previous owner may have confirmed more between the lookup above and the takeover.
        answer = yield from call(Call("get_cursor", self._calls.get_cursor, (self._reader, self._pair)))
        with self._lock:
            if isinstance(answer, Ok) and self._ownership is ownership and ownership.is_unused(answer.value):
                self._ownership = _begin_ownership(answer.value, takeover)

    def _begin_opening(self) -> bool:
        with self._lock:
            is_first, self._is_opening = not self._is_opening, True
        return is_first

    def _get_cursor(self) -> Script[Cursor | None]:
        """Return the reader's cursor; None when the caller was interrupted."""
        request = Call("get_cursor", self._calls.get_cursor, (self._reader, self._pair))
        answer = yield from call(request)
        if isinstance(answer, Ok) and answer.value is None:
            # Fetching nothing registers the reader: from now on the boundary keeps what the reader has not confirmed.
            _unwrap((yield from call(Call("fetch_facts", self._calls.fetch_facts, (self._reader, self._pair, 0)))))
            answer = yield from call(request)
        cursor: Cursor | None = _unwrap(answer)
        return cursor

    def close(self) -> Script[None]:
        """Hand the log over cleanly; unsettled claims go to the next owner."""
        ownership, self._ownership, self._is_closed = self._ownership, None, True
        if ownership is None:
            return
        yield from self._confirm(ownership)
        with self._lock:
            # Includes offsets that could not be confirmed just now: they are settled nevertheless.
            unconfirmed = range(ownership.confirmed + 1, ownership.partition.watermark)
            settled_above = {*unconfirmed, *ownership.partition.commit(orderly=True).settled_above}
        if not ownership.is_lost:
            answer = yield from call(
                Call("hand_over", self._store.hand_over, (ownership.partition.generation, settled_above))
            )
            if isinstance(answer, Err) and not isinstance(answer.error, ConnectionLostError):
                raise answer.error

    def _require_ownership(self) -> Script[_Ownership | None]:
        """Return the ownership, opening the log if necessary; None when the caller was interrupted."""
        if self._is_closed:
            raise ConnectionLostError(f"the fact log {self.name!r} is closed; call open() again")
        if self._ownership is None:
            # Several first fetches may run concurrently, and would take the log from each other.
            yield from self.open(again=False)
        if self._ownership is not None and self._ownership.is_lost:
            raise self._taken_over_error()
        return self._ownership

    def _taken_over_error(self) -> ConnectionLostError:
        return ConnectionLostError(
            f"another consumer that reads as {self._reader!r} has taken over {self.name!r}; call open() to take it back"
        )

    def _check_ownership(self, ownership: _Ownership) -> Script[bool]:
        """Return whether this instance still owns the log, according to the consumer store."""
        if not ownership.is_lost:
            answer = yield from call(Call("is_owner", self._store.is_owner, (ownership.partition.generation,)))
            ownership.is_lost = not _unwrap(answer) and not isinstance(answer, Interrupted)
        return not ownership.is_lost

    # -- dispatch -------------------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Script[list[Confirmation]]:
        """Append all transactions as facts; append nothing if one of them cannot be encoded."""
        facts = [to_fact(transaction, self._pair, self._codec, now=self._wall()) for transaction in transactions]
        answer = yield from call(Call("append_facts", self._calls.append_facts, (facts,)))
        return [_to_confirmation(raise_if_error(result)) for result in _unwrap(answer) or ()]

    # -- fetch ----------------------------------------------------------------------------------------

    def claim(self, count: int) -> Script[list[Delivery]]:
        """Deliver due, released and new facts, in order."""
        ownership = yield from self._require_ownership()
        if ownership is None or not (yield from self._confirm(ownership)):
            return []
        next_facts = self._take_next(ownership, count)
        if len(next_facts) < count:
            answer = yield from self._load(ownership, count - len(next_facts))
            if isinstance(answer, Ok):
                next_facts += self._take_next(ownership, count - len(next_facts))
            elif not (isinstance(answer, Err) and next_facts):
                self._release(ownership, next_facts)
                _unwrap(answer)
                return []
        batch, replayed = yield from self._count_deliveries(ownership, next_facts)
        if not batch and replayed:
            # The replays that came with the answer are due now, so there is something to deliver.
            batch, _ = yield from self._count_deliveries(ownership, self._take_next(ownership, count))
        return batch

    def _load(self, ownership: _Ownership, count: int) -> Script[CallResult]:
        after = Cursor(ownership.epoch, ownership.loaded_facts.last)
        fetch = partial(self._calls.fetch_facts, after=after)
        answer = yield from call(Call("fetch_facts", fetch, (self._reader, self._pair, count)))
        if isinstance(answer, Ok):
            loaded: Sequence[StoredFact] = answer.value
            converted = [(stored, to_transaction(stored, self._codec)) for stored in loaded]
            with self._lock:
                ownership.loaded_facts.add(converted)
                if loaded:
                    # The first fact of a pair shows the epoch of the pair's offsets.
                    ownership.epoch, ownership.has_read = loaded[0].epoch, True
        return answer

    def _take_next(self, ownership: _Ownership, count: int) -> list[_Next]:
        """Claim the next facts; they are not delivered yet."""
        next_facts: list[_Next] = []
        now = self._wall()
        with self._lock:
            while (
                len(next_facts) < count
                and (next_fact := ownership.partition.take(now, ownership.loaded_facts)) is not None
            ):
                next_facts.append(next_fact)
        return next_facts

    def _count_deliveries(
        self, ownership: _Ownership, next_facts: Sequence[_Next]
    ) -> Script[tuple[list[Delivery], bool]]:
        """Count the deliveries of the claimed facts and return them, and whether the answer brought replays."""
        partition = ownership.partition
        with self._lock:
            ownership.sequence += 1
            offsets = [offset for offset, _ in next_facts]
            epoch = ownership.epoch if ownership.has_read else None
            claims = tuple(partition.held)
            request = ClaimRequest(partition.generation, ownership.sequence, claims, offsets, ownership.replays, epoch)
        answer = yield from call(Call("claim", self._store.claim, (request,)))
        result: ClaimResult | None = answer.value if isinstance(answer, Ok) else None
        if result is None:
            self._release(ownership, next_facts)
            if isinstance(answer, Ok):
                ownership.is_lost = True
                raise self._taken_over_error()
            _unwrap(answer)
            return [], False
        with self._lock:
            # Concurrent claims may both receive the replays, which are applied once: only if no other answer has
            # brought some since this request was built. The store repeats the rest.
            new_replays = result.replayed if request.replays == ownership.replays else ()
            for deferred in new_replays:
                partition.defer(deferred)
            if new_replays:
                ownership.replays = result.replays
            batch = [
                Delivery(transaction, partition.get_receipt(offset), deliveries)
                for (offset, transaction), deliveries in zip(next_facts, result.counts, strict=False)
            ]
        self._release(ownership, next_facts[len(batch) :])
        return batch, bool(new_replays)

    def _release(self, ownership: _Ownership, next_facts: Sequence[_Next]) -> None:
        with self._lock:
            for offset, _ in next_facts:
                ownership.partition.return_record(offset)

    def next_due(self) -> float | None:
        """Return the seconds until a deferral ends; None when nothing becomes ready without an event."""
        ownership = self._ownership
        due = None if ownership is None else ownership.partition.next_due()
        return None if due is None else max(0.0, due - self._wall())

    # -- settle ---------------------------------------------------------------------------------------

    def settle(self, requests: Sequence[SettlementRequest]) -> Script[list[SettleResult]]:
        """Settle many deliveries, then confirm to the boundary up to the first gap."""
        ownership = self._ownership
        if ownership is None or ownership.is_lost:
            return [SettleResult.LOST for _ in requests]
        with self._lock:
            changes_or_results = [
                self._plan_change(ownership, delivery, settlement) for delivery, settlement in requests
            ]
        changes = [change for change in changes_or_results if not isinstance(change, SettleResult)]
        if self._store.confirm is not None and all(
            isinstance(each, AckChange) and not each.was_deferred for each in changes
        ):
            results = yield from self._settle_by_receipt(ownership, changes)
        else:
            results = yield from self._settle_in_store(ownership, changes)
            yield from self._confirm(ownership)
        remaining = iter(results)
        return [change if isinstance(change, SettleResult) else next(remaining) for change in changes_or_results]

    def _plan_change(self, ownership: _Ownership, delivery: Delivery, settlement: Settlement) -> Change | SettleResult:
        """Return the change that *settlement* makes, or its result if it ends here; reserve the offset until done."""
        receipt = delivery.receipt
        if (
            not isinstance(receipt, LogReceipt)
            or not ownership.partition.has_claim(receipt)
            or receipt.offset in ownership.settling
        ):
            return SettleResult.LOST
        try:
            change = self._to_change(ownership, delivery, settlement)
        except Exception:  # noqa: BLE001 - an invalid settlement; the fact stays claimed
            return SettleResult.FAILED
        if change is None:
            return SettleResult.FAILED
        ownership.settling.add(receipt.offset)
        return change

    def _to_change(self, ownership: _Ownership, delivery: Delivery, settlement: Settlement) -> Change | None:
        """Return the change of the consumer state that *settlement* makes; None if it is of an unknown kind."""
        offset = delivery.receipt.offset
        was_deferred = ownership.partition.held[offset] is not None
        match settlement:
            case Ack():
                return AckChange(offset, was_deferred)
            case Defer():
                transaction = settlement.apply(delivery.transaction)
                # Fails here for a transaction that a persistent store could not keep.
                encode_unchanged(self._codec, transaction)
                deferred = DeferredRecord(
                    self._wall() + settlement.delay, ownership.partition.to_position(offset), transaction
                )
                return DeferChange(offset, was_deferred, deferred)
            case Release():
                return ReleaseChange(offset, was_deferred)
            case DeadLetter():
                record = DeadLetterRecord.from_delivery(delivery, settlement, queue=self.name, at=self._wall())
                return DeadLetterChange(offset, was_deferred, record)
            case _:
                return None

    def _settle_in_store(self, ownership: _Ownership, changes: Sequence[Change]) -> Script[list[SettleResult]]:
        """Settle in the consumer store, before the caller confirms the cursor.

        After a crash between the two, the facts are redelivered with the state that is found there.
        """
        if not changes:
            return []
        with self._lock:
            ownership.sequence += 1
            settled_offsets = {change.offset for change in changes}
            claims = tuple(offset for offset in ownership.partition.held if offset not in settled_offsets)
            request = SettleRequest(
                ownership.partition.generation, ownership.sequence, claims, changes, ownership.confirmed
            )
        answer = yield from call(Call("settle", self._store.settle, (request,)))
        if isinstance(answer, Ok) and answer.value:
            self._apply(ownership, changes)
            return [SettleResult.SETTLED] * len(changes)
        if isinstance(answer, Err) and not isinstance(answer.error, ConnectionLostError) and len(changes) > 1:
            # One of them cannot be written: settle each separately, so that the others are not affected.
            results: list[SettleResult] = []
            for change in changes:
                results += yield from self._settle_in_store(ownership, [change])
            return results
        with self._lock:
            ownership.settling -= settled_offsets
        if isinstance(answer, Err) and not isinstance(answer.error, Exception):
            raise answer.error  # for example SystemExit
        ownership.is_lost = ownership.is_lost or isinstance(answer, Ok)
        return [SettleResult.LOST if ownership.is_lost else SettleResult.FAILED] * len(changes)

    def _settle_by_receipt(self, ownership: _Ownership, changes: Sequence[Change]) -> Script[list[SettleResult]]:
        """Settle successful facts by confirming the cursor alone: they leave nothing in the consumer store.

        The answer to the confirmation shows a former owner that it has lost the log.
        """
        self._apply(ownership, changes)
        if ownership.partition.watermark - 1 > ownership.confirmed:
            yield from self._confirm(ownership)
        elif changes:
            answer = yield from call(Call("is_owner", self._store.is_owner, (ownership.partition.generation,)))
            ownership.is_lost = ownership.is_lost or (isinstance(answer, Ok) and not answer.value)
        return [SettleResult.LOST if ownership.is_lost else SettleResult.SETTLED] * len(changes)

    def _apply(self, ownership: _Ownership, changes: Sequence[Change]) -> None:
        with self._lock:
            for change in changes:
                match change:
                    case ReleaseChange():
                        ownership.partition.return_record(change.offset)
                    case DeferChange():
                        ownership.partition.defer(change.deferred)
                    case _:
                        ownership.partition.mark_settled(change.offset)
                if not isinstance(change, ReleaseChange):
                    ownership.loaded_facts.forget(change.offset)
                ownership.settling.discard(change.offset)

    def _confirm(self, ownership: _Ownership) -> Script[bool]:
        """Confirm to the boundary the offset up to which all is settled; return False when the caller was interrupted.

        A confirmation that fails now is sent with the next call; a crash before that redelivers settled facts, as on
        any log.
        """
        with self._lock:
            settled_offset = ownership.partition.watermark - 1
            if settled_offset <= ownership.confirmed or ownership.is_lost:
                return True
        cursor = Cursor(ownership.epoch, settled_offset)
        if self._store.confirm is None:
            request = Call("confirm_receipt", self._calls.confirm_receipt, (self._reader, self._pair, cursor))
        else:
            request = Call("confirm_receipt", self._store.confirm, (ownership.partition.generation, cursor))
        answer = yield from call(request)
        if isinstance(answer, Ok) and self._store.confirm is not None and not answer.value:
            ownership.is_lost = True
        elif isinstance(answer, Ok):
            ownership.confirmed = max(ownership.confirmed, settled_offset)
        elif isinstance(answer, Err) and not isinstance(answer.error, ConnectionLostError):
            raise answer.error
        return isinstance(answer, Ok | Err)

    def extend(self, deliveries: Sequence[Delivery]) -> Script[list[float | None]]:
        """Return infinity for each valid claim, since a claim ends only with its generation; None for a lost one."""
        ownership = self._ownership
        if ownership is None or not (yield from self._check_ownership(ownership)):
            return [None for _ in deliveries]
        with self._lock:
            return [
                float("inf")
                if isinstance(each.receipt, LogReceipt) and ownership.partition.has_claim(each.receipt)
                else None
                for each in deliveries
            ]

    # -- depth ----------------------------------------------------------------------------------------

    def depth(self) -> Script[Depth]:
        """Return the depth of the log; the age is that of the oldest fact ready for delivery."""
        ownership = yield from self._require_ownership()
        end: Cursor | None = _unwrap((yield from call(Call("last_offset", self._calls.last_offset, (self._pair,)))))
        if ownership is None:
            return Depth(0)  # the caller was interrupted and does not see this result
        if ownership.loaded_facts.last < (0 if end is None else end.offset):
            _unwrap((yield from self._load(ownership, 1)))
        if not (yield from self._check_ownership(ownership)):
            raise self._taken_over_error()
        dead: int = _unwrap((yield from call(Call("dead_count", self._store.dead_count, ())))) or 0
        now = self._wall()
        with self._lock:
            partition = ownership.partition
            ready = partition.list_ready(now, 1 if end is None else end.offset + 1)
            ages = [now - since for offset in ready if (since := ownership.loaded_facts.stored_at(offset)) is not None]
            return Depth(
                ready=len(ready),
                delayed=partition.deferred_count(now),
                in_flight=len(partition.held),
                dead=dead,
                oldest_age=max(ages, default=None),
            )

    # -- dead letters ---------------------------------------------------------------------------------

    def replay_dead(self, handles: Sequence[str]) -> Script[list[ReplayResult]]:
        """Redeliver dead letters. The fact itself stays in the log permanently and cannot be appended again."""
        results: list[ReplayResult] = []
        for handle in handles:
            result = yield from self._replay_one(handle)
            results.append(result)
        return results

    def _replay_one(self, handle: str) -> Script[ReplayResult]:
        record: DeadLetterRecord | None = _unwrap(
            (yield from call(Call("get_dead_letter", self._store.get_dead_letter, (handle,))))
        )
        if record is None:
            return ReplayResult(handle, DeadLetterResult.GONE)
        answer = yield from call(Call("get_fact", self._calls.get_fact, (self._pair.from_zone, record.id)))
        if not isinstance(answer, Ok):
            return _to_failed_result(handle, answer)
        confirmation: FactConfirmation | None = answer.value
        if confirmation is None:
            reason = f"the boundary no longer knows the fact {record.id!r}, so it cannot be replayed"
            return ReplayResult(handle, DeadLetterResult.FAILED, reason)
        deferred = DeferredRecord(
            self._wall(), LogPosition(ONLY_PARTITION, confirmation.offset), record.to_new_transaction()
        )
        answer = yield from call(Call("replay", self._store.replay, (handle, deferred)))
        if not isinstance(answer, Ok):
            return _to_failed_result(
                handle, answer
            )  # a failure of the consumer store, which does not affect other handles
        return ReplayResult(handle, DeadLetterResult.REPLAYED if answer.value else DeadLetterResult.GONE)

    def discard_dead(self, handles: Sequence[str]) -> Script[list[ReplayResult]]:
        """Discard dead letters."""
        results = []
        for handle in handles:
            was_discarded = _unwrap((yield from call(Call("discard", self._store.discard, (handle,)))))
            results.append(ReplayResult(handle, DeadLetterResult.DISCARDED if was_discarded else DeadLetterResult.GONE))
        return results

    def list_dead(self, query: DeadLetterQuery, *, after: str | None, limit: int) -> Script[Sequence[DeadLetterRecord]]:
        """Return one page of dead letters."""
        request = Call("list_dead", self._store.list_dead, (query, after, limit))
        return _unwrap((yield from call(request))) or []


def _begin_ownership(cursor: Cursor, takeover: Takeover) -> _Ownership:
    begin = cursor.offset + 1
    commit = Commit(begin, frozenset(takeover.settled_above))
    partition = Partition(ONLY_PARTITION, generation=takeover.generation, commit=commit, deferred=takeover.deferred)
    return _Ownership(partition, LoadedFacts(begin), cursor.epoch, cursor.offset, takeover.replays)


def _to_failed_result(handle: str, answer: CallResult) -> ReplayResult:
    return ReplayResult(
        handle, DeadLetterResult.FAILED, error_message(answer.error) if isinstance(answer, Err) else "stopped"
    )


def _unwrap(answer: CallResult) -> Any:
    """Return the result of a call or raise its error; return None when the caller was interrupted."""
    if isinstance(answer, Err):
        raise answer.error
    return answer.value if isinstance(answer, Ok) else None


def _to_confirmation(confirmation: FactConfirmation) -> Confirmation:
    detail = {"offset": confirmation.offset, "epoch": confirmation.epoch, "digest": confirmation.digest}
    return Confirmation(confirmation.message_id, duplicate=confirmation.duplicate, detail=detail)
