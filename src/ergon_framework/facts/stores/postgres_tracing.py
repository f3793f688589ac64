"""Tracing: the fact of one id, the latest facts of one business process, and who has read them.

Facts are found by their id. By correlation they have no index, which every fact would pay for: of each pair of zones
the latest are looked through, and older ones are not found so.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from ergon_framework.history import Event, History, Kind, Place, State, Value
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.schema.snapshot import in_one_snapshot

#: The most facts that are told of, and how many of each pair are looked through for a correlation.
MOST: Final = 100
LATEST: Final = 10_000

_OF_LOG: Final = "l.id, l.from_zone, l.to_zone, e.epoch, l.forwarded, l.dropped"
_OF_FACT: Final = "f.stored_at, f.produced_at, f.correlation_id, f.causation_id, f.predicate"

#: One look for each zone: joined, the ids would be read through wherever the zones are thought to be many.
BY_ID: Final = f"""
select i.message_id, i.fact_offset, i.kept_at, {_OF_LOG}, {_OF_FACT}
from (select distinct from_zone from ergon.fact_log) as z
cross join lateral (
    select k.* from ergon.fact_ids k where k.from_zone = z.from_zone and k.message_id = %(id)s limit 1
) as i
join ergon.fact_log l on l.id = i.log
left join ergon.fact_epochs e on e.id = i.epoch
left join ergon.facts f on f.log = i.log and f.fact_offset = i.fact_offset and f.fact_offset > l.dropped
limit %(most)s
"""  # noqa: S608 - of constants

BY_CORRELATION: Final = f"""
select f.message_id, f.fact_offset, f.stored_at, {_OF_LOG}, {_OF_FACT}
from ergon.fact_log l left join ergon.fact_epochs e on e.id = l.epoch
cross join lateral (
    select g.* from ergon.facts g
    where g.log = l.id and g.fact_offset > greatest(l.dropped, l.last - %(latest)s)
        and g.correlation_id = any(%(names)s)
    order by g.fact_offset desc limit %(most)s
) as f
order by f.stored_at limit %(most)s
"""  # noqa: S608 - of constants

READERS: Final = """
select r.log, r.reader, r.fact_offset, r.confirmed_at from ergon.fact_readers r
where r.log = any(%(logs)s) order by r.log, r.reader limit 1000
"""


class _Row(NamedTuple):
    """A row of the first two."""

    message_id: str
    offset: int
    kept_at: int
    log: int
    from_zone: str
    to_zone: str
    epoch: str | None
    forwarded: bool | None
    dropped: int
    #: All of these are None if the fact is gone.
    stored_at: int | None
    produced_at: int | None
    correlation: str | None
    causation: str | None
    predicate: str | None


def trace(message_id: str, names: Sequence[str]) -> Operation[list[History]]:
    """The facts of that id, then those whose correlation is one of *names*."""
    return (yield from in_one_snapshot(_traced(message_id, names)))


def _traced(message_id: str, names: Sequence[str]) -> Operation[list[History]]:
    found = [_Row(*row) for row in (yield Query(BY_ID, {"id": message_id, "most": MOST}))]
    given = {"names": list(names), "latest": LATEST, "most": MOST}
    known = {(row.log, row.offset) for row in found}
    related = [_Row(*row) for row in (yield Query(BY_CORRELATION, given))]
    found += [row for row in related if (row.log, row.offset) not in known]
    if not found:
        return []
    readers = yield Query(READERS, {"logs": sorted({row.log for row in found})})
    return [_history(row, [reader[1:] for reader in readers if reader[0] == row.log]) for row in found]


def _history(row: _Row, readers: Sequence[Sequence[Any]]) -> History:
    told: dict[str, Value | None] = {
        "offset": row.offset,
        "epoch": row.epoch,
        "predicate": row.predicate,
        "correlation": row.correlation,
        "causation": row.causation,
    }
    told |= {f"reader {name}": _far(row.offset, offset) for name, offset, _ in readers}
    stored = (row.kept_at if row.stored_at is None else row.stored_at) / 1000
    events = [] if row.produced_at is None else [Event(at=row.produced_at / 1000, what="produced")]
    arrived = "forwarded" if row.forwarded else "stored"
    events.append(Event(at=stored, what=arrived, words=f"at offset {row.offset}"))
    events += [_reading(name, at) for name, offset, at in readers if at is not None and offset == row.offset]
    gone = row.stored_at is None
    return History(
        kind=Kind.FACT,
        id=row.message_id,
        where=f"{row.from_zone} to {row.to_zone}",
        about={name: value for name, value in told.items() if value is not None},
        events=tuple(sorted(events, key=lambda event: event.at or 0.0)),
        place=Place(state=State.DROPPED if gone else State.STORED, since=stored, words=_read_by(row.offset, readers)),
    )


def _far(offset: int, confirmed: int) -> str:
    return "has confirmed it" if confirmed >= offset else f"is {offset - confirmed} before it, at {confirmed}"


def _reading(name: str, at: datetime) -> Event:
    return Event(at=at.timestamp(), what="confirmed", words=f"by {name}")


def _read_by(offset: int, readers: Sequence[Sequence[Any]]) -> str:
    if not readers:
        return "nobody reads these zones here"
    done = sum(confirmed >= offset for _, confirmed, _ in readers)
    return f"{done} of {len(readers)} readers have confirmed it"
