"""The connection thread: all communication with one server, with its connections and channels.

The thread runs its own event loop, so that both variants of a queue share their code, and neither a blocked thread nor
a busy event loop of the user delays heartbeats.

The module also derives the parameters of a connection from the server's address, and assesses whether the server's
confirmations survive a power loss.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit

import pika
from pika.channel import Channel as RawChannel
from pika.exceptions import AMQPError, ChannelClosedByBroker, ProbableAccessDeniedError, ProbableAuthenticationError

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.certificates import explain_certificate_error
from ergon_framework.connectors.credentials import Credentials, CredentialsSource
from ergon_framework.connectors.login import BrokerLogin
from ergon_framework.connectors.rabbitmq.fields import BodyRule, FaithfulAsyncioConnection
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.telemetry import logs

#: The environment variable with the server's address, used if the program passes none.
URL_VARIABLE: Final = "ERGON_RABBITMQ__URL"
#: Heartbeat timeout in seconds, after which the server closes a connection and releases its claims; requested unless
#: the address sets another. The server's default is a minute, which would delay a dead worker's claims.
_HEARTBEAT_SECONDS: Final = 20
#: Options of an address that name files for TLS: the authority of the server's certificate, and a certificate of the
#: client with its key.
_TLS_FILES: Final = ("cacertfile", "certfile", "keyfile")
#: The first major version whose quorum queues have priorities.
_PRIORITIES_SINCE: Final = 4


def connection_parameters(url: str, credentials: Credentials | None, *, timeout: float) -> list[pika.URLParameters]:
    """Return the connection parameters of each host of *url*; errors do not quote it: it may contain a password.

    *credentials* replace the user and the password of *url*.
    """
    problem = ""
    try:
        parts = urlsplit(url)
        userinfo, at, hosts = parts.netloc.rpartition("@")
        userinfo += ":" if userinfo and ":" not in userinfo else ""  # the client cannot read a user without a password
        query = parse_qs(parts.query)
        files: dict[str, str] = {name: query.pop(name)[-1] for name in _TLS_FILES if name in query}
        text = urlencode(query, doseq=True)
        addresses = [parts._replace(netloc=f"{userinfo}{at}{host}", query=text).geturl() for host in hosts.split(",")]
        parameters = [pika.URLParameters(address) for address in addresses]
    except (ValueError, TypeError) as error:
        problem = type(error).__name__
    if problem or parts.scheme not in ("amqp", "amqps"):
        raise ConfigurationError(
            "the address of RabbitMQ is invalid; expected, e.g., amqp://user:password@host:5672/vhost, with options "
            f"as in ?heartbeat=20 ({problem or 'it does not begin with amqp:// or amqps://'})"
        )
    for each in parameters:
        if parts.path == "//":  # Celery and others write the vhost "/" like this
            each.virtual_host = "/"
        if "heartbeat" not in query:
            each.heartbeat = _HEARTBEAT_SECONDS
        if each.ssl_options is not None:
            each.ssl_options = _build_tls(each, files)
        if credentials is not None:
            user = credentials.user or each.credentials.username
            each.credentials = pika.PlainCredentials(user, credentials.password)
        each.connection_attempts = 1
        each.socket_timeout = each.stack_timeout = timeout
    return parameters


def _build_tls(parameters: pika.URLParameters, files: Mapping[str, str]) -> pika.SSLOptions:
    """Return TLS options that verify the certificate of the server and its host name."""
    options: pika.SSLOptions = parameters.ssl_options
    context = options.context
    try:
        if "cacertfile" in files:
            context = ssl.create_default_context(cafile=files["cacertfile"])
        if "certfile" in files:
            context.load_cert_chain(files["certfile"], files.get("keyfile"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"the files of the address of RabbitMQ ({', '.join(f'{name}={path}' for name, path in files.items())}) "
            f"cannot be used: {type(error).__name__}: {error}"
        ) from error
    return pika.SSLOptions(context, options.server_hostname or parameters.host)


# -- durability -------------------------------------------------------------------------------------


class RabbitMQDurability(NamedTuple):
    """Whether confirmed messages survive a power loss, None for unknown, and a description of the finding."""

    durable: bool | None
    message: str


def assess_durability(server: Mapping[str, Any]) -> RabbitMQDurability:
    """Assess the properties that a server presents; the queues are quorum queues, or were rejected.

    >>> assess_durability({"product": "RabbitMQ", "version": "3.10.8"}).durable
    True
    >>> assess_durability({"product": "LavinMQ", "version": "2.0"}).durable is None
    True
    """
    product, version = (_to_text(server.get(name)) for name in ("product", "version"))
    if product != "RabbitMQ":
        return RabbitMQDurability(None, f"durability is unknown: {product or 'the server'} is not RabbitMQ")
    return RabbitMQDurability(
        durable=True,
        message=f"confirmed data survives a power loss: RabbitMQ {version} syncs its quorum queues' log first, "
        "unless ra's write strategy was changed, which clients cannot detect",
    )


def has_priorities(server: Mapping[str, Any]) -> bool | None:
    """Return whether quorum queues of the server with these properties have priorities; None if they are unknown."""
    major = _to_text(server.get("version")).partition(".")[0]
    if not major.isdigit():
        return None
    return _to_text(server.get("product")) == "RabbitMQ" and int(major) >= _PRIORITIES_SINCE


def _to_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


# -- connections ------------------------------------------------------------------------------------

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_log = logging.getLogger(__name__)
_threads: dict[tuple[str, float, CredentialsSource | None, int], ConnectionThread] = {}
_registry_lock = threading.Lock()
#: The server's codes for a wrong name or password, and for a vhost that is missing or not allowed for the user.
_ACCESS_REFUSED: Final = 403
_NOT_ALLOWED: Final = 530
#: The server's text inside the client's error message.
_SERVER_TEXT: Final = re.compile(r"\(\d{3}\) '([^']*?)\.?'")
#: Seconds that a clean close of a connection may take.
_CLOSE_TIMEOUT_SECONDS: Final = 2.0


class ChannelClosedError(ConnectorError):
    """The server closed the channel because of a request; the message is the server's text."""

    code = "refused"


