"""The dead letters of a queue: list, replay, replace and discard them in the database.

A dead letter is a message that no worker processes again automatically, with the record of its failure. A replay moves
it back into its queue; a replacement does that with another payload. The table ready has the messages of a queue that
were never returned to it, content those that were; a replayed message is new in that sense, so it goes into ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias

from ergon_framework.audit import MAX_TARGETS
from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery, UndecodableError
from ergon_framework.connectors.codec import PROGRESS_HEADERS, Codec, decode, describe_unread
from ergon_framework.connectors.dead_letters import (
    MAX_HANDLE,
    DeadLetterQuery,
    DeadLetterRecord,
    DeadLetterResult,
    ReplayResult,
    parse_handle,
)
from ergon_framework.connectors.encryption import get_codec_keys, reveal_failure
from ergon_framework.connectors.postgres.claims import headers_as_text
from ergon_framework.database.operation import Operation, Query
from ergon_framework.failure import Failure
from ergon_framework.transaction import Transaction

_FILTER_COLUMNS: Final = {
    "id": "transaction_id",
    "reason": "reason",
    "type": "type",
    "key": "key",
    "tenant": "tenant",
    "correlation": "correlation",
    "task": "task",
    "error_type": "error_type",
    "category": "category",
}

_SELECT_DEAD: Final = """
select id, transaction_id, reason, extract(epoch from at)::float8, deliveries, readable, failure, headers,
    case when octet_length(body) <= %(load)s::bigint then body end, octet_length(body)
