"""How a connector logs in at its broker: credentials that change, and what a refused login means.

When a password is rotated, the server and the file that holds the password change at different moments, so that the
server may refuse a login that is right a moment later. With a source of credentials a refused login therefore counts as
a lost connection, which callers retry, for ``ROTATION_SECONDS`` from the first refusal after an accepted login of this
process. A first login that is refused, and a longer refusal, are configuration errors.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

from ergon_framework.connectors.credentials import Credentials, CredentialsSource, credentials_from_files
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError, error_message

#: Seconds for which a refused login is retried; orchestrators need up to two minutes to update a mounted secret.
ROTATION_SECONDS: Final = 300.0


class BrokerLogin:
    """The credentials of one address, and whether the server accepts them."""

    def __init__(self, source: CredentialsSource | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._was_accepted = False
        #: When the first of the present refusals came, by the clock.
        self._refused_at: float | None = None

    def read(self) -> Credentials | None:
        """Read the credentials now; return None without a source."""
        if self._source is None:
            return None
        try:
            credentials = self._source()
        except ErgonError as error:
            raise self.refuse(error_message(error)) from None
        except Exception as error:  # noqa: BLE001 - the boundary to a function of the program
            # Without the cause, which may quote a secret.
            raise self.refuse(f"reading the credentials failed: {type(error).__name__}; check their source") from None
        if not isinstance(credentials, Credentials):
            raise ConfigurationError(
                f"credentials source is invalid: it returned {type(credentials).__name__}; return Credentials"
            )
        return credentials

    async def read_async(self) -> Credentials | None:
        """Read the credentials without blocking the event loop; see ``read``."""
        return None if self._source is None else await asyncio.to_thread(self.read)

    def accept(self) -> None:
        """Record that the server has accepted a login."""
        self._was_accepted, self._refused_at = True, None

    def refuse(self, reason: str) -> ErgonError:
        """Return the error of a login that is refused because of *reason*."""
        now = self._clock()
        if self._refused_at is None:
            self._refused_at = now
        if self._source is not None and self._was_accepted and now - self._refused_at < ROTATION_SECONDS:
            return ConnectionLostError(f"{reason}; a login was accepted before, so it is tried again")
        return ConfigurationError(reason)


class _LoginSettings(NamedTuple):
    """The default address of a kind of broker, and the files of its credentials."""

    url: str | None
    user_file: str | None
    password_file: str | None


#: What the settings say, by the name of their section; empty until they are loaded.
_configured: Final[dict[str, _LoginSettings]] = {}


def configure(section: str, url: str | None, user_file: str | None, password_file: str | None) -> None:
    """Use the credentials in these files, if any, for all connections of this process to *url*."""
    _configured[section] = _LoginSettings(url, user_file, password_file)


def find_source(section: str, url: str | None) -> CredentialsSource | None:
    """Return the configured source for *url*, or for the default address if it is None.

    In a program that has not loaded the settings, the environment configures it, such as ``ERGON_NATS__PASSWORD_FILE``.
    """
    settings = _configured.get(section)
    if settings is None or not settings.password_file:
        settings = _read_variables(section)
    if not settings.password_file or url not in (None, settings.url):
        return None
    return _build_source(settings.password_file, settings.user_file or None)


def _read_variables(section: str) -> _LoginSettings:
    prefix = f"ERGON_{section.upper()}__"
    return _LoginSettings(*(os.environ.get(f"{prefix}{name}") for name in ("URL", "USER_FILE", "PASSWORD_FILE")))


@cache
def _build_source(password_file: str, user_file: str | None) -> CredentialsSource:
    """Return the source of these files: always the same one, so that their queues share connections."""
    return credentials_from_files(password_file, user_file)
