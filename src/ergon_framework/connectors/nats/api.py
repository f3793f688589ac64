"""The part of JetStream's API that a queue needs, in its own JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.nats.frames import Heard, read_headers
from ergon_framework.connectors.nats.line import Line, Request
from ergon_framework.errors import ConnectionLost

#: Codes of the server's errors that mean something to us.
NO_MESSAGE: Final = 10037
NO_SUCH_SEQUENCE: Final = 10043
NO_CONSUMER: Final = 10014
NO_STREAM: Final = 10059
NAME_TAKEN: Final = 10058
CONSUMER_EXISTS: Final = 10148
WRONG_LAST_SEQUENCE: Final = 10071
#: A deletion failed: because there is no such message, or because its store is closed already; the words say which.
NOT_DELETED: Final = 10057
_NOTHING_THERE: Final = ("EOF", "no message found", "deleted message")
#: The server is there and cannot do it now: it starts, a leader is being chosen, or it is short of resources.
_NOT_NOW: Final = frozenset({503})
#: The same under other codes: the limits of the account, of memory and of the disk, and a stream that is full.
_FULL: Final = frozenset({10002, 10023, 10028, 10047, 10077})
_SECOND: Final = 1_000_000_000
#: How many are read at once when a stream is gone through.
_PAGE: Final = 256


class ApiError(ConnectorError):
    """JetStream said no; *number* is the server's own code."""

    code = "jetstream"

    def __init__(self, words: str, *, number: int) -> None:
        super().__init__(f"JetStream refused: {words} (code {number})")
        self.number = number
        self._words = words

    @property
    def gone(self) -> bool:
        """Whether it means that there is no such message, in a store that is open."""
        if self.number == NOT_DELETED:
            return any(words in self._words for words in _NOTHING_THERE)
        return self.number in {NO_MESSAGE, NO_SUCH_SEQUENCE}


class Stored(NamedTuple):
    """A message as a stream keeps it."""

    seq: int
    subject: str
    headers: dict[str, str]
    body: bytes
    #: Seconds since the epoch.
    at: float


def nanos(seconds: float) -> int:
    """As JetStream counts time."""
    return int(seconds * _SECOND)


def request(what: str, **given: Any) -> Request:
    """One call of the API."""
    return Request(f"$JS.API.{what}", json.dumps(given).encode() if given else b"")


def read(answer: Heard | None) -> dict[str, Any]:
    """What was answered, or an error; no answer is a line that is down."""
    if answer is None:
        raise ConnectionLost("JetStream did not answer; it may be starting, or choosing a leader")
    return refuse(answer.data or b"{}")


def refuse(answer: bytes) -> dict[str, Any]:
    """What *answer* says, unless it says no; ConnectionLost where it says not now."""
    told: dict[str, Any] = json.loads(answer)
    error = told.get("error")
    if error:
        words, number = str(error.get("description", "")), int(error.get("err_code", 0))
        if error.get("code") in _NOT_NOW or number in _FULL:
            raise ConnectionLost(f"JetStream cannot do that now: {words}")
        raise ApiError(words, number=number)
    return told


async def call(line: Line, what: str, **given: Any) -> dict[str, Any]:
    """The answer to one call."""
    (answer,) = await line.ask_all([request(what, **given)])
    return read(answer)


# -- one message -----------------------------------------------------------------------------------


def read_reply(reply: str) -> tuple[int, int, int]:
    """How often a message was delivered, its number in the stream, and when it was stored, in nanoseconds.

    >>> read_reply("$JS.ACK.WORK.ergon.2.7.9.1700000000000000000.0")
    (2, 7, 1700000000000000000)
    >>> read_reply("$JS.ACK.hub.ABC.WORK.ergon.2.7.9.1700000000000000000.0.xyz")
    (2, 7, 1700000000000000000)
    """
    parts = reply.split(".")
    first = 4 if len(parts) == 9 else 6  # noqa: PLR2004 - newer servers name the domain and the account before
    return int(parts[first]), int(parts[first + 1]), int(parts[first + 3])


def read_delivered(reply: str) -> int:
    """How often a message was delivered, for whom that is all there is to know.

    >>> read_delivered("$JS.ACK.WORK.ergon.2.7.9.1700000000000000000.0")
    2
    >>> read_delivered("$JS.ACK.hub.ABC.WORK.ergon.2.7.9.1700000000000000000.0.xyz")
    2
    """
    parts = reply.split(".")
    return int(parts[4 if len(parts) == 9 else 6])  # noqa: PLR2004 - as above


def stored(told: Mapping[str, Any]) -> Stored:
    """The message in the answer to STREAM.MSG.GET."""
    message = told["message"]
    return Stored(
        int(message["seq"]),
        str(message["subject"]),
        read_headers(base64.b64decode(message.get("hdrs", ""))),
        base64.b64decode(message.get("data", "")),
        moment(str(message["time"])),
    )


def moment(text: str) -> float:
    """Seconds since the epoch of a time as the server writes it, to the microsecond.

    >>> moment("1970-01-01T00:00:01.123456789Z")
    1.123456
    """
    whole, dot, rest = text.partition(".")
    digits = rest.rstrip("Z")[:6] if dot else ""
    return datetime.fromisoformat(f"{whole.rstrip('Z')}.{digits or '0'}+00:00").timestamp()


# -- a whole stream -----------------------------------------------------------------------------------


async def scan(line: Line, stream: str, *, after: int = 0, bodies: bool = True) -> AsyncIterator[Stored]:
    """What is in *stream* behind number *after*, the oldest first, read by a consumer that is gone afterwards."""
    config = {
        "ack_policy": "none",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": after + 1,
        "replay_policy": "instant",
        "mem_storage": True,
        "num_replicas": 1,
        "headers_only": not bodies,
        "inactive_threshold": nanos(30.0),
    }
    made = await call(line, f"CONSUMER.CREATE.{stream}", stream_name=stream, config=config)
    name = made["name"]
    try:
        left = int(made["num_pending"])
        while left > 0:
            page = await _page(line, stream, name, min(left, _PAGE))
            for each in page:
                yield each
            left = left - len(page) if page else 0
    finally:
        with suppress(ConnectorError, ConnectionLost):  # it goes by itself before long
            await call(line, f"CONSUMER.DELETE.{stream}.{name}")


async def _page(line: Line, stream: str, consumer: str, count: int) -> list[Stored]:
    # All answers to one pull go to one subject, and more than one comes: it has a subscription of its own.
    waiting, found = line.round(1), list[Stored]()

    def heard(message: Heard) -> None:
        if message.reply:
            _, seq, at = read_reply(message.reply)
            found.append(Stored(seq, message.subject, message.headers, message.data, at / _SECOND))
        if not message.reply or len(found) >= count:
            waiting.end()

    inbox = line.inbox()
    subscription = await line.subscribe(inbox, heard)
    try:
        wanted = json.dumps({"batch": count, "no_wait": True}).encode()
        await line.send(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", wanted, reply=inbox)
        if not await line.answered(waiting):
            raise ConnectionLost(f"JetStream did not answer within {line.timeout:g} s")
    finally:
        with suppress(Exception):  # a line that is lost has no subscriptions
            await subscription.unsubscribe()
    return found
