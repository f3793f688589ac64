"""Connections to one server: the connection pool, operations on it, errors, durability, and the shared client.

The pool opens connections on demand and keeps them while they are usable. It uses the client library's connections
without its pools: after an outage the very next call tries to connect, no command is sent twice without the caller's
knowledge, and no call outlasts its timeouts.

An operation is work with a server that is written once for the sync and the async variant: a generator that yields
commands and receives their answers. The caller runs it on a thread or on an event loop; the operation's decisions are
the same for both.

Errors of the client library are translated into errors of the framework, without quoting what was sent. Durability of a
confirmed write after a power loss is read from the server's settings. All queues of an address in this process share
one client, which has a connection pool for each cluster node.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import hiredis
import redis
import redis.asyncio
from redis import exceptions
from redis.exceptions import NoScriptError, ResponseError

from ergon_framework._util.sockets import close_socket
from ergon_framework.connectors.base import ConnectorError
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError
from ergon_framework.telemetry import logs

#: The server settings that decide whether confirmed writes are durable, and whether queues may be evicted.
DURABILITY_SETTINGS: Final = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")


class RedisDurability(NamedTuple):
    """Whether confirmed data survives a power loss, None if that is unknown, with the finding as text."""

    durable: bool | None
    message: str


#: For a server whose settings cannot be read.
UNKNOWN_DURABILITY: Final = RedisDurability(
    None, "durability is unknown: the server does not allow CONFIG GET; appendfsync must be always"
)


def assess_durability(settings: Mapping[str, str]) -> RedisDurability:
    """Assess the durability that *settings* give.

    >>> assess_durability({"appendonly": "yes", "appendfsync": "always"}).durable
    True
    >>> assess_durability({"appendonly": "yes", "appendfsync": "everysec"}).durable
    False
    >>> assess_durability({"appendonly": "no", "appendfsync": "always"}).durable
    False
    >>> assess_durability({}).durable
    """
    if not settings.get("appendonly") or not settings.get("appendfsync"):
        return UNKNOWN_DURABILITY
    if settings["appendonly"] != "yes":
        return RedisDurability(
            durable=False,
            message="after a power loss or a crash all data since the last snapshot may be lost: appendonly is not yes",
        )
    fsync_policy = settings["appendfsync"]
    if fsync_policy == "everysec":
        return RedisDurability(
            durable=False,
            message="after a power loss the last two seconds of confirmed data may be lost: appendfsync is everysec, "
            "not always",
        )
    if fsync_policy != "always":
        return RedisDurability(
            durable=False,
            message=f"after a power loss data still in the kernel may be lost: appendfsync is {fsync_policy}, "
            "not always",
        )
    return RedisDurability(durable=True, message="confirmed data survives a power loss")


def reject_evicting_server(settings: Mapping[str, str]) -> None:
    """Reject a server that evicts keys when its memory is full: a queue is a key, and has no copy.

    >>> reject_evicting_server({"maxmemory": "0", "maxmemory-policy": "allkeys-lru"})
    >>> reject_evicting_server({"maxmemory": "100", "maxmemory-policy": "volatile-lru"})
    """
    policy = settings.get("maxmemory-policy", "")
    # A volatile policy evicts only keys with a time to live, and no key of a queue has one.
    if settings.get("maxmemory", "0") != "0" and policy.startswith("allkeys"):
        raise ConfigurationError(
            f"the server evicts any key when its memory is full (maxmemory-policy is {policy}), and a queue is a "
            "key: set maxmemory-policy to noeviction, or use a dedicated server for the queue"
        )


# -- errors -----------------------------------------------------------------------------------------

#: Maximum characters of the server's message in an error.
_MAX_MESSAGE_CHARS: Final = 200
MEMORY_FULL: Final = "the server's memory is full and it rejects writes; consume queued messages or raise maxmemory"
_REJECTED_CODES: Final = ("NOAUTH", "WRONGPASS", "NOPERM")
#: Error codes of a reachable server that cannot serve: it starts, fails over, or moves a slot.
_UNAVAILABLE_CODES: Final = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED", "NOREPLICAS")
#: The same errors where the client has a class for them, and has removed the code.
_UNAVAILABLE_ERRORS: Final = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterDownError, OSError)


def translate_error(error: Exception) -> ErgonError:
    """Translate *error* into an error of the framework."""
    message = str(error)[:_MAX_MESSAGE_CHARS].rstrip(".")
    code = message.partition(" ")[0]
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError) or code in _REJECTED_CODES:
        return ConfigurationError(f"the server rejected the request: {message}; check the user, password and rights")
    if reason := _describe_outage(error, message, code):
        return ConnectionLostError(reason)
    if code == "WRONGTYPE":
        return ConfigurationError(f"a key of the queue holds something else: {message}; choose another name")
    return ConnectorError(f"the server answered with {type(error).__name__}: {message}")


def _describe_outage(error: Exception, message: str, code: str) -> str:
    """Return why the server is unavailable; empty if it is not."""
    if isinstance(error, exceptions.ReadOnlyError) or code == "READONLY":
        return "the server is a replica and rejects writes; use the primary's address unless it is promoted"
    if isinstance(error, exceptions.AskError | exceptions.TryAgainError):
        return "the cluster is moving the queue to another node; retry"
    if isinstance(error, exceptions.OutOfMemoryError) or code == "OOM":
        return MEMORY_FULL
    if code == "MISCONF":
        return f"the server cannot write to its disk, which may be full, and rejects writes: {message}"
    if isinstance(error, _UNAVAILABLE_ERRORS) or code in _UNAVAILABLE_CODES:
        return f"the server is unavailable: {message}"
    return ""


# -- operations -------------------------------------------------------------------------------------

R = TypeVar("R")

Command: TypeAlias = tuple[Any, ...]


class Pipeline(NamedTuple):
    """Commands that are sent together; the answers are a list, with the error of a failed command in its place."""

    commands: Sequence[Command]


Operation: TypeAlias = Generator[Command | Pipeline, Any, R]


class Script:
    """A Lua script that the server runs in one step."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def run(self, keys: Sequence[str], *arguments: Any) -> Operation[Any]:
        """Run the script and return its answer; send its text to a server that does not know it, as after a restart."""
        try:
            return (yield ("EVALSHA", self.sha, len(keys), *keys, *arguments))
        except NoScriptError:
            return (yield ("EVAL", self.text, len(keys), *keys, *arguments))


