"""Failures: what an error of the driver means to whoever asked, told without quoting what was sent."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import errors

from ergon_framework.errors import ConfigurationError, ConnectionLost, ErgonError

#: SQLSTATE, or its class, of a server that is there and cannot serve at present, with the cause. It is waited for like
#: a server that is out of reach. The longest match decides.
_UNAVAILABLE: Final = {
    "53": "the database is short of resources",
    "53100": "the disk of the database is full",
    "53200": "the database is out of memory",
    "53300": "the database accepts no more connections",
    "53400": "the database has reached a limit of its configuration",
    "58000": "the database has an error of its operating system",
    "58030": "the database cannot read or write its files",
    "25006": "the database is read-only, as a standby is",
    "55P03": "the database did not grant a lock in time",
    "57014": "the database cancelled the statement",
    "57P01": "the database is being stopped",
    "57P02": "the database is restarting after a crash",
    "57P03": "the database is starting or stopping",
    "57P05": "the database ended the idle session",
}
#: Words of a server that refuses a new connection, for which the driver knows no SQLSTATE, with the cause. A server
#: before version 16 does not say why it could not write its init file; a full disk is by far the most frequent reason.
_UNAVAILABLE_AT_CONNECT: Final = {
    "No space left on device": "the disk of the database is full",
    "could not write init file": "the disk of the database is full, or cannot be written for another reason",
}
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
    if cause := unavailability_of(error):
        return ConnectionLost(f"{cause}: {_words(error)}")
    if broken:
        return ConnectionLost(f"the database is out of reach: {_words(error)}")
    return other(f"the database answered with {type(error).__name__}: {_words(error)}")


def unavailability_of(error: psycopg.Error) -> str:
    """Return why the server cannot serve at present, by the SQLSTATE of *error*; empty where that is not the cause."""
    state = error.sqlstate
    if state is None:
        return next((cause for words, cause in _UNAVAILABLE_AT_CONNECT.items() if words in str(error)), "")
    return _UNAVAILABLE.get(state) or _UNAVAILABLE.get(state[:2], "")


def _words(error: psycopg.Error) -> str:
    # The primary message only: the detail of an error quotes the row that it is about.
    words = error.diag.message_primary or str(error).partition("\n")[0] or type(error).__name__
    return words[:_LONGEST]
