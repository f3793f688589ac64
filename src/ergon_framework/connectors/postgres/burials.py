"""Burials: the dead letters of a queue, listed, replayed and thrown away where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias

from ergon_framework.audit import MAX_TARGETS
from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery, UndecodableError
from ergon_framework.connectors.codec import PROGRESS, Codec, decode, describe_unread
from ergon_framework.connectors.deadletters import (
    LAST,
    Became,
    DeadLetterQuery,
    DeadLetterRecord,
    ReplayResult,
    number,
)
from ergon_framework.connectors.encryption import keys_of, reveal_failure
from ergon_framework.connectors.postgres.headers import texts
from ergon_framework.failure import Failure
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.transaction import Transaction

_COLUMNS: Final = {
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

_LIST: Final = """
select id, transaction_id, reason, extract(epoch from at)::float8, deliveries, readable, failure, headers,
    case when octet_length(body) <= %(load)s::bigint then body end, octet_length(body)
from ergon.dead_letter where queue = %(queue)s and id > %(after)s {where} order by id limit %(limit)s
"""

#: Moved inside the database, in one statement: a crash finds it here or there.
_REPLAY: Final = """
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

_IDS: Final = """
select transaction_id from ergon.dead_letter where queue = %(queue)s and id = any(%(ids)s) order by id limit %(most)s
"""

_DISCARD: Final = "delete from ergon.dead_letter where queue = %(queue)s and id = any(%(ids)s) returning id"

#: The same as a replay, with other content: of two that replace one dead letter the second deletes no row.
_REPLACE: Final = """
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

_QUEUED: Final = """
select transaction_id from ergon.ready where queue = %(queue)s and transaction_id = any(%(ids)s)
union
select transaction_id from ergon.content where queue = %(queue)s and transaction_id = any(%(ids)s)
"""


#: What moves the dead letters of a queue at places.
Move: TypeAlias = Callable[[int, Sequence[str]], Operation[Sequence[ReplayResult]]]


class Row(NamedTuple):
    """A dead letter as the table has it."""

    place: int
    transaction_id: str
    reason: str
    at: float
    deliveries: int
    readable: bool
    failure: str | None
    headers: Any
    #: None where it is larger than the caller loads.
    body: bytes | None
    size: int


def listed(
    queue: int, name: str, codec: Codec, query: DeadLetterQuery, *, after: str | None, limit: int, load: int
) -> Operation[Sequence[DeadLetterRecord]]:
    """One page of the dead letters that *query* means; bodies that the codec refuses, or over *load*, by their size."""
    most = load if codec.max_bytes is None else min(load, codec.max_bytes)
    rows = yield from found(queue, query, after=after, limit=limit, load=most)
    return [_record(row, name, codec) for row in rows]


def found(
    queue: int, query: DeadLetterQuery, *, after: str | None, limit: int, load: int = LAST
) -> Operation[list[Row]]:
    """The same as rows."""
    given: dict[str, Any] = {"queue": queue, "after": 0 if after is None else number(after), "limit": limit}
    given["load"] = load
    where = ""
    for field, column in _COLUMNS.items():
        wanted = getattr(query, field)
        if wanted is not None:
            where += f" and {column} = %({field})s"
            given[field] = str(wanted)
    for field, sign in (("since", ">="), ("until", "<")):
        moment = getattr(query, field)
        if moment is not None:
            where += f" and at {sign} %({field})s"
            given[field] = datetime.fromtimestamp(moment, UTC)
    rows = yield Query(_LIST.format(where=where), given)
    return [Row(*row) for row in rows]


def _record(row: Row, name: str, codec: Codec) -> DeadLetterRecord:
    place, transaction_id, reason, at, deliveries, readable, failure, headers, body, size = row
    headers = texts(headers)
    if body is None:
        transaction, error = describe_unread(size, headers, source=name, limit=codec.max_bytes)
    else:
        transaction, error = decode(codec, body, headers, source=name)
    if not readable or isinstance(error, UndecodableError):
        transaction = Transaction(transaction_id, body, source=name)
    record = None if failure is None else Failure.model_validate_json(failure)
    letter = DeadLetter(reason, reveal_failure(keys_of(codec), record))
    delivery = Delivery(transaction, place, deliveries)
    kept = None if readable and error is None else headers
    unread = size if body is None else None
    return DeadLetterRecord.of(delivery, letter, queue=name, at=at, headers=kept, place=str(place), size=unread)


def replayed(queue: int, places: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
    """Back into the queue, with nothing counted against them."""
    return (yield from _moved(_REPLAY, queue, places, Became.REPLAYED))


def discarded(queue: int, places: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
    """Away."""
    return (yield from _moved(_DISCARD, queue, places, Became.DISCARDED))


def replace_dead(queue: int, place: str, parameters: Mapping[str, Any]) -> Operation[ReplayResult]:
    """Put the transaction of *parameters*, as a dispatch has them, into the queue in place of a dead letter."""
    dead = _id(place)
    rows = [] if dead is None else (yield Query(_REPLACE, {**parameters, "number": queue, "dead": dead}))
    return ReplayResult(place, Became.REPLAYED if rows else Became.GONE)


def ids_at(queue: int, places: Sequence[str]) -> Operation[list[str]]:
    """Return the ids of the transactions whose dead letters are at *places*."""
    known = [place_id for place in places if (place_id := _id(place)) is not None]
    rows = yield Query(_IDS, {"queue": queue, "ids": known, "most": MAX_TARGETS})
    return [row[0] for row in rows]


def _moved(sql: str, queue: int, places: Sequence[str], became: Became) -> Operation[Sequence[ReplayResult]]:
    ids = {place: _id(place) for place in places}
    known = [place_id for place_id in ids.values() if place_id is not None]
    rows = yield Query(sql, {"queue": queue, "ids": known, "progress": list(PROGRESS)})
    moved = {row[0] for row in rows}
    results = []
    for place in places:
        there = ids[place] in moved
        # Named twice it is moved once.
        moved.discard(ids[place])
        results.append(ReplayResult(place, became if there else Became.GONE))
    return results


def _id(place: str) -> int | None:
    """The number of *place*; None for what no dead letter here can have as its place."""
    try:
        return number(place)
    except ConnectorError:
        return None


def queued(queue: int, ids: Sequence[str]) -> Operation[set[str]]:
    """Which of these transactions are in the queue."""
    rows = yield Query(_QUEUED, {"queue": queue, "ids": list(ids)})
    return {row[0] for row in rows}
