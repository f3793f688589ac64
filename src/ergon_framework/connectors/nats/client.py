"""How a connection to one of several servers is opened, and the client that all queues of an event loop share."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from nats import errors

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.certificates import explain_certificate_error
from ergon_framework.connectors.credentials import Credentials, CredentialsSource
from ergon_framework.connectors.login import BrokerLogin
from ergon_framework.connectors.nats.address import get_host
from ergon_framework.connectors.nats.connection import Connection, close_client
from ergon_framework.connectors.nats.fast_client import FastClient
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError
from ergon_framework.redaction import redact_address
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Seconds between two pings of a server that sends nothing.
_PING_INTERVAL_SECONDS: Final = 10


class ConnectSettings(NamedTuple):
    """How connections are opened, besides the addresses."""

    timeout: float
    login: BrokerLogin
    #: Trusted authorities in place of the system's.
    ca_file: str | None = None
    #: Options of the client.
    options: Mapping[str, Any] = MappingProxyType({})


async def connect(addresses: deque[str], settings: ConnectSettings) -> Connection:
    """Return a connection to the first of *addresses* that can be used, opened within the timeout.

    An address that failed is moved to the end, so that a server that hangs does not take up the time of each attempt.
    """
    failures: list[ErgonError] = []
    try:
        async with asyncio.timeout(settings.timeout):
            for _ in range(len(addresses)):
                try:
                    return await _connect_to(addresses[0], settings)
                except ErgonError as error:
                    failures.append(error)
                addresses.rotate(-1)
    except TimeoutError:
        failures.append(_unavailable_error(addresses[0], TimeoutError()))
        addresses.rotate(-1)
    if len(failures) == 1 or all(isinstance(error, ConfigurationError) for error in failures):
        raise failures[0]
    # One that does not answer at present may come back, so that waiting for it helps.
    raise ConnectionLostError("; ".join(dict.fromkeys(map(str, failures)))) from failures[-1]


async def _connect_to(address: str, settings: ConnectSettings) -> Connection:
    client, connection, timeout = FastClient(), None, settings.timeout

    async def on_closed() -> None:
        if connection is not None:
            await connection._on_closed()  # noqa: SLF001 - created in this function

    try:
        await client.connect(
            [address],
            **{
                "name": "ergon",
                "connect_timeout": timeout,
                "ping_interval": _PING_INTERVAL_SECONDS,
                "flush_timeout": timeout,
                "pending_size": 16 * 1024 * 1024,
                **_build_tls_options(settings.ca_file),
                **_build_login_options(address, await settings.login.read_async()),
                **settings.options,
                "allow_reconnect": False,
                # Without a limit the client retries forever.
                "max_reconnect_attempts": 1,
                "reconnect_time_wait": 0.02,
                "error_cb": _log_client_error,
                "closed_cb": on_closed,
                "skip_subject_validation": True,
            },
        )
        connection = Connection(client, timeout=timeout, host=get_host(address))
        await connection.subscribe(f"{connection._inbox}*", connection._on_answer)  # noqa: SLF001 - created in this function
        # A round trip: the server knows the response subject before the first request.
        await client.flush(timeout=timeout)  # type: ignore[arg-type] # it takes any number
    except BaseException as error:
        if client.is_connected:
            await close_client(client)
        else:
            # After a failed handshake a clean close would wait for an answer.
            client.abort()
        translated = _translate_error(error, address, settings.login)
        if translated is error:
            raise
        raise translated from error
    settings.login.accept()
    return connection


def _build_tls_options(ca_file: str | None) -> dict[str, Any]:
    if ca_file is None:
        return {}
    try:
        return {"tls": ssl.create_default_context(cafile=ca_file)}
    except OSError as error:
        raise ConfigurationError(
            f"the file of trusted authorities {ca_file!r} cannot be used: {error.strerror or type(error).__name__}; "
            "set ca_file to a file of PEM certificates"
        ) from error


def _build_login_options(address: str, credentials: Credentials | None) -> dict[str, Any]:
    """Return the options that replace the login of *address*; a password without a user is a token."""
    if credentials is None:
        return {}
    user = credentials.user or unquote(urlsplit(address).username or "")
    return {"user": user, "password": credentials.password} if user else {"token": credentials.password}


#: Parts of the server's message when it refuses a login.
_LOGIN_REFUSALS: Final = ("authorization", "authentication")


def _translate_error(error: BaseException, address: str, login: BrokerLogin) -> BaseException:
    if isinstance(error, ErgonError) or not isinstance(error, Exception):
        return error
    server = redact_address(address)
    if refusal := explain_certificate_error(error, trust="ca_file of the queue"):
        return ConfigurationError(f"cannot connect to NATS at {server}: {refusal}")
    if isinstance(error, errors.Error) and any(part in str(error).lower() for part in _LOGIN_REFUSALS):
        return login.refuse(f"NATS at {server} refused the login; check the user and the password")
    if isinstance(error, (errors.Error, OSError, TimeoutError)):
        return _unavailable_error(address, error)
    return ConnectorError(f"cannot connect to NATS at {server}: {type(error).__name__}")


def _unavailable_error(address: str, error: Exception) -> ConnectionLostError:
    return ConnectionLostError(f"no NATS server answers at {redact_address(address)} ({type(error).__name__})")


async def _log_client_error(error: Exception) -> None:
    logs.log_event(logging.DEBUG, "nats client error", {"error": type(error).__name__}, to=_log)


# -- shared client ----------------------------------------------------------------------------------

_clients: dict[tuple[Any, ...], ServerClient] = {}
_registry_lock = threading.Lock()


class ServerClient:
    """The client of one server or cluster on this event loop."""

    def __init__(self, key: tuple[Any, ...], addresses: Sequence[str], settings: ConnectSettings) -> None:
        self.key = key
        #: The process that created it: a forked child must not use it.
        self.pid = os.getpid()
        #: Kept alive, so that no other loop can get the same id.
        self.loop = asyncio.get_running_loop()
        self.users = 0
        #: Host and port of the newest connection.
        self.host: str | None = None
        # In random order, so that the workers are spread over the servers of a cluster.
        self._addresses = deque(random.sample(addresses, len(addresses)))
        self._settings = settings
        self._connection: Connection | None = None
        self._connect_lock = asyncio.Lock()

    async def connection(self) -> Connection:
        """Return the connection, reconnecting if it was lost."""
        connection = self._connection
        if connection is not None and not connection.is_lost:
            return connection
        async with self._connect_lock:
            if self._connection is None or self._connection.is_lost:
                self._connection = await connect(self._addresses, self._settings)
                self.host = self._connection.host
            return self._connection

    async def close(self) -> None:
        if self.loop.is_closed():
            self.abandon()
            return
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def abandon(self) -> None:
        """Close the socket of a connection whose event loop was closed without closing it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()


def acquire_client(
    addresses: Sequence[str],
    *,
    timeout: float,
    credentials: CredentialsSource | None = None,
    ca_file: str | None = None,
    options: Mapping[str, Any] | None = None,
    owner: object = None,
) -> ServerClient:
    """Return the client of *addresses* on the running event loop, shared by all queues there.

    Release it with ``release_client``. A queue with its own client options gets a separate client for its *owner*.
    """
    with _registry_lock:
        shared_by = None if not options else id(owner)
        loop = id(asyncio.get_running_loop())
        key = (tuple(addresses), timeout, credentials, ca_file, shared_by, loop, os.getpid())
        for stale in [stale for stale in _clients.values() if stale.loop.is_closed()]:
            _clients.pop(stale.key).abandon()
        client = _clients.get(key)
        if client is None:
            settings = ConnectSettings(timeout, BrokerLogin(credentials), ca_file, options or {})
            client = _clients[key] = ServerClient(key, addresses, settings)
        client.users += 1
        return client


def release_client(client: ServerClient) -> bool:
    """Decrement the reference count; return True for the last user, which closes the client."""
    with _registry_lock:
        client.users -= 1
        if client.users > 0:
            return False
        if _clients.get(client.key) is client:
            del _clients[client.key]
        return True
