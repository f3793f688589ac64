"""Lines: the connections of this process to one server, made when they are needed and kept while they are sound.

The client's own connections without its pools: after an outage the very next call tries to
connect, nothing is sent twice behind anybody's back, and no call outlasts its timeouts.
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

from ergon_framework.connectors.redis.failures import translated
from ergon_framework.connectors.redis.operation import Command, Operation, Together
from ergon_framework.connectors.transports import drop
from ergon_framework.errors import ConfigurationError, ConnectionLost

R = TypeVar("R")

#: Most connections of each flavour; whoever comes later waits.
_MOST: Final = 16
#: Seconds within which a connection is made and a command answered, unless the address says otherwise.
TIMEOUT: Final = 5.0


class Line(Protocol):
    """What is used of the client's own connection."""

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def can_read(self, timeout: float) -> bool: ...

    def send_packed_command(self, command: Sequence[bytes]) -> None: ...

    def read_response(self, *, timeout: float = ...) -> Any: ...


class AsyncLine(Protocol):
    """The same on an event loop."""

    async def connect(self) -> None: ...

    async def disconnect(self, *, nowait: bool) -> None: ...

    async def can_read(self) -> bool: ...

    async def send_packed_command(self, command: bytes) -> None: ...

    async def read_response(self) -> Any: ...


class Node(NamedTuple):
    """One server of a cluster."""

    host: str
    port: int


class Moved(ConnectionLost):
    """The queue is at another node of the cluster; nothing was done here."""

    def __init__(self, node: Node) -> None:
        super().__init__("the queue is at another node of the cluster")
        self.node = node


class Lines:
    """Connections for both flavours to the server at *url*, or to another *node* of its cluster."""

    def __init__(self, url: str, node: Node | None = None) -> None:
        settings: dict[str, Any] = {
            "socket_timeout": TIMEOUT,
            "socket_connect_timeout": TIMEOUT,
            "socket_keepalive": True,
            "protocol": 2,
            "client_name": "ergon",
            "driver_info": None,
        }
        try:
            self._kind, self._options = _settings(redis.ConnectionPool, url, settings)
            self._kind_async, self._options_async = _settings(redis.asyncio.ConnectionPool, url, settings)
        except (ValueError, TypeError, exceptions.RedisError):
            # Without its cause, which quotes the address.
            raise ConfigurationError(
                "the address of the server cannot be read; it looks like redis://user@host:6379/0"
            ) from None
        if node is not None:
            self._options |= node._asdict()
            self._options_async |= node._asdict()
        self.timeout = float(self._options.get("socket_timeout") or TIMEOUT)
        # The client makes a task of every write to limit it. Here one limit holds for a command and its answer.
        self._options_async["socket_timeout"] = None
        self._begin()

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._closed = False
        # A queue: a semaphore is written in Python.
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(_MOST):
            self._free.put(None)
        self._idle: list[Line] = []
        self._per_loop: dict[asyncio.AbstractEventLoop, _LoopLines] = {}

    def after_fork(self) -> None:
        """A child begins anew."""
        if self._owner != os.getpid():
            # They are the parent's: closing them here would end its sessions. Kept, so that nobody collects them.
            self._inherited = (self._idle, self._per_loop)
            self._begin()

    # -- the sync flavour -----------------------------------------------------------------------

    def run(self, operation: Operation[R]) -> R:
        """Perform *operation* on a connection of its own."""
        self.after_fork()
        try:
            self._free.get(timeout=self.timeout)
        except Empty:
            raise _full() from None
        line: Line | None = None
        sound = False
        try:
            line = self._first_sound() or self.connect()
            value = _performed(line, operation)
        except exceptions.MovedError as error:
            raise Moved(Node(error.host, int(error.port))) from None
        except exceptions.RedisError as error:
            # A server that refuses a command has answered it: the line is as good as before.
            sound = isinstance(error, exceptions.ResponseError) and not isinstance(error, exceptions.ReadOnlyError)
            if not sound:
                self._forget()
            raise translated(error) from None
        else:
            sound = True
            return value
        finally:
            if line is not None and sound and not self._closed:
                self._idle.append(line)
            elif line is not None:
                line.disconnect()
            self._free.put(None)

    def connect(self) -> Line:
        """A new connection that nobody else will use; the caller disconnects it."""
        line = cast("Line", self._kind(**self._options))
        try:
            line.connect()
        except BaseException:
            line.disconnect()
            raise
        return line

    def _first_sound(self) -> Line | None:
        while self._idle:
            try:
                line = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            with suppress(exceptions.RedisError):
                # Nothing was asked: whatever can be read there is the end of it.
                if not line.can_read(0):
                    return line
            line.disconnect()
        return None

    def _forget(self) -> None:
        """Whatever broke one line has broken the others too."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().disconnect()

    def close(self) -> None:
        """Close what is idle; what is borrowed is closed when it comes back."""
        self._closed = True
        self._forget()
        for lines in list(self._per_loop.values()):
            lines.abandon()
        self._per_loop.clear()

    # -- the async flavour ----------------------------------------------------------------------

    async def run_async(self, operation: Operation[R]) -> R:
        """See run."""
        self.after_fork()
        lines = self._here()
        if lines.room.locked():
            try:
                async with asyncio.timeout(self.timeout):
                    await lines.room.acquire()
            except TimeoutError:
                raise _full() from None
        else:
            await lines.room.acquire()
        line: AsyncLine | None = None
        sound = False
        try:
            line = await lines.first_sound() or await self._connect_async()
            value = await _performed_async(line, operation, self.timeout)
        except exceptions.MovedError as error:
            raise Moved(Node(error.host, int(error.port))) from None
        except exceptions.RedisError as error:
            sound = isinstance(error, exceptions.ResponseError) and not isinstance(error, exceptions.ReadOnlyError)
            if not sound:
                await lines.forget()
            raise translated(error) from None
        else:
            sound = True
            return value
        finally:
            if line is not None and sound and not self._closed:
                lines.idle.append(line)
            elif line is not None:
                await _hang_up(line)
            lines.room.release()

    async def _connect_async(self) -> AsyncLine:
        line = cast("AsyncLine", self._kind_async(**self._options_async))
        try:
            async with _limit(2 * self.timeout):
                await line.connect()
        except BaseException:
            await _hang_up(line)
            raise
        return line

    def _here(self) -> _LoopLines:
        loop = asyncio.get_running_loop()
        lines = self._per_loop.get(loop)
        if lines is None:
            for other in [other for other in self._per_loop if other.is_closed()]:
                self._per_loop.pop(other).abandon()
            lines = self._per_loop[loop] = _LoopLines(loop)
        return lines

    async def close_async(self) -> None:
        """See close."""
        self._closed = True
        lines = self._per_loop.pop(asyncio.get_running_loop(), None)
        if lines is not None:
            await lines.forget()
        self.close()


class _LoopLines:
    """The connections of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.room = asyncio.Semaphore(_MOST)
        self.idle: list[AsyncLine] = []

    async def first_sound(self) -> AsyncLine | None:
        while self.idle:
            line = self.idle.pop()
            with suppress(exceptions.RedisError):
                if not await line.can_read():
                    return line
            await _hang_up(line)
        return None

    async def forget(self) -> None:
        while self.idle:
            await _hang_up(self.idle.pop())

    def abandon(self) -> None:
        """Let them go from outside their event loop, which runs elsewhere or is closed."""
        for line in self.idle:
            own: Any = line
            writer, own._writer, own._reader = own._writer, None, None  # noqa: SLF001 - disconnect() needs their loop
            if writer is None:
                continue
            try:
                self._loop.call_soon_threadsafe(writer.transport.abort)
            except RuntimeError:
                drop(writer.transport)
        self.idle.clear()


