"""Callers: a statement on a connection that is not ours, whichever library it belongs to.

No library is imported for it: whoever hands over a connection has its library loaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from typing import Any, Final, NamedTuple

from ergon_framework.errors import ConfigurationError

_PLACE: Final = re.compile(r"\{(\w+)\}")


class Style(StrEnum):
    """How a library writes its placeholders."""

    #: ``%(name)s`` and a mapping: psycopg, Django.
    PSYCOPG = "psycopg"
    #: ``:name`` and a mapping: the text() of SQLAlchemy.
    SQLALCHEMY = "sqlalchemy"
    #: ``$1`` and values in order.
    ASYNCPG = "asyncpg"
    DJANGO = "django"


#: Every kind of connection that is known: its library and its class, with its style and whether it is awaited.
_KINDS: Final = {
    ("psycopg", "Connection"): (Style.PSYCOPG, False),
    ("psycopg", "AsyncConnection"): (Style.PSYCOPG, True),
    ("sqlalchemy", "Connection"): (Style.SQLALCHEMY, False),
    ("sqlalchemy", "Session"): (Style.SQLALCHEMY, False),
    ("sqlalchemy", "scoped_session"): (Style.SQLALCHEMY, False),
    ("sqlalchemy", "AsyncConnection"): (Style.SQLALCHEMY, True),
    ("sqlalchemy", "AsyncSession"): (Style.SQLALCHEMY, True),
    ("sqlalchemy", "async_scoped_session"): (Style.SQLALCHEMY, True),
    ("asyncpg", "Connection"): (Style.ASYNCPG, True),
    ("asyncpg", "PoolConnectionProxy"): (Style.ASYNCPG, True),
    ("django", "BaseDatabaseWrapper"): (Style.DJANGO, False),
    ("django", "ConnectionProxy"): (Style.DJANGO, False),
}
#: What psycopg calls a connection on which no database transaction is open.
_IDLE: Final = 0


class Statement(NamedTuple):
    """A statement and its parameters, ready to be executed: ``execute(*statement)`` or as the library wants it."""

    sql: str
    parameters: Mapping[str, Any] | Sequence[Any]


def rendered(template: str, parameters: Mapping[str, Any], style: Style) -> Statement:
    """*template*, whose placeholders are written {so}, in the words of *style*.

    >>> rendered("select {b}, {a}, {b}", {"a": 1, "b": 2}, Style.ASYNCPG)
    Statement(sql='select $1, $2, $1', parameters=(2, 1))
    """
    sql, order = _worded(template, style)
    return Statement(sql, tuple(parameters[name] for name in order) if style is Style.ASYNCPG else parameters)


@cache
def _worded(template: str, style: Style) -> tuple[str, tuple[str, ...]]:
    """The statement, and its names in the order of their numbers."""
    order = tuple(dict.fromkeys(_PLACE.findall(template)))
    if style is Style.ASYNCPG:
        return _PLACE.sub(lambda found: f"${order.index(found[1]) + 1}", template), order
    return _PLACE.sub(r":\1" if style is Style.SQLALCHEMY else r"%(\1)s", template), order


def run(connection: Any, template: str, parameters: Mapping[str, Any]) -> list[Any]:
    """Execute on the caller's sync connection, inside the database transaction that is open there; the rows."""
    style = _style(connection, awaited=False)
    sql, given = rendered(template, parameters, style)
    if style is Style.DJANGO:
        _check_open(connection, opened=connection.in_atomic_block or not connection.get_autocommit())
        with connection.cursor() as cursor:
            cursor.execute(sql, given)
            return list(cursor.fetchall())
    if style is Style.PSYCOPG:
        _check_open(connection, opened=_is_open(connection))
        return list(connection.execute(sql, given).fetchall())
    with _discreetly():
        # A session's connection is its own: asking for it begins what executing would begin.
        plain = connection.connection() if callable(connection.connection) else connection
        _check_open(connection, opened=not _commits_each(plain))
        return list(connection.execute(_text(sql), given).fetchall())


async def run_async(connection: Any, template: str, parameters: Mapping[str, Any]) -> list[Any]:
    """The same on the caller's async connection."""
    style = _style(connection, awaited=True)
    sql, given = rendered(template, parameters, style)
    if style is Style.ASYNCPG:
        _check_open(connection, opened=connection.is_in_transaction())
        return list(await connection.fetch(sql, *given))
    if style is Style.PSYCOPG:
        _check_open(connection, opened=_is_open(connection))
        return list(await (await connection.execute(sql, given)).fetchall())
    with _discreetly():
        plain = connection if hasattr(connection, "sync_connection") else await connection.connection()
        _check_open(connection, opened=not _commits_each(plain.sync_connection))
        return list((await connection.execute(_text(sql), given)).fetchall())


def _style(connection: object, *, awaited: bool) -> Style:
    """The style of the library that *connection* belongs to; before anything is executed, because it may commit."""
    name = type(connection).__qualname__
    for kind in type(connection).__mro__:
        style, is_async = _KINDS.get((kind.__module__.partition(".")[0], kind.__name__), (None, False))
        if style is None:
            continue
        if is_async is not awaited:
            raise ConfigurationError(
                f"a {name} is an async connection; use the method whose name ends in _async"
                if is_async
                else f"a {name} is a sync connection; use the method without _async in its name"
            )
        return style
    raise ConfigurationError(
        f"a {name} is no connection of psycopg, SQLAlchemy, asyncpg or Django; "
        "statement() gives the statement and its parameters for any other library"
    )


def _is_open(connection: Any) -> bool:
    """Whether psycopg is inside a database transaction, or begins one by itself."""
    return not connection.autocommit or connection.info.transaction_status != _IDLE


def _commits_each(connection: Any) -> bool:
    """Whether SQLAlchemy has told the driver to commit each statement."""
    return getattr(connection.connection.dbapi_connection, "autocommit", False) is True


def _check_open(connection: object, *, opened: bool) -> None:
    if not opened:
        raise ConfigurationError(
            f"no database transaction is open on this {type(connection).__qualname__}: it commits each statement by "
            "itself, so what belongs together would not stay together; begin one first"
        )


@contextmanager
def _discreetly() -> Iterator[None]:
    """An error of SQLAlchemy shows the parameters of its statement unless it is told not to: ours hold payloads."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "hide_parameters"):
            error.hide_parameters = True
        raise


def _text(sql: str) -> Any:
    return sys.modules["sqlalchemy"].text(sql)
