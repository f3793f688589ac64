"""Claims on messages, the state of deferred or released messages, and the heartbeat of the event loop.

A claim is a worker's right to settle one delivery. It is valid until the worker's own clock ends it. The server's lease
begins when it sends a message, and a message may stay in the socket for as long as the event loop is blocked.
LoopHeartbeat therefore keeps the latest time at which the loop certainly polled its sockets. A message that is read now
arrived after the tick before the last one: the last tick may have run in the same loop iteration that read the message.

The state of a message is stored outside the message: a redelivery brings the headers that were published, so attempts,
history and deferrals cannot travel in them. The server counts every delivery, so uncounted deliveries have to be
subtracted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError, Defer, Delivery, MissingKeyError
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.encryption import get_codec_keys, hide_errors, reveal_errors
from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.fast_client import RawMessage
from ergon_framework.failure import Attempt, Deferral
from ergon_framework.transaction import MAX_HISTORY, Transaction


class NatsClaim:
    """One delivery of one message; it is its own receipt, so no two are equal.

    JetStream accepts the ack of any delivery, also of a stale worker: only the check of ``until`` prevents a worker
    from settling a message that another worker has claimed since.
    """

    __slots__ = (
        "ack_subject",
        "counted_deliveries",
        "keep_state",
        "message",
        "owner",
        "readable",
        "server_delivery_count",
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
        #: The delivery count of the server, which includes released and deferred deliveries.
        self.server_delivery_count = api.read_delivered(message.reply)
        #: The deliveries that count against the limit; lower than the server's once the state is loaded.
        self.counted_deliveries = self.server_delivery_count
        #: When the lease ends, in seconds of the monotonic clock.
        self.until = until
        #: The loaded state of the message, and its sequence number; None and 0 if there is none or it is not loaded.
        self.state: MessageState | None = None
        self.state_seq = 0
        #: Whether the body can be decoded; set when the queue decodes the message.
        self.readable = True
        #: Whether a deferral keeps the stored attempts, history and deferral; otherwise it stores those it is given.
        #: The queue sets this when it defers a message again that the server has delivered before it was due.
        self.keep_state = False

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


# -- message state ----------------------------------------------------------------------------------

#: The header with the due time of a deferred message, so that deferred messages can be counted without their bodies.
DUE: Final = "Ergon-Due"
#: The header of a state whose message has been delivered before its ``not_before``, and is deferred until then.
EARLY: Final = "Ergon-Early"


@dataclass(frozen=True, slots=True)
class MessageState:
    """The state of one message, stored under the message's key until it is settled."""

    #: Earlier deliveries that count against the limit, because no settlement ended them (the worker crashed, or its
    #: lease expired), as known when the server's delivery count was *server_delivery_count*.
    crashed_deliveries: int
    server_delivery_count: int
    #: Seconds since the epoch; 0 for immediately.
    due: float = 0.0
    #: None if the message's own headers are still valid.
    attempts: int | None = None
    history: tuple[Attempt, ...] = ()
    deferral: Deferral | None = None
    #: The encrypted error texts of history and deferral; None if they are not encrypted.
    errors: str | None = None

    def count_deliveries(self, server_delivery_count: int) -> int:
        """Return how many deliveries count, including the current one, for the server's present count.

        A server that was killed may have lost its count, and starts from the beginning.

        >>> state = MessageState(crashed_deliveries=1, server_delivery_count=5)
        >>> state.count_deliveries(6), state.count_deliveries(1)
        (2, 2)
        """
        earlier = self.server_delivery_count
        since = server_delivery_count - earlier if server_delivery_count > earlier else server_delivery_count
        return self.crashed_deliveries + since

    def with_progress(self, defer: Defer, delivery: Delivery, codec: Codec) -> MessageState:
        """Return this state with the progress of a deferred transaction."""
        transaction, error = delivery.transaction, delivery.error
        if isinstance(error, MissingKeyError):
            # Its error texts need the same key, so they are copied as they are.
            history, deferral, errors = defer.history[-MAX_HISTORY:], defer.deferral, error.errors
        else:
            keys, past = get_codec_keys(codec), defer.history[-MAX_HISTORY:]
            history, deferral, errors = hide_errors(keys, transaction, past, defer.deferral)
        return replace(self, attempts=defer.attempts, history=history, deferral=deferral, errors=errors)

    def apply_to(self, transaction: Transaction, error: ConnectorError | None, codec: Codec) -> Transaction:
        """Return *transaction* with its attempts, history and deferral; *error* is set if its key is missing."""
        if self.attempts is None:
            return transaction
        history, deferral = self.history, self.deferral
        if isinstance(error, MissingKeyError):
            error.errors = self.errors
        else:
            history, deferral = reveal_errors(get_codec_keys(codec), transaction, history, deferral, self.errors)
        return transaction.replace(attempts=self.attempts, history=history, deferral=deferral)

    def to_bytes(self) -> bytes:
        # The names are part of the stored format, and stay as they are.
        fields: dict[str, Any] = {
            "paid": self.crashed_deliveries,
            "delivered": self.server_delivery_count,
            "due": self.due,
        }
        if self.attempts is not None:
            fields["attempts"] = self.attempts
            fields["history"] = [attempt.model_dump(mode="json") for attempt in self.history[-MAX_HISTORY:]]
            if self.deferral is not None:
                fields["deferral"] = self.deferral.model_dump(mode="json")
            if self.errors is not None:
                fields["errors"] = self.errors
        return json.dumps(fields).encode()


def parse_message_state(body: bytes) -> MessageState:
    """Parse a message state; raise ValueError for an invalid one."""
    fields = json.loads(body)
    return MessageState(
        crashed_deliveries=int(fields["paid"]),
        server_delivery_count=int(fields["delivered"]),
        due=float(fields.get("due", 0.0)),
        attempts=None if fields.get("attempts") is None else int(fields["attempts"]),
        history=tuple(Attempt.model_validate(attempt) for attempt in fields.get("history", ())),
        deferral=None if fields.get("deferral") is None else Deferral.model_validate(fields["deferral"]),
        errors=None if fields.get("errors") is None else str(fields["errors"]),
    )


# -- event loop heartbeat ---------------------------------------------------------------------------

#: Ticks per lease; a claim is assumed to be older than it is by two of them at most.
_TICKS_PER_LEASE: Final = 20


class LoopHeartbeat:
    """Ticks on the running event loop for as long as *on_tick* returns true."""

    def __init__(self, lease: float, on_tick: Callable[[], bool]) -> None:
        self._interval = lease / _TICKS_PER_LEASE
        self._on_tick = on_tick
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last = 0.0
        #: A time at which the loop certainly still polled its sockets.
        self.before = 0.0

    def start(self) -> None:
        """Start ticking, if it is not running yet."""
        loop = asyncio.get_running_loop()
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self.before = self._last = time.monotonic()
            self._timer = loop.call_later(self._interval, self._tick)

    def stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _tick(self) -> None:
        self.before, self._last = self._last, time.monotonic()
        self._timer = None
        if self._on_tick() and self._loop is not None:
            self._timer = self._loop.call_later(self._interval, self._tick)
