"""Read and write message headers that pika cannot decode or would change, and leave out bodies that are too large.

pika closes the connection at a timestamp beyond the year 9999, and reads a floating-point header as an integer. Other
programs write both, so this module decodes the properties of such messages itself.

AMQP sends a message as a properties frame (in AMQP: the content header frame), which has the headers and the size of
the body, and body frames. A queue cannot use a body over the limit of its codec, and loading it could exhaust the
memory. A rule of the channel therefore decides by the properties frame whether the body is left out; its frames are
dropped one by one as they arrive.
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
_PROPERTIES_FRAME: Final = 2
_FLAG_BYTES: Final = 2


#: Returns whether the body of a message is left out, for example because it is over a limit; its arguments are the
#: properties of the message and the size of the body in bytes.
BodyRule: TypeAlias = Callable[[BasicProperties, int], bool]


class Timestamp(int):
    """A timestamp that a datetime cannot hold, in seconds since 1970."""


class Properties(BasicProperties):  # type: ignore[misc]  # pika comes without types
    """Properties of a message, with headers of every type that a server accepts."""

    #: Why pika cannot decode the message's properties; empty if it can. Such a message is dead-lettered as
    #: undecodable; its dead letter shows the headers that this module can decode.
    problem: str = ""
    #: Bytes of a body that was left out; None if it was loaded.
    unread: int | None = None

    def encode(self) -> list[bytes]:
        """Encode as the base class does, and floating-point headers and late timestamps as they were decoded here."""
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
    """Override ``_read_frame``, a private method of pika that returns the next frame; its version is capped.

    The mixin has no ``__init__``, so its state is created on first use.
    """

    _frame_buffer: bytes
    _trim_frame_buffer: Callable[[int], None]

    def leave_out(self, channel: int, rule: BodyRule) -> None:
        """Drop the bodies that *rule* selects on *channel*; such a message has an empty body and ``unread``."""
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
                return 0, None  # for pika: no complete frame has arrived

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
            # Catch everything that pika raises: properties that it cannot decode must not end the connection.
            if buffer[0] != _PROPERTIES_FRAME:
                raise
            return _read_properties_frame(buffer, f"{type(error).__name__}: {error}")
        if type(decoded) is frame.Header and _is_ambiguous(decoded.properties.headers):
            return _read_properties_frame(buffer, "")
        return size, decoded


def _is_ambiguous(headers: Mapping[Any, Any] | None) -> bool:
    """Return whether pika may have changed a floating-point header.

    pika reads one as ``long``, as it does 64-bit integers; a nested table or list may contain one.
    """
    return headers is not None and any(type(value) in (long, dict, list) for value in headers.values())


def _read_properties_frame(buffer: bytes, problem: str) -> tuple[int, frame.Header]:
    """Decode the complete properties frame at the start of *buffer*; return its size and the frame."""
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
    except Exception as error:  # noqa: BLE001  # an unknown type of field, or a broken table
        properties.headers, properties.problem = {}, f"{type(error).__name__}: {error}"
    return end + _FRAME_END_BYTES, frame.Header(channel, body_size, properties)


class FaithfulAsyncioConnection(_FaithfulReading, AsyncioConnection):  # type: ignore[misc]  # pika comes without types
    """A connection on an event loop that reads every message."""


class FaithfulSelectConnection(_FaithfulReading, SelectConnection):  # type: ignore[misc]  # pika comes without types
    """The same for threads: pika's BlockingConnection runs on a SelectConnection."""
