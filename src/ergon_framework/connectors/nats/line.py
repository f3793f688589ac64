"""Line: one connection to a NATS server, and answers to what was asked over it.

A line that is lost stays lost: whoever waits on it is told at once, and the next call makes another.
The client's own reconnecting would keep what nobody can vouch for: requests that the server has
forgotten, and publishes that come long after their sender gave up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from nats import errors
from nats.aio.subscription import Subscription

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.nats.client import DirectClient
from ergon_framework.connectors.nats.frames import Ear, Heard
from ergon_framework.errors import ConnectionLost, ErgonError
from ergon_framework.redaction import redact_address
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Seconds between two looks whether a silent server is still there.
_PING: Final = 10
#: Seconds that a connection may take to close before it is left to itself.
_LEAVE: Final = 2.0
_NO_RESPONDERS: Final = "503"
#: What the wire adds to a block of headers, and some more.
_FRAME: Final = 64
#: The first release that writes down what was deleted.
_REMEMBERS: Final = (2, 10)


class Request(NamedTuple):
    """Something to publish that will be answered."""

    subject: str
    payload: bytes = b""
    headers: Mapping[str, str] | None = None

    @property
    def size(self) -> int:
        """What the server counts: the payload with its headers."""
        headers = 0 if self.headers is None else _FRAME
        for name, text in (self.headers or {}).items():
            headers += len(name) + len(text.encode()) + 4
        return len(self.payload) + headers


class Round:
    """Requests that are out together."""

    __slots__ = ("_waiter", "answers", "error", "missing", "over")

    def __init__(self, count: int) -> None:
        self.answers: list[Heard | None] = [None] * count
        self.missing = count
        self.over = False
        self.error: ConnectionLost | None = None
        self._waiter: asyncio.Future[None] | None = None

    def end(self) -> None:
        """Nothing more is waited for."""
        self.missing = 0
        self.over = True
        self._wake()

    def fail(self, error: ConnectionLost) -> None:
        """Nothing more will come, because of *error*."""
        if not self.over:
            self.over, self.error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Until it is over, or *seconds* are; who waits in pieces waits again. One at a time."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(seconds, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None


class Line:
    """A connection; made by ``connect``."""

    def __init__(self, client: DirectClient, *, timeout: float) -> None:
        self.client = client
        self.timeout = timeout
        self.connected_at = time.time()
        self.lost = False
        server = client.connected_server_version
        self._version = server.major, server.minor
        #: By the last part of the subject that the answer comes to.
        self._rounds: dict[str, tuple[Round, int]] = {}
        self._waited: set[Round] = set()
        self._number = 0
        self._inbox = f"{client.new_inbox()}."
        self._mourners: list[Callable[[], None]] = []
        self._leaving: asyncio.Task[None] | None = None

    @property
    def version(self) -> tuple[int, int]:
        """Of the server."""
        return self._version

    @property
    def forgets(self) -> bool:
        """Whether the server, if it is killed, brings back what was acked or deleted: releases before 2.10 do."""
        return self._version < _REMEMBERS

    @property
    def max_payload(self) -> int:
        """Bytes that the server takes, headers included."""
        return int(self.client.max_payload)

    def mourn(self, told: Callable[[], None]) -> None:
        """Have *told* called when the line is lost."""
        self._mourners.append(told)

    # -- sending ------------------------------------------------------------------------------------

    async def send(
        self, subject: str, payload: bytes = b"", *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish without waiting for anything."""
        try:
            await self.client.publish(subject, payload, reply, headers)  # type: ignore[arg-type] # it only reads them
        except (errors.ConnectionClosedError, errors.ConnectionDrainingError, errors.OutboundBufferLimitError) as error:
            raise ConnectionLost("the line to NATS is down") from error
        except errors.MaxPayloadError as error:
            raise ConnectorError(
                f"{len(payload)} bytes are more than the {self.max_payload} that NATS takes"
            ) from error
        except (errors.Error, OSError, RuntimeError, AttributeError) as error:
            # The client forgets its transport when it is closed under somebody's hands.
            raise ConnectionLost(f"the line to NATS broke: {type(error).__name__}") from error

    async def send_all(self, messages: Iterable[tuple[str, str, bytes]]) -> None:
        """Publish many: subject, where the answer is to go, payload."""
        try:
            await self.client.publish_all(messages)
        except (errors.Error, OSError, RuntimeError, AttributeError) as error:
            raise ConnectionLost(f"the line to NATS broke: {type(error).__name__}") from error

    async def ask(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Heard:
        """The answer to one request, or ConnectionLost."""
        (answer,) = await self.ask_all([Request(subject, payload, headers)], timeout=timeout)
        if answer is None:
            raise ConnectionLost(f"NATS did not answer within {timeout or self.timeout:g} s")
        return answer

    async def ask_all(self, requests: Sequence[Request], *, timeout: float | None = None) -> list[Heard | None]:
        """One answer each, in order; None for what was not answered in time, or by nobody."""
        waiting, most = self.round(len(requests)), self.max_payload
        if all(headers is None and len(payload) <= most for _, payload, headers in requests):
            await self.send_all(
                [(subject, self.reply(waiting, index), payload) for index, (subject, payload, _) in enumerate(requests)]
            )
        else:
            for index, (subject, payload, headers) in enumerate(requests):
                await self.send(subject, payload, reply=self.reply(waiting, index), headers=headers)
        await self.answered(waiting, timeout=timeout)
        return [answer if answer is not None and not unheard(answer) else None for answer in waiting.answers]

    def round(self, count: int) -> Round:
        """Room for *count* answers."""
        if self.lost:
            raise ConnectionLost("the line to NATS is down")
        return Round(count)

    def reply(self, waiting: Round, index: int = 0) -> str:
        """Where the answer to number *index* is to go."""
        self._number = number = self._number + 1
        token = str(number)
        self._rounds[token] = waiting, index
        return self._inbox + token

    async def answered(self, waiting: Round, *, timeout: float | None = None) -> bool:
        """Wait until all of a round was answered; False if some was not in time."""
        if not waiting.missing:
            return True
        if self.lost:
            raise ConnectionLost("the line to NATS was lost before it answered")
        self._waited.add(waiting)
        try:
            await waiting.wait(self.timeout if timeout is None else timeout)
        finally:
            self._waited.discard(waiting)
            if waiting.missing:
                for token in [token for token, (known, _) in self._rounds.items() if known is waiting]:
                    del self._rounds[token]
        if waiting.error is not None:
            raise waiting.error
        if waiting.over:
            return True
        await self.doubted()
        return False

    async def doubted(self) -> None:
        """Nothing came when something should have: see whether the server is silent or the line dead."""
        try:
            await self.client.flush(timeout=self.timeout)  # type: ignore[arg-type] # it takes any number
        except (errors.Error, OSError, ValueError, AttributeError):
            self.drop()
            raise ConnectionLost(f"NATS has not answered for {2 * self.timeout:g} s") from None

    def _answer(self, message: Heard) -> None:
        found = self._rounds.pop(message.subject[len(self._inbox) :], None)
        if found is None:
            return
        waiting, index = found
        waiting.answers[index] = message
        waiting.missing -= 1
        if not waiting.missing:
            waiting.end()

    # -- receiving ----------------------------------------------------------------------------------

    def inbox(self) -> str:
        """A name that nobody else has."""
        return str(self.client.new_inbox())

    async def subscribe(self, subject: str, ear: Ear) -> Subscription:
        """Have *ear* called with each message, however many come: one that is dropped would be a lost claim."""
        try:
            return await self.client.hear(subject, ear)
        except (errors.Error, OSError, RuntimeError, AttributeError) as error:
            raise ConnectionLost(f"the line to NATS broke: {type(error).__name__}") from error

    # -- the end ------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Give the line up: everybody who waits is told now; the connection closes behind our back."""
        if not self.lost:
            self._gone()
            self._leaving = asyncio.ensure_future(_left(self.client))

    async def close(self) -> None:
        """Close it in good order."""
        self._gone()
        await _left(self.client)

    def abandon(self) -> None:
        """Let it go from outside its event loop, which is closed: nobody waits there any more."""
        self.lost = True
        self.client.let_go(loop_is_closed=True)

    def _gone(self) -> None:
        self.lost = True
        self._rounds.clear()
        for waiting in self._waited:
            waiting.fail(ConnectionLost("the line to NATS was lost before it answered"))
        mourners, self._mourners = self._mourners, []
        for told in mourners:
            told()

    async def _closed(self) -> None:
        if not self.lost:
            self._gone()


def unheard(message: Heard) -> bool:
    """Whether the server says that nobody was there to answer."""
    return not message.data and message.status[0] == _NO_RESPONDERS


async def connect(addresses: Sequence[str], *, timeout: float, options: Mapping[str, Any]) -> Line:
    """A line to one of *addresses*, within *timeout*."""
    client, line = DirectClient(), None

    async def closed() -> None:
        if line is not None:
            await line._closed()  # noqa: SLF001 - made here

    try:
        async with asyncio.timeout(timeout):
            await client.connect(
                list(addresses),
                **{
                    "name": "ergon",
                    "connect_timeout": timeout,
                    "ping_interval": _PING,
                    "flush_timeout": timeout,
                    "pending_size": 16 * 1024 * 1024,
                    **options,
                    "allow_reconnect": False,
                    # For each address; without a number the client goes on for ever.
                    "max_reconnect_attempts": 1,
                    "reconnect_time_wait": 0.02,
                    "error_cb": _told,
                    "closed_cb": closed,
                    "skip_subject_validation": True,
                },
            )
            line = Line(client, timeout=timeout)
            await line.subscribe(f"{line._inbox}*", line._answer)  # noqa: SLF001 - made here
            # A round trip: the server knows where answers go before anything is asked.
            await client.flush(timeout=timeout)  # type: ignore[arg-type] # it takes any number
    except BaseException as error:
        await _left(client)
        refusal = _refusal(error, addresses)
        if refusal is error:
            raise
        raise refusal from error
    return line


async def _left(client: DirectClient) -> None:
    """Close in good order if that can be done in time, and leave no socket behind in any case."""
    try:
        with suppress(Exception):  # a server that is gone will find out by itself
            async with asyncio.timeout(_LEAVE):
                await client.close()
    finally:
        client.let_go()


def _refusal(error: BaseException, addresses: Sequence[str]) -> BaseException:
    where = ", ".join(redact_address(address) for address in addresses)
    if isinstance(error, errors.AuthorizationError) or "authorization" in str(error).lower():
        return ConnectorError(f"NATS at {where} refuses these credentials")
    if isinstance(error, (errors.Error, OSError, TimeoutError)):
        return ConnectionLost(f"no NATS server answers at {where} ({type(error).__name__})")
    return error if isinstance(error, ErgonError) or not isinstance(error, Exception) else _odd(error, where)


def _odd(error: Exception, where: str) -> ErgonError:
    return ConnectorError(f"cannot connect to NATS at {where}: {type(error).__name__}")


async def _told(error: Exception) -> None:
    logs.say(logging.DEBUG, "nats client", {"error": type(error).__name__}, to=_log)
