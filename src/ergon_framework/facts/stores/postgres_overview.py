"""Overview: how far the readers of every pair of zones are behind, for whoever looks at all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ergon_framework.schema.operation import Operation, Query

MOST: Final = 200

_READERS: Final = """
select l.from_zone, l.to_zone, r.reader, l.last - r.fact_offset, l.total - r.total,
    coalesce(greatest(0, extract(epoch from now()) - (
        select f.stored_at from ergon.facts f where f.log = l.id and f.fact_offset = r.fact_offset + 1
    ) / 1000.0), 0)::float8
from ergon.fact_log l join ergon.fact_readers r on r.log = l.id order by 1, 2, 3 limit %(most)s
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """One reader of a pair of zones: facts and bytes that he has not confirmed, and how long the oldest is there."""

    from_zone: str
    to_zone: str
    reader: str
    facts: int
    bytes: int
    seconds: float


def readings() -> Operation[list[Reading]]:
    """All readers of all pairs."""
    return [Reading(*row) for row in (yield Query(_READERS, {"most": MOST}))]
