"""Claim: what a worker holds of a message, until its own clock says that it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.frames import Heard

if TYPE_CHECKING:
    from ergon_framework.connectors.nats.note import Note


class Claim:
    """One delivery of one message; it is its own receipt, so no two are equal.

    JetStream takes the ack of any delivery, a stale worker's too: what ``until`` says is all that
    keeps one from settling what another has by now.
    """

    __slots__ = ("ack", "delivered", "deliveries", "message", "note", "note_seq", "owner", "readable", "until")

    def __init__(self, owner: object, message: Heard, until: float) -> None:
        #: Whose it is; None once it was settled or lost.
        self.owner: object | None = owner
        #: As it came: what is rarely needed of it is read when it is.
        self.message = message
        #: Where acks go.
        self.ack = message.reply
        #: How often the server says that it was delivered.
        self.delivered = self.deliveries = api.read_delivered(message.reply)
        #: When the lease ends, in seconds of the monotonic clock.
        self.until = until
        self.note: Note | None = None
        self.note_seq = 0
        self.readable = True

    @property
    def body(self) -> bytes:
        return self.message.data

    @property
    def headers(self) -> dict[str, str]:
        return self.message.headers

    @property
    def seq(self) -> int:
        """Its number in the stream."""
        return api.read_reply(self.ack)[1]

    @property
    def key(self) -> str:
        """Names the message for ever: numbers begin anew in a stream that was made anew."""
        _, seq, stored_at = api.read_reply(self.ack)
        return f"{seq}-{stored_at}"
