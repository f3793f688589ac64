"""Statements that dispatch transactions to a queue, on the framework's connections and on the caller's own.

An outbox is a dispatch in the caller's own database transaction: the message exists if and only if that commits.

The caller's connection may be one of psycopg, SQLAlchemy, asyncpg or Django. The module imports none of these
libraries: a caller that passes a connection has already loaded its library.

A library prepares a statement if it lets the server plan it once per connection and reuse the plan. psycopg does so for
frequent statements, asyncpg always.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.payload_json import to_json
from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction

_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")


class ParamStyle(StrEnum):
    """The placeholder style of a library."""

    #: The hash of an enum member takes longer than the lookup in the cache of rendered statements.
    __hash__ = str.__hash__

    #: ``%(name)s`` and a mapping: psycopg, Django.
    PSYCOPG = "psycopg"
    #: ``:name`` and a mapping: the text() of SQLAlchemy.
    SQLALCHEMY = "sqlalchemy"
    #: ``$1`` and positional values.
    ASYNCPG = "asyncpg"
    DJANGO = "django"


#: Known connection classes, by library and class name: the style, and whether the connection is async.
_CONNECTION_STYLES: Final = {
    ("psycopg", "Connection"): (ParamStyle.PSYCOPG, False),
    ("psycopg", "AsyncConnection"): (ParamStyle.PSYCOPG, True),
    ("sqlalchemy", "Connection"): (ParamStyle.SQLALCHEMY, False),
    ("sqlalchemy", "Session"): (ParamStyle.SQLALCHEMY, False),
    ("sqlalchemy", "scoped_session"): (ParamStyle.SQLALCHEMY, False),
    ("sqlalchemy", "AsyncConnection"): (ParamStyle.SQLALCHEMY, True),
    ("sqlalchemy", "AsyncSession"): (ParamStyle.SQLALCHEMY, True),
    ("sqlalchemy", "async_scoped_session"): (ParamStyle.SQLALCHEMY, True),
    ("asyncpg", "Connection"): (ParamStyle.ASYNCPG, True),
    ("asyncpg", "PoolConnectionProxy"): (ParamStyle.ASYNCPG, True),
    ("django", "BaseDatabaseWrapper"): (ParamStyle.DJANGO, False),
    ("django", "ConnectionProxy"): (ParamStyle.DJANGO, False),
}
#: Module constants, because the lookup of an enum member is slow and every dispatch needs these.
_PSYCOPG, _SQLALCHEMY, _ASYNCPG, _DJANGO = ParamStyle
#: The transaction status of psycopg for a connection without an open database transaction.
_IDLE_STATUS: Final = 0
#: Connection classes whose style is cached; a program has two or three.
_STYLE_CACHE_SIZE: Final = 32


class SqlTemplate(NamedTuple):
    """A statement for any library, with placeholders of the form {name}."""

    text: str
    #: The variant for a library that prepares statements: its length does not matter, because it is planned once.
    prepared: str | None = None


class Statement(NamedTuple):
    """A statement and its parameters, ready for ``execute(*statement)`` or the library's equivalent."""

    sql: str
    parameters: Mapping[str, Any] | Sequence[Any]


def render(
    template: SqlTemplate, parameters: Mapping[str, Any], style: ParamStyle, *, prepares: bool = False
) -> Statement:
    """Render *template* in *style*; *prepares* says whether the library will prepare it, as asyncpg always does.

    >>> render(SqlTemplate("select {b}, {a}, {b}"), {"a": 1, "b": 2}, ParamStyle.ASYNCPG)
    Statement(sql='select $1, $2, $1', parameters=(2, 1))
    """
    sql, names = _render_cached(template, style, prepares or style is _ASYNCPG)
    if style is _ASYNCPG:
        return Statement(sql, tuple([parameters[name] for name in names]))
    return Statement(sql, {name: parameters[name] for name in names})


@cache
def _render_cached(template: SqlTemplate, style: ParamStyle, prepares: bool, /) -> tuple[str, tuple[str, ...]]:  # noqa: FBT001 - see execute_on_async
    """Return the statement, and its parameter names in the order of their numbers."""
    text = template.prepared if prepares and template.prepared is not None else template.text
    names = tuple(dict.fromkeys(_PLACEHOLDER.findall(text)))
    if style is _ASYNCPG:
        return _PLACEHOLDER.sub(lambda match: f"${names.index(match[1]) + 1}", text), names
    return _PLACEHOLDER.sub(r":\1" if style is _SQLALCHEMY else r"%(\1)s", text), names


