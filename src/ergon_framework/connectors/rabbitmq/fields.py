"""Fields: read and write message headers that pika cannot decode or would change, and leave out bodies.

pika closes the connection at a timestamp beyond the year 9999, and reads a floating-point header as an integer. Other
programs write both, so this module reads the frames that carry such properties. The size of a body is in the same
frame: a body that the channel leaves out is dropped frame by frame as it arrives, and never held as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from pika import BasicProperties, SelectConnection, data, frame
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.compat import long

#: Frame type, channel and size; then class, weight and size of the body.
_FRAME: Final = struct.Struct(">BHL")
_CONTENT: Final = struct.Struct(">HHQ")
_FLOATS: Final = {b"f": struct.Struct(">f"), b"d": struct.Struct(">d")}
_FRAME_END_BYTES: Final = 1
_HEADER_FRAME: Final = 2
_FLAG_BYTES: Final = 2


#: Whether the body of a message is left out, given its properties and the size of the body in bytes.
BodyRule: TypeAlias = Callable[[BasicProperties, int], bool]


class Timestamp(int):
    """Seconds since the epoch of a timestamp that a datetime cannot hold."""


class Properties(BasicProperties):  # type: ignore[misc]  # pika comes without types
    """Properties of a message, with headers of every type that a server accepts."""

    #: Why the client cannot decode the headers; empty if it can.
    problem: str = ""
    #: Bytes of a body that was left out; None if it was loaded.
    unread: int | None = None

    def encode(self) -> list[bytes]:
        """Encode as the base class does, and headers as they were decoded here."""
        if not self.headers:
            return list(super().encode())
        # The table comes after the content's type and encoding, and before all other properties.
        front = BasicProperties(content_type=self.content_type, content_encoding=self.content_encoding)
        back = BasicProperties(**{**vars(self), "headers": None, "content_type": None, "content_encoding": None})
        first, last = b"".join(front.encode()), b"".join(back.encode())
        (flags,) = struct.unpack_from(">H", first)
        (more,) = struct.unpack_from(">H", last)
        table: list[bytes] = []
        encode_table(table, self.headers)
        return [
            struct.pack(">H", flags | more | BasicProperties.FLAG_HEADERS),
            first[_FLAG_BYTES:],
            *table,
            last[_FLAG_BYTES:],
        ]


def encode_table(parts: list[bytes], table: Mapping[Any, Any]) -> None:
    """Append *table* in the encoding of AMQP."""
    fields: list[bytes] = []
    for name, value in table.items():
        data.encode_short_string(fields, name)
        _encode_value(fields, value)
    content = b"".join(fields)
    parts += [struct.pack(">I", len(content)), content]


def _encode_value(parts: list[bytes], value: Any) -> None:
    if isinstance(value, float):
        parts.append(struct.pack(">cd", b"d", value))
    elif isinstance(value, Timestamp):
        parts.append(struct.pack(">cQ", b"T", value))
    elif isinstance(value, dict):
        parts.append(b"F")
        encode_table(parts, value)
    elif isinstance(value, list):
        items: list[bytes] = []
        for item in value:
            _encode_value(items, item)
        content = b"".join(items)
        parts += [struct.pack(">cI", b"A", len(content)), content]
    else:
        data.encode_value(parts, value)


def decode_table(encoded: bytes, offset: int) -> tuple[dict[Any, Any], int]:
    """Decode the table at *offset*; return it and the offset after it."""
    (size,) = struct.unpack_from(">I", encoded, offset)
    offset += 4
    end = offset + size
    table: dict[Any, Any] = {}
    while offset < end:
        name, offset = data.decode_short_string(encoded, offset)
        table[name], offset = _decode_value(encoded, offset)
    return table, offset


def _decode_value(encoded: bytes, offset: int) -> tuple[Any, int]:
    kind, begin = encoded[offset : offset + 1], offset + 1
    value: Any
    if kind in _FLOATS:
        (value,) = _FLOATS[kind].unpack_from(encoded, begin)
        return value, begin + _FLOATS[kind].size
    if kind == b"F":
        return decode_table(encoded, begin)
    if kind == b"A":
        return _decode_array(encoded, begin)
    try:
        value, end = data.decode_value(encoded, offset)
    except (ValueError, OverflowError, OSError):  # the exception depends on the platform's clock functions
        if kind != b"T":
            raise
        (seconds,) = struct.unpack_from(">Q", encoded, begin)
        return Timestamp(seconds), begin + 8
    return value, end


def _decode_array(encoded: bytes, offset: int) -> tuple[list[Any], int]:
    (size,) = struct.unpack_from(">I", encoded, offset)
    offset += 4
    end = offset + size
    items: list[Any] = []
    while offset < end:
        item, offset = _decode_value(encoded, offset)
        items.append(item)
    return items, offset


class _FaithfulReading:
    """Override how a connection reads frames: a private method of pika, whose version is capped and tested."""

    _frame_buffer: bytes
    _trim_frame_buffer: Callable[[int], None]

    def leave_out(self, channel: int, rule: BodyRule) -> None:
        """Drop the bodies of messages on *channel* that *rule* selects; such a message arrives without its body."""
        vars(self).setdefault("_rules", {})[channel] = rule

    def _read_frame(self) -> tuple[int, Any]:
        bytes_to_drop: dict[int, int] = vars(self).setdefault("_bytes_to_drop", {})
        while True:
            size, decoded = self._read_any_frame()
            if type(decoded) is frame.Header:
                return size, self._apply_rule(decoded, bytes_to_drop)
            if type(decoded) is not frame.Body or not bytes_to_drop.get(decoded.channel_number):
                return size, decoded
            bytes_to_drop[decoded.channel_number] -= len(decoded.fragment)
            self._trim_frame_buffer(size)
            if not self._frame_buffer:
                return 0, None

    def _apply_rule(self, header: frame.Header, bytes_to_drop: dict[int, int]) -> frame.Header:
        """Return *header*, with no body to follow if the rule of its channel leaves the body out."""
        channel, size = header.channel_number, header.body_size
        rule: BodyRule | None = vars(self).get("_rules", {}).get(channel)
        bytes_to_drop[channel] = size if rule is not None and rule(header.properties, size) else 0
        if not bytes_to_drop[channel]:
            return header
        header.properties.unread = size
        return frame.Header(channel, 0, header.properties)

    def _read_any_frame(self) -> tuple[int, Any]:
        buffer = self._frame_buffer
        try:
            size, decoded = frame.decode_frame(buffer)
        except Exception as error:
            # The boundary to the client: a message that it cannot decode must not end the connection.
            if buffer[0] != _HEADER_FRAME:
                raise
            return _read_header(buffer, f"{type(error).__name__}: {error}")
        if type(decoded) is frame.Header and _is_ambiguous(decoded.properties.headers):
            return _read_header(buffer, "")
        return size, decoded


def _is_ambiguous(headers: Mapping[Any, Any] | None) -> bool:
    """Return whether a header may be a floating-point number, which pika reads as a long integer."""
    return headers is not None and any(type(value) in (long, dict, list) for value in headers.values())


def _read_header(buffer: bytes, problem: str) -> tuple[int, frame.Header]:
    """Read the complete frame of properties at the start of *buffer*; return its size too."""
    _, channel, size = _FRAME.unpack_from(buffer)
    end = _FRAME.size + size
    _, _, body_size = _CONTENT.unpack_from(buffer, _FRAME.size)
    encoded = buffer[_FRAME.size + _CONTENT.size : end]
    properties = Properties()
    properties.problem = problem
    (flags,) = struct.unpack_from(">H", encoded)
    begin = _FLAG_BYTES
    for flag in (BasicProperties.FLAG_CONTENT_TYPE, BasicProperties.FLAG_CONTENT_ENCODING):
        if flags & flag:
            _, begin = data.decode_short_string(encoded, begin)
    after_table = begin + 4 + struct.unpack_from(">I", encoded, begin)[0]
    rest = struct.pack(">H", flags & ~BasicProperties.FLAG_HEADERS) + encoded[_FLAG_BYTES:begin] + encoded[after_table:]
    properties.decode(rest)
    try:
        properties.headers, _ = decode_table(encoded, begin)
    except Exception as error:  # noqa: BLE001  # as above: an unknown type of field, or a broken table
        properties.headers, properties.problem = {}, f"{type(error).__name__}: {error}"
    return end + _FRAME_END_BYTES, frame.Header(channel, body_size, properties)


class FaithfulAsyncioConnection(_FaithfulReading, AsyncioConnection):  # type: ignore[misc]  # pika comes without types
    """A connection on an event loop that reads every message."""


class FaithfulSelectConnection(_FaithfulReading, SelectConnection):  # type: ignore[misc]  # pika comes without types
    """The same for a blocking connection."""
