"""Lag of the readers of every pair of zones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ergon_framework.schema.operation import Operation, Query

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