def execute_on(connection: Any, template: SqlTemplate, parameters: Mapping[str, Any]) -> list[Any]:
    """Execute on the caller's sync connection, in its open database transaction; return the rows."""
    style = _detect_style(connection, expects_async=False)
    sql, values = render(template, parameters, style, prepares=style is _PSYCOPG and _can_prepare(connection))
    if style is _DJANGO:
        _check_open(connection, is_open=connection.in_atomic_block or not connection.get_autocommit())
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
            return list(cursor.fetchall())
    if style is _PSYCOPG:
        _check_open(connection, is_open=_is_open(connection))
        cursor = connection.execute(sql, values)
        return list(cursor.fetchall()) if cursor.description else []
    with _hide_parameters():
        # connection() of a session starts the same database transaction that execute() would start.
        core_connection = connection.connection() if callable(connection.connection) else connection
        _check_open(connection, is_open=not _is_autocommit(core_connection))
        return list(connection.execute(_to_text_clause(sql), values).fetchall())


async def execute_on_async(connection: Any, template: SqlTemplate, parameters: Mapping[str, Any]) -> list[Any]:
    """Execute on the caller's async connection, in its open database transaction; return the rows."""
    style = _detect_style(connection, expects_async=True)
    if style is _ASYNCPG:
        if not connection.is_in_transaction():
            _check_open(connection, is_open=False)
        sql, names = _render_cached(template, style, True)  # noqa: FBT003 - a cached call is slower by keyword
        rows: list[Any] = await connection.fetch(sql, *[parameters[name] for name in names])
        return rows
    sql, values = render(template, parameters, style, prepares=style is _PSYCOPG and _can_prepare(connection))
    if style is _PSYCOPG:
        _check_open(connection, is_open=_is_open(connection))
        cursor = await connection.execute(sql, values)
        return list(await cursor.fetchall()) if cursor.description else []
    with _hide_parameters():
        core_connection = connection if hasattr(connection, "sync_connection") else await connection.connection()
        _check_open(connection, is_open=not _is_autocommit(core_connection.sync_connection))
        return list((await connection.execute(_to_text_clause(sql), values)).fetchall())


def _detect_style(connection: object, *, expects_async: bool) -> ParamStyle:
    """Return the style of the library of *connection*; checked before executing, because that may commit."""
    connection_type: Any = type(connection)
    style, is_async = _classify(connection_type)
    if style is not None and is_async is expects_async:
        return style
    name = connection_type.__qualname__
    if style is None:
        raise ConfigurationError(
            f"a {name} is not a connection of psycopg, SQLAlchemy, asyncpg or Django; "
            "dispatch_statement(), or statement() of a job client, returns the statement and its parameters for any "
            "other library"
        )
    raise ConfigurationError(
        f"a {name} is an async connection; use the method whose name ends in _async"
        if is_async
        else f"a {name} is a sync connection; use the method without _async in its name"
    )


@lru_cache(_STYLE_CACHE_SIZE)
def _classify(connection_type: type) -> tuple[ParamStyle | None, bool]:
    """Return the style of such connections, and whether they are async."""
    for base in connection_type.__mro__:
        entry = _CONNECTION_STYLES.get((base.__module__.partition(".")[0], base.__name__))
        if entry is not None:
            return entry
    return None, False


def _can_prepare(connection: Any) -> bool:
    """Return whether psycopg prepares frequent statements on this connection; behind a pooler that is off."""
    return connection.prepare_threshold is not None


def _is_open(connection: Any) -> bool:
    """Return whether psycopg is inside a database transaction, or begins one automatically."""
    return not connection.autocommit or connection.info.transaction_status != _IDLE_STATUS


def _is_autocommit(connection: Any) -> bool:
    """Return whether SQLAlchemy has set the driver to commit each statement."""
    return getattr(connection.connection.dbapi_connection, "autocommit", False) is True


def _check_open(connection: object, *, is_open: bool) -> None:
    if not is_open:
        raise ConfigurationError(
            f"no database transaction is open on this {type(connection).__qualname__}: it commits each statement "
            "automatically, so related changes would not be atomic; begin a transaction first"
        )


