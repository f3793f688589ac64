"""Look up a transaction in the queues of a database: where it is, what has happened to it, whether it is done.

A message that was never returned to its queue is in the table ready, any other in content; a claim has the messages
that a worker processes, redelivery the due times of those that wait, dead_letter the failed ones, inbox the ids of
processed ones.

All queries use one snapshot: a message that moves from one table to another meanwhile is seen once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.base import UndecodableError
from ergon_framework.connectors.codec import read_headers
from ergon_framework.connectors.encryption import load_environment_keys, reveal_envelope, reveal_failure
from ergon_framework.connectors.lookup import MAX_DEAD_LETTERS, created_event, dead_letter_history, envelope_fields
from ergon_framework.connectors.postgres.claims import headers_as_text
from ergon_framework.database.operation import Operation, Query, in_snapshot
from ergon_framework.failure import Failure
from ergon_framework.history import (
    History,
    HistoryEvent,
    Location,
    Value,
    WorkKind,
    WorkState,
    attempt_events,
    deferral_events,
    sort_events,
)

#: Waiting messages have no index by id, which would slow down every message: their tables are scanned sequentially,
#: instead of through an arbitrary index.
_ENABLE_SEQSCAN: Final = "select set_config('enable_seqscan', 'on', true)"
_QUEUE_CONDITION: Final = "q.name = coalesce(%(queue)s::text, q.name)"

#: A message is in ready or in content. One in content also has a row in redelivery while it waits; one that a worker
#: processes is in a claim.
SELECT_WAITING: Final = f"""
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
left join ergon.redelivery b on b.id = m.id
left join lateral (
    select h.worker, k.name, k.alive_until from ergon.claim h left join ergon.worker k on k.id = h.worker
    where h.queue = m.queue and m.id = any(h.ids) and b.id is null limit 1
) as w on true
where {_QUEUE_CONDITION}
order by m.id limit %(most)s
"""  # noqa: S608 - of constants

SELECT_DEAD: Final = f"""
select q.name, d.id, extract(epoch from d.at)::float8, d.reason, d.deliveries, d.failure, d.headers
from ergon.queue q join ergon.dead_letter d on d.queue = q.id and d.transaction_id = %(id)s
where {_QUEUE_CONDITION}
order by d.id limit %(most)s
"""  # noqa: S608 - of constants

SELECT_MARKED: Final = f"""
select q.name, extract(epoch from i.at)::float8
from ergon.queue q join ergon.inbox i on i.queue = q.id and i.transaction_id = %(id)s
where {_QUEUE_CONDITION}
order by i.at limit %(most)s
"""  # noqa: S608 - of constants


class _WaitingRow(NamedTuple):
    """A row of ``SELECT_WAITING``."""

    queue: str
    message: int
    sent_at: float
    #: Deliveries that have ended.
    deliveries: int
    priority: int
    key: str | None
    headers: Any
    #: None if the message was never returned, or is in flight; so are the next two.
    due_at: float | None
    #: Whether an older message with the same key has to be settled first: its due time is 'infinity'.
    is_blocked: bool | None
    is_delayed: bool | None
    #: The worker instance that has claimed the message; None if none has.
    worker: int | None
    #: None if the worker has expired.
    name: str | None
    alive_until: float | None


class _DeadRow(NamedTuple):
    """A row of ``SELECT_DEAD``."""

    queue: str
    handle: int
    at: float
    reason: str
    deliveries: int
    failure: str | None
    headers: Any


def lookup_transaction(transaction_id: str, queue: str | None = None) -> Operation[list[History]]:
    """Return the histories of a transaction in all queues, or in *queue*: ended ones first, waiting ones last."""
    parameters = {"id": transaction_id, "queue": queue, "most": MAX_DEAD_LETTERS}
    return (yield from in_snapshot(_lookup(transaction_id, parameters)))


def _lookup(transaction_id: str, parameters: dict[str, Any]) -> Operation[list[History]]:
    marked_rows = yield Query(SELECT_MARKED, parameters)
    dead_rows = yield Query(SELECT_DEAD, parameters)
    yield Query(_ENABLE_SEQSCAN)
    waiting_rows = yield Query(SELECT_WAITING, parameters)
    return [
        *(_to_done_history(transaction_id, *row) for row in marked_rows),
        *(_to_dead_history(transaction_id, _DeadRow(*row)) for row in dead_rows),
        *(_to_waiting_history(transaction_id, _WaitingRow(*row)) for row in waiting_rows),
    ]


def _to_done_history(transaction_id: str, queue: str, at: float) -> History:
    return History(
        kind=WorkKind.TRANSACTION,
        id=transaction_id,
        where=queue,
        events=(HistoryEvent(at=at, event="succeeded", details="marked in the inbox"),),
        location=Location(state=WorkState.DONE, since=at),
    )


def _to_dead_history(transaction_id: str, row: _DeadRow) -> History:
    return dead_letter_history(
        transaction_id,
        row.queue,
        handle=str(row.handle),
        at=row.at,
        reason=row.reason,
        deliveries=row.deliveries,
        failure=_parse_failure(row.failure),
        envelope=_read_envelope(row.headers),
    )


def _to_waiting_history(transaction_id: str, row: _WaitingRow) -> History:
    envelope = _read_envelope(row.headers)
    details: dict[str, Value] = {**envelope_fields(envelope), "deliveries ended": row.deliveries}
    if row.key is not None:
        details["key"] = row.key
    if row.priority:
        details["priority"] = row.priority
    if envelope.get("attempts"):
        details["attempts"] = envelope["attempts"]
    sent_event = HistoryEvent(at=row.sent_at, event="queued", details=f"in {row.queue}")
    return History(
        kind=WorkKind.TRANSACTION,
        id=transaction_id,
        where=row.queue,
        attributes=details,
        events=sort_events(
            (
                *created_event(envelope.get("created_at")),
                sent_event,
                *attempt_events(envelope.get("history", ())),
                *deferral_events(envelope.get("deferral")),
            )
        ),
        location=_to_location(row),
    )


def _to_location(row: _WaitingRow) -> Location:
    handle = str(row.message)
    if row.worker is not None:
        holder = f"worker {row.worker}{f' ({row.name})' if row.name else ''}"
        return Location(state=WorkState.CLAIMED, until=row.alive_until, holder=holder, handle=handle)
    if row.is_blocked:
        return Location(state=WorkState.BLOCKED_BY_KEY, handle=handle)
    if row.is_delayed:
        return Location(state=WorkState.DELAYED, until=row.due_at, handle=handle)
    return Location(state=WorkState.READY, since=row.sent_at if row.due_at is None else row.due_at, handle=handle)


def _read_envelope(raw_headers: Any) -> Mapping[str, Any]:
    """Read the envelope from the headers; return an empty one where they are third-party or broken."""
    headers = headers_as_text(raw_headers)
    try:
        envelope = read_headers(headers)
    except UndecodableError:
        return {}
    return reveal_envelope(load_environment_keys(), envelope, headers)


def _parse_failure(text: str | None) -> Failure | None:
    try:
        return None if text is None else reveal_failure(load_environment_keys(), Failure.model_validate_json(text))
    except ValueError:  # written by another release, in another form
        return None
