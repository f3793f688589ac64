"""Translate errors of the driver into errors of the framework, without quoting what was sent."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import errors

from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError

#: SQLSTATE, or its class, of a server that is reachable and cannot serve at present, with the cause. Callers wait
#: for it as for an unreachable server. The longest match decides.
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
#: Message fragments of a server that rejects a new connection, for which the driver knows no SQLSTATE, with the cause.
#: Before version 16 it does not say why it could not write its init file; a full disk is the most frequent reason.
_UNAVAILABLE_AT_CONNECT: Final = {
    "No space left on device": "the disk of the database is full",
    "could not write init file": "the disk of the database is full, or cannot be written for another reason",
}
_MISSING_SCHEMA_ERRORS: Final = (
    errors.InvalidSchemaName,
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedFunction,
)
_ACCESS_ERRORS: Final = (
    errors.InvalidPassword,
    errors.InvalidAuthorizationSpecification,
    errors.InvalidCatalogName,
    errors.InsufficientPrivilege,
)

#: Longest part of the driver's message that is passed on.
_MAX_MESSAGE_CHARS: Final = 200


class ServerTimeout(ConnectionLostError, psycopg.OperationalError):
    """The server did not answer in time; the statement may still be executed."""

    def __init__(self) -> None:
        super().__init__("the server did not answer in time")


def translate_error(error: psycopg.Error, *, is_broken: bool, error_type: type[ErgonError] = ErgonError) -> ErgonError:
    """Translate *error*; *is_broken* says that the connection was lost. Any other error becomes an *error_type*."""
    if isinstance(error, _MISSING_SCHEMA_ERRORS):
        return ConfigurationError(
            f"database schema is missing or outdated ({_get_message(error)}); run: ergon db upgrade"
        )
    if isinstance(error, _ACCESS_ERRORS):
        return ConfigurationError(f"the database rejected access: {_get_message(error)}")
    if cause := get_unavailability_cause(error):
        return ConnectionLostError(f"{cause}: {_get_message(error)}")
    if is_broken:
        return ConnectionLostError(f"the database is unavailable: {_get_message(error)}")
    return error_type(f"the database answered with {type(error).__name__}: {_get_message(error)}")


def get_unavailability_cause(error: psycopg.Error) -> str:
    """Return why the server cannot serve at present, by the SQLSTATE of *error*; empty where that is not the cause."""
    sqlstate = error.sqlstate
    if sqlstate is None:
        return next((cause for fragment, cause in _UNAVAILABLE_AT_CONNECT.items() if fragment in str(error)), "")
    return _UNAVAILABLE.get(sqlstate) or _UNAVAILABLE.get(sqlstate[:2], "")


def _get_message(error: psycopg.Error) -> str:
    # The primary message only: the detail of an error quotes the affected row.
    message = error.diag.message_primary or str(error).partition("\n")[0] or type(error).__name__
    return message[:_MAX_MESSAGE_CHARS]