@contextmanager
def _hide_parameters() -> Iterator[None]:
    """Hide the parameters in errors of SQLAlchemy, which contain payloads and would be shown otherwise."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "hide_parameters"):
            error.hide_parameters = True
        raise


def _to_text_clause(sql: str) -> Any:
    return sys.modules["sqlalchemy"].text(sql)


# -- dispatch ---------------------------------------------------------------------------------------

# Casts are written out, because some libraries parse a colon as the start of a parameter name.
_BY_FUNCTION: Final = """
select ergon.put(
    cast({queue} as text), cast({id} as text), cast(cast({headers} as text) as jsonb), cast({body} as bytea),
    cast({key} as text), cast({priority} as smallint)
)
"""
#: The body of the function, for a queue whose number is known. With a cached plan it saves the call and the lookup of
#: the name; without one it would be planned for every message, unlike the function.
_BY_INSERT: Final = """
insert into ergon.ready (queue, rank, transaction_id, key, headers, body)
values (
    case
        when exists (
            select 1 from ergon.listener s where s.queue = cast({number} as integer) and s.until > now()
        )
        then ergon.notify_listeners(cast({number} as integer)) else cast({number} as integer)
    end,
    - cast({priority} as smallint), cast({id} as text), cast({key} as text), cast(cast({headers} as text) as jsonb),
    cast({body} as bytea)
)
"""
ONE_BY_NUMBER: Final = SqlTemplate(_BY_FUNCTION, _BY_INSERT)
ONE_BY_NAME: Final = SqlTemplate(_BY_FUNCTION)
MANY_BY_NAME: Final = SqlTemplate("""
select ergon.put_many(
    cast({queue} as text), cast({ids} as text[]), cast(cast({headers} as text[]) as jsonb[]),
    cast({bodies} as bytea[]), cast({keys} as text[]), cast({priorities} as smallint[])
)
""")
#: Messages of which some are due later: these are inserted like deferred ones, and become due by the server's clock.
#: The time is that of the execution, because the caller's database transaction may have begun long before. Their key is
#: left out until they are due (``sql.PROMOTE``): it would block the later messages of the key for all that time.
DELAYED_BY_NAME: Final = SqlTemplate("""
with queue as materialized (
    select coalesce(
        (select id from ergon.queue where name = cast({queue} as text)), ergon.create_queue(cast({queue} as text))
    ) as id
),
given as materialized (
    select nextval('ergon.ready_id_seq') as id, q.id as queue, g.*,
        clock_timestamp() + g.delay * interval '1 second' as due_at
    from queue q, unnest(
        cast({ids} as text[]), cast(cast({headers} as text[]) as jsonb[]), cast({bodies} as bytea[]),
        cast({keys} as text[]), cast({priorities} as smallint[]), cast({delays} as float8[])
    ) as g(transaction_id, headers, body, key, priority, delay)
),
fresh as (
    insert into ergon.ready (id, queue, rank, transaction_id, key, headers, body)
    select id, queue, -priority, transaction_id, key, headers, body from given where delay <= 0
),
contents as (
    insert into ergon.content (id, created_at, queue, priority, transaction_id, headers, body)
    select id, due_at, queue, priority, transaction_id, headers, body from given where delay > 0
),
redeliveries as (
    insert into ergon.redelivery (id, due_at, queue) select id, due_at, queue from given where delay > 0
)
select pg_notify('ergon', cast(q.id as text) || ' ' || cast(m.delay as text))
from queue q cross join (select min(g.delay) as delay from given g group by g.delay > 0) as m
where exists (select 1 from ergon.listener s where s.queue = q.id and s.until > now())
""")


class DispatchStatement(NamedTuple):
    """A statement template with its parameters, not yet rendered for a library."""

    template: SqlTemplate
    parameters: dict[str, Any]
    #: The ids of the transactions, in order.
    ids: list[str]


def build_dispatch(
    queue: str, number: int | None, transactions: Sequence[Transaction], *, codec: Codec, priorities: Sequence[int]
) -> DispatchStatement:
    """Build the statement that inserts *transactions* into *queue*; *number* is its id in the database, if known.

    Raise UnencodableError if a transaction cannot be encoded.
    """
    now = time.time()
    delays = [transaction.compute_delay(now) for transaction in transactions]
    if len(transactions) == 1 and not delays[0]:
        # By far the most frequent case; arrays of one element take as long as arrays of ten.
        (transaction,) = transactions
        body, envelope = codec.encode(transaction)
        parameters = {
            "queue": queue,
            "number": number,
            "id": transaction.id,
            "headers": to_json(envelope),
            "body": body,
            "key": transaction.key,
            "priority": priorities[0],
        }
        return DispatchStatement(ONE_BY_NAME if number is None else ONE_BY_NUMBER, parameters, [transaction.id])
    encoded = [codec.encode(transaction) for transaction in transactions]
    ids = [transaction.id for transaction in transactions]
    columns: dict[str, Any] = {
        "queue": queue,
        "ids": ids,
        "headers": [to_json(headers) for _, headers in encoded],
        "bodies": [body for body, _ in encoded],
        "keys": [transaction.key for transaction in transactions],
        "priorities": list(priorities),
    }
    if any(delays):
        return DispatchStatement(DELAYED_BY_NAME, {**columns, "delays": delays}, ids)
    return DispatchStatement(MANY_BY_NAME, columns, ids)
