"""The NATS client with a fast path for received messages and acks.

The client queues each message and wakes a task for it, parses headers character by character, and uses four coroutines
to send an ack. For messages to the connector's own inboxes, and for acks, that took a third of a worker's time. The
fast path uses a few private names of the client, and a test checks that they still exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from ergon_framework.connectors.nats.frames import FastParser, MessageCallback, RawMessage, invoke_callback
from ergon_framework.connectors.transports import close_socket

#: Bytes that a socket accepts immediately, unless the peer has stopped reading.
_MAX_IMMEDIATE_WRITE_BYTES: Final = 65_536


class FastClient(Client):
    """A client that calls message callbacks directly."""

    def __init__(self) -> None:
        super().__init__()
        #: By subscription number, as written on the wire.
        self._callbacks: dict[bytes, MessageCallback] = {}
        self._ps = FastParser(self, self._callbacks)

    async def subscribe_callback(self, subject: str, callback: MessageCallback) -> Subscription:
        """Subscribe to *subject* and call *callback* with every message."""
        subscription = await self.subscribe(subject, pending_msgs_limit=0, pending_bytes_limit=0)
        self._callbacks[b"%d" % subscription._id] = callback  # noqa: SLF001 - one of the private names
        return subscription

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        callback = self._callbacks.get(b"%d" % sid)
        if callback is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            invoke_callback(callback, RawMessage(subject.decode(), reply.decode(), data, headers))

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._callbacks.pop(b"%d" % sid, None)

    def abort(self, *, loop_is_closed: bool = False) -> None:
        """Close the socket and drop unsent data: a clean close waits for that data, perhaps forever."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is None:
            return
        if loop_is_closed:
            close_socket(writer.transport)
        else:
            writer.transport.abort()

    async def publish_all(self, messages: Iterable[tuple[str, str, bytes]]) -> None:
        """Publish several messages without headers: subject, reply subject, payload.

        They are written immediately and not by the client's task, which runs only after the tasks that are ready now:
        the server would start its work late. That task is woken for data that the socket may not accept immediately,
        and for transports that write only when they are drained.
        """
        data = b"".join(
            [
                f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n"
                for subject, reply, payload in messages
            ]
        )
        transport = self._transport
        if not self.is_connected or transport is None:
            raise ConnectionError("the client is not connected")
        if self._pending:
            # It may contain a subscription that receives the responses to this call.
            transport.writelines(self._pending)
            self._pending = []
        transport.write(data)
        if len(data) > _MAX_IMMEDIATE_WRITE_BYTES or type(transport) is not TcpTransport:
            self._pending_data_size += len(data)
            await self._flush_pending()
