"""MessageState: the state of a deferred or released message, stored outside the message.

A redelivery brings the headers that were published, so attempts, history and deferrals cannot travel in them. The
server counts every delivery, so uncounted deliveries have to be subtracted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError, Defer, Delivery, MissingKeyError
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.encryption import get_codec_keys, hide_errors, reveal_errors
from ergon_framework.failure import Attempt, Deferral
from ergon_framework.transaction import MAX_HISTORY, Transaction

#: The header with the due time of a deferred message, so that deferred messages can be counted without their bodies.
DUE: Final = "Ergon-Due"


@dataclass(frozen=True, slots=True)
class MessageState:
    """The state of one message, stored under the message's key until it is settled."""

    #: Deliveries that ended in a crash, as known at delivery number *delivered*.
    crashed_deliveries: int
    delivered: int
    #: Seconds since the epoch; 0 for immediately.
    due: float = 0.0
    #: None if the message's own headers are still valid.
    attempts: int | None = None
    history: tuple[Attempt, ...] = ()
    deferral: Deferral | None = None
    #: The encrypted error texts of both; None if they are not encrypted.
    errors: str | None = None

    def count_deliveries(self, delivered: int) -> int:
        """Return how many deliveries count, including the current one, for the server's count *delivered*.

        A server that was killed may have lost its count, and starts from the beginning.

        >>> state = MessageState(crashed_deliveries=1, delivered=5)
        >>> state.count_deliveries(6), state.count_deliveries(1)
        (2, 2)
        """
        since = delivered - self.delivered if delivered > self.delivered else delivered
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
        fields: dict[str, Any] = {"paid": self.crashed_deliveries, "delivered": self.delivered, "due": self.due}
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
        delivered=int(fields["delivered"]),
        due=float(fields.get("due", 0.0)),
        attempts=None if fields.get("attempts") is None else int(fields["attempts"]),
        history=tuple(Attempt.model_validate(attempt) for attempt in fields.get("history", ())),
        deferral=None if fields.get("deferral") is None else Deferral.model_validate(fields["deferral"]),
        errors=None if fields.get("errors") is None else str(fields["errors"]),
    )
