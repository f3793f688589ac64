"""PostgresFactConsumerStore: the durable state of fact consumers, kept outside the log, in PostgreSQL.

The reader of a log of facts has a cursor, the last fact that it confirmed. Its consumer state is what the cursor cannot
express: deferred facts, counted deliveries, dead letters, and facts settled after the cursor. The owner is the process
that reads; each takeover by another one raises the generation, and a write with an older generation changes nothing
(fencing). An epoch names the history of a store: after a restored backup, offsets may mean other facts, and a new epoch
begins.

The state of one reader is written as operations, once for the sync and the async variant. The envelope of a transaction
or dead letter is stored as a separate text, because a fact may have longer values and other names than a header can
hold, and it must be possible to store it all the same.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Self, TypeVar

from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery
from ergon_framework.connectors.codec import Codec, JsonCodec, encode_unchanged
from ergon_framework.connectors.dead_letters import (
    DeadLetterQuery,
    DeadLetterRecord,
    DeadLetterResult,
    TransactionEnvelope,
    parse_handle,
)
from ergon_framework.connectors.log_consumer import DeferredRecord, LogPosition
from ergon_framework.connectors.postgres import dead_letters
from ergon_framework.connectors.postgres.claims import headers_as_text
from ergon_framework.connectors.postgres.dead_letters import DeadLetterRow
from ergon_framework.connectors.postgres.queue import DSN_VARIABLE
from ergon_framework.connectors.postgres.settle import sanitize_text
from ergon_framework.database.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.consumer_state import (
    EPOCH_CHANGED_REASON,
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
from ergon_framework.facts.errors import FactError, InvalidFactError
from ergon_framework.facts.model import Cursor, ZonePair
from ergon_framework.facts.stores.postgres import read as reading
from ergon_framework.facts.stores.postgres import sql as statements
from ergon_framework.facts.stores.postgres.session import DatabaseSession, check_database
from ergon_framework.failure import Failure
from ergon_framework.transaction import Transaction

#: The header of a dead letter that contains its envelope.
ENVELOPE_HEADER: Final = "ergon-envelope"
#: Key in an envelope: the body is encoded by the codec instead of as plain JSON.
_CODED_KEY: Final = "coded"


def serialize_transaction(transaction: Transaction, codec: Codec) -> tuple[str, bytes]:
    """Return *transaction* as the text of its envelope and a body."""
    envelope = TransactionEnvelope.model_validate(transaction).model_dump(mode="json")
    try:
        body = json.dumps(transaction.payload).encode()
    except (TypeError, ValueError):
        body, envelope[_CODED_KEY] = encode_unchanged(codec, transaction)[0], True
    return json.dumps(envelope), body


def deserialize_transaction(envelope: str, body: bytes, codec: Codec) -> Transaction:
    """Return the transaction that serialize_transaction() has written."""
    data = json.loads(envelope)
    fields = TransactionEnvelope.model_validate(data)
    payload = codec.decode(body, {"ergon-id": fields.id}).payload if data.get(_CODED_KEY) else json.loads(body)
    return Transaction(payload=payload, **{name: getattr(fields, name) for name in TransactionEnvelope.model_fields})


def dead_letter_columns(changes: Sequence[DeadLetterChange], codec: Codec) -> dict[str, list[Any]]:
    """Return the columns of dead letters."""
    records = [change.record for change in changes]
    envelopes = [record.envelope for record in records]
    failures = [record.failure for record in records]
    serialized = [serialize_transaction(record.transaction(), codec) for record in records]
    return {
        "offsets": [change.offset for change in changes],
        "was_deferred": [change.was_deferred for change in changes],
        "names": sanitize_text(envelope.id for envelope in envelopes),
        "reasons": sanitize_text(record.reason for record in records),
        "ats": [record.at for record in records],
        "deliveries": [record.deliveries for record in records],
        "types": sanitize_text(envelope.type for envelope in envelopes),
        "keys": sanitize_text(envelope.key for envelope in envelopes),
        "tenants": sanitize_text(envelope.tenant for envelope in envelopes),
        "correlations": sanitize_text(envelope.correlation for envelope in envelopes),
        "tasks": sanitize_text(None if failure is None else failure.task_name for failure in failures),
        "error_types": sanitize_text(None if failure is None else failure.error_type for failure in failures),
        "categories": [None if failure is None else failure.category.value for failure in failures],
        "failures": [None if failure is None else failure.model_dump_json() for failure in failures],
        "headers": [
            _build_headers(record.envelope, text) for record, (text, _) in zip(records, serialized, strict=True)
        ],
        "bodies": [body for _, body in serialized],
    }


def _build_headers(envelope: TransactionEnvelope, text: str) -> str:
    # The columns that operators search for, and the whole envelope as text; escapes in that text stay as they are.
    transaction_id, correlation = sanitize_text([envelope.id, envelope.correlation])
    headers = {"ergon-id": transaction_id, "ergon-correlation": correlation, ENVELOPE_HEADER: text}
    return json.dumps({header: value for header, value in headers.items() if value is not None})


def row_to_dead_letter(row: DeadLetterRow, queue: str, codec: Codec) -> DeadLetterRecord:
    """Return the dead letter of *row*."""
    transaction = deserialize_transaction(headers_as_text(row.headers)[ENVELOPE_HEADER], row.body or b"", codec)
    letter = DeadLetter(row.reason, None if row.failure is None else Failure.model_validate_json(row.failure))
    delivery = Delivery(transaction, row.handle, row.deliveries)
    return DeadLetterRecord.from_delivery(delivery, letter, queue=queue, at=row.at, handle=str(row.handle))


# -- operations of a reader -------------------------------------------------------------------------

C = TypeVar("C", AckChange, DeadLetterChange, DeferChange)

#: Higher than any sequence number of an owner, so that no late report of claims follows the handover.
_MAX_SEQUENCE: Final = 2**62


class _ConsumerIds(NamedTuple):
    consumer: int
    queue: int


class ConsumerStoreOperations:
    """The operations that a connector calls for its reader; it caches only what an owner has to know."""

    def __init__(self, reader_info: ReaderInfo) -> None:
        self._reader_info = reader_info
        self._key = {"from": reader_info.pair.from_zone, "to": reader_info.pair.to_zone, "reader": reader_info.reader}
        self._ids: _ConsumerIds | None = None
        #: By offset, how many deliveries ended with their owner. Only a takeover adds to them.
        self._delivery_counts: dict[int, int] = {}

    def _find_ids(self) -> Operation[_ConsumerIds | None]:
        if self._ids is None:
            rows = yield Query(statements.SELECT_CONSUMER, self._key)
            self._ids = _ConsumerIds(*rows[0]) if rows else None
        return self._ids

    def _find_or_create_ids(self) -> Operation[_ConsumerIds]:
        while (ids := (yield from self._find_ids())) is None:
            name = f"{self._key['from']}/{self._key['to']} as {self._key['reader']}"
            yield Query(statements.INSERT_CONSUMER, {**self._key, "name": name})
        return ids

    # -- ownership ------------------------------------------------------------------------------------

    def take_over(self, cursor: Cursor) -> Operation[Takeover]:
        """Begin a new generation, and count a delivery for each claim of the previous owner."""
        # After a restore the id may belong to another reader, or to none.
        self._ids = None
        consumer_id, _ = yield from self._find_or_create_ids()
        yield BEGIN
        ((epoch,),) = yield Query(statements.LOCK_CONSUMER, {"consumer": consumer_id})
        self._reader_info.check_epoch(epoch, cursor.epoch)
        parameters = {"consumer": consumer_id, "cursor": cursor.offset}
        yield Query(statements.COUNT_LOST_CLAIMS, parameters)
        yield Query(statements.DELETE_OBSOLETE, parameters)
        ((generation, replays),) = yield Query(statements.NEXT_GENERATION, {"consumer": consumer_id})
        rows = yield Query(statements.SELECT_STATE, {"consumer": consumer_id})
        yield COMMIT
        self._delivery_counts = {
            offset: lost_count for offset, lost_count, settled, *_ in rows if lost_count and not settled
        }
        settled_above = [offset for offset, _, settled, *_ in rows if settled]
        deferred = [self._to_deferred(offset, *rest) for offset, _, _, *rest in rows if rest[0] is not None]
        return Takeover(generation, settled_above, deferred, replays)

    def _to_deferred(self, offset: int, due: float, envelope: str, body: bytes) -> DeferredRecord:
        return DeferredRecord(
            due,
            LogPosition(ONLY_PARTITION, offset),
            deserialize_transaction(envelope, body, self._reader_info.codec),
        )

    def is_owner(self, generation: int) -> Operation[bool]:
        consumer_id, _ = yield from self._find_or_create_ids()
        return bool((yield Query(statements.CHECK_OWNER, {"consumer": consumer_id, "generation": generation})))

    def release(self, generation: int, settled_above: Collection[int]) -> Operation[bool]:
        """Store the offsets settled above the cursor for the next owner; no claim remains."""
        consumer_id, _ = yield from self._find_or_create_ids()
        yield BEGIN
        parameters = {
            "consumer": consumer_id,
            "generation": generation,
            "sequence": _MAX_SEQUENCE,
            "claims": [],
            "epoch": None,
        }
        if not (yield Query(statements.FENCE, parameters)):
            yield ROLLBACK
            return False
        yield Query(statements.RELEASE, {"consumer": consumer_id, "offsets": list(settled_above)})
        yield COMMIT
        return True

    # -- owner ----------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest) -> Operation[ClaimResult | None]:
        consumer_id, _ = yield from self._find_or_create_ids()
        parameters: dict[str, Any] = {"consumer": consumer_id, "generation": request.generation}
        if request.new:
            parameters |= {"sequence": request.sequence, "claims": list(request.claims), "epoch": request.epoch}
        rows = yield Query(statements.CLAIM if request.new else statements.CHECK_OWNER, parameters)
        if not rows:
            return None
        replays, replayed = rows[0][0], []
        if replays > request.replays:
            replay_parameters = {"consumer": consumer_id, "known": request.replays, "latest": replays}
            for offset, *rest in (yield Query(statements.LIST_REPLAYED, replay_parameters)):
                self._delivery_counts.pop(offset, None)
                replayed.append(self._to_deferred(offset, *rest))
        return ClaimResult([self._delivery_counts.get(offset, 0) + 1 for offset in request.new], replayed, replays)

    def settle(self, request: SettleRequest) -> Operation[bool]:
        """Write the settlements, all or none; return False if another generation owns the reader."""
        ids = yield from self._find_or_create_ids()
        parameters = {
            "consumer": ids.consumer,
            "generation": request.generation,
            "sequence": request.sequence,
            "claims": list(request.claims),
        }
        parameters["epoch"] = None
        if all(_is_write_free(change) for change in request.changes):
            return bool((yield Query(statements.CLAIM, parameters)))
        queries = self._build_queries(ids, request)
        yield BEGIN
        if not (yield Query(statements.FENCE, parameters)):
            yield ROLLBACK
            return False
        for query in queries:  # noqa: UP028 - results are not needed
            yield query
        yield COMMIT
        for change in request.changes:
            if not isinstance(change, ReleaseChange | DeferChange):
                self._delivery_counts.pop(change.offset, None)
        return True

    def _build_queries(self, ids: _ConsumerIds, request: SettleRequest) -> list[Query]:
        """Build all queries before the first is sent, so that data that cannot be serialized is found in time."""
        parameters = {"consumer": ids.consumer}
        queries: list[Query] = []
        if deferred := _select(request.changes, DeferChange):
            queries.append(Query(statements.DEFER, parameters | self._build_defer_columns(deferred)))
        if acked_offsets := [change.offset for change in _select(request.changes, AckChange) if change.was_deferred]:
            queries.append(Query(statements.ACK, parameters | {"offsets": acked_offsets}))
        if dead_lettered := _select(request.changes, DeadLetterChange):
            queries.append(self._build_dead_letter_query(ids, dead_lettered))
        queries.append(Query(statements.DELETE_CONFIRMED, parameters | {"confirmed": request.confirmed}))
        return queries

    def _build_dead_letter_query(self, ids: _ConsumerIds, dead_lettered: Sequence[DeadLetterChange]) -> Query:
        columns = dead_letter_columns(dead_lettered, self._reader_info.codec)
        return Query(statements.DEAD_LETTER, {"consumer": ids.consumer, "queue": ids.queue, **columns})

    def _build_defer_columns(self, deferred: Sequence[DeferChange]) -> dict[str, list[Any]]:
        serialized = [
            serialize_transaction(change.deferred.transaction, self._reader_info.codec) for change in deferred
        ]
        return {
            "offsets": [change.offset for change in deferred],
            "deliveries": [self._delivery_counts.get(change.offset, 0) for change in deferred],
            "dues": [change.deferred.due for change in deferred],
            "envelopes": [envelope for envelope, _ in serialized],
            "bodies": [body for _, body in serialized],
        }

    def confirm(self, session: DatabaseSession, generation: int, cursor: Cursor) -> Operation[bool]:
        """Confirm to the boundary, which is in the same database."""
        consumer_id, _ = yield from self._find_or_create_ids()
        reader_info = self._reader_info
        return (
            yield from reading.confirm_if_owner(
                session, reader_info.reader, reader_info.pair, cursor, consumer_id=consumer_id, generation=generation
            )
        )

    # -- dead letters ---------------------------------------------------------------------------------

    def get_dead_letter(self, handle: str) -> Operation[DeadLetterRecord | None]:
        try:
            preceding = str(parse_handle(handle) - 1)
        except ConnectorError:
            return None
        records = yield from self.list_dead(DeadLetterQuery(), preceding if preceding != "-1" else None, 1)
        return records[0] if records and records[0].handle == handle else None

    def list_dead(self, query: DeadLetterQuery, after: str | None, limit: int) -> Operation[list[DeadLetterRecord]]:
        ids = yield from self._find_ids()
        if ids is None:
            return []
        rows = yield from dead_letters.select_dead(ids.queue, query, after=after, limit=limit)
        return [row_to_dead_letter(row, self._reader_info.queue, self._reader_info.codec) for row in rows]

    def count_dead_letters(self) -> Operation[int]:
        ids = yield from self._find_ids()
        return 0 if ids is None else int((yield Query(statements.COUNT_DEAD_LETTERS, {"queue": ids.queue}))[0][0])

    def replay(self, handle: str, deferred: DeferredRecord) -> Operation[bool]:
        ids = yield from self._find_or_create_ids()
        envelope, body = serialize_transaction(deferred.transaction, self._reader_info.codec)
        parameters: dict[str, Any] = {
            "consumer": ids.consumer,
            "queue": ids.queue,
            "id": parse_handle(handle),
            "offset": deferred.position.offset,
        }
        parameters |= {"due": deferred.due, "envelope": envelope, "body": body}
        return bool((yield Query(statements.REPLAY, parameters)))

    def discard(self, handle: str) -> Operation[bool]:
        ids = yield from self._find_ids()
        if ids is None:
            return False
        (result,) = yield from dead_letters.discard_dead(ids.queue, [handle])
        return result.outcome is DeadLetterResult.DISCARDED

    # -- another epoch --------------------------------------------------------------------------------

    def forget_epoch(self, at: float) -> Operation[int]:
        """Prepare for another epoch; return how many deferred facts became dead letters."""
        ids = yield from self._find_ids()
        if ids is None:
            # The row is not created here: a misspelled name would report success while the consumer stays blocked.
            readers = yield Query(statements.LIST_READERS, self._key)
            raise InvalidFactError(
                f"no reader {self._key['reader']!r} of facts from {self._key['from']!r} to {self._key['to']!r} "
                f"is registered; registered readers: {', '.join(sorted(name for (name,) in readers)) or 'none'}"
            )
        yield BEGIN
        yield Query(statements.LOCK_CONSUMER, {"consumer": ids.consumer})
        rows = yield Query(statements.SELECT_STATE, {"consumer": ids.consumer})
        deferred_rows = [
            (self._to_deferred(offset, *rest), lost_count)
            for offset, lost_count, _, *rest in rows
            if rest[0] is not None
        ]
        dead_lettered = [
            DeadLetterChange(
                deferred.position.offset, was_deferred=True, record=self._to_outdated_record(deferred, lost_count, at)
            )
            for deferred, lost_count in deferred_rows
        ]
        if dead_lettered:
            yield self._build_dead_letter_query(ids, dead_lettered)
        yield Query(statements.DELETE_STATE, {"consumer": ids.consumer})
        yield Query(statements.RESET_CONSUMER, {"consumer": ids.consumer})
        yield COMMIT
        return len(dead_lettered)

    def _to_outdated_record(self, deferred: DeferredRecord, lost_count: int, at: float) -> DeadLetterRecord:
        delivery = Delivery(deferred.transaction, None, lost_count)
        return DeadLetterRecord.from_delivery(
            delivery, DeadLetter(EPOCH_CHANGED_REASON), queue=self._reader_info.queue, at=at
        )


def _is_write_free(change: Change) -> bool:
    """Return whether the change only ends a claim: nothing about the single fact has to be stored."""
    return isinstance(change, ReleaseChange) or (isinstance(change, AckChange) and not change.was_deferred)


def _select(changes: Sequence[Change], change_type: type[C]) -> list[C]:
    return [change for change in changes if isinstance(change, change_type)]


# -- store ------------------------------------------------------------------------------------------

#: The revision that creates its tables.
_REQUIRED_REVISION: Final = "0004"
#: Timeout of a call.
_CALL_TIMEOUT_SECONDS: Final = 30.0


class PostgresFactConsumerStore:
    """The consumer state of all readers, in a database that ``ergon db upgrade`` has prepared.

    The address is *dsn*, or the environment's ``ERGON_POSTGRES__DSN``. A ``PostgresBoundary`` has one in its own
    database, which its consumers use automatically; this class is for facts that are stored elsewhere, for instance
    behind a service. A database that may lose committed data is rejected, unless *accept_loss*.
    """

    def __init__(self, dsn: str | None = None, *, accept_loss: bool = False) -> None:
        self._dsn = dsn
        self._accept_loss = accept_loss
        self._lock = threading.Lock()
        self._pool: ConnectionPool | None = None
        self._is_checked = False
        #: The sync and async runner of a boundary in the same database; None without one.
        self._boundary_runners: tuple[Callable[..., Any], Callable[..., Awaitable[Any]]] | None = None

    @classmethod
    def for_boundary(cls, run: Callable[..., Any], run_async: Callable[..., Awaitable[Any]]) -> Self:
        """Create the consumer store of a boundary, which runs its operations over its own connections."""
        consumer_store = cls()
        consumer_store._boundary_runners = run, run_async
        return consumer_store

    # -- lifecycle ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect; the next call connects again. Connections of a boundary stay open."""
        pool = self._detach_pool()
        if pool is not None:
            pool.close()

    async def close_async(self) -> None:
        pool = self._detach_pool()
        if pool is not None:
            await pool.close_async()

    def _detach_pool(self) -> ConnectionPool | None:
        with self._lock:
            pool, self._pool = self._pool, None
        return pool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    def _get_pool(self) -> ConnectionPool:
        with self._lock:
            if self._pool is None:
                dsn = self._dsn or os.environ.get(DSN_VARIABLE)
                if not dsn:
                    raise ConfigurationError(
                        f"fact consumer store has no database address: set {DSN_VARIABLE} or pass dsn=…"
                    )
                self._pool = ConnectionPool(dsn, error_type=FactError)
            return self._pool

    def _run(self, make_operation: Callable[..., Operation[Any]], *args: Any) -> Any:
        if self._boundary_runners is not None:
            return self._boundary_runners[0](partial(_ignore_session, make_operation), *args)
        return self._get_pool().run(self._check_and_run(make_operation, *args), timeout_seconds=_CALL_TIMEOUT_SECONDS)

    async def _run_async(self, make_operation: Callable[..., Operation[Any]], *args: Any) -> Any:
        if self._boundary_runners is not None:
            return await self._boundary_runners[1](partial(_ignore_session, make_operation), *args)
        return await self._get_pool().run_async(
            self._check_and_run(make_operation, *args), timeout_seconds=_CALL_TIMEOUT_SECONDS
        )

    def _check_and_run(self, make_operation: Callable[..., Operation[Any]], *args: Any) -> Operation[Any]:
        if not self._is_checked:
            yield from check_database("dead letters", required=_REQUIRED_REVISION, accept_loss=self._accept_loss)
            self._is_checked = True
        return (yield from make_operation(*args))

    # -- operations -----------------------------------------------------------------------------------

    def get_calls(self, reader_info: ReaderInfo) -> ConsumerStoreCalls:
        return _to_calls(
            ConsumerStoreOperations(reader_info),
            self._run,
            None if self._boundary_runners is None else self._boundary_runners[0],
        )

    def get_calls_async(self, reader_info: ReaderInfo) -> ConsumerStoreCalls:
        return _to_calls(
            ConsumerStoreOperations(reader_info),
            self._run_async,
            None if self._boundary_runners is None else self._boundary_runners[1],
        )

    def forget_epoch(self, pair: ZonePair, reader: str = "default") -> int:
        """Let *reader* read in another epoch, after an operator has compared the stores.

        Deferred facts become dead letters, because their offsets may mean other facts; the result is their number. All
        other state of single facts is deleted: some facts may be delivered again.
        """
        return int(self._run(_make_operations(pair, reader).forget_epoch, time.time()))

    async def forget_epoch_async(self, pair: ZonePair, reader: str = "default") -> int:
        return int(await self._run_async(_make_operations(pair, reader).forget_epoch, time.time()))


def _make_operations(pair: ZonePair, reader: str) -> ConsumerStoreOperations:
    return ConsumerStoreOperations(
        ReaderInfo(pair, reader, f"{pair.from_zone}/{pair.to_zone}", JsonCodec(), lambda: True)
    )


# The runner of a boundary passes its session as the first argument.
def _ignore_session(make_operation: Callable[..., Operation[Any]], _session: object, *args: Any) -> Operation[Any]:
    return make_operation(*args)


def _to_calls(
    operations: ConsumerStoreOperations, run: Callable[..., Any], run_in_boundary: Callable[..., Any] | None
) -> ConsumerStoreCalls:
    return ConsumerStoreCalls(
        partial(run, operations.take_over),
        partial(run, operations.claim),
        partial(run, operations.settle),
        partial(run, operations.release),
        partial(run, operations.is_owner),
        partial(run, operations.get_dead_letter),
        partial(run, operations.replay),
        partial(run, operations.discard),
        partial(run, operations.list_dead),
        partial(run, operations.count_dead_letters),
        None if run_in_boundary is None else partial(run_in_boundary, operations.confirm),
    )
