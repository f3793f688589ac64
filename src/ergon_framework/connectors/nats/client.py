"""The NATS client, with what is done for every message done at once.

The client puts each message into a queue and wakes a task for it, reads its headers letter by letter, and takes four
coroutines to send an ack. For what comes to our own inboxes, and for acks, that was a third of all that a worker did.
A few seams of the client are used for it, and a test watches that they are still there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from ergon_framework.connectors.nats.frames import Ear, Frames, Heard, tell
from ergon_framework.connectors.transports import drop

#: Bytes that a socket takes at once, unless the other side has stopped reading.
_MUCH: Final = 65_536


class DirectClient(Client):
    """Hands messages to ears without a detour."""

    def __init__(self) -> None:
        super().__init__()
        #: By the number of their subscription, as it is written on the wire.
        self._ears: dict[bytes, Ear] = {}
        self._ps = Frames(self, self._ears)

    async def hear(self, subject: str, ear: Ear) -> Subscription:
        """Have *ear* called with everything that comes to *subject*."""
        subscription = await self.subscribe(subject, pending_msgs_limit=0, pending_bytes_limit=0)
        self._ears[b"%d" % subscription._id] = ear  # noqa: SLF001 - one of the seams
        return subscription

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        ear = self._ears.get(b"%d" % sid)
        if ear is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            tell(ear, Heard(subject.decode(), reply.decode(), data, headers))

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._ears.pop(b"%d" % sid, None)

    def let_go(self, *, loop_is_closed: bool = False) -> None:
        """Give the socket up, and what was not sent: to close in good order is to wait for that, perhaps for ever."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is None:
            return
        if loop_is_closed:
            drop(writer.transport)
        else:
            writer.transport.abort()

    async def publish_all(self, messages: Iterable[tuple[str, str, bytes]]) -> None:
        """Publish many without headers: subject, where the answer is to go, payload.

        Written at once and not by the client's task, which comes round only after those who are ready now: what the
        server can do meanwhile it would begin when they are done. That task is woken for what the socket may not take
        at once, and for transports that write only when they are drained.
        """
        written = b"".join(
            [
                f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n"
                for subject, reply, payload in messages
            ]
        )
        transport = self._transport
        if not self.is_connected or transport is None:
            raise ConnectionError("the client is not connected")
        if self._pending:
            # A subscription may be among them whose answers are asked for now.
            transport.writelines(self._pending)
            self._pending = []
        transport.write(written)
        if len(written) > _MUCH or type(transport) is not TcpTransport:
            self._pending_data_size += len(written)
            await self._flush_pending()
