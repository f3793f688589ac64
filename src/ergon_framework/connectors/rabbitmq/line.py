"""Line: the thread on which all talk with one server happens, and the connections and channels it has.

The thread runs an event loop of its own, so that both variants of a queue have the same code behind them and neither a
blocked thread nor a busy event loop of the user's keeps heartbeats from being answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import pika
from pika.channel import Channel as RawChannel
from pika.exceptions import AMQPError, ChannelClosedByBroker, ProbableAccessDeniedError, ProbableAuthenticationError

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.rabbitmq.address import parameters
from ergon_framework.connectors.rabbitmq.durability import Durability, judged
from ergon_framework.connectors.rabbitmq.fields import BodyRule, FaithfulAsyncioConnection
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.telemetry import logs

T = TypeVar("T")

_log = logging.getLogger(__name__)
_lines: dict[tuple[str, float, int], Line] = {}
_making = threading.Lock()
#: How the server says that a name or password is wrong, and that a vhost is not there or not for this user.
_REFUSED: Final = 403
_NOT_ALLOWED: Final = 530
#: Its words, in what the client makes of them.
_SAID: Final = re.compile(r"\(\d{3}\) '([^']*?)\.?'")
#: Seconds that a connection may take to say goodbye.
_GOODBYE: Final = 2.0


class Refused(ConnectorError):
    """The server closed the channel because of what it was asked; the message is its own words."""

    code = "refused"


class Channel:
    """One channel; whoever waits on it learns when it closes."""

    def __init__(self, raw: RawChannel, timeout: float) -> None:
        self.raw = raw
        self._timeout = timeout
        self._waiting: set[asyncio.Future[Any]] = set()
        self._closed: list[Callable[[Exception], None]] = []
        self.reason: Exception | None = None
        raw.add_on_close_callback(self._on_closed)

    @property
    def is_open(self) -> bool:
        return self.reason is None and bool(self.raw.is_open)

    def leave_out(self, rule: BodyRule) -> None:
        """Have messages arrive without the bodies that *rule* names."""
        self.raw.connection.leave_out(self.raw.channel_number, rule)

    def when_closed(self, tell: Callable[[Exception], None]) -> None:
        self._closed.append(tell)

    def _on_closed(self, _raw: RawChannel, reason: Exception) -> None:
        if isinstance(reason, ChannelClosedByBroker):
            self.lose(Refused(reason.reply_text))
        else:
            self.lose(ConnectionLost(f"the connection to RabbitMQ is gone: {_words(reason)}"))

    def lose(self, reason: Exception) -> None:
        """It is of no use any more; everybody who waits is told."""
        if self.reason is not None:
            return
        self.reason = reason
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(reason)
        for tell in self._closed:
            tell(reason)

    def future(self) -> asyncio.Future[Any]:
        """A future that fails when the channel closes."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.reason is not None:
            future.set_exception(self.reason)
            return future
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    async def ask(self, request: Callable[[Callable[[Any], None]], object]) -> Any:
        """The answer to *request*, which is given whom to tell; Refused, ConnectionLost or TimeoutError."""
        future = self.future()
        if not future.done():
            try:
                request(lambda answer: None if future.done() else future.set_result(answer))
            except AMQPError as error:
                raise ConnectionLost(f"the channel to RabbitMQ is closed: {_words(error)}") from error
        async with asyncio.timeout(self._timeout):
            return await future

    def close(self) -> None:
        with suppress(AMQPError):
            self.raw.close()


