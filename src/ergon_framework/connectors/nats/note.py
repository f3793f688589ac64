"""Note: what is known of a message that was put off or given back, kept beside it.

A redelivery brings the headers that were published, so attempts, history and deferrals cannot travel in them;
and the server counts every delivery, so those that cost nothing have to be taken off.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError, Delivery, Later, MissingKeyError
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.encryption import hide_errors, keys_of, reveal_errors
from ergon_framework.failure import Attempt, Deferral
from ergon_framework.transaction import HISTORY, Transaction

#: The header that says when what was put off is due, so that they can be counted without being read.
DUE: Final = "Ergon-Due"


@dataclass(frozen=True, slots=True)
class Note:
    """Kept under the message's own key until it is settled."""

    #: Deliveries that ended in a crash, as they were known at delivery number *delivered*.
    paid: int
    delivered: int
    #: Seconds since the epoch; 0 for at once.
    due: float = 0.0
    #: None where the message's own headers still say it.
    attempts: int | None = None
    history: tuple[Attempt, ...] = ()
    deferral: Deferral | None = None
    #: The texts of the errors in both, encrypted; None where they are not.
    errors: str | None = None

    def deliveries(self, delivered: int) -> int:
        """How many deliveries count, the present one included, where the server says *delivered*.

        A server that was killed may have forgotten what it had counted, and begins anew.

        >>> Note(paid=1, delivered=5).deliveries(6), Note(paid=1, delivered=5).deliveries(1)
        (2, 2)
        """
        since = delivered - self.delivered if delivered > self.delivered else delivered
        return self.paid + since

    def after(self, later: Later, delivery: Delivery, codec: Codec) -> Note:
        """Return this note with what the transaction of *delivery* comes back with."""
        transaction, error = delivery.transaction, delivery.error
        if isinstance(error, MissingKeyError):
            # The texts of its errors need the same key: they stay as they are.
            history, deferral, errors = later.history[-HISTORY:], later.deferral, error.errors
        else:
            keys, past = keys_of(codec), later.history[-HISTORY:]
            history, deferral, errors = hide_errors(keys, transaction, past, later.deferral)
        return replace(self, attempts=later.attempts, history=history, deferral=deferral, errors=errors)

    def apply(self, transaction: Transaction, error: ConnectorError | None, codec: Codec) -> Transaction:
        """Return *transaction* with what it has gone through; *error* is set if its key is missing."""
        if self.attempts is None:
            return transaction
        history, deferral = self.history, self.deferral
        if isinstance(error, MissingKeyError):
            error.errors = self.errors
        else:
            history, deferral = reveal_errors(keys_of(codec), transaction, history, deferral, self.errors)
        return transaction.replace(attempts=self.attempts, history=history, deferral=deferral)

    def written(self) -> bytes:
        told: dict[str, Any] = {"paid": self.paid, "delivered": self.delivered, "due": self.due}
        if self.attempts is not None:
            told["attempts"] = self.attempts
            told["history"] = [attempt.model_dump(mode="json") for attempt in self.history[-HISTORY:]]
            if self.deferral is not None:
                told["deferral"] = self.deferral.model_dump(mode="json")
            if self.errors is not None:
                told["errors"] = self.errors
        return json.dumps(told).encode()


def read(body: bytes) -> Note:
    """The note in *body*; ValueError for what is none."""
    told = json.loads(body)
    return Note(
        paid=int(told["paid"]),
        delivered=int(told["delivered"]),
        due=float(told.get("due", 0.0)),
        attempts=None if told.get("attempts") is None else int(told["attempts"]),
        history=tuple(Attempt.model_validate(attempt) for attempt in told.get("history", ())),
        deferral=None if told.get("deferral") is None else Deferral.model_validate(told["deferral"]),
        errors=None if told.get("errors") is None else str(told["errors"]),
    )
