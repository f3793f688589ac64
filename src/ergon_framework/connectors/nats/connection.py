"""A connection to a NATS server, with requests and responses.

A batch is a group of requests that are sent together; their responses are awaited together. The server sends each
response to the request's reply subject, a unique subject below the connection's inbox.

A lost connection is never reused: waiting callers are notified immediately, and the next call opens a new one. The
client's own reconnecting would keep state whose outcome is unknown: requests that the server has dropped, and publishes
that arrive long after their sender gave up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from nats import errors
from nats.aio.subscription import Subscription

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.nats.fast_client import (
    FastClient,
    MessageCallback,
    RawMessage,
)
from ergon_framework.errors import ConnectionLostError

_log = logging.getLogger(__name__)

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

    def __init__(self, client: FastClient, *, timeout: float, host: str | None = None) -> None:
        self.client = client
        #: Host and port of the server.
        self.host = host
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
            self._close_task = asyncio.ensure_future(close_client(self.client))

    async def close(self) -> None:
        """Close the connection cleanly."""
        self._mark_lost()
        await close_client(self.client)

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


async def close_client(client: FastClient) -> None:
    """Close cleanly if that is possible in time, and close the socket in any case."""
    try:
        with suppress(Exception):  # an unavailable server detects the close on its own
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                await client.close()
    finally:
        client.abort()
