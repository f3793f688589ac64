"""An overview of all breakers in the database that are not closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ergon_framework.schema.operation import Operation, Query

MAX_OPEN_BREAKERS: Final = 200

_SELECT_OPEN_BREAKERS: Final = """
select b.provider_name, b.capability, b.state, count(*)::int, max(extract(epoch from now() - b.updated_at))::float8
from ergon.provider_breakers b where b.state <> 'closed' group by 1, 2, 3 order by 1, 2, 3 limit %(most)s
"""


@dataclass(frozen=True, slots=True)
class OpenBreakerSummary:
    """The breakers of one provider in one state, for *tenants* tenants; the oldest state is *seconds* old."""

    provider: str
    capability: str
    state: str
    tenants: int
    seconds: float


def open_breakers() -> Operation[list[OpenBreakerSummary]]:
    """Return all breakers that are not closed."""
    return [OpenBreakerSummary(*row) for row in (yield Query(_SELECT_OPEN_BREAKERS, {"most": MAX_OPEN_BREAKERS}))]
