"""The connection pool: it opens connections on demand and keeps them while they are usable.

It uses the client library's connections without its pools: after an outage the very next call tries to connect, no
command is sent twice without the caller's knowledge, and no call outlasts its timeouts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, cast

import redis
import redis.asyncio
from redis import exceptions

from ergon_framework._util.sockets import close_socket
from ergon_framework.connectors.certificates import explain_certificate_error
from ergon_framework.connectors.credentials import Credentials
from ergon_framework.connectors.login import BrokerLogin
from ergon_framework.connectors.redis.address import PrimaryFinder, RedisAddress, ServerNode, require_primary
from ergon_framework.connectors.redis.connection import (
    AsyncConnection,
    Command,
    Connection,
    Operation,
    R,
    run_operation,
    run_operation_async,
    time_limit,
    translate_error,
)
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError

#: Maximum number of sync connections, and of async ones for each event loop; further callers wait.
_MAX_CONNECTIONS: Final = 16
#: Timeout of a connection attempt and of a command, unless the address gives another one.
DEFAULT_TIMEOUT_SECONDS: Final = 5.0
_DEFAULT_PORT: Final = 6379
#: The option of an address that names the trusted authorities for TLS.
_CA_OPTION: Final = "ssl_ca_certs"


class ClusterMovedError(ConnectionLostError):
    """The queue is at another node of the cluster; this node has changed nothing."""

    def __init__(self, node: ServerNode) -> None:
        super().__init__("the queue is at another node of the cluster")
        self.node = node


class ConnectionPool:
    """Sync and async connections to the server at *address*, or to another *node* of its cluster.

    Of an address with sentinels, each new connection is opened to the primary that they name at that moment.
    """

    def __init__(
        self, address: RedisAddress, node: ServerNode | None = None, *, login: BrokerLogin | None = None
    ) -> None:
        settings: dict[str, Any] = {
            "socket_timeout": DEFAULT_TIMEOUT_SECONDS,
            "socket_connect_timeout": DEFAULT_TIMEOUT_SECONDS,
            "socket_keepalive": True,
            "protocol": 2,
            "client_name": "ergon",
            "driver_info": None,
        }
        if address.url.startswith("rediss://"):
            settings["ssl_check_hostname"] = True
        try:
            self._connection_class, self._options = _parse_options(redis.ConnectionPool, address.url, settings)
            self._async_connection_class, self._options_async = _parse_options(
                redis.asyncio.ConnectionPool, address.url, settings
            )
        except (ValueError, TypeError, exceptions.RedisError):
            # Without the cause, which quotes the address.
            raise ConfigurationError(
                "the address of the server is invalid; expected, e.g., redis://user@host:6379/0"
            ) from None
        _check_authorities(self._options.get(_CA_OPTION))
        if node is not None:
            self._options |= node._asdict()
            self._options_async |= node._asdict()
        self.timeout = float(self._options.get("socket_timeout") or DEFAULT_TIMEOUT_SECONDS)
        # The client creates a task for every write to limit its time. Here one timeout covers a command and its answer.
        self._options_async["socket_timeout"] = None
        self._login = login or BrokerLogin(None)
        self._finder = PrimaryFinder(address.service, address.sentinels) if address.sentinels else None
        self._sentinel_login = {"username": address.sentinel_user, "password": address.sentinel_password}
        #: The primary that the sentinels named last.
        self.primary: ServerNode | None = None
        self._reset()

    @property
    def host(self) -> str | None:
        """Host and port of the newest connection; None before the first one that sentinels named, and for a socket."""
        if self._finder is not None:
            return None if self.primary is None else str(self.primary)
        if "host" not in self._options and "path" in self._options:
            return None
        return str(ServerNode(self._options.get("host", "localhost"), self._options.get("port", _DEFAULT_PORT)))

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._closed = False
        # A queue serves as a semaphore, because that of the standard library is written in Python and slower.
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(_MAX_CONNECTIONS):
            self._permits.put(None)
        self._idle: list[Connection] = []
        self._loop_connections: dict[asyncio.AbstractEventLoop, _LoopConnections] = {}

    def after_fork(self) -> None:
        """Reset the pool in a forked child."""
        if self._owner != os.getpid():
            # Closing the parent's connections would end its sessions. Kept, so that they are not garbage-collected.
            self._inherited = (self._idle, self._loop_connections)
            self._reset()

    # -- sync -----------------------------------------------------------------------------------

    def run(self, operation: Operation[R]) -> R:
        """Run *operation* on a connection of its own."""
        self.after_fork()
        try:
            self._permits.get(timeout=self.timeout)
        except Empty:
            raise _pool_exhausted_error() from None
        connection: Connection | None = None
        is_usable = False
        try:
            connection = self._take_idle() or self.connect()
            value = run_operation(connection, operation)
        except exceptions.MovedError as error:
            raise ClusterMovedError(ServerNode(error.host, int(error.port))) from None
        except exceptions.RedisError as error:
            # A server that rejects a command has answered it, so the connection is still usable.
            is_usable = isinstance(error, exceptions.ResponseError) and not isinstance(error, exceptions.ReadOnlyError)
            if not is_usable:
                self._close_idle()
            raise translate_error(error) from None
        else:
            is_usable = True
            return value
        finally:
            if connection is not None and is_usable and not self._closed:
                self._idle.append(connection)
            elif connection is not None:
                connection.disconnect()
            self._permits.put(None)

    def connect(self) -> Connection:
        """Open a connection outside the pool; the caller disconnects it."""
        primary = None if self._finder is None else self._find_primary(self._finder)
        options = self._build_options(self._options, primary, self._login.read())
        connection = cast("Connection", self._connection_class(**options))
        try:
            connection.connect()
            if primary is not None:
                run_operation(connection, require_primary(primary))
        except BaseException as error:
            connection.disconnect()
            if (refusal := self._explain_refusal(error)) is not None:
                raise refusal from None
            raise
        self._note_connected(primary)
        return connection

    def _find_primary(self, finder: PrimaryFinder) -> ServerNode:
        """Ask the sentinels; see ``PrimaryFinder``."""
        search = finder.find()
        sentinel = next(search)
        try:
            while True:
                sentinel = search.send(self._ask_sentinel(sentinel, finder.question))
        except StopIteration as stop:
            primary: ServerNode = stop.value
            return primary

    def _ask_sentinel(self, sentinel: ServerNode, question: Command) -> Sequence[bytes] | ErgonError | None:
        connection = cast("Connection", self._connection_class(**self._build_sentinel_options(self._options, sentinel)))
        try:
            connection.connect()
            answer: Sequence[bytes] | None = run_operation(connection, _ask(question))
        except (exceptions.RedisError, OSError) as error:
            return self._explain_sentinel_error(error)
        else:
            return answer
        finally:
            connection.disconnect()

    def _build_options(
        self, options: Mapping[str, Any], primary: ServerNode | None, credentials: Credentials | None
    ) -> dict[str, Any]:
        """Return the options of a new connection, with the server and the login of this moment."""
        built = dict(options)
        if primary is not None:
            built |= primary._asdict()
        if credentials is not None:
            built["password"] = credentials.password
            if credentials.user is not None:
                built["username"] = credentials.user
        return built

    def _build_sentinel_options(self, options: Mapping[str, Any], sentinel: ServerNode) -> dict[str, Any]:
        # A sentinel has no databases, and its own users.
        return {**options, **sentinel._asdict(), **self._sentinel_login, "db": 0, "client_name": None}

    def _explain_refusal(self, error: BaseException) -> ErgonError | None:
        """Return the error of a connection that the server or this side refused; None for other errors."""
        if refusal := explain_certificate_error(error, trust=f"{_CA_OPTION} in the address"):
            return ConfigurationError(f"connecting to the server failed: {refusal}")
        if isinstance(error, exceptions.AuthenticationError):
            translated = translate_error(error)
            return self._login.refuse(str(translated))
        return None

    def _explain_sentinel_error(self, error: Exception) -> ErgonError:
        if refusal := explain_certificate_error(error, trust=f"{_CA_OPTION} in the address"):
            return ConfigurationError(f"connecting to a sentinel failed: {refusal}")
        return translate_error(error)

    def _note_connected(self, primary: ServerNode | None) -> None:
        self._login.accept()
        self.primary = primary

    def _is_current(self, connection: Connection | AsyncConnection) -> bool:
        """Return whether *connection* is not one to a server that was the primary before."""
        return self.primary is None or (connection.host, int(connection.port)) == self.primary

    def _take_idle(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            with suppress(exceptions.RedisError):
                # No command is pending: data to read is an end of file or an error.
                if self._is_current(connection) and not connection.can_read(0):
                    return connection
            connection.disconnect()
        return None

    def _close_idle(self) -> None:
        """Close all idle connections: an error that broke one connection has broken the others too."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().disconnect()

    def close(self) -> None:
        """Close idle connections; one that is in use is closed when it is released."""
        self._closed = True
        self._close_idle()
        for loop_connections in list(self._loop_connections.values()):
            loop_connections.abandon()
        self._loop_connections.clear()

    # -- async ----------------------------------------------------------------------------------

    async def run_async(self, operation: Operation[R]) -> R:
        """Run *operation* on an async connection; see ``run``."""
        self.after_fork()
        loop_connections = self._get_loop_connections()
        if loop_connections.permits.locked():
            try:
                async with asyncio.timeout(self.timeout):
                    await loop_connections.permits.acquire()
            except TimeoutError:
                raise _pool_exhausted_error() from None
        else:
            await loop_connections.permits.acquire()
        connection: AsyncConnection | None = None
        is_usable = False
        try:
            connection = await loop_connections.take_idle(self._is_current) or await self._connect_async()
            value = await run_operation_async(connection, operation, self.timeout)
        except exceptions.MovedError as error:
            raise ClusterMovedError(ServerNode(error.host, int(error.port))) from None
        except exceptions.RedisError as error:
            is_usable = isinstance(error, exceptions.ResponseError) and not isinstance(error, exceptions.ReadOnlyError)
            if not is_usable:
                await loop_connections.close_idle()
            raise translate_error(error) from None
        else:
            is_usable = True
            return value
        finally:
            if connection is not None and is_usable and not self._closed:
                loop_connections.idle.append(connection)
            elif connection is not None:
                await _disconnect(connection)
            loop_connections.permits.release()

    async def _connect_async(self) -> AsyncConnection:
        primary = None if self._finder is None else await self._find_primary_async(self._finder)
        options = self._build_options(self._options_async, primary, await self._login.read_async())
        connection = cast("AsyncConnection", self._async_connection_class(**options))
        try:
            async with time_limit(2 * self.timeout):
                await connection.connect()
                if primary is not None:
                    await run_operation_async(connection, require_primary(primary), self.timeout)
        except BaseException as error:
            await _disconnect(connection)
            if (refusal := self._explain_refusal(error)) is not None:
                raise refusal from None
            raise
        self._note_connected(primary)
        return connection

    async def _find_primary_async(self, finder: PrimaryFinder) -> ServerNode:
        search = finder.find()
        sentinel = next(search)
        try:
            while True:
                sentinel = search.send(await self._ask_sentinel_async(sentinel, finder.question))
        except StopIteration as stop:
            primary: ServerNode = stop.value
            return primary

    async def _ask_sentinel_async(self, sentinel: ServerNode, question: Command) -> Sequence[bytes] | ErgonError | None:
        options = self._build_sentinel_options(self._options_async, sentinel)
        connection = cast("AsyncConnection", self._async_connection_class(**options))
        try:
            async with time_limit(2 * self.timeout):
                await connection.connect()
            answer: Sequence[bytes] | None = await run_operation_async(connection, _ask(question), self.timeout)
        except (exceptions.RedisError, OSError) as error:
            return self._explain_sentinel_error(error)
        else:
            return answer
        finally:
            await _disconnect(connection)

    def _get_loop_connections(self) -> _LoopConnections:
        loop = asyncio.get_running_loop()
        loop_connections = self._loop_connections.get(loop)
        if loop_connections is None:
            for other in [other for other in self._loop_connections if other.is_closed()]:
                self._loop_connections.pop(other).abandon()
            loop_connections = self._loop_connections[loop] = _LoopConnections(loop)
        return loop_connections

    async def close_async(self) -> None:
        """Close the connections of the running event loop, and all idle ones; see ``close``."""
        self._closed = True
        loop_connections = self._loop_connections.pop(asyncio.get_running_loop(), None)
        if loop_connections is not None:
            await loop_connections.close_idle()
        self.close()


