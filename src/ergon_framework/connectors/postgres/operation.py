"""Operation: a piece of database work, written once for both flavours.

An operation is a generator that yields queries and is sent their rows. Who performs them, on a
thread or on an event loop, is not its business; what it decides is the same for both.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from psycopg import AsyncConnection, Connection
from psycopg.rows import TupleRow

R = TypeVar("R")


class Query(NamedTuple):
    """One statement with its parameters."""

    sql: str
    parameters: Mapping[str, Any] | None = None


Rows: TypeAlias = list[TupleRow]
Operation: TypeAlias = Generator[Query, Rows, R]

BEGIN: Final = Query("begin")
COMMIT: Final = Query("commit")
ROLLBACK: Final = Query("rollback")


def perform(connection: Connection[TupleRow], operation: Operation[R]) -> R:
    """Run *operation* on *connection*; whatever a query raises is raised at its yield."""
    try:
        query = next(operation)
        while True:
            try:
                cursor = connection.execute(query.sql, query.parameters, binary=True)
                rows = cursor.fetchall() if cursor.description else []
            except BaseException as error:  # noqa: BLE001 - handed to the operation, which hands it on
                query = operation.throw(error)
            else:
                query = operation.send(rows)
    except StopIteration as stop:
        value: R = stop.value
        return value


async def perform_async(connection: AsyncConnection[TupleRow], operation: Operation[R]) -> R:
    """The same without blocking the event loop."""
    try:
        query = next(operation)
        while True:
            try:
                cursor = await connection.execute(query.sql, query.parameters, binary=True)
                rows = await cursor.fetchall() if cursor.description else []
            except BaseException as error:  # noqa: BLE001 - handed to the operation, which hands it on
                query = operation.throw(error)
            else:
                query = operation.send(rows)
    except StopIteration as stop:
        value: R = stop.value
        return value
