"""The part of the JetStream API that a queue needs, as JSON requests.

JetStream is the message store of a NATS server. It stores messages in streams, numbered by sequence. A RequestBatch of
a connection waits for a number of responses, and ends earlier if its ``end`` is called.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.nats.connection import Connection, Request
from ergon_framework.connectors.nats.fast_client import RawMessage, read_headers
from ergon_framework.errors import ConnectionLostError

#: Error codes of the server that the connector handles.
NO_MESSAGE: Final = 10037
NO_SUCH_SEQUENCE: Final = 10043
NO_CONSUMER: Final = 10014
NO_STREAM: Final = 10059
NAME_TAKEN: Final = 10058
CONSUMER_EXISTS: Final = 10148
WRONG_LAST_SEQUENCE: Final = 10071
#: A deletion failed: there is no such message, or its store is closed already; the description says which.
NOT_DELETED: Final = 10057
_ALREADY_DELETED: Final = ("EOF", "no message found", "deleted message")
#: The server is reachable but cannot serve now: it starts, elects a leader, or is short of resources.
_UNAVAILABLE_STATUSES: Final = frozenset({503})
#: Error codes for exceeded limits, which a retry may find free again: account, memory, disk and stream limits.
_RESOURCE_ERRORS: Final = frozenset({10002, 10023, 10028, 10047, 10077})
_NANOSECONDS_PER_SECOND: Final = 1_000_000_000
#: Messages per pull request while a stream is scanned.
_SCAN_BATCH: Final = 256


class ApiError(ConnectorError):
    """JetStream rejected a request; *number* is the server's error code."""

    code = "jetstream"

    def __init__(self, description: str, *, number: int) -> None:
        super().__init__(f"JetStream rejected the request: {description} (code {number})")
        self.number = number
        self._description = description

    @property
    def is_not_found(self) -> bool:
        """Whether the error means that the message does not exist, in a store that is open."""
        if self.number == NOT_DELETED:
            return any(text in self._description for text in _ALREADY_DELETED)
        return self.number in {NO_MESSAGE, NO_SUCH_SEQUENCE}


class StoredMessage(NamedTuple):
    """A message as a stream stores it."""

    seq: int
    subject: str
    headers: dict[str, str]
    body: bytes
    #: Seconds since the epoch.
    at: float


def to_nanoseconds(seconds: float) -> int:
    """Convert seconds to JetStream's time unit."""
    return int(seconds * _NANOSECONDS_PER_SECOND)


def request(endpoint: str, **fields: Any) -> Request:
    """Return the request of one API call."""
    return Request(f"$JS.API.{endpoint}", json.dumps(fields).encode() if fields else b"")


def parse_response(answer: RawMessage | None) -> dict[str, Any]:
    """Parse a response or raise its error; a missing response counts as a lost connection."""
    if answer is None:
        raise ConnectionLostError("JetStream did not answer: it may be starting or electing a leader")
    return raise_for_error(answer.data or b"{}")


def raise_for_error(answer: bytes) -> dict[str, Any]:
    """Parse *answer*; raise ApiError for a rejection, ConnectionLostError if the server cannot serve now."""
    response: dict[str, Any] = json.loads(answer)
    error = response.get("error")
    if error:
        description, number = str(error.get("description", "")), int(error.get("err_code", 0))
        if error.get("code") in _UNAVAILABLE_STATUSES or number in _RESOURCE_ERRORS:
            raise ConnectionLostError(f"JetStream is temporarily unavailable: {description}")
        raise ApiError(description, number=number)
    return response


async def call(connection: Connection, endpoint: str, **fields: Any) -> dict[str, Any]:
    """Send one API call and return its response."""
    (answer,) = await connection.request_many([request(endpoint, **fields)])
    return parse_response(answer)


# -- one message -----------------------------------------------------------------------------------


