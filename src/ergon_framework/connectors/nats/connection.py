"""Connections to a NATS server, with requests and responses, and the client that all queues of an event loop share.

A batch is a group of requests that are sent together; their responses are awaited together. The server sends each
response to the request's reply subject, a unique subject below the connection's inbox.

A lost connection is never reused: waiting callers are notified immediately, and the next call opens a new one. The
client's own reconnecting would keep state whose outcome is unknown: requests that the server has dropped, and publishes
that arrive long after their sender gave up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from nats import errors
from nats.aio.subscription import Subscription

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.nats.fast_client import FastClient, MessageCallback, RawMessage
from ergon_framework.errors import ConnectionLostError, ErgonError
from ergon_framework.redaction import redact_address
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Seconds between two pings of a server that sends nothing.
_PING_INTERVAL_SECONDS: Final = 10
#: Seconds that a connection may take to close before it is aborted.
_CLOSE_TIMEOUT_SECONDS: Final = 2.0
_NO_RESPONDERS_STATUS: Final = "503"
#: The framing of a block of headers on the wire, rounded up.
_HEADER_FRAME_BYTES: Final = 64
#: The first release that persists deletions.
_MIN_PERSISTENT_DELETE_VERSION: Final = (2, 10)


class Request(NamedTuple):
    """A message to publish that expects a response."""

    subject: str
    payload: bytes = b""
    headers: Mapping[str, str] | None = None

    @property
    def size(self) -> int:
        """The size that the server counts: the payload with its headers."""
        headers = 0 if self.headers is None else _HEADER_FRAME_BYTES
        for name, text in (self.headers or {}).items():
            headers += len(name) + len(text.encode()) + 4
        return len(self.payload) + headers


class RequestBatch:
    """A batch of requests that wait for their responses together."""

    __slots__ = ("_waiter", "answers", "done", "error", "missing")

    def __init__(self, count: int) -> None:
        self.answers: list[RawMessage | None] = [None] * count
        self.missing = count
        self.done = False
        self.error: ConnectionLostError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def end(self) -> None:
        """Stop waiting for further responses."""
        self.missing = 0
        self.done = True
        self._wake()

    def fail(self, error: ConnectionLostError) -> None:
        """Fail the batch with *error*: no further response will arrive."""
        if not self.done:
            self.done, self.error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Wait until the batch is complete or *seconds* have passed; call again to continue. One waiter at a time."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(seconds, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None


class Connection:
    """A connection; created by ``connect``."""

    def __init__(self, client: FastClient, *, timeout: float) -> None:
        self.client = client
        self.timeout = timeout
        self.connected_at = time.time()
        self.is_lost = False
        server = client.connected_server_version
        self._version = server.major, server.minor
        #: By the last part of the response subject.
        self._batches: dict[str, tuple[RequestBatch, int]] = {}
        self._waiting_batches: set[RequestBatch] = set()
        self._number = 0
        self._inbox = f"{client.new_inbox()}."
        self._lost_callbacks: list[Callable[[], None]] = []
        self._close_task: asyncio.Task[None] | None = None

    @property
    def version(self) -> tuple[int, int]:
        """The release of the server: major and minor number."""
        return self._version

    @property
    def loses_deletes(self) -> bool:
        """Whether a killed server restores acked or deleted messages: releases before 2.10 do."""
        return self._version < _MIN_PERSISTENT_DELETE_VERSION

    @property
    def max_payload(self) -> int:
        """Bytes that the server accepts, headers included."""
        return int(self.client.max_payload)

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call *callback* when the connection is lost."""
        self._lost_callbacks.append(callback)

    # -- sending ------------------------------------------------------------------------------------

    async def send(
        self, subject: str, payload: bytes = b"", *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish without waiting for a response."""
        try:
            await self.client.publish(subject, payload, reply, headers)  # type: ignore[arg-type] # it only reads them
        except (errors.ConnectionClosedError, errors.ConnectionDrainingError, errors.OutboundBufferLimitError) as error:
            raise ConnectionLostError("connection to NATS is lost") from error
        except errors.MaxPayloadError as error:
            raise ConnectorError(
                f"a message of {len(payload)} bytes is over the limit of NATS, {self.max_payload} (max_payload)"
            ) from error
        except (errors.Error, OSError, RuntimeError, AttributeError) as error:
            # The client drops its transport when it is closed during the call.
            raise ConnectionLostError(f"publishing to NATS failed: {type(error).__name__}") from error

    async def send_all(self, messages: Iterable[tuple[str, str, bytes]]) -> None:
        """Publish several messages: subject, reply subject, payload."""
        try:
            await self.client.publish_all(messages)
        except (errors.Error, OSError, RuntimeError, AttributeError) as error:
            raise ConnectionLostError(f"publishing to NATS failed: {type(error).__name__}") from error

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> RawMessage:
        """Send one request and return its response, or raise ConnectionLostError."""
        (answer,) = await self.request_many([Request(subject, payload, headers)], timeout=timeout)
        if answer is None:
            raise ConnectionLostError(f"NATS did not answer within {timeout or self.timeout:g} s")
        return answer

    async def request_many(
        self, requests: Sequence[Request], *, timeout: float | None = None
    ) -> list[RawMessage | None]:
        """Return one response each, in order; None for a timeout or a subject without responders."""
        batch, max_payload = self.new_batch(len(requests)), self.max_payload
        if all(headers is None and len(payload) <= max_payload for _, payload, headers in requests):
            await self.send_all(
                [
                    (subject, self.new_reply_subject(batch, index), payload)
                    for index, (subject, payload, _) in enumerate(requests)
                ]
            )
        else:
            for index, (subject, payload, headers) in enumerate(requests):
                await self.send(subject, payload, reply=self.new_reply_subject(batch, index), headers=headers)
        await self.wait_for_batch(batch, timeout=timeout)
        return [answer if answer is not None and not is_no_responders(answer) else None for answer in batch.answers]

    def new_batch(self, count: int) -> RequestBatch:
        """Create a batch for *count* responses."""
        if self.is_lost:
            raise ConnectionLostError("connection to NATS is lost")
        return RequestBatch(count)

    def new_reply_subject(self, batch: RequestBatch, index: int = 0) -> str:
        """Return the reply subject for response number *index*."""
        self._number = number = self._number + 1
        token = str(number)
        self._batches[token] = batch, index
        return self._inbox + token

    async def wait_for_batch(self, batch: RequestBatch, *, timeout: float | None = None) -> bool:
        """Wait for all responses of a batch; return False if some are missing at the timeout."""
        if not batch.missing:
            return True
        if self.is_lost:
            raise ConnectionLostError("connection to NATS was lost before it answered")
        self._waiting_batches.add(batch)
        try:
            await batch.wait(self.timeout if timeout is None else timeout)
        finally:
            self._waiting_batches.discard(batch)
            if batch.missing:
                for token in [token for token, (other, _) in self._batches.items() if other is batch]:
                    del self._batches[token]
        if batch.error is not None:
            raise batch.error
        if batch.done:
            return True
        await self.check_alive()
        return False

    async def check_alive(self) -> None:
        """After a timeout, distinguish a slow response from a dead connection; drop the latter."""
        try:
            await self.client.flush(timeout=self.timeout)  # type: ignore[arg-type] # it takes any number
        except (errors.Error, OSError, ValueError, AttributeError):
            self.drop()
            raise ConnectionLostError(f"NATS has not answered for {2 * self.timeout:g} s") from None

    def _on_answer(self, message: RawMessage) -> None:
        entry = self._batches.pop(message.subject[len(self._inbox) :], None)
        if entry is None:
            return
        batch, index = entry
        batch.answers[index] = message
        batch.missing -= 1
        if not batch.missing:
            batch.end()

    # -- receiving ----------------------------------------------------------------------------------

    def new_inbox(self) -> str:
        """Return a unique subject."""
        return str(self.client.new_inbox())

    async def subscribe(self, subject: str, callback: MessageCallback) -> Subscription:
        """Call *callback* with each message, without a limit on their number.

        The client would drop messages over a limit, and the server would not redeliver them until their leases end.
        """
        try:
            return await self.client.subscribe_callback(subject, callback)
        except (errors.Error, OSError, RuntimeError, AttributeError) as error:
            raise ConnectionLostError(f"subscribing to a NATS subject failed: {type(error).__name__}") from error

    # -- the end ------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Abandon the connection: waiting callers are notified immediately, and it closes in the background."""
        if not self.is_lost:
            self._mark_lost()
            self._close_task = asyncio.ensure_future(_close_client(self.client))

    async def close(self) -> None:
        """Close the connection cleanly."""
        self._mark_lost()
        await _close_client(self.client)

    def abandon(self) -> None:
        """Close the socket from outside the event loop, which is closed, so that no caller waits there."""
        self.is_lost = True
        self.client.abort(loop_is_closed=True)

    def _mark_lost(self) -> None:
        self.is_lost = True
        self._batches.clear()
        for batch in self._waiting_batches:
            batch.fail(ConnectionLostError("connection to NATS was lost before it answered"))
        callbacks, self._lost_callbacks = self._lost_callbacks, []
        for callback in callbacks:
            callback()

    async def _on_closed(self) -> None:
        if not self.is_lost:
            self._mark_lost()


def is_no_responders(message: RawMessage) -> bool:
    """Return whether *message* is the server's status for a subject without responders."""
    return not message.data and message.status[0] == _NO_RESPONDERS_STATUS


async def connect(addresses: Sequence[str], *, timeout: float, options: Mapping[str, Any]) -> Connection:
    """Return a connection to one of *addresses*, opened within *timeout*."""
    client, connection = FastClient(), None

    async def on_closed() -> None:
        if connection is not None:
            await connection._on_closed()  # noqa: SLF001 - created in this function

    try:
        async with asyncio.timeout(timeout):
            await client.connect(
                list(addresses),
                **{
                    "name": "ergon",
                    "connect_timeout": timeout,
                    "ping_interval": _PING_INTERVAL_SECONDS,
                    "flush_timeout": timeout,
                    "pending_size": 16 * 1024 * 1024,
                    **options,
                    "allow_reconnect": False,
                    # For each address; without a limit the client retries forever.
                    "max_reconnect_attempts": 1,
                    "reconnect_time_wait": 0.02,
                    "error_cb": _log_client_error,
                    "closed_cb": on_closed,
                    "skip_subject_validation": True,
                },
            )
            connection = Connection(client, timeout=timeout)
            await connection.subscribe(f"{connection._inbox}*", connection._on_answer)  # noqa: SLF001 - created in this function
            # A round trip: the server knows the response subject before the first request.
            await client.flush(timeout=timeout)  # type: ignore[arg-type] # it takes any number
    except BaseException as error:
        await _close_client(client)
        translated = _translate_error(error, addresses)
        if translated is error:
            raise
        raise translated from error
    return connection


async def _close_client(client: FastClient) -> None:
    """Close cleanly if that is possible in time, and close the socket in any case."""
    try:
        with suppress(Exception):  # an unavailable server detects the close on its own
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                await client.close()
    finally:
        client.abort()


def _translate_error(error: BaseException, addresses: Sequence[str]) -> BaseException:
    servers = ", ".join(redact_address(address) for address in addresses)
    if isinstance(error, errors.AuthorizationError) or "authorization" in str(error).lower():
        return ConnectorError(f"NATS at {servers} rejected the credentials")
    if isinstance(error, (errors.Error, OSError, TimeoutError)):
        return ConnectionLostError(f"no NATS server answers at {servers} ({type(error).__name__})")
    return (
        error if isinstance(error, ErgonError) or not isinstance(error, Exception) else _connect_error(error, servers)
    )


def _connect_error(error: Exception, servers: str) -> ErgonError:
    return ConnectorError(f"cannot connect to NATS at {servers}: {type(error).__name__}")


async def _log_client_error(error: Exception) -> None:
    logs.log_event(logging.DEBUG, "nats client error", {"error": type(error).__name__}, to=_log)


# -- shared client ----------------------------------------------------------------------------------

_clients: dict[tuple[Any, ...], ServerClient] = {}
_registry_lock = threading.Lock()


class ServerClient:
    """The client of one server or cluster on this event loop."""

    def __init__(
        self, key: tuple[Any, ...], addresses: Sequence[str], *, timeout: float, options: Mapping[str, Any]
    ) -> None:
        self.key = key
        #: The process that created it: a forked child must not use it.
        self.pid = os.getpid()
        #: Kept alive, so that no other loop can get the same id.
        self.loop = asyncio.get_running_loop()
        self.users = 0
        self._addresses = addresses
        self._timeout = timeout
        self._options = options
        self._connection: Connection | None = None
        self._connect_lock = asyncio.Lock()

    async def connection(self) -> Connection:
        """Return the connection, reconnecting if it was lost."""
        connection = self._connection
        if connection is not None and not connection.is_lost:
            return connection
        async with self._connect_lock:
            if self._connection is None or self._connection.is_lost:
                self._connection = await connect(self._addresses, timeout=self._timeout, options=self._options)
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
    addresses: Sequence[str], *, timeout: float, options: Mapping[str, Any], owner: object = None
) -> ServerClient:
    """Return the client of *addresses* on the running event loop, shared by all queues there.

    Release it with ``release_client``. A queue with its own client options gets a separate client for its *owner*.
    """
    with _registry_lock:
        key = (tuple(addresses), timeout, id(owner) if options else None, id(asyncio.get_running_loop()), os.getpid())
        for stale in [stale for stale in _clients.values() if stale.loop.is_closed()]:
            _clients.pop(stale.key).abandon()
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = ServerClient(key, addresses, timeout=timeout, options=options)
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