class Connection:
    """One connection, made when it is needed and again when it was lost."""

    def __init__(self, settings: pika.ConnectionParameters, timeout: float) -> None:
        self._settings = settings
        self._timeout = timeout
        self._raw: FaithfulAsyncioConnection | None = None
        self._connecting = asyncio.Lock()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._channels: list[Channel] = []
        #: Why the server does not read what is published, in its words; empty when it does.
        self.blocked = ""
        self.server: dict[str, Any] = {}

    async def channel(self) -> Channel:
        """A new channel; ConnectionLost where there is no server, ConfigurationError where it does not let us in."""
        raw = await self._connected()
        opened: asyncio.Future[RawChannel] = self._future()
        with _lost("open a channel"):
            raw.channel(on_open_callback=lambda channel: None if opened.done() else opened.set_result(channel))
        async with self.answering("open a channel"):
            channel = Channel(await opened, self._timeout)
        self._channels = [*(other for other in self._channels if other.is_open), channel]
        return channel

    @asynccontextmanager
    async def answering(self, words: str) -> AsyncIterator[None]:
        """Within: a server that does not answer in time is as good as gone, and so is the connection."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            self.drop()
            why = f"; it blocks publishers: {self.blocked}" if self.blocked else ""
            raise ConnectionLost(f"RabbitMQ did not answer within {self._timeout:g} s to: {words}{why}") from error

    def drop(self) -> None:
        """Have nothing to do with it any more. Everybody who waits is told, also if nothing comes through."""
        raw, self._raw = self._raw, None
        channels, self._channels = self._channels, []
        for channel in channels:
            channel.lose(ConnectionLost("the connection to RabbitMQ was given up"))
        if raw is not None and raw.is_open:
            with suppress(AMQPError):
                raw.close()

    async def close(self) -> None:
        raw = self._raw
        if raw is None or not raw.is_open:
            return
        closed = self._future()
        raw.add_on_close_callback(lambda *_: None if closed.done() else closed.set_result(None))
        self.drop()
        with suppress(TimeoutError, ConnectionLost):
            async with asyncio.timeout(_GOODBYE):
                await closed

    async def _connected(self) -> FaithfulAsyncioConnection:
        async with self._connecting:
            if self._raw is None or not self._raw.is_open:
                self._raw = await self._connect()
            return self._raw

    async def _connect(self) -> FaithfulAsyncioConnection:
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        raw = FaithfulAsyncioConnection(
            self._settings,
            on_open_callback=lambda connection: None if opened.done() else opened.set_result(connection),
            on_open_error_callback=lambda _, error: (
                None if opened.done() else opened.set_exception(_unopened(error, self._settings))
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
            raise ConnectionLost(f"RabbitMQ did not let us in within {self._timeout:g} s") from error
        self.blocked = ""
        self.server = raw.server_properties or {}
        return raw

    def _future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def _on_closed(self, raw: Any, reason: BaseException) -> None:
        if self._raw is raw:
            self._raw = None
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(ConnectionLost(f"the connection to RabbitMQ is gone: {_words(reason)}"))

    def _on_blocked(self, _raw: Any, frame: Any) -> None:
        self.blocked = str(frame.method.reason)
        logs.say(logging.WARNING, "rabbitmq blocks publishers", {"reason": self.blocked}, to=_log)

    def _on_unblocked(self, *_: Any) -> None:
        self.blocked = ""


class Line:
    """The server at one address, as this process knows it; shared by all its queues.

    What is published goes over a connection of its own: a server that is short of memory stops reading from those that
    publish, and acks must not wait behind that.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.owner = os.getpid()
        self.users = 0
        self._ending = False
        self.durability: Durability | None = None
        settings = parameters(url, timeout=timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="ergon-rabbitmq", daemon=True)
        self.takes = Connection(settings, timeout)
        self.sends = Connection(settings, timeout)
        self._thread.start()

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_end_others())
        finally:
            self._loop.close()

    # -- for those on other threads -----------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What *work* comes to on the line's own thread."""
        return self._begun(work).result()

    async def run_async(self, work: Coroutine[Any, Any, T], *, whole: bool = False) -> T:
        """The same for a caller on an event loop; *whole* work is finished although its caller is cancelled."""
        future = asyncio.wrap_future(self._begun(work))
        if not whole:
            return await future
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to look
        return await asyncio.shield(future)

    def _begun(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if threading.current_thread() is self._thread:
            work.close()
            raise ConfigurationError("a RabbitMQ queue was called from its own thread, which would wait for itself")
        try:
            return asyncio.run_coroutine_threadsafe(self._guarded(work), self._loop)
        except RuntimeError as error:
            work.close()
            raise ConnectionLost("the line to RabbitMQ is closed") from error

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._ending:  # not its caller has cancelled it
                raise ConnectionLost("the line to RabbitMQ was closed during the call") from None
            raise

    def tell(self, what: Callable[[], None]) -> None:
        """Have *what* called on the line's thread, soon."""
        with suppress(RuntimeError):  # it has ended, and everything with it
            self._loop.call_soon_threadsafe(what)

    async def close(self) -> None:
        """Say goodbye to the server."""
        await asyncio.gather(self.takes.close(), self.sends.close())

    def end(self) -> None:
        """End the thread; nothing runs there afterwards."""
        self._ending = True
        self.tell(self._loop.stop)

    # -- on the line's own thread -------------------------------------------------------------------

    def judge(self, server: dict[str, Any]) -> None:
        """Once: say what the server's confirmations are worth."""
        if self.durability is None:
            self.durability = judged(server)
            level = logging.INFO if self.durability.durable else logging.WARNING
            logs.say(
                level,
                "rabbitmq durability",
                {"durable": self.durability.durable, "words": self.durability.words},
                to=_log,
            )


def line_to(url: str, timeout: float) -> Line:
    """The line to *url*, one per process however many queues use it; give it back with ``leave``."""
    with _making:
        where = url, timeout, os.getpid()
        line = _lines.get(where)
        if line is None:
            line = _lines[where] = Line(url, timeout)
        line.users += 1
        return line


def leave(line: Line) -> bool:
    """One user less; True for the last one, who turns off the light."""
    with _making:
        line.users -= 1
        if line.users > 0:
            return False
        for where, known in list(_lines.items()):
            if known is line:
                del _lines[where]
        return True


async def _end_others() -> None:
    """Whoever still waits on this loop learns that it ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _lost:  # noqa: N801 - used as a function
    """What the client raises within because there is no connection is ConnectionLost."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, AMQPError):
            raise ConnectionLost(f"cannot {self._words}: {_words(error)}") from error


def _unopened(error: BaseException, settings: pika.ConnectionParameters) -> Exception:
    """Why there is no connection; a wrong password stays wrong, everything else may be over soon."""
    server = f"RabbitMQ at {settings.host}:{settings.port}"
    if isinstance(error, ProbableAuthenticationError | ProbableAccessDeniedError) and _told(str(error)):
        said = _SAID.search(str(error))
        why = f": {said[1]}" if said else ""
        return ConfigurationError(
            f"{server} does not let this user in{why}; check the name, the password and the vhost of the address"
        )
    return ConnectionLost(f"{server} cannot be reached: {_words(error)}")


def _told(words: str) -> bool:
    """Whether the server has said no, where the client only guesses: one that dies in between says nothing."""
    return any(f"({code})" in words for code in (_REFUSED, _NOT_ALLOWED)) and "is down" not in words


def _words(error: BaseException) -> str:
    """What the client says without the address, which it never quotes with a password but at great length."""
    while (within := _within(error)) is not None:
        error = within
    return f"{type(error).__name__}: {error}"[:200]


def _within(error: BaseException) -> BaseException | None:
    """What *error* only wraps: the client has it among several, as an attribute, or as an argument."""
    several = getattr(error, "exceptions", ())
    found = several[-1] if several else getattr(error, "exception", error.args[0] if error.args else None)
    return found if isinstance(found, BaseException) else None
