"""Messages: entries of a stream as bodies and headers, also those that some other producer wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ergon_framework.connectors.base import MissingKeyError, UndecodableError
from ergon_framework.connectors.codec import (
    PROGRESS,
    WIRE,
    Codec,
    UnencodableError,
    decode,
    describe_unread,
    to_json,
)
from ergon_framework.connectors.redis.scripts import PACKED
from ergon_framework.transaction import Transaction

#: How often an entry was handed out at a cost before it was put back as a new one.
DELIVERIES: Final = "ergon-deliveries"
#: What a transaction brings home when it is put off, and loses when it is replayed.
CHANGING: Final = (*PROGRESS, DELIVERIES)
_PACKED: Final = PACKED.encode()
#: More bytes than any message has, and as many as a number in Lua counts exactly.
_UNLIMITED: Final = 2**53
#: Names of headers that are read for nearly every message, and need not be decoded each time.
_NAMES: Final = {row.header.encode(): row.header for row in WIRE} | {DELIVERIES.encode(): DELIVERIES}


class Messages:
    """Writes and reads the entries of one queue.

    A header is a field, and the body is the field called *body*. What has none is somebody else's:
    its fields are then the headers, and as one JSON object the body.
    """

    def __init__(self, codec: Codec, *, name: str, body: str) -> None:
        self.codec = codec
        self._name = name
        #: The name of the field that holds the body.
        self.body = body
        self._field = body.encode()

    @property
    def largest(self) -> int:
        """Bytes of the largest body that is read."""
        most = self.codec.max_bytes
        return _UNLIMITED if most is None else most

    def fields(self, transaction: Transaction) -> list[str | bytes]:
        """The fields and values of *transaction*."""
        body, headers = self.codec.encode(transaction)
        if self.body in headers:
            raise UnencodableError(f"a header of transaction {transaction.id!r} is called {self.body!r}, as the body")
        fields: list[str | bytes] = [self._field, body]
        for header, text in headers.items():
            fields += (header, text)
        return fields

    def split(self, fields: Sequence[bytes]) -> tuple[bytes, dict[str, str]]:
        """Body and headers of an entry."""
        body: bytes | None = None
        headers: dict[str, str] = {}
        pairs = iter(spread(fields) if fields and fields[0] == _PACKED else fields)
        for name, value in zip(pairs, pairs, strict=True):
            if name == self._field:
                body = value
            else:
                headers[_NAMES.get(name) or name.decode(errors="replace")] = value.decode(errors="replace")
        return (to_json(headers).encode() if body is None else body), headers

    def read(
        self, body: bytes, headers: Mapping[str, str]
    ) -> tuple[Transaction, UndecodableError | MissingKeyError | None]:
        """The transaction of an entry, or a stand-in for it and why."""
        try:
            return self.codec.decode(body, headers, source=self._name), None
        except Exception:  # noqa: BLE001 - whatever it is, the next line tells it
            return decode(self.codec, body, headers, source=self._name)

    def describe(
        self, size: int, headers: Mapping[str, str]
    ) -> tuple[Transaction, UndecodableError | MissingKeyError | None]:
        """The same of an entry whose body of *size* bytes was not loaded."""
        return describe_unread(size, headers, source=self._name, limit=self.codec.max_bytes)


def counted(headers: Mapping[str, str]) -> int:
    """How many deliveries an entry had cost before it was put back; a producer's nonsense is none."""
    text = headers.get(DELIVERIES)
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else 0  # noqa: PLR2004


def spread(fields: Sequence[bytes]) -> Sequence[bytes]:
    """The fields of an entry whose first one holds them, as the scripts pack them; what only looks so stays as it is.

    >>> spread([b"ergon-packed", b"1:a2:bc", b"more", b"x"])
    [b'a', b'bc', b'more', b'x']
    >>> spread([b"ergon-packed", b"1:a2:b"])
    [b'ergon-packed', b'1:a2:b']
    """
    whole, texts, at = fields[1], list[bytes](), 0
    while at < len(whole):
        colon = whole.find(b":", at, at + 10)
        length = whole[at:colon]
        end = colon + 1 + int(length) if colon > 0 and length.isdigit() else len(whole) + 1
        if end > len(whole):
            return fields
        texts.append(whole[colon + 1 : end])
        at = end
    return [*texts, *fields[2:]] if texts and len(texts) % 2 == 0 else fields
