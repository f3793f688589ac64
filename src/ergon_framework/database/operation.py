"""Operation: database work that is written once for the sync and the async variant.

An operation is a generator that yields queries and receives their rows. The caller runs it on a thread or on an event
loop; the operation's decisions are the same for both.
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


class PreparedTextQuery(NamedTuple):
    """One statement with numbered placeholders, whose parameters are text and whose answer is one text.

    For statements of the hot path: without the driver's conversions they take half the time.
    """

    sql: str
    values: tuple[str | None, ...]


Rows: TypeAlias = list[TupleRow]
Operation: TypeAlias = Generator[Query | PreparedTextQuery, Rows, R]

BEGIN: Final = Query("begin")
COMMIT: Final = Query("commit")
ROLLBACK: Final = Query("rollback")

_NO_SUCH_STATEMENT: Final = b"26000"


def _has_rows(cursor: Cursor[TupleRow] | AsyncCursor[TupleRow]) -> bool:
    """Return whether there are rows to fetch; from the result itself, because each description is a new object."""
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def _execute(connection: Connection[TupleRow], query: Query) -> Rows:
    cursor = connection.execute(query.sql, query.parameters, binary=True)
    return cursor.fetchall() if _has_rows(cursor) else []


#: The names of the statements that are prepared on each connection.
_statement_names: Final[WeakKeyDictionary[Connection[TupleRow] | AsyncConnection[TupleRow], dict[str, bytes]]] = (
    WeakKeyDictionary()
)
_statement_numbers: Final = count()


def _execute_text(
    connection: Connection[TupleRow] | AsyncConnection[TupleRow], query: PreparedTextQuery
) -> PQGen[Rows]:
    """Execute *query* without the driver's conversions; yields for the connection's own ``wait``."""
    values: list[Any] = [None if value is None else value.encode() for value in query.values]
    pgconn = connection.pgconn
    if connection.prepare_threshold is None:  # a pooler: a prepared statement may be in another client's session
        pgconn.send_query_params(query.sql.encode(), values)
        return _to_rows(connection, (yield from generators.execute(pgconn)))
    names = _statement_names.get(connection)
    if names is None:
        names = _statement_names[connection] = {}
    if query.sql in names:
        pgconn.send_query_prepared(names[query.sql], values)
        results = yield from generators.execute(pgconn)
        if not _is_unknown_statement(connection, results):
            return _to_rows(connection, results)
        names.clear()
    # Always a new name: the server may still know statements that were forgotten here.
    name = b"ergon_%d" % next(_statement_numbers)
    pgconn.send_prepare(name, query.sql.encode())
    _to_rows(connection, (yield from generators.execute(pgconn)))
    names[query.sql] = name
    pgconn.send_query_prepared(name, values)
    return _to_rows(connection, (yield from generators.execute(pgconn)))


def _is_unknown_statement(
    connection: Connection[TupleRow] | AsyncConnection[TupleRow], results: list[PGresult]
) -> bool:
    """Return whether the server knows no statement of that name: the driver deallocates all after a rollback."""
    result = results[-1]
    return (
        result.status == ExecStatus.FATAL_ERROR
        and result.error_field(DiagnosticField.SQLSTATE) == _NO_SUCH_STATEMENT
        and connection.pgconn.transaction_status == TransactionStatus.IDLE
    )


def _to_rows(connection: Connection[TupleRow] | AsyncConnection[TupleRow], results: list[PGresult]) -> Rows:
    result = results[-1]
    if result.status == ExecStatus.TUPLES_OK:
        value = result.get_value(0, 0)
        return [(None if value is None else value.decode(),)]
    if result.status == ExecStatus.COMMAND_OK:
        return []
    raise error_from_result(result, encoding=connection.info.encoding)


def run_operation(connection: Connection[TupleRow], operation: Operation[R]) -> R:
    """Run *operation* on *connection*; an error of a query is raised at its yield."""
    try:
        query = next(operation)
        while True:
            try:
                if isinstance(query, PreparedTextQuery):
                    rows = connection.wait(_execute_text(connection, query))
                else:
                    rows = _execute(connection, query)
            except BaseException as error:  # noqa: BLE001 - thrown into the operation, which raises it again
                query = operation.throw(error)
            else:
                query = operation.send(rows)
    except StopIteration as stop:
        value: R = stop.value
        return value


async def run_operation_async(connection: AsyncConnection[TupleRow], operation: Operation[R]) -> R:
    """Run *operation* on an async connection, without blocking the event loop."""
    try:
        query = next(operation)
        while True:
            try:
                if isinstance(query, PreparedTextQuery):
                    rows = await connection.wait(_execute_text(connection, query))
                else:
                    cursor = await connection.execute(query.sql, query.parameters, binary=True)
                    rows = await cursor.fetchall() if _has_rows(cursor) else []
            except BaseException as error:  # noqa: BLE001 - thrown into the operation, which raises it again
                query = operation.throw(error)
            else:
                query = operation.send(rows)
    except StopIteration as stop:
        value: R = stop.value
        return value


# -- snapshots --------------------------------------------------------------------------------------

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