async def _hang_up(line: AsyncLine) -> None:
    with suppress(exceptions.RedisError, OSError):
        await line.disconnect(nowait=True)


def _full() -> ConnectionLost:
    return ConnectionLost(f"none of {_MOST} connections to the server was free in time")


def _settings(pool: Any, url: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    made = pool.from_url(url, **settings)
    options = {name: value for name, value in made.connection_kwargs.items() if name in settings or value is not None}
    return made.connection_class, options


def packed(command: Command) -> bytes:
    """The bytes of *command*."""
    data: bytes = hiredis.pack_command(command)
    return data


def _packed(command: Command | Together) -> tuple[bytes, int]:
    """The bytes of *command*, and how many answers it has; 0 means one that is not in a list."""
    if isinstance(command, Together):
        return b"".join(packed(each) for each in command.commands), len(command.commands)
    return packed(command), 0


def _performed(line: Line, operation: Operation[R]) -> R:
    """Run *operation* on *line*; whatever a command raises is raised at its yield."""
    try:
        command = next(operation)
        while True:
            data, many = _packed(command)
            try:
                line.send_packed_command([data])
                answer = _answers(line, many) if many else line.read_response()
            except Exception as error:  # noqa: BLE001 - handed to the operation, which hands it on
                command = operation.throw(error)
            else:
                command = operation.send(answer)
    except StopIteration as stop:
        value: R = stop.value
        return value


def _answers(line: Line, many: int) -> Sequence[Any]:
    answers: list[Any] = []
    for _ in range(many):
        try:
            answers.append(line.read_response())
        except exceptions.ResponseError as error:
            answers.append(error)
    return answers


@asynccontextmanager
async def _limit(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise exceptions.TimeoutError(f"no answer within {seconds:g} s") from None


async def _performed_async(line: AsyncLine, operation: Operation[R], timeout: float) -> R:
    """The same without blocking the event loop."""
    try:
        command = next(operation)
        while True:
            data, many = _packed(command)
            try:
                async with _limit(timeout):
                    await line.send_packed_command(data)
                    answer = await _answers_async(line, many) if many else await line.read_response()
            except Exception as error:  # noqa: BLE001 - handed to the operation, which hands it on
                command = operation.throw(error)
            else:
                command = operation.send(answer)
    except StopIteration as stop:
        value: R = stop.value
        return value


async def _answers_async(line: AsyncLine, many: int) -> Sequence[Any]:
    answers: list[Any] = []
    for _ in range(many):
        try:
            answers.append(await line.read_response())
        except exceptions.ResponseError as error:
            answers.append(error)
    return answers
