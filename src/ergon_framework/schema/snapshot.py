"""Run several queries in one snapshot of the database, with a timeout."""

from __future__ import annotations

from typing import Final, TypeVar

from ergon_framework.schema.operation import COMMIT, Operation, Query

R = TypeVar("R")

_BEGIN_SNAPSHOT: Final = Query("begin isolation level repeatable read read only")
_SET_TIMEOUT: Final = "select set_config('statement_timeout', %(limit)s, true)"
#: Timeout of one query: a caller waits for it, and it must not occupy the server.
QUERY_TIMEOUT_SECONDS: Final = 10.0


def in_snapshot(operation: Operation[R], *, timeout_seconds: float = QUERY_TIMEOUT_SECONDS) -> Operation[R]:
    """Run the read-only *operation* in one snapshot: a row that moves between tables meanwhile is seen once."""
    yield _BEGIN_SNAPSHOT
    yield Query(_SET_TIMEOUT, {"limit": f"{round(1000 * timeout_seconds)}ms"})
    result = yield from operation
    yield COMMIT
    return result
