"""Message: one delivery of the server, and the messages that are published in its place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pika import BasicProperties

from ergon_framework.connectors.base import UndecodableError
from ergon_framework.connectors.codec import (
    PROGRESS_HEADERS,
    WIRE,
    Codec,
    DecodeResult,
    decode,
    describe_unread,
    read_not_before,
)
from ergon_framework.connectors.rabbitmq.fields import Properties, Timestamp

#: The headers of an envelope.
ENVELOPE_HEADERS: Final = frozenset((*(row.header for row in WIRE), *PROGRESS_HEADERS))
#: The deliveries of a message before it was last republished: the server restarts its count there.
DELIVERED_HEADER: Final = "ergon-delivered"
#: The time since which it is, or will be, ready; in seconds since the epoch.
READY_SINCE_HEADER: Final = "ergon-since"
_COUNT_HEADER: Final = "x-delivery-count"
#: How often a message was given to a consumer, including those that returned it uncounted; from RabbitMQ 4.3 on.
_ACQUIRED_HEADER: Final = "x-acquired-count"
#: Headers that the server adds. With its list of deaths it would silently drop a message that returns to a queue.
_SERVER_HEADERS: Final = ("x-death", "x-first-death-", "x-last-death-", _COUNT_HEADER, _ACQUIRED_HEADER)
#: The properties that are kept when a message is republished. Not its expiration, which would end every delay early,
#: and not its user, which the server compares with the connection's.
_KEPT_PROPERTIES: Final = (
    *("content_type", "content_encoding", "priority", "correlation_id", "reply_to"),
    *("message_id", "timestamp", "type", "app_id"),
)
#: The priority of a message without one, as servers from version 4.0 on define it for quorum queues.
DEFAULT_PRIORITY: Final = 4
#: The highest priority of quorum queues.
MAX_PRIORITY: Final = 31
#: The largest size of a short-string property, in bytes.
_MAX_SHORT_STRING_BYTES: Final = 255


class RabbitMQReceipt(NamedTuple):
    """The identity of a delivery: its channel, numbered by this client, and its delivery tag there."""

    channel: int
    tag: int


class OutgoingMessage(NamedTuple):
    """A message to be published, and the queue for it."""

    queue: str
    body: bytes
    properties: BasicProperties


class Message:
    """A delivery as it was received, until it is acked."""

    __slots__ = ("body", "properties", "receipt", "redelivered", "seen")

    def __init__(
        self, receipt: RabbitMQReceipt, body: bytes, properties: BasicProperties, *, redelivered: bool = False
    ) -> None:
        self.receipt = receipt
        self.body = body
        self.properties = properties
        self.redelivered = redelivered
        self.seen = time.time()

    @property
    def unread(self) -> int | None:
        """Bytes of a body that was left out; None if it was loaded."""
        return getattr(self.properties, "unread", None)

    @property
    def raw_headers(self) -> Mapping[str, Any]:
        return self.properties.headers or {}

    @property
    def headers(self) -> dict[str, str]:
        """The headers whose values are text, without those that the server adds."""
        headers = {
            name: value
            for name, value in self.raw_headers.items()
            if type(value) is str and not _is_server_header(name)
        }
        if self.problem:
            # Shown with the dead letter; a message that can be decoded has no such header.
            headers |= {name: str(value) for name, value in self.raw_headers.items() if type(value) is Timestamp}
        return headers

    @property
    def problem(self) -> str:
        """Why the client cannot decode the headers; empty if it can."""
        return self.properties.problem if isinstance(self.properties, Properties) else ""

    def decode(self, codec: Codec, *, source: str) -> DecodeResult:
        """Decode the transaction; it is undecodable if the headers are, also with a valid body."""
        if self.unread is not None:
            return describe_unread(self.unread, self.headers, source=source, limit=codec.max_bytes)
        decoded = decode(codec, self.body, self.headers, source=source)
        if not self.problem:
            return decoded
        error = UndecodableError(f"the headers of the message cannot be decoded: {self.problem}")
        return DecodeResult(decoded.transaction.replace(payload=self.body), error)

    @property
    def deliveries(self) -> int:
        """The number of deliveries, including this one."""
        return count_deliveries(self.properties) + self.is_uncounted

    @property
    def is_uncounted(self) -> bool:
        """Whether it was delivered before and the server does not count: a classic queue reports only the fact."""
        return self.redelivered and self.raw_headers.keys().isdisjoint((_COUNT_HEADER, _ACQUIRED_HEADER))

    @property
    def ready_since(self) -> float:
        """The time since which the message is ready, as far as known."""
        stated = self.stated_ready_since
        return self.seen if stated is None else stated

    @property
    def stated_ready_since(self) -> float | None:
        """The time since which the message is ready, as its headers state it; None if they state none."""
        header = self.raw_headers.get(READY_SINCE_HEADER)
        try:
            return float(header) if isinstance(header, str) else float(self.properties.timestamp or "")
        except (TypeError, ValueError):
            return None

    @property
    def not_before(self) -> float | None:
        """The earliest time of its delivery, as its headers state it; None if they state none."""
        return read_not_before(self.raw_headers)

    def republished_to(
        self, queue: str, *, delivered: int, ready_since: float | None = None, envelope: Mapping[str, str] | None = None
    ) -> OutgoingMessage:
        """Return the same message for *queue*; *envelope*, if given, replaces its complete envelope."""
        headers = {name: value for name, value in self.raw_headers.items() if not _is_server_header(name)}
        if envelope is not None:
            headers = {name: value for name, value in headers.items() if name not in ENVELOPE_HEADERS} | dict(envelope)
        headers[DELIVERED_HEADER] = str(delivered)
        headers[READY_SINCE_HEADER] = f"{self.ready_since if ready_since is None else ready_since:.3f}"
        kept_properties = {name: getattr(self.properties, name) for name in _KEPT_PROPERTIES}
        return OutgoingMessage(queue, self.body, Properties(headers=headers, delivery_mode=2, **kept_properties))


def new_message(
    queue: str, body: bytes, headers: Mapping[str, str], *, ready_since: float, priority: int = 0
) -> OutgoingMessage:
    """Return a message with reset delivery count."""
    kept_headers = {
        message_id: value
        for message_id, value in headers.items()
        if message_id != DELIVERED_HEADER and not message_id.startswith(_SERVER_HEADERS)
    }
    raw_headers = {**kept_headers, READY_SINCE_HEADER: f"{ready_since:.3f}"}
    message_id = headers.get("ergon-id", "")[:_MAX_SHORT_STRING_BYTES] or None
    properties = BasicProperties(
        headers=raw_headers,
        delivery_mode=2,
        message_id=message_id,
        priority=DEFAULT_PRIORITY + priority if priority else None,
    )
    return OutgoingMessage(queue, body, properties)


def count_deliveries(properties: BasicProperties) -> int:
    """Return how often the message of *properties* was delivered, including this time."""
    raw_headers: Mapping[str, Any] = properties.headers or {}
    server_count = raw_headers.get(_COUNT_HEADER, 0)
    return _parse_count(raw_headers.get(DELIVERED_HEADER)) + (server_count if isinstance(server_count, int) else 0) + 1


def _is_server_header(name: str | bytes) -> bool:
    """Return whether the server adds the header *name*; the server adds only names that are text."""
    return isinstance(name, str) and name.startswith(_SERVER_HEADERS)


def _parse_count(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 9 else 0  # noqa: PLR2004 - digits of a count
