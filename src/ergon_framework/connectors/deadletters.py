"""DeadLetterRecord: what is kept of a transaction that was put aside, the same on every broker."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery
from ergon_framework.failure import Attempt, Failure
from ergon_framework.transaction import Transaction


class NoSuchDeadLetterError(ConnectorError):
    """There is no dead letter of that id here, or no longer."""

    final = True
    code = "no_such_dead_letter"


class Envelope(BaseModel):
    """A transaction without its payload, in a shape that JSON can hold."""

    model_config = ConfigDict(frozen=True, extra="ignore", from_attributes=True)

    id: str
    source: str = ""
    type: str = ""
    schema_version: int = 1
    key: str | None = None
    tenant: str | None = None
    correlation: str | None = None
    causation: str | None = None
    created_at: float | None = None
    expires_at: float | None = None
    attempts: int = 0
    history: tuple[Attempt, ...] = ()
    trace: dict[str, str] = Field(default_factory=dict)


class DeadLetterRecord(BaseModel):
    """One dead letter: the original message, why it is here, and since when.

    ``raw`` holds the payload where it is bytes, which is so for everything that could not be
    decoded; ``headers`` are then the message's own. ``at`` is in seconds since the epoch.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64")

    queue: str
    envelope: Envelope
    # Out of the representation: those end up in logs.
    payload: Any = Field(default=None, repr=False)
    raw: bytes | None = Field(default=None, repr=False)
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    reason: str
    failure: Failure | None = None
    deliveries: int
    at: float
    trace_id: str | None = None

    @classmethod
    def of(
        cls,
        delivery: Delivery,
        settlement: DeadLetter,
        *,
        queue: str,
        at: float,
        headers: dict[str, str] | None = None,
    ) -> Self:
        """The record of *delivery*, put aside by *settlement*."""
        transaction, payload, failure = delivery.transaction, delivery.transaction.payload, settlement.failure
        raw = bytes(payload) if isinstance(payload, (bytes, bytearray)) else None
        return cls(
            queue=queue,
            envelope=Envelope.model_validate(transaction),
            payload=payload if raw is None else None,
            raw=raw,
            headers=headers or {},
            reason=settlement.reason,
            failure=failure,
            deliveries=delivery.deliveries,
            at=at,
            trace_id=failure.trace_id if failure is not None and failure.trace_id else _trace_id(transaction),
        )

    @property
    def id(self) -> str:
        """The transaction's id, by which a dead letter is found."""
        return self.envelope.id

    def transaction(self) -> Transaction:
        """The transaction as it was put aside."""
        fields = {name: getattr(self.envelope, name) for name in Envelope.model_fields}
        return Transaction(payload=self.payload if self.raw is None else self.raw, **fields)

    def fresh(self) -> Transaction:
        """The transaction for another try: the same id and correlation, nothing counted against it."""
        return self.transaction().replace(attempts=0, history=())


def _trace_id(transaction: Transaction) -> str | None:
    parts = transaction.trace.get("traceparent", "").split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None  # noqa: PLR2004 - the form of a traceparent
