"""The login of the database in the settings: the files of its credentials, by the address that they belong to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from ergon_framework.connectors.credentials import CredentialsSource, credentials_from_files

#: The environment variables with the address of the database and the files of its credentials.
DSN_VARIABLE: Final = "ERGON_POSTGRES__DSN"
USER_FILE_VARIABLE: Final = "ERGON_POSTGRES__USER_FILE"
PASSWORD_FILE_VARIABLE: Final = "ERGON_POSTGRES__PASSWORD_FILE"  # noqa: S105 - a name


class _ConfiguredLogin(NamedTuple):
    """The address of the settings, and the source of its credentials."""

    dsn: str
    source: CredentialsSource


#: What the settings say; None until they are loaded.
_configured: _ConfiguredLogin | None = None
_is_configured = False


def configure(dsn: str | None, user_file: str | None, password_file: str | None) -> None:
    """Use the credentials in these files, if any, for all connections of this process to the database at *dsn*."""
    global _configured, _is_configured
    _configured, _is_configured = _build_login(dsn, user_file, password_file), True


def get_configured() -> _ConfiguredLogin | None:
    """Return the login of the settings, or of the environment in a program that has not loaded the settings."""
    if _is_configured:
        return _configured
    return _build_login(*_read_variables(os.environ))


def _read_variables(environ: Mapping[str, str]) -> tuple[str | None, str | None, str | None]:
    return environ.get(DSN_VARIABLE), environ.get(USER_FILE_VARIABLE), environ.get(PASSWORD_FILE_VARIABLE)


@lru_cache(maxsize=16)
def _build_login(dsn: str | None, user_file: str | None, password_file: str | None) -> _ConfiguredLogin | None:
    """Build the login of the settings; the same arguments give the same source, by which pools share their login."""
    if not password_file or not dsn:
        return None
    return _ConfiguredLogin(dsn, credentials_from_files(password_file, user_file or None))
