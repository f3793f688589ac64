"""Failures: what an error of the driver means to whoever asked, told without quoting what was sent."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import errors

from ergon_framework.errors import ConfigurationError, ConnectionLost, ErgonError

#: The server is there but cannot serve: it starts, stops, or has become a standby.
_AWAY: Final = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.IdleSessionTimeout,
    errors.ReadOnlySqlTransaction,
    errors.TooManyConnections,
)
_UNMADE: Final = (errors.InvalidSchemaName, errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedFunction)
_REFUSED: Final = (
    errors.InvalidPassword,
    errors.InvalidAuthorizationSpecification,
    errors.InvalidCatalogName,
    errors.InsufficientPrivilege,
)

#: Longest part of the driver's own words that is passed on.
_LONGEST: Final = 200


class Silent(ConnectionLost, psycopg.OperationalError):
    """The server did not answer in time; what it was told may still happen."""

    def __init__(self) -> None:
        super().__init__("the server did not answer in time")


def translated(error: psycopg.Error, *, broken: bool, other: type[ErgonError] = ErgonError) -> ErgonError:
    """*error* in our words; *broken* when the connection did not survive it. What is none of these is *other*."""
    if isinstance(error, _UNMADE):
        return ConfigurationError(
            f"the database has not the tables that this release needs ({_words(error)}); run: ergon db upgrade"
        )
    if isinstance(error, _REFUSED):
        return ConfigurationError(f"the database refuses: {_words(error)}")
    if broken or isinstance(error, _AWAY):
        return ConnectionLost(f"the database is out of reach: {_words(error)}")
    return other(f"the database answered with {type(error).__name__}: {_words(error)}")


def _words(error: psycopg.Error) -> str:
    # The primary message only: the detail of an error quotes the row that it is about.
    words = error.diag.message_primary or str(error).partition("\n")[0] or type(error).__name__
    return words[:_LONGEST]
