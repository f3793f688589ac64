"""Operations on a connection to the server, and errors.

An operation is work with a server that is written once for the sync and the async variant: a generator that yields
commands and receives their answers. The caller runs it on a thread or on an event loop; the operation's decisions are
the same for both.

Errors of the client library are translated into errors of the framework, without quoting what was sent.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import hiredis
from redis import exceptions
from redis.exceptions import NoScriptError

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError

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


# -- connections ------------------------------------------------------------------------------------


class Connection(Protocol):
    """The used part of the client's own connection."""

    host: str
    port: int

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def can_read(self, timeout: float) -> bool: ...

    def send_packed_command(self, command: Sequence[bytes]) -> None: ...

    def read_response(self, *, timeout: float = ...) -> Any: ...


class AsyncConnection(Protocol):
    """The used part of the client's own connection on an event loop."""

    host: str
    port: int

    async def connect(self) -> None: ...

    async def disconnect(self, *, nowait: bool) -> None: ...

    async def can_read(self) -> bool: ...

    async def send_packed_command(self, command: bytes) -> None: ...

    async def read_response(self) -> Any: ...


def pack_command(command: Command) -> bytes:
    """Encode *command* to bytes."""
    data: bytes = hiredis.pack_command(command)
    return data


def _pack(command: Command | Pipeline) -> tuple[bytes, int]:
    """Return the bytes of *command*, and the number of its answers; 0 means one answer that is not in a list."""
    if isinstance(command, Pipeline):
        return b"".join(pack_command(each) for each in command.commands), len(command.commands)
    return pack_command(command), 0


def run_operation(connection: Connection, operation: Operation[R]) -> R:
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
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Limit the time of the block; raise the client's TimeoutError, which the callers translate, and not Python's."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise exceptions.TimeoutError(f"no answer within {seconds:g} s") from None


async def run_operation_async(connection: AsyncConnection, operation: Operation[R], timeout: float) -> R:
    """Run *operation* on an async connection, without blocking the event loop."""
    try:
        command = next(operation)
        while True:
            data, answer_count = _pack(command)
            try:
                async with time_limit(timeout):
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
