"""Connection pool: the connections of this process to one server, opened on demand and kept while they are usable.

It uses the client's connections without its pools: after an outage the very next call tries to connect, no command is
sent twice without the caller's knowledge, and no call outlasts its timeouts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

import hiredis
import redis
import redis.asyncio
from redis import exceptions

from ergon_framework.connectors.redis.failures import translate_error
from ergon_framework.connectors.redis.operation import Command, Operation, Pipeline
from ergon_framework.connectors.transports import close_socket
from ergon_framework.errors import ConfigurationError, ConnectionLostError

R = TypeVar("R")

#: Most connections, sync and async ones each; further callers wait.
_MAX_CONNECTIONS: Final = 16
#: Timeout of a connection attempt and of a command, unless the address gives another one.
DEFAULT_TIMEOUT_SECONDS: Final = 5.0


class Connection(Protocol):
    """The used part of the client's own connection."""

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def can_read(self, timeout: float) -> bool: ...

    def send_packed_command(self, command: Sequence[bytes]) -> None: ...

    def read_response(self, *, timeout: float = ...) -> Any: ...


class AsyncConnection(Protocol):
    """The used part of the client's own connection on an event loop."""

    async def connect(self) -> None: ...

    async def disconnect(self, *, nowait: bool) -> None: ...

    async def can_read(self) -> bool: ...

    async def send_packed_command(self, command: bytes) -> None: ...

    async def read_response(self) -> Any: ...


class ClusterNode(NamedTuple):
    """One server of a cluster."""

    host: str
    port: int


class ClusterMovedError(ConnectionLostError):
    """The queue is at another node of the cluster; this node has changed nothing."""

    def __init__(self, node: ClusterNode) -> None:
        super().__init__("the queue is at another node of the cluster")
        self.node = node


class ConnectionPool:
    """Sync and async connections to the server at *url*, or to another *node* of its cluster."""

    def __init__(self, url: str, node: ClusterNode | None = None) -> None:
        settings: dict[str, Any] = {
            "socket_timeout": DEFAULT_TIMEOUT_SECONDS,
            "socket_connect_timeout": DEFAULT_TIMEOUT_SECONDS,
            "socket_keepalive": True,
            "protocol": 2,
            "client_name": "ergon",
            "driver_info": None,
        }
        try:
            self._connection_class, self._options = _parse_options(redis.ConnectionPool, url, settings)
            self._async_connection_class, self._options_async = _parse_options(
                redis.asyncio.ConnectionPool, url, settings
            )
        except (ValueError, TypeError, exceptions.RedisError):
            # Without the cause, which quotes the address.
            raise ConfigurationError(
                "the address of the server cannot be read; it looks like redis://user@host:6379/0"
            ) from None
        if node is not None:
            self._options |= node._asdict()
            self._options_async |= node._asdict()
        self.timeout = float(self._options.get("socket_timeout") or DEFAULT_TIMEOUT_SECONDS)
        # The client creates a task for every write to limit its time. Here one timeout covers a command and its answer.
        self._options_async["socket_timeout"] = None
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._closed = False
        # A queue, because a semaphore is written in Python.
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(_MAX_CONNECTIONS):
            self._permits.put(None)
        self._idle: list[Connection] = []
        self._loop_connections: dict[asyncio.AbstractEventLoop, _LoopConnections] = {}

    def after_fork(self) -> None:
        """Reset the pool in a forked child."""
        if self._owner != os.getpid():
            # These are the parent's: closing them would end its sessions. Kept, so that they are not garbage-collected.
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
            value = _run_operation(connection, operation)
        except exceptions.MovedError as error:
            raise ClusterMovedError(ClusterNode(error.host, int(error.port))) from None
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
        connection = cast("Connection", self._connection_class(**self._options))
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def _take_idle(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            with suppress(exceptions.RedisError):
                # No command is pending: data to read is an end of file or an error.
                if not connection.can_read(0):
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
            connection = await loop_connections.take_idle() or await self._connect_async()
            value = await _run_operation_async(connection, operation, self.timeout)
        except exceptions.MovedError as error:
            raise ClusterMovedError(ClusterNode(error.host, int(error.port))) from None
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
        connection = cast("AsyncConnection", self._async_connection_class(**self._options_async))
        try:
            async with _time_limit(2 * self.timeout):
                await connection.connect()
        except BaseException:
            await _disconnect(connection)
            raise
        return connection

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

    async def take_idle(self) -> AsyncConnection | None:
        while self.idle:
            connection = self.idle.pop()
            with suppress(exceptions.RedisError):
                if not await connection.can_read():
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
    return ConnectionLostError(f"none of {_MAX_CONNECTIONS} connections to the server was free in time")


def _parse_options(pool: Any, url: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    client_pool = pool.from_url(url, **settings)
    options = {
        name: value for name, value in client_pool.connection_kwargs.items() if name in settings or value is not None
    }
    return client_pool.connection_class, options


def pack_command(command: Command) -> bytes:
    """Encode *command* to bytes."""
    data: bytes = hiredis.pack_command(command)
    return data


def _pack(command: Command | Pipeline) -> tuple[bytes, int]:
    """Return the bytes of *command*, and the number of its answers; 0 means one answer that is not in a list."""
    if isinstance(command, Pipeline):
        return b"".join(pack_command(each) for each in command.commands), len(command.commands)
    return pack_command(command), 0


def _run_operation(connection: Connection, operation: Operation[R]) -> R:
    """Run *operation* on *connection*; an error of a command is raised at its yield."""
    try:
        command = next(operation)
        while True:
            data, answer_count = _pack(command)
            try:
                connection.send_packed_command([data])
                answer = _read_answers(connection, answer_count) if answer_count else connection.read_response()
            except Exception as error:  # noqa: BLE001 - thrown into the operation, which raises it again
                command = operation.throw(error)
            else:
                command = operation.send(answer)
    except StopIteration as stop:
        value: R = stop.value
        return value


def _read_answers(connection: Connection, answer_count: int) -> Sequence[Any]:
    answers: list[Any] = []
    for _ in range(answer_count):
        try:
            answers.append(connection.read_response())
        except exceptions.ResponseError as error:
            answers.append(error)
    return answers


@asynccontextmanager
async def _time_limit(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise exceptions.TimeoutError(f"no answer within {seconds:g} s") from None


async def _run_operation_async(connection: AsyncConnection, operation: Operation[R], timeout: float) -> R:
    """Run *operation* on an async connection, without blocking the event loop."""
    try:
        command = next(operation)
        while True:
            data, answer_count = _pack(command)
            try:
                async with _time_limit(timeout):
                    await connection.send_packed_command(data)
                    answer = (
                        await _read_answers_async(connection, answer_count)
                        if answer_count
                        else await connection.read_response()
                    )
            except Exception as error:  # noqa: BLE001 - thrown into the operation, which raises it again
                command = operation.throw(error)
            else:
                command = operation.send(answer)
    except StopIteration as stop:
        value: R = stop.value
        return value


async def _read_answers_async(connection: AsyncConnection, answer_count: int) -> Sequence[Any]:
    answers: list[Any] = []
    for _ in range(answer_count):
        try:
            answers.append(await connection.read_response())
        except exceptions.ResponseError as error:
            answers.append(error)
    return answers
