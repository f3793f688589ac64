"""Message: one delivery of the server, and what it looks like when it is sent on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pika import BasicProperties

from ergon_framework.connectors.codec import WIRE

#: The headers of an envelope.
HEADERS: Final = frozenset(row.header for row in WIRE)
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
    def table(self) -> Mapping[str, Any]:
        return self.properties.headers or {}

    @property
    def headers(self) -> dict[str, str]:
        """Those headers that are texts; what the server adds is not for the reader."""
        return {name: value for name, value in self.table.items() if type(value) is str and not name.startswith(_ADDED)}

    @property
    def deliveries(self) -> int:
        """How often it was handed out, this time included."""
        counted = self.table.get(_COUNT, 0)
        return _number(self.table.get(DELIVERED)) + (counted if isinstance(counted, int) else 0) + 1

    @property
    def since(self) -> float:
        """Since when it is ready, as far as anybody knows."""
        given = self.table.get(SINCE)
        try:
            return float(given) if isinstance(given, str) else float(self.properties.timestamp or self.seen)
        except (TypeError, ValueError):
            return self.seen

    def sent_on(
        self, queue: str, *, delivered: int, since: float | None = None, written: Mapping[str, str] | None = None
    ) -> Outgoing:
        """The same message for *queue*; *written*, if given, is its whole envelope."""
        headers = {name: value for name, value in self.table.items() if not name.startswith(_ADDED)}
        if written is not None:
            headers = {name: value for name, value in headers.items() if name not in HEADERS} | dict(written)
        headers[DELIVERED] = str(delivered)
        headers[SINCE] = f"{self.since if since is None else since:.3f}"
        kept = {name: getattr(self.properties, name) for name in _KEPT}
        return Outgoing(queue, self.body, BasicProperties(headers=headers, delivery_mode=2, **kept))


def fresh(queue: str, body: bytes, headers: Mapping[str, str], *, since: float) -> Outgoing:
    """A message that starts anew."""
    kept = {name: value for name, value in headers.items() if name != DELIVERED and not name.startswith(_ADDED)}
    table = {**kept, SINCE: f"{since:.3f}"}
    name = headers.get("ergon-id", "")[:_SHORT] or None
    return Outgoing(queue, body, BasicProperties(headers=table, delivery_mode=2, message_id=name))


def _number(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 9 else 0  # noqa: PLR2004 - as long as a count