class Channel:
    """One channel; waiting callers are notified when it closes."""

    def __init__(self, raw: RawChannel, timeout: float) -> None:
        self.raw = raw
        self._timeout = timeout
        self._waiting: set[asyncio.Future[Any]] = set()
        self._close_callbacks: list[Callable[[Exception], None]] = []
        self.reason: Exception | None = None
        raw.add_on_close_callback(self._on_closed)

    @property
    def is_open(self) -> bool:
        return self.reason is None and bool(self.raw.is_open)

    def leave_out(self, rule: BodyRule) -> None:
        """Deliver messages without the bodies that *rule* selects."""
        self.raw.connection.leave_out(self.raw.channel_number, rule)

    def add_close_callback(self, callback: Callable[[Exception], None]) -> None:
        self._close_callbacks.append(callback)

    def _on_closed(self, _raw: RawChannel, reason: Exception) -> None:
        if isinstance(reason, ChannelClosedByBroker):
            self.fail(ChannelClosedError(reason.reply_text))
        else:
            self.fail(ConnectionLostError(f"connection to RabbitMQ was lost: {_describe(reason)}"))

    def fail(self, reason: Exception) -> None:
        """Mark the channel as unusable, and fail all waiting callers."""
        if self.reason is not None:
            return
        self.reason = reason
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(reason)
        for callback in self._close_callbacks:
            callback(reason)

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future that fails when the channel closes."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.reason is not None:
            future.set_exception(self.reason)
            return future
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    async def request(self, request: Callable[[Callable[[Any], None]], object]) -> Any:
        """Send *request*, which receives a response callback, and return the response.

        Raises ChannelClosedError, ConnectionLostError or TimeoutError.
        """
        future = self.create_future()
        if not future.done():
            try:
                request(lambda answer: None if future.done() else future.set_result(answer))
            except AMQPError as error:
                raise ConnectionLostError(f"the channel to RabbitMQ is closed: {_describe(error)}") from error
        async with asyncio.timeout(self._timeout):
            return await future

    def close(self) -> None:
        with suppress(AMQPError):
            self.raw.close()


