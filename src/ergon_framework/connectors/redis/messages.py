"""The keys of a queue in Redis, and the entries of its stream as bodies and headers.

An entry has an id and a list of field names and values. A body and each header of a message are one field.

All keys of a queue are in one slot of a cluster, because a script can use only keys of one slot: the text in the first
braces of a key decides its slot. Entries of third-party producers are decoded too. A message with more fields than a
script can pass to one command is packed into a single field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ergon_framework.connectors.base import MissingKeyError, UndecodableError
from ergon_framework.connectors.codec import (
    PROGRESS_HEADERS,
    WIRE,
    Codec,
    UnencodableError,
    decode,
    describe_unread,
)
from ergon_framework.connectors.payload_json import to_json
from ergon_framework.connectors.redis.scripts import PACKED_FIELD
from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction

#: Maximum characters of a queue name, the same on every broker.
_MAX_NAME_CHARS = 200


class QueueKeys(NamedTuple):
    """The keys of one queue.

    Messages that are ready or in flight are in *stream*; deferred ones are in *later*, with their due
    times in *due*; *free* has the number of deliveries of each entry that do not count against the delivery
    limit; *dead* has the dead letters; *bell* notifies waiting workers of releases and earlier due times,
    which add no entry to *stream*.
    """

    stream: str
    later: str
    due: str
    free: str
    dead: str
    bell: str


def queue_keys(name: str, stream: str | None = None) -> QueueKeys:
    """Return the keys of the queue *name*; *stream* is the key that a third-party producer writes to.

    >>> queue_keys("orders").stream, queue_keys("orders").dead
    ('ergon:{orders}', 'ergon:{orders}:orders:dead')
    >>> queue_keys("orders", "shop:orders").dead
    'ergon:{shop:orders}:orders:dead'
    """
    if not 0 < len(name) <= _MAX_NAME_CHARS:
        raise ConfigurationError(
            f"queue name {name!r:.40} must have 1 to {_MAX_NAME_CHARS} characters, not {len(name)}"
        )
    if stream is None and ("{" in name or "}" in name):
        raise ConfigurationError(f"a queue name in Redis must have no braces, which mark a cluster's slot: {name!r}")
    stream = f"ergon:{{{name}}}" if stream is None else stream
    prefix = f"ergon:{{{_parse_hash_tag(stream)}}}:{name}"
    return QueueKeys(stream, *(f"{prefix}:{part}" for part in ("later", "due", "free", "dead", "bell")))


def _parse_hash_tag(stream: str) -> str:
    """Return the part of a key that decides its slot: the text in its first braces, otherwise the whole key."""
    _, opening, rest = stream.partition("{")
    inside, closing, _ = rest.partition("}")
    if opening and closing and inside:
        return inside
    if not stream or "}" in stream:
        raise ConfigurationError(f"no queue keys can share a cluster slot with the stream {stream!r}")
    return stream


# -- entries of a stream ----------------------------------------------------------------------------

#: Counted deliveries of an entry before it was added again as a new one.
DELIVERIES_HEADER: Final = "ergon-deliveries"
#: Headers that a deferred transaction brings back, and that a replay removes.
CHANGING_HEADERS: Final = (*PROGRESS_HEADERS, DELIVERIES_HEADER)
_PACKED_FIELD: Final = PACKED_FIELD.encode()
#: The size limit if none is set: the largest integer that Lua represents exactly, which no message reaches.
_NO_SIZE_LIMIT: Final = 2**53
#: Headers of nearly every message, so that their names need not be decoded each time.
_HEADER_NAMES: Final = {row.header.encode(): row.header for row in WIRE} | {
    DELIVERIES_HEADER.encode(): DELIVERIES_HEADER
}


class Messages:
    """Encodes and decodes the entries of one queue.

    A header is a field, and the body is the field called *body_field*. An entry without that field is
    a third-party one: its fields are the headers, and the body is one JSON object of them.
    """

    def __init__(self, codec: Codec, *, name: str, body_field: str) -> None:
        self.codec = codec
        self._name = name
        #: The name of the field that holds the body.
        self.body_field = body_field
        self._encoded_body_field = body_field.encode()

    @property
    def max_body_bytes(self) -> int:
        """The largest body that is decoded, in bytes."""
        max_bytes = self.codec.max_bytes
        return _NO_SIZE_LIMIT if max_bytes is None else max_bytes

    def encode_fields(self, transaction: Transaction) -> list[str | bytes]:
        """Encode *transaction* to fields and values."""
        body, headers = self.codec.encode(transaction)
        if self.body_field in headers:
            raise UnencodableError(
                f"a header of transaction {transaction.id!r} is called {self.body_field!r}, like the body"
            )
        fields: list[str | bytes] = [self._encoded_body_field, body]
        for header, text in headers.items():
            fields += (header, text)
        return fields

    def split(self, fields: Sequence[bytes]) -> tuple[bytes, dict[str, str]]:
        """Split an entry into body and headers."""
        body: bytes | None = None
        headers: dict[str, str] = {}
        pairs = iter(unpack_fields(fields) if fields and fields[0] == _PACKED_FIELD else fields)
        for name, value in zip(pairs, pairs, strict=True):
            if name == self._encoded_body_field:
                body = value
            else:
                headers[_HEADER_NAMES.get(name) or name.decode(errors="replace")] = value.decode(errors="replace")
        return (to_json(headers).encode() if body is None else body), headers

    def decode(
        self, body: bytes, headers: Mapping[str, str]
    ) -> tuple[Transaction, UndecodableError | MissingKeyError | None]:
        """Decode an entry; return its transaction, or a stand-in and the error."""
        try:
            return self.codec.decode(body, headers, source=self._name), None
        except Exception:  # noqa: BLE001 - whatever the error is, the next line reports it
            return decode(self.codec, body, headers, source=self._name)

    def describe(
        self, size: int, headers: Mapping[str, str]
    ) -> tuple[Transaction, UndecodableError | MissingKeyError | None]:
        """Return a stand-in for an entry whose body of *size* bytes was not loaded, and the error."""
        return describe_unread(size, headers, source=self._name, limit=self.codec.max_bytes)


def previous_deliveries(headers: Mapping[str, str]) -> int:
    """Return the counted deliveries of an entry before it was added again; an invalid header counts as none."""
    text = headers.get(DELIVERIES_HEADER)
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else 0  # noqa: PLR2004


def unpack_fields(fields: Sequence[bytes]) -> Sequence[bytes]:
    """Unpack the fields of an entry that the scripts have packed into one; return an invalid packing unchanged.

    >>> unpack_fields([b"ergon-packed", b"1:a2:bc", b"more", b"x"])
    [b'a', b'bc', b'more', b'x']
    >>> unpack_fields([b"ergon-packed", b"1:a2:b"])
    [b'ergon-packed', b'1:a2:b']
    """
    packed, texts, position = fields[1], list[bytes](), 0
    while position < len(packed):
        colon = packed.find(b":", position, position + 10)
        length = packed[position:colon]
        end = colon + 1 + int(length) if colon > 0 and length.isdigit() else len(packed) + 1
        if end > len(packed):
            return fields
        texts.append(packed[colon + 1 : end])
        position = end
    return [*texts, *fields[2:]] if texts and len(texts) % 2 == 0 else fields
