"""Callers: a statement on a connection that is not ours, whichever library it belongs to.

No library is imported for it: whoever hands over a connection has its library loaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

from ergon_framework.errors import ConfigurationError

_PLACE: Final = re.compile(r"\{(\w+)\}")


class Style(StrEnum):
    """How a library writes its placeholders."""

    #: An enumeration's own takes longer than looking up what was worded before.
    __hash__ = str.__hash__

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
#: Looked up once: members of an enumeration are found slowly, and these are asked for at every dispatch.
_PSYCOPG, _SQLALCHEMY, _ASYNCPG, _DJANGO = Style
#: What psycopg calls a connection on which no database transaction is open.
_IDLE: Final = 0
#: How many kinds of connection are remembered; a program has two or three.
_KNOWN: Final = 32


class Template(NamedTuple):
    """A statement for any library; its placeholders are written {so}."""

    text: str
    #: The same where the library prepares what it executes: as long as it likes, because it is planned once.
    prepared: str | None = None


class Statement(NamedTuple):
    """A statement and its parameters, ready to be executed: ``execute(*statement)`` or as the library wants it."""

    sql: str
    parameters: Mapping[str, Any] | Sequence[Any]


def rendered(template: Template, parameters: Mapping[str, Any], style: Style, *, prepares: bool = False) -> Statement:
    """*template* in the words of *style*; *prepares* where the library will prepare it, as asyncpg always does.

    >>> rendered(Template("select {b}, {a}, {b}"), {"a": 1, "b": 2}, Style.ASYNCPG)
    Statement(sql='select $1, $2, $1', parameters=(2, 1))
    """
    sql, order = _worded(template, style, prepares or style is _ASYNCPG)
    if style is _ASYNCPG:
        return Statement(sql, tuple([parameters[name] for name in order]))
    return Statement(sql, {name: parameters[name] for name in order})


@cache
def _worded(template: Template, style: Style, prepares: bool, /) -> tuple[str, tuple[str, ...]]:  # noqa: FBT001 - see run_async
    """The statement, and its names in the order of their numbers."""
    text = template.prepared if prepares and template.prepared is not None else template.text
    order = tuple(dict.fromkeys(_PLACE.findall(text)))
    if style is _ASYNCPG:
        return _PLACE.sub(lambda found: f"${order.index(found[1]) + 1}", text), order
    return _PLACE.sub(r":\1" if style is _SQLALCHEMY else r"%(\1)s", text), order


def run(connection: Any, template: Template, parameters: Mapping[str, Any]) -> list[Any]:
    """Execute on the caller's sync connection, inside the database transaction that is open there; the rows."""
    style = _style(connection, awaited=False)
    sql, given = rendered(template, parameters, style, prepares=style is _PSYCOPG and _prepares(connection))
    if style is _DJANGO:
        _check_open(connection, opened=connection.in_atomic_block or not connection.get_autocommit())
        with connection.cursor() as cursor:
            cursor.execute(sql, given)
            return list(cursor.fetchall())
    if style is _PSYCOPG:
        _check_open(connection, opened=_is_open(connection))
        cursor = connection.execute(sql, given)
        return list(cursor.fetchall()) if cursor.description else []
    with _discreetly():
        # A session's connection is its own: asking for it begins what executing would begin.
        plain = connection.connection() if callable(connection.connection) else connection
        _check_open(connection, opened=not _commits_each(plain))
        return list(connection.execute(_text(sql), given).fetchall())


async def run_async(connection: Any, template: Template, parameters: Mapping[str, Any]) -> list[Any]:
    """The same on the caller's async connection."""
    style = _style(connection, awaited=True)
    if style is _ASYNCPG:
        if not connection.is_in_transaction():
            _check_open(connection, opened=False)
        sql, order = _worded(template, style, True)  # noqa: FBT003 - a cached call is slower by keyword
        rows: list[Any] = await connection.fetch(sql, *[parameters[name] for name in order])
        return rows
    sql, given = rendered(template, parameters, style, prepares=style is _PSYCOPG and _prepares(connection))
    if style is _PSYCOPG:
        _check_open(connection, opened=_is_open(connection))
        cursor = await connection.execute(sql, given)
        return list(await cursor.fetchall()) if cursor.description else []
    with _discreetly():
        plain = connection if hasattr(connection, "sync_connection") else await connection.connection()
        _check_open(connection, opened=not _commits_each(plain.sync_connection))
        return list((await connection.execute(_text(sql), given)).fetchall())


def _style(connection: object, *, awaited: bool) -> Style:
    """The style of the library that *connection* belongs to; before anything is executed, because it may commit."""
    kind: Any = type(connection)
    style, is_async = _kind(kind)
    if style is not None and is_async is awaited:
        return style
    name = kind.__qualname__
    if style is None:
        raise ConfigurationError(
            f"a {name} is no connection of psycopg, SQLAlchemy, asyncpg or Django; "
            "statement() gives the statement and its parameters for any other library"
        )
    raise ConfigurationError(
        f"a {name} is an async connection; use the method whose name ends in _async"
        if is_async
        else f"a {name} is a sync connection; use the method without _async in its name"
    )


@lru_cache(_KNOWN)
def _kind(kind: type) -> tuple[Style | None, bool]:
    """The style of such connections, and whether they are awaited."""
    for known in kind.__mro__:
        found = _KINDS.get((known.__module__.partition(".")[0], known.__name__))
        if found is not None:
            return found
    return None, False


def _prepares(connection: Any) -> bool:
    """Whether psycopg prepares on this connection what it executes often; behind a pooler it is told not to."""
    return connection.prepare_threshold is not None


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
