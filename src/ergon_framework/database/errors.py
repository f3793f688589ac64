"""Translate errors of the driver into errors of the framework, without quoting what was sent."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import errors

from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError, error_message

if TYPE_CHECKING:
    from ergon_framework.connectors.login import BrokerLogin

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
#: SQLSTATE of a server that has become a standby, or stops: its other connections are useless too.
_SERVER_CHANGED: Final = frozenset({"25006", "57P01", "57P02", "57P03"})
#: Message fragments of a server that refuses a login, because the driver knows no SQLSTATE of a failed connection. Two
#: refusals stay a lost connection: in another language, and of an LDAP, RADIUS or PAM server, which may be unavailable.
_LOGIN_REFUSALS: Final = (
    "password authentication failed",
    "SASL authentication failed",
    "Peer authentication failed",
    "no password supplied",
    "is not permitted to log in",
    "no pg_hba.conf entry",
)
#: Message fragments of libpq for a server that does not fulfil the request for TLS, with the problem and its remedy.
_TLS_PROBLEMS: Final = {
    "does not support SSL": (
        "the database offers no TLS, which sslmode requires",
        "set ssl, ssl_cert_file and ssl_key_file on the server",
    ),
    "does not match host name": (
        "the certificate of the database is for another host name",
        "use a name of the certificate as host in the address, or issue a certificate for this one",
    ),
    "root certificate": (
        "the file of trusted authorities cannot be used",
        "set sslrootcert in the address to the certificate of the authority that signed the server's",
    ),
    "certificate verify failed": (
        "the certificate of the database is expired or not signed by a trusted authority",
        "renew it, or set sslrootcert in the address to the certificate of the authority that signed it",
    ),
}
#: The start of one failure in the driver's message about several addresses, with host and port as in the address.
_ATTEMPT: Final = re.compile(r"^- host: (.*?, port: .*?), hostaddr: .*?: ", re.MULTILINE)
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
#: Failed attempts of one connection that a message names.
_MAX_FAILURES: Final = 3


class ServerTimeout(ConnectionLostError, psycopg.OperationalError):
    """The server did not answer in time; the statement may still be executed."""

    def __init__(self) -> None:
        super().__init__("the server did not answer in time")


class ConnectFailed(ConnectionLostError, psycopg.OperationalError):
    """No connection could be opened; another attempt may help. Also an error of the driver, for those who catch it."""


class ConnectRejected(ConfigurationError, psycopg.OperationalError):
    """No connection can be opened with this configuration. Also an error of the driver."""


def translate_error(error: psycopg.Error, *, is_broken: bool, error_type: type[ErgonError] = ErgonError) -> ErgonError:
    """Translate *error*; *is_broken* says that the connection was lost. Any other error becomes an *error_type*."""
    if isinstance(error, ConnectFailed | ConnectRejected):
        public_type = ConnectionLostError if isinstance(error, ConnectFailed) else ConfigurationError
        return public_type(str(error))
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


def translate_connect_error(error: psycopg.Error, login: BrokerLogin) -> ConnectFailed | ConnectRejected:
    """Translate *error*, with which no connection could be opened.

    A refused login and a certificate that does not verify are errors of the configuration if every host of the address
    has one: a host that does not answer at present may come back.
    """
    messages = dict.fromkeys(text.partition("\n")[0][:_MAX_MESSAGE_CHARS] for _, text in _list_failures(error))
    message = ", and ".join(list(messages)[:_MAX_FAILURES])
    if _has_every_host(error, _TLS_PROBLEMS):
        problem, remedy = next(text for part, text in _TLS_PROBLEMS.items() if part in str(error))
        return ConnectRejected(f"{problem}: {message}; {remedy}")
    if is_login_refusal(error):
        # Without a remedy after a semicolon: ergon doctor adds the one that names the setting.
        reason = f"the database refused the login (check the user and the password): {message}"
        return to_driver_error(login.refuse(reason))
    cause = get_unavailability_cause(error) or "the database is unavailable"
    return ConnectFailed(f"{cause}: {message}")


def to_driver_error(error: ErgonError) -> ConnectFailed | ConnectRejected:
    """Return *error*, because of which no connection can be opened, as an error of the driver too."""
    kind = ConnectFailed if isinstance(error, ConnectionLostError) else ConnectRejected
    return kind(error_message(error))


def is_login_refusal(error: psycopg.Error) -> bool:
    """Return whether every host that *error* is about has refused the login."""
    return _has_every_host(error, _LOGIN_REFUSALS)


def has_server_changed(error: psycopg.Error) -> bool:
    """Return whether *error* says that the server is a standby now, or stops."""
    return error.sqlstate in _SERVER_CHANGED


def _has_every_host(error: psycopg.Error, fragments: Collection[str]) -> bool:
    """Return whether each host has one of *fragments* in its messages; a host name may have several addresses."""
    if error.sqlstate is not None:
        return False
    failures = _list_failures(error)
    matching = {host for host, text in failures if any(each in text for each in fragments)}
    return matching == {host for host, _ in failures}


def _list_failures(error: psycopg.Error) -> list[tuple[str, str]]:
    """List the server and the message of each attempt to connect; the server is empty if there was one attempt only."""
    first, *others = _ATTEMPT.split(str(error))
    return list(zip(others[::2], others[1::2], strict=True)) or [("", first)]


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
