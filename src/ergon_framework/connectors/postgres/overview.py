"""Overview: how full every queue of the database is, for whoever looks at all of them."""

from __future__ import annotations

from typing import Final

from ergon_framework.connectors.base import Depth
from ergon_framework.connectors.postgres import statements
from ergon_framework.schema.operation import Operation, Query

#: More queues than a person looks at; each costs a question of its own.
MOST: Final = 200

_QUEUES: Final = "select id, name from ergon.queue order by name limit %(most)s"


def depths() -> Operation[dict[str, Depth]]:
    """What is in each queue, by its name."""
    found = {}
    for number, name in (yield Query(_QUEUES, {"most": MOST})):
        ((ready, delayed, in_flight, dead, oldest),) = yield Query(statements.DEPTH, {"queue": number})
        found[str(name)] = Depth(ready, delayed, in_flight, dead, None if oldest is None else max(0.0, oldest))
    return found
