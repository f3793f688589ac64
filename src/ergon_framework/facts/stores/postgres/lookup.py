"""Lookup of facts by id or business process, and the lag of the readers of every pair of zones.

The lag of a reader is the number of facts after the one that it confirmed last.

Facts are found by their id. They have no index by correlation, which would slow down every append: the latest facts
of each pair of zones are scanned, and older ones are not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from ergon_framework.database.operation import Operation, Query, in_snapshot
from ergon_framework.history import History, HistoryEvent, Location, Value, WorkKind, WorkState

#: Maximum number of readers whose lag is returned.
MAX_READERS: Final = 200

_READER_LAGS: Final = """
select l.from_zone, l.to_zone, r.reader, l.last - r.fact_offset, l.total - r.total,
    coalesce(greatest(0, extract(epoch from now()) - (
        select f.stored_at from ergon.facts f where f.log = l.id and f.fact_offset = r.fact_offset + 1
    ) / 1000.0), 0)::float8
from ergon.fact_log l join ergon.fact_readers r on r.log = l.id order by 1, 2, 3 limit %(most)s
"""


@dataclass(frozen=True, slots=True)
class ReaderLagRow:
    """One reader of a pair of zones: unconfirmed facts and bytes, and the age of the oldest in seconds."""

    from_zone: str
    to_zone: str
    reader: str
    facts: int
    bytes: int
    seconds: float


def reader_lags() -> Operation[list[ReaderLagRow]]:
    """Return the lag of all readers of all pairs."""
    return [ReaderLagRow(*row) for row in (yield Query(_READER_LAGS, {"most": MAX_READERS}))]


# -- lookup of facts --------------------------------------------------------------------------------

#: Limits of the facts that are returned, and of the facts of each pair that are scanned for a correlation.
MAX_FACTS: Final = 100
MAX_SCANNED_FACTS: Final = 10_000

_LOG_COLUMNS: Final = "l.id, l.from_zone, l.to_zone, e.epoch, l.forwarded, l.dropped"
_FACT_COLUMNS: Final = "f.stored_at, f.produced_at, f.correlation_id, f.causation_id, f.predicate"

#: One lookup per zone: as a join, the planner would scan all ids if it expects many zones.
BY_ID: Final = f"""
select i.message_id, i.fact_offset, i.kept_at, {_LOG_COLUMNS}, {_FACT_COLUMNS}
from (select distinct from_zone from ergon.fact_log) as z
cross join lateral (
    select k.* from ergon.fact_ids k where k.from_zone = z.from_zone and k.message_id = %(id)s limit 1
) as i
join ergon.fact_log l on l.id = i.log
left join ergon.fact_epochs e on e.id = i.epoch
left join ergon.facts f on f.log = i.log and f.fact_offset = i.fact_offset and f.fact_offset > l.dropped
limit %(most)s
"""  # noqa: S608 - constants

BY_CORRELATION: Final = f"""
select f.message_id, f.fact_offset, f.stored_at, {_LOG_COLUMNS}, {_FACT_COLUMNS}
from ergon.fact_log l left join ergon.fact_epochs e on e.id = l.epoch
cross join lateral (
    select g.* from ergon.facts g
    where g.log = l.id and g.fact_offset > greatest(l.dropped, l.last - %(latest)s)
        and g.correlation_id = any(%(names)s)
    order by g.fact_offset desc limit %(most)s
) as f
order by f.stored_at limit %(most)s
"""  # noqa: S608 - constants

READERS: Final = """
select r.log, r.reader, r.fact_offset, r.confirmed_at from ergon.fact_readers r
where r.log = any(%(logs)s) order by r.log, r.reader limit 1000
"""


class _TracedFactRow(NamedTuple):
    """A row of BY_ID and BY_CORRELATION."""

    message_id: str
    offset: int
    kept_at: int
    log: int
    from_zone: str
    to_zone: str
    epoch: str | None
    forwarded: bool | None
    dropped: int
    #: This and the following are None if retention has dropped the fact; only its id is left then.
    stored_at: int | None
    produced_at: int | None
    correlation: str | None
    causation: str | None
    predicate: str | None


def lookup_facts(message_id: str, names: Sequence[str]) -> Operation[list[History]]:
    """Return the facts with that id, then the facts whose correlation is one of *names*."""
    return (yield from in_snapshot(_find_facts(message_id, names)))


def _find_facts(message_id: str, names: Sequence[str]) -> Operation[list[History]]:
    rows = [_TracedFactRow(*row) for row in (yield Query(BY_ID, {"id": message_id, "most": MAX_FACTS}))]
    parameters = {"names": list(names), "latest": MAX_SCANNED_FACTS, "most": MAX_FACTS}
    keys = {(row.log, row.offset) for row in rows}
    related = [_TracedFactRow(*row) for row in (yield Query(BY_CORRELATION, parameters))]
    rows += [row for row in related if (row.log, row.offset) not in keys]
    if not rows:
        return []
    readers = yield Query(READERS, {"logs": sorted({row.log for row in rows})})
    return [_to_history(row, [reader[1:] for reader in readers if reader[0] == row.log]) for row in rows]


def _to_history(row: _TracedFactRow, readers: Sequence[Sequence[Any]]) -> History:
    attributes: dict[str, Value | None] = {
        "offset": row.offset,
        "epoch": row.epoch,
        "predicate": row.predicate,
        "correlation": row.correlation,
        "causation": row.causation,
    }
    attributes |= {f"reader {name}": _describe_distance(row.offset, offset) for name, offset, _ in readers}
    stored_at = (row.kept_at if row.stored_at is None else row.stored_at) / 1000
    events = [] if row.produced_at is None else [HistoryEvent(at=row.produced_at / 1000, event="produced")]
    event_name = "forwarded" if row.forwarded else "stored"
    events.append(HistoryEvent(at=stored_at, event=event_name, details=f"at offset {row.offset}"))
    events += [
        _to_event(name, confirmed_at)
        for name, offset, confirmed_at in readers
        if confirmed_at is not None and offset == row.offset
    ]
    is_dropped = row.stored_at is None
    return History(
        kind=WorkKind.FACT,
        id=row.message_id,
        where=f"{row.from_zone} to {row.to_zone}",
        attributes={name: value for name, value in attributes.items() if value is not None},
        events=tuple(sorted(events, key=lambda event: event.at or 0.0)),
        location=Location(
            state=WorkState.DROPPED if is_dropped else WorkState.STORED,
            since=stored_at,
            details=_describe_readers(row.offset, readers),
        ),
    )


def _describe_distance(offset: int, confirmed: int) -> str:
    return "confirmed" if confirmed >= offset else f"{offset - confirmed} behind, at offset {confirmed}"


def _to_event(name: str, confirmed_at: datetime) -> HistoryEvent:
    return HistoryEvent(at=confirmed_at.timestamp(), event="confirmed", details=f"by {name}")


def _describe_readers(offset: int, readers: Sequence[Sequence[Any]]) -> str:
    if not readers:
        return "no reader of these zones is registered"
    confirmed_count = sum(confirmed >= offset for _, confirmed, _ in readers)
    return f"confirmed by {confirmed_count} of {len(readers)} readers"
