"""Pull requests over one long-lived inbox, to which the server sends the requested messages.

A pull request asks the consumer of a stream for a number of messages; the server sends them to the reply subject of the
request, the inbox, and ends the request with a status. Each message is a claim: the worker's right to settle that
delivery until its lease ends.

The server's lease begins when it sends a message, which may wait in the socket while the event loop is blocked. A claim
therefore counts its lease from the later of two times at which the message had not arrived yet: when the oldest request
that it may belong to was sent, and ``LoopHeartbeat.before``, a time up to which the event loop has read everything that
had arrived. The second time may be later than the sending by the transit of the message, which is neglected. A request
whose fetch was cancelled stays at the server, so it counts as open until its expiry.
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
#: The statuses for no messages, and for a request that has expired.
_EMPTY_STATUSES: Final = frozenset({"404", "408"})
#: The next message is larger than the remaining bytes of the request.
_TOO_LARGE: Final = "409", "Message Size Exceeds MaxBytes"
#: The request has brought as many bytes as it asked for.
_COMPLETE: Final = "409", "Batch Completed"


class _PullRequest:
    """One pull request for *count* messages; *waiter* ends the wait for them, and may be ended more than once."""

    __slots__ = ("count", "description", "status", "waiter")

    def __init__(self, waiter: RequestBatch, count: int) -> None:
        self.waiter = waiter
        self.count = count
        self.status = ""
        self.description = ""


class PullRequests:
    """The pull requests of one queue over one connection.

    All messages go into *buffer* as claims of *owner*, whichever request brought them: a fetch that gave up leaves its
    request at the server, and the next fetch finds its messages. Every request starts *heartbeat*; the queue, which
    owns it, keeps it ticking while ``is_waiting``. *wake* wakes the loops that wait for messages, the queue's
    listeners; *has_listeners* says whether there are any.
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
        #: The requests of running fetches.
        self._requests: dict[str, _PullRequest] = {}
        #: The requests that the server may still answer, with the time until which it may, and how many messages it may
        #: still send for all of them.
        self._open_requests: dict[str, float] = {}
        self._open_count = 0
        self._tokens = itertools.count(1)
        #: When the oldest open request was sent, or an older one.
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
        """Whether the server may still send messages, for a fetch, for a fetch that gave up, or as a wakeup."""
        return bool(self._requests) or self._wakeup_pending or self._has_open_requests()

    @property
    def is_fetching(self) -> bool:
        """Whether a fetch waits for messages."""
        return bool(self._requests)

    def _has_open_requests(self) -> bool:
        # Everything that had arrived before this time has been read.
        before = self._heartbeat.before
        self._open_requests = {token: until for token, until in self._open_requests.items() if until >= before}
        if not self._open_requests:
            self._open_count = 0
        return bool(self._open_requests)

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
        # Counts as one awaited response: the messages go to the buffer, and _on_message ends the wait.
        request = _PullRequest(self._connection.new_batch(1), count)
        now = time.monotonic()
        if not self._has_open_requests():
            self._requested_at = now
        self._requests[token] = request
        self._open_requests[token] = now + max(wait, 0.0) + self._connection.timeout
        self._open_count += count
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
        """Wait in intervals: after each one ``wait_for_batch`` pings the server, and raises if it does not answer."""
        connection = self._connection
        end = time.monotonic() + (wait + _EXPIRY_GRACE_SECONDS if wait > 0 else connection.timeout)
        while not await connection.wait_for_batch(
            request.waiter, timeout=min(2 * connection.timeout, max(0.0, end - time.monotonic()))
        ):
            if time.monotonic() < end:
                continue
            if wait <= 0:
                raise ConnectionLostError(f"JetStream has not answered a fetch for {connection.timeout:g} s")
            # The server has answered the ping. Release 2.9 drops a request that expires while a message arrives,
            # without a status.
            return

    def _rejection_error(self, request: _PullRequest) -> ConnectorError | ConnectionLostError:
        # For example "Exceeded MaxRequestBatch", a limit in the configuration of the consumer.
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
            request.waiter.end()

    async def end(self) -> None:
        """Unsubscribe from the inboxes; messages that are still in transit end up in the buffer."""
        self._has_listeners = _always_false
        self.interrupt()
        for subscription in self._subscriptions:
            with suppress(Exception):  # a lost connection has no subscriptions, and a dead one does not answer
                async with asyncio.timeout(self._connection.timeout):
                    await subscription.drain()  # type: ignore[no-untyped-call] # untyped in the client
        self._subscriptions = []

    # -- receiving ----------------------------------------------------------------------------------

    def _on_message(self, message: RawMessage) -> None:
        """Buffer a message, or record the status with which the server ended a request."""
        # A message of the stream has a reply subject for its ack; a status has none.
        if message.reply:
            buffer = self._buffer
            buffer.append(self._to_claim(message, self._requested_at))
            self._open_count -= 1
            if self._open_count <= 0:
                # All open requests have brought as many messages as they asked for.
                self._open_requests, self._open_count = {}, 0
            for request in self._requests.values():
                if len(buffer) >= request.count:
                    request.waiter.end()
            return
        token = message.subject[len(self._inbox) :]
        self._open_requests.pop(token, None)
        finished = self._requests.get(token)
        if finished is not None:
            finished.status, finished.description = message.status
            finished.waiter.end()

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
        with suppress(ConnectionLostError):  # the next fetch raises it
            await self.ensure_outstanding()

    def _to_claim(self, message: RawMessage, requested_at: float) -> NatsClaim:
        """Return the claim on *message*; its lease is counted from a time at which the message had not arrived yet."""
        return NatsClaim(self._owner, message, max(requested_at, self._heartbeat.before) + self._lease)


def _always_false() -> bool:
    return False