class Connection:
    """One connection, opened on demand and reopened when it was lost."""

    def __init__(self, url: str, login: BrokerLogin, timeout: float) -> None:
        self._url = url
        #: The credentials, read for every attempt because they may have changed.
        self._login = login
        #: Attempts that have failed: each is followed by one with the next host.
        self._failed_attempts = 0
        #: Host and port of the newest connection; None before the first.
        self.host: str | None = None
        self._timeout = timeout
        self._raw: FaithfulAsyncioConnection | None = None
        self._connecting = asyncio.Lock()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._channels: list[Channel] = []
        #: Why the server does not read published messages, as the server states it; empty if it does.
        self.blocked = ""
        self.server: dict[str, Any] = {}

    async def channel(self) -> Channel:
        """Return a new channel.

        Raises ConnectionLostError if there is no server, ConfigurationError if it rejects the user.
        """
        raw = await self._ensure_connected()
        opened: asyncio.Future[RawChannel] = self._create_future()
        with _translate_errors("open a channel"):
            raw.channel(on_open_callback=lambda channel: None if opened.done() else opened.set_result(channel))
        async with self.timeout("open a channel"):
            channel = Channel(await opened, self._timeout)
        self._channels = [*(other for other in self._channels if other.is_open), channel]
        return channel

    @asynccontextmanager
    async def timeout(self, action: str) -> AsyncIterator[None]:
        """Limit the duration of the block; at the timeout the server and the connection count as lost."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            self.abort()
            why = f"; it blocks publishers: {self.blocked}" if self.blocked else ""
            raise ConnectionLostError(
                f"RabbitMQ did not answer within {self._timeout:g} s to: {action}{why}"
            ) from error

    def abort(self) -> None:
        """Abandon the connection. All waiting callers are notified, even if no data passes any more."""
        raw, self._raw = self._raw, None
        channels, self._channels = self._channels, []
        for channel in channels:
            channel.fail(ConnectionLostError("connection to RabbitMQ was aborted"))
        if raw is not None and raw.is_open:
            with suppress(AMQPError):
                raw.close()

    async def close(self) -> None:
        raw = self._raw
        if raw is None or not raw.is_open:
            return
        closed = self._create_future()
        raw.add_on_close_callback(lambda *_: None if closed.done() else closed.set_result(None))
        self.abort()
        with suppress(TimeoutError, ConnectionLostError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                await closed

    async def _ensure_connected(self) -> FaithfulAsyncioConnection:
        async with self._connecting:
            if self._raw is None or not self._raw.is_open:
                self._raw = await self._connect()
            return self._raw

    async def _connect(self) -> FaithfulAsyncioConnection:
        """Connect to the first host that accepts, beginning with the one after the last failure."""
        hosts = connection_parameters(self._url, await self._login.read_async(), timeout=self._timeout)
        for attempt in range(len(hosts)):
            try:
                parameters = hosts[self._failed_attempts % len(hosts)]
                raw = await self._connect_to(parameters)
            except ConnectionLostError:
                self._failed_attempts += 1
                if attempt == len(hosts) - 1:
                    raise
            else:
                self._login.accept()
                self.host = f"{parameters.host}:{parameters.port}"
                return raw
        raise ConfigurationError("the address of RabbitMQ has no host")

    async def _connect_to(self, parameters: pika.ConnectionParameters) -> FaithfulAsyncioConnection:
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        raw = FaithfulAsyncioConnection(
            parameters,
            on_open_callback=lambda connection: None if opened.done() else opened.set_result(connection),
            on_open_error_callback=lambda _, error: (
                None if opened.done() else opened.set_exception(_to_connect_error(error, parameters, self._login))
            ),
            on_close_callback=self._on_closed,
            custom_ioloop=asyncio.get_running_loop(),
        )
        raw.add_on_connection_blocked_callback(self._on_blocked)
        raw.add_on_connection_unblocked_callback(self._on_unblocked)
        try:
            async with asyncio.timeout(self._timeout):
                await opened
        except TimeoutError as error:
            with suppress(AMQPError):
                raw.close()
            address = f"{parameters.host}:{parameters.port}"
            raise ConnectionLostError(
                f"connecting to RabbitMQ at {address} timed out after {self._timeout:g} s"
            ) from error
        self.blocked = ""
        self.server = raw.server_properties or {}
        return raw

    def _create_future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def _on_closed(self, raw: Any, reason: BaseException) -> None:
        if self._raw is raw:
            self._raw = None
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(ConnectionLostError(f"connection to RabbitMQ was lost: {_describe(reason)}"))

    def _on_blocked(self, _raw: Any, frame: Any) -> None:
        self.blocked = str(frame.method.reason)
        logs.log_event(logging.WARNING, "rabbitmq publisher blocked", {"reason": self.blocked}, to=_log)

    def _on_unblocked(self, *_: Any) -> None:
        self.blocked = ""


class ConnectionThread:
    """The thread that serves one server address in this process; all its queues share it.

    Publishing has a separate connection: a server that is short of memory stops reading from publishers, and acks must
    not wait behind that.
    """

    def __init__(self, url: str, timeout: float, credentials: CredentialsSource | None) -> None:
        self.owner_pid = os.getpid()
        self.users = 0
        self._is_stopping = False
        self.durability: RabbitMQDurability | None = None
        connection_parameters(url, None, timeout=timeout)  # an invalid address is an error here, not in the first call
        login = BrokerLogin(credentials)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="ergon-rabbitmq", daemon=True)
        self.consume_connection = Connection(url, login, timeout)
        self.publish_connection = Connection(url, login, timeout)
        self._thread.start()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_other_tasks())
        finally:
            self._loop.close()

    # -- for callers on other threads ---------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run *work* on the connection thread and return its result."""
        return self._submit(work).result()

    async def run_async(self, work: Coroutine[Any, Any, T], *, whole: bool = False) -> T:
        """Run *work* for a caller on an event loop; with *whole* it completes even if its caller is cancelled."""
        future = asyncio.wrap_future(self._submit(work))
        if not whole:
            return await future
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # possibly no caller awaits it
        return await asyncio.shield(future)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if threading.current_thread() is self._thread:
            work.close()
            raise ConfigurationError("a RabbitMQ queue was called from its own connection thread: this would deadlock")
        try:
            return asyncio.run_coroutine_threadsafe(self._run_guarded(work), self._loop)
        except RuntimeError as error:
            work.close()
            raise ConnectionLostError("connection to RabbitMQ is closed") from error

    async def _run_guarded(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._is_stopping:  # the stop cancelled it, not its caller
                raise ConnectionLostError("connection to RabbitMQ was closed during the call") from None
            raise

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call *callback* on the connection thread, soon."""
        with suppress(RuntimeError):  # the loop is closed, and everything on it has ended
            self._loop.call_soon_threadsafe(callback)

    async def close(self) -> None:
        """Close both connections cleanly."""
        await asyncio.gather(self.consume_connection.close(), self.publish_connection.close())

    def stop(self) -> None:
        """Stop the thread; nothing runs there afterwards."""
        self._is_stopping = True
        self.call_soon(self._loop.stop)

    # -- on the connection thread -------------------------------------------------------------------

    def log_durability(self, server: dict[str, Any]) -> None:
        """Log once how durable the server's confirmations are."""
        if self.durability is None:
            self.durability = assess_durability(server)
            level = logging.INFO if self.durability.durable else logging.WARNING
            logs.log_event(
                level,
                "rabbitmq durability",
                {"durable": self.durability.durable, "summary": self.durability.message},
                to=_log,
            )


def acquire_connection_thread(
    url: str, timeout: float, credentials: CredentialsSource | None = None
) -> ConnectionThread:
    """Return the connection thread of *url*, shared by all its queues; release with ``release_connection_thread``."""
    with _registry_lock:
        key = url, timeout, credentials, os.getpid()
        thread = _threads.get(key)
        if thread is None:
            thread = _threads[key] = ConnectionThread(url, timeout, credentials)
        thread.users += 1
        return thread


def release_connection_thread(thread: ConnectionThread) -> bool:
    """Decrement the reference count; return True for the last user, which closes the thread."""
    with _registry_lock:
        thread.users -= 1
        if thread.users > 0:
            return False
        for key, other in list(_threads.items()):
            if other is thread:
                del _threads[key]
        return True


async def _cancel_other_tasks() -> None:
    """Cancel all other tasks of this loop, so that their callers learn that it ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _translate_errors:  # noqa: N801 - used as a function
    """Translate the client's errors within the block into ConnectionLostError."""

    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, AMQPError):
            raise ConnectionLostError(f"cannot {self._action}: {_describe(error)}") from error


