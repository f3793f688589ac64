"""Addresses of databases: connection parameters, the login of an address, and the address that logs may show."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psycopg

from ergon_framework.connectors.credentials import CredentialsSource
from ergon_framework.connectors.login import BrokerLogin
from ergon_framework.database.login import get_configured
from ergon_framework.errors import ConfigurationError

#: Detection of a network failure: an unacknowledged packet after 12 s, an idle connection after 20 s.
KEEPALIVE_OPTIONS: Final = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 12_000,
    "application_name": "ergon",
}
#: The parameters that name a database, and those that name an account in it.
_LOCATION: Final = ("host", "hostaddr", "port", "dbname")
_ACCOUNT: Final = (*_LOCATION, "user")


def connect_options(dsn: str, defaults: Mapping[str, Any] = KEEPALIVE_OPTIONS) -> dict[str, Any]:
    """Return the connection parameters of *dsn*; those in the address take precedence over *defaults*."""
    try:
        return {**defaults, **psycopg.conninfo.conninfo_to_dict(dsn)}
    except psycopg.ProgrammingError:
        # Without the cause, which quotes the address.
        raise ConfigurationError(
            "invalid database address: expected something like postgresql://user@host:5432/name; it is set "
            "by ERGON_POSTGRES__DSN, by ergon.toml or by the program"
        ) from None


#: One login for each account and source, for all pools of this process.
_logins: Final[dict[tuple[object, ...], BrokerLogin]] = {}


def find_login(options: Mapping[str, Any], source: CredentialsSource | None = None) -> BrokerLogin:
    """Return the login of the account that *options* name.

    Its credentials come from *source*, or else from the files that the settings name for the same account, and take
    precedence over those of the address.
    """
    account = tuple(options.get(key) for key in _ACCOUNT)
    if source is None and (configured := get_configured()) is not None:
        settings_options = connect_options(configured.dsn, {})
        if account == tuple(settings_options.get(key) for key in _ACCOUNT):
            source = configured.source
    return _logins.setdefault((*account, options.get("password"), source), BrokerLogin(source))


def is_same_database(one: str, other: str) -> bool:
    """Return whether two addresses name the same database; user and options are ignored."""
    locations = [{key: connect_options(dsn).get(key) for key in _LOCATION} for dsn in (one, other)]
    return locations[0] == locations[1]


def public_address(dsn: str | None) -> str | None:
    """Return the location of the database of *dsn*, without credentials and options; None if it cannot be parsed."""
    if not dsn:
        return None
    try:
        options = connect_options(dsn, {})
    except ConfigurationError:
        return None
    hosts = str(options.get("host") or options.get("hostaddr") or "").split(",")
    ports = str(options.get("port") or "").split(",")
    # A single port applies to all hosts.
    ports *= len(hosts) if len(ports) == 1 else 1
    location = ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False))
    return f"postgresql://{location}/{options.get('dbname', '')}"


def is_unverified(options: Mapping[str, Any]) -> bool:
    """Return whether *options* request TLS and verify nothing: anyone on the way can pretend to be the server.

    libpq verifies the authority with ``sslmode=require`` if there is a file of authorities.
    """
    mode = options.get("sslmode") or os.environ.get("PGSSLMODE")
    authorities = options.get("sslrootcert") or os.environ.get("PGSSLROOTCERT")
    return mode == "require" and not authorities and not _has_default_authorities()


def _has_default_authorities() -> bool:
    try:
        return (Path.home() / ".postgresql" / "root.crt").exists()
    except RuntimeError:  # a user without a home folder
        return False
