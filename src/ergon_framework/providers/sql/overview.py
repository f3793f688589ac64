"""Overview: which breakers of the database are not closed, for whoever looks at all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ergon_framework.schema.operation import Operation, Query

MOST: Final = 200

_HELD: Final = """
select b.provider_name, b.capability, b.state, count(*)::int, max(extract(epoch from now() - b.updated_at))::float8
from ergon.provider_breakers b where b.state <> 'closed' group by 1, 2, 3 order by 1, 2, 3 limit %(most)s
"""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Breakers of one provider in one state, of so many tenants; the longest has been so for *seconds*."""

    provider: str
    capability: str
    state: str
    tenants: int
    seconds: float


def held_back() -> Operation[list[HeldBack]]:
    """All breakers that are not closed."""
    return [HeldBack(*row) for row in (yield Query(_HELD, {"most": MOST}))]
