"""Operation: a piece of database work, written once for both flavours.

An operation is a generator that yields queries and is sent their rows. Who performs them, on a
thread or on an event loop, is not its business; what it decides is the same for both.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import count
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, generators
from psycopg.abc import PQGen
from psycopg.errors import error_from_result
from psycopg.pq import DiagnosticField, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import TupleRow

R = TypeVar("R")


class Query(NamedTuple):
    """One statement with its parameters."""

    sql: str
    parameters: Mapping[str, Any] | None = None


class Text(NamedTuple):
    """One statement, with numbered places, whose parameters are text and whose answer is one text.

    For those that are made for every call: without the driver's conversions they cost half as much.
    """

    sql: str
    values: tuple[str | None, ...]


Rows: TypeAlias = list[TupleRow]
Operation: TypeAlias = Generator[Query | Text, Rows, R]

BEGIN: Final = Query("begin")
COMMIT: Final = Query("commit")
ROLLBACK: Final = Query("rollback")

_NO_SUCH_STATEMENT: Final = b"26000"


def _answers(cursor: Cursor[TupleRow] | AsyncCursor[TupleRow]) -> bool:
    """Whether there are rows to fetch; asked of the result itself, because a description is made anew for each."""
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def _executed(connection: Connection[TupleRow], query: Query) -> Rows:
    cursor = connection.execute(query.sql, query.parameters, binary=True)
    return cursor.fetchall() if _answers(cursor) else []


#: What was prepared on each connection, and under which name.
_prepared: Final[WeakKeyDictionary[Connection[TupleRow] | AsyncConnection[TupleRow], dict[str, bytes]]] = (
    WeakKeyDictionary()
)
_numbers: Final = count()


def _asked(connection: Connection[TupleRow] | AsyncConnection[TupleRow], query: Text) -> PQGen[Rows]:
    """Ask without the driver's conversions; what is yielded is for the connection's own ``wait``."""
    values: list[Any] = [None if value is None else value.encode() for value in query.values]
    line = connection.pgconn
    if connection.prepare_threshold is None:  # a pooler: what is prepared may be somebody else's
        line.send_query_params(query.sql.encode(), values)
        return _answered(connection, (yield from generators.execute(line)))
    known = _prepared.get(connection)
    if known is None:
        known = _prepared[connection] = {}
    if query.sql in known:
        line.send_query_prepared(known[query.sql], values)
        results = yield from generators.execute(line)
        if not _forgotten(connection, results):
            return _answered(connection, results)
        known.clear()
    # Never one that was used before: of what is forgotten here, the server may still know some.
    name = b"ergon_%d" % next(_numbers)
    line.send_prepare(name, query.sql.encode())
    _answered(connection, (yield from generators.execute(line)))
    known[query.sql] = name
    line.send_query_prepared(name, values)
    return _answered(connection, (yield from generators.execute(line)))


def _forgotten(connection: Connection[TupleRow] | AsyncConnection[TupleRow], results: list[PGresult]) -> bool:
    """Whether the server knows no statement of that name: the driver lets go of all of them after a rollback."""
    result = results[-1]
    return (
        result.status == ExecStatus.FATAL_ERROR
        and result.error_field(DiagnosticField.SQLSTATE) == _NO_SUCH_STATEMENT
        and connection.pgconn.transaction_status == TransactionStatus.IDLE
    )


def _answered(connection: Connection[TupleRow] | AsyncConnection[TupleRow], results: list[PGresult]) -> Rows:
    result = results[-1]
    if result.status == ExecStatus.TUPLES_OK:
        found = result.get_value(0, 0)
        return [(None if found is None else found.decode(),)]
    if result.status == ExecStatus.COMMAND_OK:
        return []
    raise error_from_result(result, encoding=connection.info.encoding)


def perform(connection: Connection[TupleRow], operation: Operation[R]) -> R:
    """Run *operation* on *connection*; whatever a query raises is raised at its yield."""
    try:
        query = next(operation)
        while True:
            try:
                if isinstance(query, Text):
                    rows = connection.wait(_asked(connection, query))
                else:
                    rows = _executed(connection, query)
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
                if isinstance(query, Text):
                    rows = await connection.wait(_asked(connection, query))
                else:
                    cursor = await connection.execute(query.sql, query.parameters, binary=True)
                    rows = await cursor.fetchall() if _answers(cursor) else []
            except BaseException as error:  # noqa: BLE001 - handed to the operation, which hands it on
                query = operation.throw(error)
            else:
                query = operation.send(rows)
    except StopIteration as stop:
        value: R = stop.value
        return value