def read_reply(reply: str) -> tuple[int, int, int]:
    """Return a message's delivery count, its number in the stream, and its store time in nanoseconds.

    >>> read_reply("$JS.ACK.WORK.ergon.2.7.9.1700000000000000000.0")
    (2, 7, 1700000000000000000)
    >>> read_reply("$JS.ACK.hub.ABC.WORK.ergon.2.7.9.1700000000000000000.0.xyz")
    (2, 7, 1700000000000000000)
    """
    parts = reply.split(".")
    first = 4 if len(parts) == 9 else 6  # noqa: PLR2004 - newer servers put the domain and the account first
    return int(parts[first]), int(parts[first + 1]), int(parts[first + 3])


def read_delivered(reply: str) -> int:
    """Return only the delivery count of a message.

    >>> read_delivered("$JS.ACK.WORK.ergon.2.7.9.1700000000000000000.0")
    2
    >>> read_delivered("$JS.ACK.hub.ABC.WORK.ergon.2.7.9.1700000000000000000.0.xyz")
    2
    """
    parts = reply.split(".")
    return int(parts[4 if len(parts) == 9 else 6])  # noqa: PLR2004 - as in read_reply


def parse_stored_message(response: Mapping[str, Any]) -> StoredMessage:
    """Parse the message in a response to STREAM.MSG.GET."""
    message = response["message"]
    return StoredMessage(
        int(message["seq"]),
        str(message["subject"]),
        read_headers(base64.b64decode(message.get("hdrs", ""))),
        base64.b64decode(message.get("data", "")),
        parse_timestamp(str(message["time"])),
    )


def parse_timestamp(text: str) -> float:
    """Parse a server timestamp as seconds since the epoch, to the microsecond.

    >>> parse_timestamp("1970-01-01T00:00:01.123456789Z")
    1.123456
    """
    whole, dot, rest = text.partition(".")
    digits = rest.rstrip("Z")[:6] if dot else ""
    return datetime.fromisoformat(f"{whole.rstrip('Z')}.{digits or '0'}+00:00").timestamp()


# -- a whole stream -----------------------------------------------------------------------------------


async def scan(
    connection: Connection, stream: str, *, after: int = 0, bodies: bool = True
) -> AsyncIterator[StoredMessage]:
    """Yield the messages of *stream* after number *after*, the oldest first, through a temporary consumer.

    Without *bodies* the server sends only subjects and headers, which suffice to count messages by state.
    """
    config = {
        "ack_policy": "none",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": after + 1,
        "replay_policy": "instant",
        "mem_storage": True,
        "num_replicas": 1,
        "headers_only": not bodies,
        "inactive_threshold": to_nanoseconds(30.0),
    }
    consumer = await call(connection, f"CONSUMER.CREATE.{stream}", stream_name=stream, config=config)
    name = consumer["name"]
    try:
        remaining = int(consumer["num_pending"])
        while remaining > 0:
            page = await _fetch_page(connection, stream, name, min(remaining, _SCAN_BATCH))
            for message in page:
                yield message
            remaining = remaining - len(page) if page else 0
    finally:
        with suppress(ConnectorError, ConnectionLostError):  # the server deletes it after its inactivity threshold
            await call(connection, f"CONSUMER.DELETE.{stream}.{name}")


async def _fetch_page(connection: Connection, stream: str, consumer: str, count: int) -> list[StoredMessage]:
    """Pull at most *count* messages; return those that came before the server ended the request."""
    # All responses to one pull go to one subject, and there are several: they need a dedicated subscription.
    batch, messages = connection.new_batch(1), list[StoredMessage]()

    def on_message(message: RawMessage) -> None:
        if message.reply:
            _, seq, stored_at = read_reply(message.reply)
            messages.append(
                StoredMessage(seq, message.subject, message.headers, message.data, stored_at / _NANOSECONDS_PER_SECOND)
            )
        # A message without a reply subject is a status: the server ends the request.
        if not message.reply or len(messages) >= count:
            batch.end()

    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox, on_message)
    try:
        payload = json.dumps({"batch": count, "no_wait": True}).encode()
        await connection.send(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", payload, reply=inbox)
        if not await connection.wait_for_batch(batch):
            raise ConnectionLostError(f"JetStream did not answer within {connection.timeout:g} s")
    finally:
        with suppress(Exception):  # a lost connection has no subscriptions
            await subscription.unsubscribe()
    return messages
