"""Snapshot: several questions that see one moment of the database, and end whatever happens."""

from __future__ import annotations

from typing import Final, TypeVar

from ergon_framework.schema.operation import COMMIT, Operation, Query

R = TypeVar("R")

_BEGIN: Final = Query("begin isolation level repeatable read read only")
_LIMIT: Final = "select set_config('statement_timeout', %(limit)s, true)"
#: Seconds that one question may take: somebody waits for it, and the server is there for others.
PATIENCE: Final = 10.0


def in_one_snapshot(operation: Operation[R], *, patience: float = PATIENCE) -> Operation[R]:
    """*operation* as one that changes nothing: what moves between tables meanwhile is seen in one of them."""
    yield _BEGIN
    yield Query(_LIMIT, {"limit": f"{round(1000 * patience)}ms"})
    found = yield from operation
    yield COMMIT
    return found
