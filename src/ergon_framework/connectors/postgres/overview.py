"""The depth of every queue of the database."""

from __future__ import annotations

from typing import Final

from ergon_framework.connectors.base import Depth
from ergon_framework.connectors.postgres import statements
from ergon_framework.schema.operation import Operation, Query

#: More queues than a person can read; each queue costs one query.
MAX_QUEUES: Final = 200

_SELECT_QUEUES: Final = "select id, name from ergon.queue order by name limit %(most)s"


def queue_depths() -> Operation[dict[str, Depth]]:
    """Return the depth of each queue, by its name."""
    depth_by_queue = {}
    for number, name in (yield Query(_SELECT_QUEUES, {"most": MAX_QUEUES})):
        ((ready, delayed, in_flight, dead, oldest),) = yield Query(statements.DEPTH, {"queue": number})
        depth_by_queue[str(name)] = Depth(ready, delayed, in_flight, dead, None if oldest is None else max(0.0, oldest))
    return depth_by_queue
