"""The NATS client, with what is done for every message done at once.

The client puts each message into a queue and wakes a task for it, reads its headers letter by letter, and takes four
coroutines to send an ack. For what comes to our own inboxes, and for acks, that was a third of all that a worker did.
A few seams of the client are used for it, and a test watches that they are still there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from nats.aio.client import Client
from nats.aio.subscription import Subscription

_log = logging.getLogger(__name__)


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
        first = self.head.partition(b"\r\n")[0].decode(errors="replace")
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
    for row in head.decode("utf-8", "replace").split("\r\n"):
        name, colon, value = row.partition(":")
        if colon:
            found[name] = value.strip()
    return found


class DirectClient(Client):
    """Hands messages to ears without a detour."""

    def __init__(self) -> None:
        super().__init__()
        self._ears: dict[int, Ear] = {}

    async def hear(self, subject: str, ear: Ear) -> Subscription:
        """Have *ear* called with everything that comes to *subject*."""
        subscription = await self.subscribe(subject, pending_msgs_limit=0, pending_bytes_limit=0)
        self._ears[subscription._id] = ear  # noqa: SLF001 - one of the seams
        return subscription

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        ear = self._ears.get(sid)
        if ear is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            ear(Heard(subject.decode(), reply.decode(), data, headers))
        except Exception as error:  # noqa: BLE001 - raised here it would end the client's reading for good
            _log.error("a message from nats could not be taken in", extra={"error": type(error).__name__})

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._ears.pop(sid, None)

    async def publish_all(self, messages: Iterable[tuple[str, str, bytes]]) -> None:
        """Publish many without headers: subject, where the answer is to go, payload."""
        written = [
            f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n"
            for subject, reply, payload in messages
        ]
        if not self.is_connected:
            raise ConnectionError("the client is not connected")
        await self._send_command(b"".join(written))
        await self._flush_pending()
