"""How connections log in: credentials that change while the process runs, and what a refused login means.

The credentials come from a source, which is called before every new connection. When a password is rotated, the server
and the file that holds it change at different moments, so that the server may refuse a login that is right a moment
later. A refused login therefore counts as a lost connection, which callers retry, for ``ROTATION_SECONDS`` from the
first refusal after an accepted login of this process. A first login that is refused, and a longer refusal, are
configuration errors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from ergon_framework.connectors.credentials import Credentials, CredentialsSource, credentials_from_files
from ergon_framework.errors import ConfigurationError, ErgonError

#: Seconds for which a refused login is retried; orchestrators need up to two minutes to update a mounted secret.
ROTATION_SECONDS: Final = 300.0
#: The environment variables with the address of the database and the files of its credentials.
DSN_VARIABLE: Final = "ERGON_POSTGRES__DSN"
USER_FILE_VARIABLE: Final = "ERGON_POSTGRES__USER_FILE"
PASSWORD_FILE_VARIABLE: Final = "ERGON_POSTGRES__PASSWORD_FILE"  # noqa: S105 - a name


class Login:
    """The credentials of one account, and whether the server accepts them; shared by the pools of this process."""

    def __init__(self, source: CredentialsSource | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        self._clock = clock
        self._was_accepted = False
        #: When the first of the present refusals came, by the clock.
        self._refused_at: float | None = None

    def read(self) -> dict[str, str]:
        """Read the credentials now; return them as connection parameters, without a source none."""
        if self.source is None:
            return {}
        try:
            credentials = self.source()
        except ErgonError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to a function of the program
            # Without the cause, which may quote a secret.
            raise ConfigurationError(
                f"reading the database credentials failed: {type(error).__name__}; check their source"
            ) from None
        if not isinstance(credentials, Credentials):
            raise ConfigurationError(
                f"source of database credentials is invalid: it returned {type(credentials).__name__}; "
                "return Credentials"
            )
        user = {} if credentials.user is None else {"user": credentials.user}
        return {**user, "password": credentials.password}

    def accept(self) -> None:
        """Record that the server has accepted a login."""
        self._was_accepted, self._refused_at = True, None

    def refuse(self) -> bool:
        """Record that a login was refused; return whether another attempt may help, during a rotation."""
        now = self._clock()
        if self._refused_at is None:
            self._refused_at = now
        return self._was_accepted and now - self._refused_at < ROTATION_SECONDS


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
