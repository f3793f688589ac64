"""Message: one delivery of the server, and what it looks like when it is sent on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pika import BasicProperties

from ergon_framework.connectors.base import UndecodableError
from ergon_framework.connectors.codec import PROGRESS, WIRE, Codec, Decoded, decode, describe_unread
from ergon_framework.connectors.rabbitmq.fields import Properties, Timestamp

#: The headers of an envelope.
HEADERS: Final = frozenset((*(row.header for row in WIRE), *PROGRESS))
#: How many deliveries a message had before it was last sent on: the server counts anew from there.
DELIVERED: Final = "ergon-delivered"
#: Since when it is, or will be, ready; in seconds since the epoch.
SINCE: Final = "ergon-since"
_COUNT: Final = "x-delivery-count"
#: What the server adds on the way. With its list of deaths it would drop, silently, what goes in a circle.
_ADDED: Final = ("x-death", "x-first-death-", "x-last-death-", _COUNT)
#: The properties that are kept when a message is sent on. Not its expiration, which would end every delay early, and
#: not its user, whom the server compares with ours.
_KEPT: Final = (
    *("content_type", "content_encoding", "priority", "correlation_id", "reply_to"),
    *("message_id", "timestamp", "type", "app_id"),
)
#: The longest text that a property can hold, in bytes.
_SHORT: Final = 255


class Receipt(NamedTuple):
    """Which delivery is meant: its channel, as this client counts them, and its number there."""

    channel: int
    tag: int


class Outgoing(NamedTuple):
    """What is to be published: to which queue, and what."""

    queue: str
    body: bytes
    properties: BasicProperties


class Message:
    """A delivery as it came, until it is acked."""

    __slots__ = ("body", "properties", "receipt", "seen")

    def __init__(self, receipt: Receipt, body: bytes, properties: BasicProperties) -> None:
        self.receipt = receipt
        self.body = body
        self.properties = properties
        self.seen = time.time()

    @property
    def unread(self) -> int | None:
        """Bytes of a body that was left out; None where it is here."""
        return getattr(self.properties, "unread", None)

    @property
    def table(self) -> Mapping[str, Any]:
        return self.properties.headers or {}

    @property
    def headers(self) -> dict[str, str]:
        """Those headers that are texts; what the server adds is not for the reader."""
        found = {name: value for name, value in self.table.items() if type(value) is str and not _is_added(name)}
        if self.problem:
            # Shown with the dead letter; a message that can be read has no such header.
            found |= {name: str(value) for name, value in self.table.items() if type(value) is Timestamp}
        return found

    @property
    def problem(self) -> str:
        """Why the client cannot decode the headers; empty where it can."""
        return self.properties.problem if isinstance(self.properties, Properties) else ""

    def decode(self, codec: Codec, *, source: str) -> Decoded:
        """Read the transaction; it is undecodable if the headers are, also with a valid body."""
        if self.unread is not None:
            return describe_unread(self.unread, self.headers, source=source, limit=codec.max_bytes)
        decoded = decode(codec, self.body, self.headers, source=source)
        if not self.problem:
            return decoded
        error = UndecodableError(f"the headers of the message cannot be decoded: {self.problem}")
        return Decoded(decoded.transaction.replace(payload=self.body), error)

    @property
    def deliveries(self) -> int:
        """How often it was handed out, this time included."""
        return count_deliveries(self.properties)

    @property
    def since(self) -> float:
        """Since when it is ready, as far as anybody knows."""
        stated = self.stated_since
        return self.seen if stated is None else stated

    @property
    def stated_since(self) -> float | None:
        """The time since which the message is ready, as its headers state it; None if they state none."""
        given = self.table.get(SINCE)
        try:
            return float(given) if isinstance(given, str) else float(self.properties.timestamp or "")
        except (TypeError, ValueError):
            return None

    def sent_on(
        self, queue: str, *, delivered: int, since: float | None = None, written: Mapping[str, str] | None = None
    ) -> Outgoing:
        """The same message for *queue*; *written*, if given, is its whole envelope."""
        headers = {name: value for name, value in self.table.items() if not _is_added(name)}
        if written is not None:
            headers = {name: value for name, value in headers.items() if name not in HEADERS} | dict(written)
        headers[DELIVERED] = str(delivered)
        headers[SINCE] = f"{self.since if since is None else since:.3f}"
        kept = {name: getattr(self.properties, name) for name in _KEPT}
        return Outgoing(queue, self.body, Properties(headers=headers, delivery_mode=2, **kept))


def fresh(queue: str, body: bytes, headers: Mapping[str, str], *, since: float) -> Outgoing:
    """A message that starts anew."""
    kept = {name: value for name, value in headers.items() if name != DELIVERED and not name.startswith(_ADDED)}
    table = {**kept, SINCE: f"{since:.3f}"}
    name = headers.get("ergon-id", "")[:_SHORT] or None
    return Outgoing(queue, body, BasicProperties(headers=table, delivery_mode=2, message_id=name))


def count_deliveries(properties: BasicProperties) -> int:
    """Return how often the message of *properties* was handed out, this time included."""
    table: Mapping[str, Any] = properties.headers or {}
    counted = table.get(_COUNT, 0)
    return _number(table.get(DELIVERED)) + (counted if isinstance(counted, int) else 0) + 1


def _is_added(name: str | bytes) -> bool:
    """Whether the server adds the header *name*; the server adds only names that are text."""
    return isinstance(name, str) and name.startswith(_ADDED)


def _number(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 9 else 0  # noqa: PLR2004 - as long as a count
