"""ConsumerStoreOperations: the state of one reader in PostgreSQL, as operations for the sync and async variant."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, DeadLetterResult, parse_handle
from ergon_framework.connectors.postgres import burials
from ergon_framework.connectors.side_store import DeferredRecord, LogPosition
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import Cursor
from ergon_framework.facts.side import (
    EPOCH_CHANGED_REASON,
    ONLY_PARTITION,
    AckChange,
    Change,
    ClaimRequest,
    ClaimResult,
    DeadLetterChange,
    DeferChange,
    ReaderInfo,
    ReleaseChange,
    SettleRequest,
    Takeover,
)
from ergon_framework.facts.stores import postgres_reading as reading
from ergon_framework.facts.stores import postgres_side_records as records
from ergon_framework.facts.stores import postgres_side_statements as statements
from ergon_framework.facts.stores.postgres_store import DatabaseSession
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

C = TypeVar("C", AckChange, DeadLetterChange, DeferChange)

#: Higher than any turn of an owner.
_MAX_TURN: Final = 2**62


class _ConsumerIds(NamedTuple):
    consumer: int
    queue: int


class ConsumerStoreOperations:
    """What a connector calls for its reader; caches only what an owner has to know."""

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
        # After a restore the id may belong to another reader, or to none.
        self._ids = None
        consumer_id, _ = yield from self._find_or_create_ids()
        yield BEGIN
        ((epoch,),) = yield Query(statements.LOCK_CONSUMER, {"side": consumer_id})
        self._reader_info.check_epoch(epoch, cursor.epoch)
        parameters = {"side": consumer_id, "cursor": cursor.offset}
        yield Query(statements.COUNT_LOST_CLAIMS, parameters)
        yield Query(statements.DELETE_OBSOLETE, parameters)
        ((generation, replays),) = yield Query(statements.NEXT_GENERATION, {"side": consumer_id})
        rows = yield Query(statements.SELECT_STATE, {"side": consumer_id})
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
            records.deserialize_transaction(envelope, body, self._reader_info.codec),
        )

    def is_owner(self, generation: int) -> Operation[bool]:
        consumer_id, _ = yield from self._find_or_create_ids()
        return bool((yield Query(statements.CHECK_OWNER, {"side": consumer_id, "generation": generation})))

    def release(self, generation: int, settled_above: Collection[int]) -> Operation[bool]:
        consumer_id, _ = yield from self._find_or_create_ids()
        yield BEGIN
        parameters = {"side": consumer_id, "generation": generation, "turn": _MAX_TURN, "held": [], "epoch": None}
        if not (yield Query(statements.FENCE, parameters)):
            yield ROLLBACK
            return False
        yield Query(statements.RELEASE, {"side": consumer_id, "offsets": list(settled_above)})
        yield COMMIT
        return True

    # -- owner ----------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest) -> Operation[ClaimResult | None]:
        consumer_id, _ = yield from self._find_or_create_ids()
        parameters: dict[str, Any] = {"side": consumer_id, "generation": request.generation}
        if request.new:
            parameters |= {"turn": request.sequence, "held": list(request.claims), "epoch": request.epoch}
        rows = yield Query(statements.CLAIM if request.new else statements.CHECK_OWNER, parameters)
        if not rows:
            return None
        replays, replayed = rows[0][0], []
        if replays > request.replays:
            replay_parameters = {"side": consumer_id, "known": request.replays, "latest": replays}
            for offset, *rest in (yield Query(statements.LIST_REPLAYED, replay_parameters)):
                self._delivery_counts.pop(offset, None)
                replayed.append(self._to_deferred(offset, *rest))
        return ClaimResult([self._delivery_counts.get(offset, 0) + 1 for offset in request.new], replayed, replays)

    def settle(self, request: SettleRequest) -> Operation[bool]:
        ids = yield from self._find_or_create_ids()
        parameters = {
            "side": ids.consumer,
            "generation": request.generation,
            "turn": request.sequence,
            "held": list(request.claims),
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
        parameters = {"side": ids.consumer}
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
        columns = records.dead_letter_columns(dead_lettered, self._reader_info.codec)
        return Query(statements.DEAD_LETTER, {"side": ids.consumer, "queue": ids.queue, **columns})

    def _build_defer_columns(self, deferred: Sequence[DeferChange]) -> dict[str, list[Any]]:
        serialized = [
            records.serialize_transaction(change.deferred.transaction, self._reader_info.codec) for change in deferred
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
        dead_letters = yield from self.list_dead(DeadLetterQuery(), preceding if preceding != "-1" else None, 1)
        return dead_letters[0] if dead_letters and dead_letters[0].handle == handle else None

    def list_dead(self, query: DeadLetterQuery, after: str | None, limit: int) -> Operation[list[DeadLetterRecord]]:
        ids = yield from self._find_ids()
        if ids is None:
            return []
        rows = yield from burials.select_dead(ids.queue, query, after=after, limit=limit)
        return [records.row_to_dead_letter(row, self._reader_info.queue, self._reader_info.codec) for row in rows]

    def count_dead_letters(self) -> Operation[int]:
        ids = yield from self._find_ids()
        return 0 if ids is None else int((yield Query(statements.COUNT_DEAD_LETTERS, {"queue": ids.queue}))[0][0])

    def replay(self, handle: str, deferred: DeferredRecord) -> Operation[bool]:
        ids = yield from self._find_or_create_ids()
        envelope, body = records.serialize_transaction(deferred.transaction, self._reader_info.codec)
        parameters: dict[str, Any] = {
            "side": ids.consumer,
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
        (result,) = yield from burials.discard_dead(ids.queue, [handle])
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
                f"is known; known are: {', '.join(sorted(name for (name,) in readers)) or 'none'}"
            )
        yield BEGIN
        yield Query(statements.LOCK_CONSUMER, {"side": ids.consumer})
        rows = yield Query(statements.SELECT_STATE, {"side": ids.consumer})
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
        yield Query(statements.DELETE_STATE, {"side": ids.consumer})
        yield Query(statements.RESET_CONSUMER, {"side": ids.consumer})
        yield COMMIT
        return len(dead_lettered)

    def _to_outdated_record(self, deferred: DeferredRecord, lost_count: int, at: float) -> DeadLetterRecord:
        delivery = Delivery(deferred.transaction, None, lost_count)
        return DeadLetterRecord.from_delivery(
            delivery, DeadLetter(EPOCH_CHANGED_REASON), queue=self._reader_info.queue, at=at
        )


def _is_write_free(change: Change) -> bool:
    return isinstance(change, ReleaseChange) or (isinstance(change, AckChange) and not change.was_deferred)


def _select(changes: Sequence[Change], change_type: type[C]) -> list[C]:
    return [change for change in changes if isinstance(change, change_type)]
