"""Tracing: where a transaction is in the queues of a database, what has happened to it, and that it is done.

All of it in one snapshot: what moves from one table to another while it is looked for is seen once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.base import UndecodableError
from ergon_framework.connectors.codec import read_headers
from ergon_framework.connectors.encryption import environment_keys, reveal_envelope, reveal_failure
from ergon_framework.connectors.postgres.headers import texts
from ergon_framework.connectors.tracing import MOST, about, created, dead
from ergon_framework.failure import Failure
from ergon_framework.history import Event, History, Kind, Place, State, Value, deferral_events, in_order, tried
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.schema.snapshot import in_one_snapshot

#: Those that wait have no index by id, which every message would pay for: their tables are read from one end to the
#: other, and that goes by the table and not by whichever index is there.
_THROUGH: Final = "select set_config('enable_seqscan', 'on', true)"
_OF_QUEUE: Final = "q.name = coalesce(%(queue)s::text, q.name)"

#: A message is in ready or in content; in returned if it waits, in a claim if somebody has it.
WAITING: Final = f"""
with found as materialized (
    select r.queue, r.id, r.created_at, 0 as deliveries, -r.rank as priority, r.key, r.headers from ergon.ready r
    where r.transaction_id = %(id)s
    union all
    select c.queue, c.id, c.created_at, c.deliveries, c.priority, c.key, c.headers from ergon.content c
    where c.transaction_id = %(id)s
)
select q.name, m.id, extract(epoch from m.created_at)::float8, m.deliveries, m.priority, m.key, m.headers,
    extract(epoch from b.due_at)::float8, b.due_at = 'infinity', b.due_at > now(),
    w.worker, w.name, extract(epoch from w.alive_until)::float8
from found m join ergon.queue q on q.id = m.queue
left join ergon.returned b on b.id = m.id
left join lateral (
    select h.worker, k.name, k.alive_until from ergon.held h left join ergon.worker k on k.id = h.worker
    where h.queue = m.queue and m.id = any(h.ids) and b.id is null limit 1
) as w on true
where {_OF_QUEUE}
order by m.id limit %(most)s
"""  # noqa: S608 - of constants

BURIED: Final = f"""
select q.name, d.id, extract(epoch from d.at)::float8, d.reason, d.deliveries, d.failure, d.headers
from ergon.queue q join ergon.dead_letter d on d.queue = q.id and d.transaction_id = %(id)s
where {_OF_QUEUE}
order by d.id limit %(most)s
"""  # noqa: S608 - of constants

MARKED: Final = f"""
select q.name, extract(epoch from i.at)::float8
from ergon.queue q join ergon.inbox i on i.queue = q.id and i.transaction_id = %(id)s
where {_OF_QUEUE}
order by i.at limit %(most)s
"""  # noqa: S608 - of constants


class _Waiting(NamedTuple):
    """A row of ``WAITING``."""

    queue: str
    message: int
    sent_at: float
    #: Those that have ended.
    deliveries: int
    priority: int
    key: str | None
    headers: Any
    #: None if it has never come back, or is in somebody's hands.
    due: float | None
    blocked: bool | None
    early: bool | None
    worker: int | None
    #: None of these if the worker was taken away.
    name: str | None
    alive_until: float | None


class _Buried(NamedTuple):
    """A row of ``BURIED``."""

    queue: str
    place: int
    at: float
    reason: str
    deliveries: int
    failure: str | None
    headers: Any


def trace(transaction_id: str, queue: str | None = None) -> Operation[list[History]]:
    """What the queues know of it, or the one called *queue*: what ended first, what still waits last."""
    given = {"id": transaction_id, "queue": queue, "most": MOST}
    return (yield from in_one_snapshot(_traced(transaction_id, given)))


def _traced(transaction_id: str, given: dict[str, Any]) -> Operation[list[History]]:
    marked = yield Query(MARKED, given)
    buried = yield Query(BURIED, given)
    yield Query(_THROUGH)
    waiting = yield Query(WAITING, given)
    return [
        *(_done(transaction_id, *row) for row in marked),
        *(_dead(transaction_id, _Buried(*row)) for row in buried),
        *(_waits(transaction_id, _Waiting(*row)) for row in waiting),
    ]


def _done(transaction_id: str, queue: str, at: float) -> History:
    return History(
        kind=Kind.TRANSACTION,
        id=transaction_id,
        where=queue,
        events=(Event(at=at, what="succeeded", words="marked in the inbox"),),
        place=Place(state=State.DONE, since=at),
    )


def _dead(transaction_id: str, row: _Buried) -> History:
    return dead(
        transaction_id,
        row.queue,
        handle=str(row.place),
        at=row.at,
        reason=row.reason,
        deliveries=row.deliveries,
        failure=_failure(row.failure),
        envelope=_envelope(row.headers),
    )


def _waits(transaction_id: str, row: _Waiting) -> History:
    envelope = _envelope(row.headers)
    told: dict[str, Value] = {**about(envelope), "deliveries ended": row.deliveries}
    if row.key is not None:
        told["key"] = row.key
    if row.priority:
        told["priority"] = row.priority
    if envelope.get("attempts"):
        told["attempts"] = envelope["attempts"]
    sent = Event(at=row.sent_at, what="queued", words=f"in {row.queue}")
    return History(
        kind=Kind.TRANSACTION,
        id=transaction_id,
        where=row.queue,
        about=told,
        events=in_order(
            (
                *created(envelope.get("created_at")),
                sent,
                *tried(envelope.get("history", ())),
                *deferral_events(envelope.get("deferral")),
            )
        ),
        place=_place(row),
    )


def _place(row: _Waiting) -> Place:
    handle = str(row.message)
    if row.worker is not None:
        holder = f"worker {row.worker}{f' ({row.name})' if row.name else ''}"
        return Place(state=State.HELD, until=row.alive_until, holder=holder, handle=handle)
    if row.blocked:
        return Place(state=State.BEHIND, handle=handle)
    if row.early:
        return Place(state=State.DELAYED, until=row.due, handle=handle)
    return Place(state=State.READY, since=row.sent_at if row.due is None else row.due, handle=handle)


def _envelope(given: Any) -> Mapping[str, Any]:
    """What the headers say; nothing where they are somebody else's, or broken."""
    headers = texts(given)
    try:
        envelope = read_headers(headers)
    except UndecodableError:
        return {}
    return reveal_envelope(environment_keys(), envelope, headers)


def _failure(text: str | None) -> Failure | None:
    try:
        return None if text is None else reveal_failure(environment_keys(), Failure.model_validate_json(text))
    except ValueError:  # of another release
        return None
