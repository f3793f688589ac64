"""Frames: however what the server sends is cut on its way, everybody hears all of it, in order."""

from __future__ import annotations

import asyncio

import pytest
from nats.errors import ProtocolError

from ergon_framework.connectors.nats.fast_client import FastClient

HEADER_BLOCK = b"NATS/1.0\r\nergon-id: 7\r\nx: a: b\r\n\r\n"


def build_message(subject: str, body: bytes, *, sid: int = 1, reply: str = "", head: bytes = b"") -> bytes:
    parts = ["HMSG" if head else "MSG", subject, str(sid), *([reply] if reply else [])]
    parts += [str(len(head)), str(len(head) + len(body))] if head else [str(len(body))]
    return " ".join(parts).encode() + b"\r\n" + head + body + b"\r\n"


class RecordingClient(FastClient):
    """A client without a line: it is fed by hand, and writes down who heard what."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded_events: list[object] = []
        self._callbacks[b"1"] = lambda delivery: self.recorded_events.append(("ear", *delivery))

    async def _process_ping(self) -> None:
        self.recorded_events.append("ping")

    async def _process_err(self, err_msg: str) -> None:
        self.recorded_events.append(err_msg)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if b"%d" % sid in self._callbacks:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            self.recorded_events.append(("client", sid, subject, reply, data, headers))

    def feed_chunks(self, *chunks: bytes) -> list[object]:
        async def parse_all() -> None:
            for chunk in chunks:
                await self._ps.parse(chunk)

        asyncio.run(parse_all())
        return self.recorded_events


STREAM = b"".join(
    [
        build_message("a", b"one", reply="back.1", head=HEADER_BLOCK),
        build_message("a.longer.subject", b"", reply="back.2"),
        b"PING\r\n",
        build_message("b", b"MSG a 1 3\r\nabc\r\n", head=HEADER_BLOCK),
        b"+OK\r\n",
        build_message("c", b"\r\n" * 5, sid=2, reply="r", head=HEADER_BLOCK),
        build_message("d", b"x" * 300),
        b"-ERR 'Slow Consumer'\r\n",
        build_message("c", b"plain", sid=22),
        build_message("e", b"last", reply="back.3", head=b"NATS/1.0 404 No Messages\r\n\r\n"),
    ]
)
EXPECTED_EVENTS = [
    ("ear", "a", "back.1", b"one", HEADER_BLOCK),
    ("ear", "a.longer.subject", "back.2", b"", None),
    "ping",
    ("ear", "b", "", b"MSG a 1 3\r\nabc\r\n", HEADER_BLOCK),
    ("client", 2, b"c", b"r", b"\r\n" * 5, HEADER_BLOCK),
    ("ear", "d", "", b"x" * 300, None),
    "'slow consumer'",
    ("client", 22, b"c", b"", b"plain", None),
    ("ear", "e", "back.3", b"last", b"NATS/1.0 404 No Messages\r\n\r\n"),
]


def test_frames_in_one_chunk_are_delivered_in_order():
    assert RecordingClient().feed_chunks(STREAM) == EXPECTED_EVENTS


def test_a_split_at_any_byte_changes_nothing():
    for cut in range(len(STREAM) + 1):
        assert RecordingClient().feed_chunks(STREAM[:cut], STREAM[cut:]) == EXPECTED_EVENTS, f"cut at {cut}"


@pytest.mark.parametrize("size", [1, 2, 7, 50, 301])
def test_chunks_of_any_size_change_nothing(size):
    chunks = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert RecordingClient().feed_chunks(*chunks) == EXPECTED_EVENTS


@pytest.mark.parametrize(
    "line",
    [b"MSG a 1 three\r\n", b"HMSG a 1 back x 5\r\n", b"MSG\r\n", b"NOISE a 1 3\r\nabc\r\n", b"HMSG a 1 -4 3\r\n"],
)
def test_an_invalid_frame_is_a_protocol_error_of_the_client(line):
    client = RecordingClient()
    with pytest.raises(ProtocolError):
        client.feed_chunks(build_message("a", b"one"), line)
    assert client.recorded_events == [("ear", "a", "", b"one", None)]