# -- connection pool --------------------------------------------------------------------------------

#: Maximum number of sync connections, and of async ones for each event loop; further callers wait.
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
                "the address of the server is invalid; expected, e.g., redis://user@host:6379/0"
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
    return ConnectionLostError(
        f"connection pool exhausted: no free connection of {_MAX_CONNECTIONS} within the timeout"
    )


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
    """Limit the time of the block; raise the client's TimeoutError, which the callers translate, and not Python's."""
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


# -- shared client ----------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
_clients: dict[tuple[str, int], ServerClient] = {}
_registry_lock = threading.Lock()


class ServerClient:
    """The per-process state of one address."""

    def __init__(self, url: str) -> None:
        self.owner_pid = os.getpid()
        self._url = url
        self._lock = threading.Lock()
        #: By node; None is the node that the address names.
        self._pools: dict[ClusterNode | None, ConnectionPool] = {None: ConnectionPool(url)}
        self._durabilities: dict[ClusterNode | None, RedisDurability] = {}
        self.users = 0

    def pool(self, node: ClusterNode | None) -> ConnectionPool:
        """Return the connection pool of *node*."""
        with self._lock:
            pool = self._pools.get(node)
            if pool is None:
                pool = self._pools[node] = ConnectionPool(self._url, node)
            return pool

    def follow_redirect(self, node: ClusterNode | None) -> ClusterNode | None:
        """Return the node to ask next because *node* does not answer: another one may know where its queues moved."""
        nodes = list(self._pools)
        return nodes[(nodes.index(node) + 1) % len(nodes)] if node in nodes else None

    def check_durability(self, node: ClusterNode | None) -> Operation[RedisDurability]:
        """Read once per server how durable confirmed writes are; raise ConfigurationError if it may evict a queue."""
        durability = self._durabilities.get(node)
        if durability is None:
            settings: dict[str, str] = {}
            # Hosted servers often forbid CONFIG GET.
            with suppress(ResponseError):
                for name in DURABILITY_SETTINGS:
                    answer: Sequence[bytes] = yield ("CONFIG", "GET", name)
                    if answer:
                        settings[name] = answer[1].decode()
            reject_evicting_server(settings)
            durability = self._durabilities[node] = assess_durability(settings) if settings else UNKNOWN_DURABILITY
            level = logging.INFO if durability.durable else logging.WARNING
            logs.log_event(
                level, "redis durability", {"durable": durability.durable, "summary": durability.message}, to=_log
            )
            if node is not None:
                yield from self._discover_nodes()
        return durability

    def _discover_nodes(self) -> Operation[None]:
        """Discover the cluster's other nodes, so that they are known when this one fails."""
        with suppress(ResponseError):
            slots = yield ("CLUSTER", "SLOTS")
            for _, _, *nodes in slots:
                for host, port, *_ in nodes:
                    if host:
                        self.pool(ClusterNode(host.decode(), int(port)))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    async def close_async(self) -> None:
        for pool in self._pools.values():
            await pool.close_async()


def acquire_client(url: str) -> ServerClient:
    """Return the client of *url*, one per process; end its use with ``release_client``."""
    with _registry_lock:
        key = url, os.getpid()
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = ServerClient(url)
        client.users += 1
        return client


def release_client(client: ServerClient) -> bool:
    """Decrement the reference count; return True for the last user, which closes the client."""
    with _registry_lock:
        client.users -= 1
        if client.users > 0:
            return False
        for key, other in list(_clients.items()):
            if other is client:
                del _clients[key]
        return True
