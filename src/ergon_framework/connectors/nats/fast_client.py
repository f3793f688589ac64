"""The NATS client with a fast path for received messages and acks, and its parser of the server's frames.

The client library queues each message and wakes a task for it, parses headers character by character, and uses four
coroutines to send an ack. For messages to the connector's own inboxes (the subjects on which it receives messages and
responses), and for acks, that took a third of a worker's time. The fast path uses a few private names of the library,
and a test checks that they still exist.

The library's own parser matches a pattern for each kind of frame against all data, and moves its buffer twice per
message. FastParser cuts complete messages that have a callback out of the data, many at a time. Everything else,
incomplete messages included, is passed piece by piece to the library's parser.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from ergon_framework._util.sockets import close_socket
from ergon_framework.errors import ConfigurationError
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

_LINE_END: Final = b"\r\n"
#: The number of fields in a frame with a reply subject, one more than without. The frames are
#: ``MSG subject subscription [reply] size`` and ``HMSG subject subscription [reply] header-size size``, where the last
#: size includes the headers.
_FIELDS_WITH_REPLY: Final = {b"HMSG": 6, b"MSG": 5}


class RawMessage(NamedTuple):
    """A message as it was received; *head* is its block of headers, not yet parsed."""

    subject: str
    reply: str
    data: bytes
    head: bytes | None = None

    @property
    def status(self) -> tuple[str, str]:
        r"""The status that the server sends in place of a message, and its description.

        >>> RawMessage("", "", b"", b"NATS/1.0 404 No Messages\r\n\r\n").status
        ('404', 'No Messages')
        """
        if not self.head:
            return "", ""
        first = self.head.partition(_LINE_END)[0].decode(errors="replace")
        _, _, rest = first.partition(" ")
        status, _, description = rest.partition(" ")
        return status, description

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the message."""
        return read_headers(self.head) if self.head else {}


#: Called directly for each message; it must neither block nor raise.
MessageCallback: TypeAlias = Callable[[RawMessage], None]


def read_headers(head: bytes) -> dict[str, str]:
    r"""Parse a block of headers as it is on the wire.

    >>> read_headers(b"NATS/1.0\r\nergon-id: 7\r\nx: a: b\r\n\r\n")
    {'ergon-id': '7', 'x': 'a: b'}
    """
    headers = {}
    _, *rows = head.decode("utf-8", "replace").split("\r\n")
    for row in rows:
        name, colon, value = row.partition(":")
        if colon:
            headers[name] = value.strip()
    return headers


def invoke_callback(callback: MessageCallback, message: RawMessage) -> None:
    """Call *callback* with *message* and log its error, which would otherwise end the client's reading permanently."""
    try:
        callback(message)
    except Exception as error:  # noqa: BLE001 - logged, so that the client keeps reading
        logs.log_event(logging.ERROR, "nats message failed", {"error": type(error).__name__}, to=_log)


class FastParser(Parser):
    """The parser of *client*; *callbacks* are keyed by subscription number, as written on the wire."""

    def __init__(self, client: Any, callbacks: dict[bytes, MessageCallback]) -> None:
        super().__init__(client)
        self._callbacks = callbacks

    async def parse(self, data: bytes = b"") -> None:
        """Process all complete frames in *data*; the client keeps the rest.

        ``buf``, ``state`` and ``needed`` belong to the library's parser: the incomplete frame, whether it awaits the
        line of a frame or the payload after it, and the length of that payload.
        """
        if self.buf and self.state == AWAITING_CONTROL_LINE:
            data, self.buf = bytes(self.buf) + data, bytearray()
        at, end = 0, len(data)
        while at < end:
            if self.state == AWAITING_CONTROL_LINE:
                at = self._deliver_messages(data, at)
                line = data.find(_LINE_END, at)
                piece_end = end if line < 0 else line + len(_LINE_END)
            else:
                piece_end = min(end, at + self.needed + len(_LINE_END) - len(self.buf))
            if at < piece_end:
                await super().parse(data[at:piece_end])
                at = piece_end

    def _deliver_messages(self, data: bytes, at: int) -> int:
        """Call the callbacks of the messages in *data* from *at* on; return the end of the last one."""
        callbacks, find, end = self._callbacks, data.find, len(data)
        while at < end:
            line = find(_LINE_END, at)
            fields = data[at:line].split(b" ") if line > 0 else []
            with_reply = _FIELDS_WITH_REPLY.get(fields[0]) if fields else None
            if with_reply is None or not with_reply - 1 <= len(fields) <= with_reply:
                break
            callback = callbacks.get(fields[2])
            size, head_size = fields[-1], fields[-2] if with_reply == _FIELDS_WITH_REPLY[b"HMSG"] else b"0"
            if callback is None or not size.isdigit() or not head_size.isdigit():
                break
            head_start = line + 2
            body_start, message_end = head_start + int(head_size), head_start + int(size)
            if message_end + 2 > end:
                break
            reply = fields[3].decode() if len(fields) == with_reply else ""
            invoke_callback(
                callback,
                RawMessage(
                    fields[1].decode(), reply, data[body_start:message_end], data[head_start:body_start] or None
                ),
            )
            at = message_end + 2
        return at


# -- client -----------------------------------------------------------------------------------------

#: Bytes that a socket accepts immediately, unless the peer has stopped reading.
_MAX_IMMEDIATE_WRITE_BYTES: Final = 65_536


class FastClient(Client):
    """A client that calls message callbacks directly."""

    def __init__(self) -> None:
        super().__init__()
        #: By subscription number, as written on the wire.
        self._callbacks: dict[bytes, MessageCallback] = {}
        self._ps = FastParser(self, self._callbacks)

    def _connect_command(self) -> bytes:
        """Return the command that sends the credentials; never without TLS to an address with tls://.

        The client encrypts if the server asks for it. Anyone between the two could remove that from its greeting.
        """
        server = self._current_server
        if server is not None and server.uri.scheme == "tls":
            writer = getattr(self._transport, "_io_writer", None)
            if writer is None or writer.get_extra_info("ssl_object") is None:
                raise ConfigurationError(
                    f"NATS at {server.uri.hostname}:{server.uri.port} does not offer TLS, which the address requires; "
                    "set tls { … } in the server's configuration, or use nats:// in the address"
                )
        return super()._connect_command()

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
            # The pending data may contain the subscription that receives the responses to this call.
            transport.writelines(self._pending)
            self._pending = []
        transport.write(data)
        if len(data) > _MAX_IMMEDIATE_WRITE_BYTES or type(transport) is not TcpTransport:
            self._pending_data_size += len(data)
            await self._flush_pending()
