"""Pull requests over one long-lived inbox, to which the server sends the requested messages.

A pull request asks the consumer of a stream for a number of messages; the server sends them to the reply subject of the
request, the inbox, and ends the request with a status. Each message is a claim: the worker's right to settle that
delivery until its lease ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from nats.aio.subscription import Subscription

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.claims import LoopHeartbeat, NatsClaim
from ergon_framework.connectors.nats.connection import Connection, RequestBatch
from ergon_framework.connectors.nats.fast_client import RawMessage
from ergon_framework.connectors.nats.streams import CONSUMER
from ergon_framework.errors import ConnectionLostError

#: Seconds that the server keeps the request of a loop that waits for a wakeup.
_WAKEUP_PULL_SECONDS: Final = 30.0
#: Shortest expiry of a pull request.
_MIN_EXPIRY_SECONDS: Final = 0.005
#: Seconds after the expiry of a request in which the server may report it.
_EXPIRY_GRACE_SECONDS: Final = 0.25
#: No messages, and request timeout.
_EMPTY_STATUSES: Final = frozenset({"404", "408"})
#: The next message is larger than the remaining bytes of the request.
_TOO_LARGE: Final = "409", "Message Size Exceeds MaxBytes"
#: The request has brought as many bytes as it asked for.
_COMPLETE: Final = "409", "Batch Completed"


class _PullRequest:
    """One pull request, and the batch that waits for its messages."""

    __slots__ = ("batch", "count", "description", "status")

    def __init__(self, batch: RequestBatch, count: int) -> None:
        self.batch = batch
        self.count = count
        self.status = ""
        self.description = ""


class PullRequests:
    """The pull requests of one queue over one connection.

    All messages go into *buffer* as claims of *owner*, whichever request brought them: a fetch that gave up leaves its
    request at the server, and the next fetch finds its messages. *heartbeat* knows a recent time at which the event
    loop certainly polled its sockets. *wake* wakes the loops that wait for messages, its listeners; *has_listeners*
    says whether there are any.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        buffer: deque[NatsClaim],
        *,
        owner: object,
        lease: float,
        max_bytes: int,
        heartbeat: LoopHeartbeat,
        wake: Callable[[], None],
        has_listeners: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{CONSUMER}"
        self._buffer = buffer
        self._owner = owner
        self._lease = lease
        #: Bytes that one request may bring.
        self._max_bytes = max_bytes
        self._heartbeat = heartbeat
        self._wake = wake
        self._has_listeners = has_listeners
        self._requests: dict[str, _PullRequest] = {}
        self._tokens = itertools.count(1)
        #: When the oldest unanswered request was sent.
        self._requested_at = 0.0
        self._wakeup_pending = False
        self._wakeup_sent_at = 0.0
        self._inbox, self._wakeup_inbox = f"{connection.new_inbox()}.", connection.new_inbox()
        self._subscriptions: list[Subscription] = []
        #: Kept, because a task without a reference may be garbage-collected.
        self._renew_task: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """Subscribe to the inboxes."""
        self._subscriptions = [
            await self._connection.subscribe(f"{self._inbox}*", self._on_message),
            await self._connection.subscribe(self._wakeup_inbox, self._on_wakeup),
        ]

    @property
    def is_waiting(self) -> bool:
        """Whether a request is outstanding."""
        return bool(self._requests) or self._wakeup_pending

    @property
    def is_fetching(self) -> bool:
        return bool(self._requests)

    async def fetch(self, count: int, wait: float) -> None:
        """Request *count* messages and wait for them, for all that fit or exist, or until *wait* has passed."""
        status = await self._pull({"batch": count, "max_bytes": self._max_bytes}, count, wait)
        if status == _TOO_LARGE and not self._buffer:
            # One message is larger than the byte limit of a fetch: it is fetched alone.
            status = await self._pull({"batch": 1}, 1, wait)

    async def _pull(self, fields: dict[str, object], count: int, wait: float) -> tuple[str, str]:
        """Send a pull request with *fields*; return the status with which the server ended it, if it did."""
        # With both options the server waits for the first message, and then sends those that are ready.
        fields["no_wait"] = True
        if wait > 0:
            fields["expires"] = api.to_nanoseconds(max(wait, _MIN_EXPIRY_SECONDS))
        token = str(next(self._tokens))
        request = _PullRequest(self._connection.new_batch(1), count)
        if not self._requests:
            self._requested_at = time.monotonic()
        self._requests[token] = request
        self._heartbeat.start()
        try:
            await self._connection.send_all([(self._subject, f"{self._inbox}{token}", json.dumps(fields).encode())])
            await self._wait_for_answer(request, wait)
        finally:
            del self._requests[token]
        status = request.status, request.description
        if request.status and request.status not in _EMPTY_STATUSES and status not in (_TOO_LARGE, _COMPLETE):
            raise self._rejection_error(request)
        return status

    async def _wait_for_answer(self, request: _PullRequest, wait: float) -> None:
        """Wait in intervals, and check between them that the server is still there."""
        connection = self._connection
        end = time.monotonic() + (wait + _EXPIRY_GRACE_SECONDS if wait > 0 else connection.timeout)
        while not await connection.wait_for_batch(
            request.batch, timeout=min(2 * connection.timeout, max(0.0, end - time.monotonic()))
        ):
            if time.monotonic() < end:
                continue
            if wait <= 0:
                raise ConnectionLostError(f"JetStream has not answered a fetch for {connection.timeout:g} s")
            # The server is there. It drops a request that expires while a message arrives, without a status (2.9).
            return

    def _rejection_error(self, request: _PullRequest) -> ConnectorError | ConnectionLostError:
        if request.status == "409" and "Exceeded" in request.description:
            return ConnectorError(
                f"the consumer {CONSUMER!r} allows less than the fetch requests: {request.description}; raise its limit"
            )
        # Deleted, shut down or under a new leader: reconnecting shows the new state.
        self._connection.drop()
        return ConnectionLostError(f"JetStream cannot fetch now: {request.status} {request.description}".rstrip())

    async def ensure_outstanding(self) -> None:
        """Leave a request for one message with the server, so that an arrival wakes the listeners."""
        if self._wakeup_pending or self._connection.is_lost:
            return
        self._wakeup_pending = True
        self._wakeup_sent_at = time.monotonic()
        self._heartbeat.start()
        request = {"batch": 1, "max_bytes": self._max_bytes, "expires": api.to_nanoseconds(_WAKEUP_PULL_SECONDS)}
        payload = json.dumps(request).encode()
        try:
            await self._connection.send(self._subject, payload, reply=self._wakeup_inbox)
        except BaseException:
            self._wakeup_pending = False
            raise

    def interrupt(self) -> None:
        """End every wait that has begun."""
        for request in list(self._requests.values()):
            request.batch.end()

    async def end(self) -> None:
        """Unsubscribe from the inboxes; messages that are still in transit end up in the buffer."""
        self._has_listeners = _always_false
        self.interrupt()
        for subscription in self._subscriptions:
            with suppress(Exception):  # a lost connection has none, and a dead one does not answer
                async with asyncio.timeout(self._connection.timeout):
                    await subscription.drain()  # type: ignore[no-untyped-call] # untyped in the client
        self._subscriptions = []

    # -- receiving ----------------------------------------------------------------------------------

    def _on_message(self, message: RawMessage) -> None:
        if message.reply:
            buffer = self._buffer
            buffer.append(self._to_claim(message, self._requested_at))
            for request in self._requests.values():
                if len(buffer) >= request.count:
                    request.batch.end()
            return
        finished = self._requests.get(message.subject[len(self._inbox) :])
        if finished is not None:
            finished.status, finished.description = message.status
            finished.batch.end()

    def _on_wakeup(self, message: RawMessage) -> None:
        self._wakeup_pending = False
        if message.reply:
            self._buffer.append(self._to_claim(message, self._wakeup_sent_at))
            self._wake()
        elif message.status in (_TOO_LARGE, _COMPLETE):
            self._wake()
        elif message.status[0] in _EMPTY_STATUSES and self._has_listeners():
            self._renew_task = asyncio.ensure_future(self._renew_outstanding())

    async def _renew_outstanding(self) -> None:
        with suppress(ConnectionLostError):  # the next fetch will notice
            await self.ensure_outstanding()

    def _to_claim(self, message: RawMessage, requested_at: float) -> NatsClaim:
        """Return the claim on *message*; its lease is counted from a time that is certainly before the server sent it.

        The server sent it after the request, and after the last time at which the event loop certainly polled.
        """
        before = self._heartbeat.before
        return NatsClaim(self._owner, message, (max(requested_at, before)) + self._lease)


def _always_false() -> bool:
    return False