from ergon.dead_letter where queue = %(queue)s and id > %(after)s {where} order by id limit %(limit)s
"""

#: Moved inside the database, in one statement: after a crash a message is in exactly one of the two tables.
_REPLAY_DEAD: Final = """
with dead as materialized (
    delete from ergon.dead_letter where queue = %(queue)s and id = any(%(ids)s)
    returning id, transaction_id, key, priority, headers, body
),
ready as (
    insert into ergon.ready (queue, rank, transaction_id, key, headers, body)
    select %(queue)s, -priority, transaction_id, key,
        case jsonb_typeof(headers) when 'object'
            then headers - %(progress)s::text[] else headers end,
        body
    from dead order by id
)
select id from dead
"""

_SELECT_IDS: Final = """
select transaction_id from ergon.dead_letter where queue = %(queue)s and id = any(%(ids)s) order by id limit %(most)s
"""

_DELETE_DEAD: Final = "delete from ergon.dead_letter where queue = %(queue)s and id = any(%(ids)s) returning id"

#: As a replay, with other content; of two replacements of one dead letter, the second deletes no row.
_REPLACE_DEAD: Final = """
with dead as materialized (
    delete from ergon.dead_letter where queue = %(number)s and id = %(dead)s returning id
),
ready as (
    insert into ergon.ready (queue, rank, transaction_id, key, headers, body)
    select %(number)s, - cast(%(priority)s as smallint), cast(%(id)s as text), cast(%(key)s as text),
        cast(cast(%(headers)s as text) as jsonb), cast(%(body)s as bytea)
    from dead
)
select id from dead
"""

_SELECT_QUEUED: Final = """
select transaction_id from ergon.ready where queue = %(queue)s and transaction_id = any(%(ids)s)
union
select transaction_id from ergon.content where queue = %(queue)s and transaction_id = any(%(ids)s)
"""


#: An operation that moves the dead letters of a queue that have the given handles.
MoveOperation: TypeAlias = Callable[[int, Sequence[str]], Operation[Sequence[ReplayResult]]]


class DeadLetterRow(NamedTuple):
    """A row of the table of dead letters."""

    handle: int
    transaction_id: str
    reason: str
    at: float
    deliveries: int
    #: Whether the worker that dead-lettered the message could decode it.
    readable: bool
    failure: str | None
    headers: Any
    #: None where it is larger than the caller loads.
    body: bytes | None
    size: int


def list_dead(
    queue: int, name: str, codec: Codec, query: DeadLetterQuery, *, after: str | None, limit: int, max_bytes: int
) -> Operation[Sequence[DeadLetterRecord]]:
    """Return one page of the dead letters that match *query*.

    A body that the codec rejects, or that is larger than *max_bytes*, is described by its size.
    """
    body_limit = max_bytes if codec.max_bytes is None else min(max_bytes, codec.max_bytes)
    rows = yield from select_dead(queue, query, after=after, limit=limit, max_bytes=body_limit)
    return [_to_record(row, name, codec) for row in rows]


def select_dead(
    queue: int, query: DeadLetterQuery, *, after: str | None, limit: int, max_bytes: int = MAX_HANDLE
) -> Operation[list[DeadLetterRow]]:
    """Return one page of the matching dead letters as rows."""
    parameters: dict[str, Any] = {"queue": queue, "after": 0 if after is None else parse_handle(after), "limit": limit}
    parameters["load"] = max_bytes
    where = ""
    for field, column in _FILTER_COLUMNS.items():
        expected = getattr(query, field)
        if expected is not None:
            where += f" and {column} = %({field})s"
            parameters[field] = str(expected)
    for field, sign in (("since", ">="), ("until", "<")):
        timestamp = getattr(query, field)
        if timestamp is not None:
            where += f" and at {sign} %({field})s"
            parameters[field] = datetime.fromtimestamp(timestamp, UTC)
    rows = yield Query(_SELECT_DEAD.format(where=where), parameters)
    return [DeadLetterRow(*row) for row in rows]


def _to_record(row: DeadLetterRow, name: str, codec: Codec) -> DeadLetterRecord:
    handle, transaction_id, reason, at, deliveries, readable, failure, headers, body, size = row
    headers = headers_as_text(headers)
    if body is None:
        transaction, error = describe_unread(size, headers, source=name, limit=codec.max_bytes)
    else:
        transaction, error = decode(codec, body, headers, source=name)
    if not readable or isinstance(error, UndecodableError):
        transaction = Transaction(body, id=transaction_id, source=name)
    record = None if failure is None else Failure.model_validate_json(failure)
    settlement = DeadLetter(reason, reveal_failure(get_codec_keys(codec), record))
    delivery = Delivery(transaction, handle, deliveries)
    shown_headers = None if readable and error is None else headers
    unread_size = size if body is None else None
    return DeadLetterRecord.from_delivery(
        delivery, settlement, queue=name, at=at, headers=shown_headers, handle=str(handle), size=unread_size
    )


def replay_dead(queue: int, handles: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
    """Move dead letters back into the queue, without their delivery count and history."""
    return (yield from _move(_REPLAY_DEAD, queue, handles, DeadLetterResult.REPLAYED))


def discard_dead(queue: int, handles: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
    """Delete dead letters."""
    return (yield from _move(_DELETE_DEAD, queue, handles, DeadLetterResult.DISCARDED))


def replace_dead(queue: int, handle: str, parameters: Mapping[str, Any]) -> Operation[ReplayResult]:
    """Replace a dead letter by a queued transaction; *parameters* are those of a dispatch statement."""
    row_id = _parse_id(handle)
    rows = [] if row_id is None else (yield Query(_REPLACE_DEAD, {**parameters, "number": queue, "dead": row_id}))
    return ReplayResult(handle, DeadLetterResult.REPLAYED if rows else DeadLetterResult.GONE)


def find_ids(queue: int, handles: Sequence[str]) -> Operation[list[str]]:
    """Return the ids of the transactions whose dead letters have these handles, for the audit row of a move."""
    row_ids = [row_id for handle in handles if (row_id := _parse_id(handle)) is not None]
    rows = yield Query(_SELECT_IDS, {"queue": queue, "ids": row_ids, "most": MAX_TARGETS})
    return [row[0] for row in rows]


def _move(sql: str, queue: int, handles: Sequence[str], outcome: DeadLetterResult) -> Operation[Sequence[ReplayResult]]:
    """Execute *sql*, which moves dead letters and returns their row ids; return one result for each handle."""
    ids = {handle: _parse_id(handle) for handle in handles}
    row_ids = [row_id for row_id in ids.values() if row_id is not None]
    rows = yield Query(sql, {"queue": queue, "ids": row_ids, "progress": list(PROGRESS_HEADERS)})
    moved_ids = {row[0] for row in rows}
    results = []
    for handle in handles:
        was_moved = ids[handle] in moved_ids
        # A handle that is named twice is moved once.
        moved_ids.discard(ids[handle])
        results.append(ReplayResult(handle, outcome if was_moved else DeadLetterResult.GONE))
    return results


def _parse_id(handle: str) -> int | None:
    """Parse *handle* to the row's id; return None if no dead letter of this queue can have that handle."""
    try:
        return parse_handle(handle)
    except ConnectorError:
        return None


def find_queued(queue: int, ids: Sequence[str]) -> Operation[set[str]]:
    """Return those of *ids* whose transactions are in the queue."""
    rows = yield Query(_SELECT_QUEUED, {"queue": queue, "ids": list(ids)})
    return {row[0] for row in rows}
