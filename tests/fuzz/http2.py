"""HTTP/2 frames written by hand, valid and invalid: a library would refuse to send most of them."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x4, 0x8, 0x20


def encode_frame(
    kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0, length: int | None = None
) -> bytes:
    """Write one frame; *length* is what its header says if that is not the length of *payload*."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size & 0xFFFFFF)[1:] + struct.pack(">BBI", kind, flags, stream & 0xFFFFFFFF) + payload


def encode_headers(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Encode *pairs* as literals of HPACK, without an index and without Huffman codes."""
    return b"".join(b"\0" + _encode_text(name) + _encode_text(value) for name, value in pairs)


def _encode_text(value: bytes) -> bytes:
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, digits = len(value) - 127, [127]
    while rest >= 128:
        digits.append(rest % 128 + 128)
        rest //= 128
    return bytes([*digits, rest]) + value


def encode_request(path: bytes, *, more: list[tuple[bytes, bytes]] | None = None) -> bytes:
    """Return the header block of a gRPC call."""
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    return encode_headers([*pairs, *(more or [])])


def encode_message(data: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """Return a message of gRPC; *length* is what its prefix says if that is not its length."""
    return struct.pack(">BI", compressed, len(data) if length is None else length) + data
