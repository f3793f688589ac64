"""Frames: what the server sends, cut into messages.

The client's own parser tries a pattern for each kind of frame on everything, and moves its buffer twice for a message.
Here whole messages that have an ear are cut out of what was read, many at a time. Everything else is left to the
client's parser, piece by piece; so is a message that is not all there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

_END: Final = b"\r\n"
#: The words of a frame that names where an answer goes: more than there are without.
_WITH_REPLY: Final = {b"HMSG": 6, b"MSG": 5}


class Heard(NamedTuple):
    """A message as it came; *head* is its block of headers, not yet read."""

    subject: str
    reply: str
    data: bytes
    head: bytes | None = None

    @property
    def status(self) -> tuple[str, str]:
        r"""What the server says in place of a message, and in words.

        >>> Heard("", "", b"", b"NATS/1.0 404 No Messages\r\n\r\n").status
        ('404', 'No Messages')
        """
        if not self.head:
            return "", ""
        first = self.head.partition(_END)[0].decode(errors="replace")
        _, _, rest = first.partition(" ")
        status, _, words = rest.partition(" ")
        return status, words

    @property
    def headers(self) -> dict[str, str]:
        """Its headers."""
        return read_headers(self.head) if self.head else {}


#: Called for each message, at once; it must neither wait nor raise.
Ear: TypeAlias = Callable[[Heard], None]


def read_headers(head: bytes) -> dict[str, str]:
    r"""The headers in a block as the wire has it.

    >>> read_headers(b"NATS/1.0\r\nergon-id: 7\r\nx: a: b\r\n\r\n")
    {'ergon-id': '7', 'x': 'a: b'}
    """
    found = {}
    _, *rows = head.decode("utf-8", "replace").split("\r\n")
    for row in rows:
        name, colon, value = row.partition(":")
        if colon:
            found[name] = value.strip()
    return found


def tell(ear: Ear, message: Heard) -> None:
    """Have *ear* hear *message*; raised on, its error would end the client's reading for good."""
    try:
        ear(message)
    except Exception as error:  # noqa: BLE001 - see above
        logs.say(logging.ERROR, "a message from nats could not be taken in", {"error": type(error).__name__}, to=_log)


class Frames(Parser):
    """Reads for *client*; *ears* are found by the number of their subscription, as it is written on the wire."""

    def __init__(self, client: Any, ears: dict[bytes, Ear]) -> None:
        super().__init__(client)
        self._ears = ears

    async def parse(self, data: bytes = b"") -> None:
        """Hand on everything that is complete in *data*; the client keeps the rest."""
        if self.buf and self.state == AWAITING_CONTROL_LINE:
            data, self.buf = bytes(self.buf) + data, bytearray()
        at, end = 0, len(data)
        while at < end:
            if self.state == AWAITING_CONTROL_LINE:
                at = self._heard(data, at)
                line = data.find(_END, at)
                piece = end if line < 0 else line + len(_END)
            else:
                piece = min(end, at + self.needed + len(_END) - len(self.buf))
            if at < piece:
                await super().parse(data[at:piece])
                at = piece

    def _heard(self, data: bytes, at: int) -> int:
        """Tell ears of the messages in *data* from *at* on; up to where there was nothing else."""
        ears, find, end = self._ears, data.find, len(data)
        while at < end:
            line = find(_END, at)
            words = data[at:line].split(b" ") if line > 0 else []
            with_reply = _WITH_REPLY.get(words[0]) if words else None
            if with_reply is None or not with_reply - 1 <= len(words) <= with_reply:
                break
            ear = ears.get(words[2])
            size, head_size = words[-1], words[-2] if with_reply == _WITH_REPLY[b"HMSG"] else b"0"
            if ear is None or not size.isdigit() or not head_size.isdigit():
                break
            head = line + 2
            body, over = head + int(head_size), head + int(size)
            if over + 2 > end:
                break
            reply = words[3].decode() if len(words) == with_reply else ""
            tell(ear, Heard(words[1].decode(), reply, data[body:over], data[head:body] or None))
            at = over + 2
        return at
