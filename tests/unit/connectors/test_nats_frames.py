"""Frames: however what the server sends is cut on its way, everybody hears all of it, in order."""

from __future__ import annotations

import asyncio

import pytest
from nats.errors import ProtocolError

from ergon_framework.connectors.nats.client import DirectClient

HEAD = b"NATS/1.0\r\nergon-id: 7\r\nx: a: b\r\n\r\n"


def message(subject: str, body: bytes, *, sid: int = 1, reply: str = "", head: bytes = b"") -> bytes:
    words = ["HMSG" if head else "MSG", subject, str(sid), *([reply] if reply else [])]
    words += [str(len(head)), str(len(head) + len(body))] if head else [str(len(body))]
    return " ".join(words).encode() + b"\r\n" + head + body + b"\r\n"


class Listening(DirectClient):
    """A client without a line: it is fed by hand, and writes down who heard what."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []
        self._ears[b"1"] = lambda heard: self.told.append(("ear", *heard))

    async def _process_ping(self) -> None:
        self.told.append("ping")

    async def _process_err(self, err_msg: str) -> None:
        self.told.append(err_msg)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if b"%d" % sid in self._ears:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            self.told.append(("client", sid, subject, reply, data, headers))

    def fed(self, *pieces: bytes) -> list[object]:
        async def feed() -> None:
            for piece in pieces:
                await self._ps.parse(piece)

        asyncio.run(feed())
        return self.told


STREAM = b"".join(
    [
        message("a", b"one", reply="back.1", head=HEAD),
        message("a.longer.subject", b"", reply="back.2"),
        b"PING\r\n",
        message("b", b"MSG a 1 3\r\nabc\r\n", head=HEAD),
        b"+OK\r\n",
        message("c", b"\r\n" * 5, sid=2, reply="r", head=HEAD),
        message("d", b"x" * 300),
        b"-ERR 'Slow Consumer'\r\n",
        message("c", b"plain", sid=22),
        message("e", b"last", reply="back.3", head=b"NATS/1.0 404 No Messages\r\n\r\n"),
    ]
)
TOLD = [
    ("ear", "a", "back.1", b"one", HEAD),
    ("ear", "a.longer.subject", "back.2", b"", None),
    "ping",
    ("ear", "b", "", b"MSG a 1 3\r\nabc\r\n", HEAD),
    ("client", 2, b"c", b"r", b"\r\n" * 5, HEAD),
    ("ear", "d", "", b"x" * 300, None),
    "'slow consumer'",
    ("client", 22, b"c", b"", b"plain", None),
    ("ear", "e", "back.3", b"last", b"NATS/1.0 404 No Messages\r\n\r\n"),
]


def test_everything_that_comes_at_once_is_told_in_order():
    assert Listening().fed(STREAM) == TOLD


def test_a_cut_anywhere_changes_nothing():
    for cut in range(len(STREAM) + 1):
        assert Listening().fed(STREAM[:cut], STREAM[cut:]) == TOLD, f"cut at {cut}"


@pytest.mark.parametrize("size", [1, 2, 7, 50, 301])
def test_pieces_of_any_size_change_nothing(size):
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert Listening().fed(*pieces) == TOLD


@pytest.mark.parametrize(
    "line",
    [b"MSG a 1 three\r\n", b"HMSG a 1 back x 5\r\n", b"MSG\r\n", b"NOISE a 1 3\r\nabc\r\n", b"HMSG a 1 -4 3\r\n"],
)
def test_what_is_no_frame_is_the_clients_to_refuse(line):
    client = Listening()
    with pytest.raises(ProtocolError):
        client.fed(message("a", b"one"), line)
    assert client.told == [("ear", "a", "", b"one", None)]