class _LoopConnections:
    """The connections of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.permits = asyncio.Semaphore(_MAX_CONNECTIONS)
        self.idle: list[AsyncConnection] = []

    async def take_idle(self, is_current: Callable[[AsyncConnection], bool]) -> AsyncConnection | None:
        while self.idle:
            connection = self.idle.pop()
            with suppress(exceptions.RedisError):
                if is_current(connection) and not await connection.can_read():
                    return connection
            await _disconnect(connection)
        return None

    async def close_idle(self) -> None:
        while self.idle:
            await _disconnect(self.idle.pop())

    def abandon(self) -> None:
        """Discard idle connections from outside their event loop, which runs in another thread or is closed."""
        for connection in self.idle:
            client_connection: Any = connection
            writer, client_connection._writer, client_connection._reader = client_connection._writer, None, None  # noqa: SLF001 - disconnect() needs their loop
            if writer is None:
                continue
            try:
                self._loop.call_soon_threadsafe(writer.transport.abort)
            except RuntimeError:
                close_socket(writer.transport)
        self.idle.clear()


async def _disconnect(connection: AsyncConnection) -> None:
    with suppress(exceptions.RedisError, OSError):
        await connection.disconnect(nowait=True)


def _pool_exhausted_error() -> ConnectionLostError:
    return ConnectionLostError(
        f"connection pool exhausted: no free connection of {_MAX_CONNECTIONS} within the timeout"
    )


def _ask(question: Command) -> Operation[Any]:
    return (yield question)


def _check_authorities(path: str | None) -> None:
    """Raise ConfigurationError if the file of trusted authorities at *path* cannot be read."""
    if path is not None and not os.access(path, os.R_OK):
        raise ConfigurationError(
            f"the file of trusted authorities {path!r} cannot be read; set {_CA_OPTION} in the address to a file of "
            "PEM certificates"
        )


def _parse_options(pool: Any, url: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    client_pool = pool.from_url(url, **settings)
    options = {
        name: value for name, value in client_pool.connection_kwargs.items() if name in settings or value is not None
    }
    return client_pool.connection_class, options
