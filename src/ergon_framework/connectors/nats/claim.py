"""Claim: a worker's claim on a message, valid until the worker's own clock ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.frames import RawMessage

if TYPE_CHECKING:
    from ergon_framework.connectors.nats.note import MessageState


class NatsClaim:
    """One delivery of one message; it is its own receipt, so no two are equal.

    JetStream accepts the ack of any delivery, also of a stale worker: only the check of ``until`` prevents a worker
    from settling a message that another worker has claimed since.
    """

    __slots__ = (
        "ack_subject",
        "delivered",
        "deliveries",
        "message",
        "owner",
        "readable",
        "state",
        "state_seq",
        "until",
    )

    def __init__(self, owner: object, message: RawMessage, until: float) -> None:
        #: The queue object that holds it; None once it was settled or lost.
        self.owner: object | None = owner
        #: The raw message; rarely needed parts are parsed on demand.
        self.message = message
        #: The subject for acks.
        self.ack_subject = message.reply
        #: The delivery count of the server.
        self.delivered = self.deliveries = api.read_delivered(message.reply)
        #: When the lease ends, in seconds of the monotonic clock.
        self.until = until
        self.state: MessageState | None = None
        self.state_seq = 0
        self.readable = True

    @property
    def body(self) -> bytes:
        return self.message.data

    @property
    def headers(self) -> dict[str, str]:
        return self.message.headers

    @property
    def seq(self) -> int:
        """The number of the message in the stream."""
        return api.read_reply(self.ack_subject)[1]

    @property
    def key(self) -> str:
        """A permanent key of the message: sequence numbers restart in a stream that was recreated."""
        _, seq, stored_at = api.read_reply(self.ack_subject)
        return f"{seq}-{stored_at}"
