"""Claim: what a worker holds of a message, until its own clock says that it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ergon_framework.connectors.nats.note import Note


class Claim:
    """One delivery of one message; it is its own receipt, so no two are equal.

    JetStream takes the ack of any delivery, a stale worker's too: what ``until`` says is all that
    keeps one from settling what another has by now.
    """

    __slots__ = (
        "ack",
        "body",
        "delivered",
        "deliveries",
        "headers",
        "note",
        "note_seq",
        "owner",
        "readable",
        "seq",
        "stored_at",
        "until",
    )

    def __init__(
        self,
        owner: object,
        ack: str,
        body: bytes,
        headers: dict[str, str],
        *,
        place: tuple[int, int, int],
        until: float,
    ) -> None:
        #: Whose it is; None once it was settled or lost.
        self.owner: object | None = owner
        #: Where acks go.
        self.ack = ack
        self.body = body
        self.headers = headers
        #: How often the server says that it was delivered, its number, and when it was stored.
        self.delivered, self.seq, self.stored_at = place
        #: When the lease ends, in seconds of the monotonic clock.
        self.until = until
        self.deliveries = self.delivered
        self.note: Note | None = None
        self.note_seq = 0
        self.readable = True

    @property
    def key(self) -> str:
        """Names the message for ever: numbers begin anew in a stream that was made anew."""
        return f"{self.seq}-{self.stored_at}"