def _to_connect_error(error: BaseException, parameters: pika.ConnectionParameters, login: BrokerLogin) -> Exception:
    """Return the reason of a failed connection: what a program cannot cure by waiting is a ConfigurationError."""
    server = f"RabbitMQ at {parameters.host}:{parameters.port}"
    certificate_error = _find_cause(error, ssl.SSLCertVerificationError)
    if certificate_error is not None:
        refusal = explain_certificate_error(certificate_error, trust="?cacertfile= of the address")
        return ConfigurationError(f"cannot connect to {server}: {refusal}")
    if isinstance(error, ProbableAuthenticationError | ProbableAccessDeniedError) and _is_rejection(str(error)):
        match = _SERVER_TEXT.search(str(error))
        why = f": {match[1]}" if match else ""
        return login.refuse(
            f"{server} rejected the user{why}; check the name, the password and the vhost of the address"
        )
    return ConnectionLostError(f"{server} cannot be reached: {_describe(error)}")


def _find_cause(error: BaseException | None, kind: type[E]) -> E | None:
    """Return the error of *kind* that *error* is, wraps or was caused by."""
    while error is not None:
        if isinstance(error, kind):
            return error
        error = _unwrap(error) or error.__cause__
    return None


def _is_rejection(message: str) -> bool:
    """Return whether the server rejected the user; the client only guesses, and a server that dies sends nothing."""
    return any(f"({code})" in message for code in (_ACCESS_REFUSED, _NOT_ALLOWED)) and "is down" not in message


def _describe(error: BaseException) -> str:
    """Describe the client's error without its text for the address, which contains no password but is very long."""
    while (wrapped := _unwrap(error)) is not None:
        error = wrapped
    return f"{type(error).__name__}: {error}"[:200]


def _unwrap(error: BaseException) -> BaseException | None:
    """Return the error that *error* only wraps: one of several, an attribute, or an argument."""
    errors = getattr(error, "exceptions", ())
    wrapped = errors[-1] if errors else getattr(error, "exception", error.args[0] if error.args else None)
    return wrapped if isinstance(wrapped, BaseException) else None
