"""Dead letters, the same on every broker: the record of each, the query that selects them, the result of a move.

A dead letter is a transaction that failed and is kept for an operator. A handle identifies it in its queue; a move
replays it (the transaction returns to the queue) or discards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import dropwhile, islice
from typing import Annotated, Any, Self, TypeAlias

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.failure import EDITED_CODE, MAX_MESSAGE_CHARS, Attempt, Deferral, Failure, trim_history
from ergon_framework.transaction import MAX_HISTORY, Transaction

#: The largest number that can be a handle: the largest bigint of a database.
MAX_HANDLE = 2**63 - 1


def _check_storable(text: str) -> str:
    # PostgreSQL would reject the query with an error of its own, which names no field.
    if "\0" in text:
        raise ValueError("contains a NUL character, which no store accepts")
    return text


#: The text of a filter.
FilterText: TypeAlias = Annotated[str, Field(max_length=1000), AfterValidator(_check_storable)]
#: From the year 1 to the year 9999: the range of a date.
EpochSeconds: TypeAlias = Annotated[float, Field(ge=-62_135_596_800, le=253_402_300_799, allow_inf_nan=False)]


class TransactionEnvelope(BaseModel):
    """A transaction without its payload, in a form that JSON can represent."""

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
    deferral: Deferral | None = None
    trace: dict[str, str] = Field(default_factory=dict)
    not_before: float | None = None
    priority: int = 0


class DeadLetterRecord(BaseModel):
    """One dead letter: the original message, the reason, and the time.

    ``raw`` holds the payload if it is bytes, which is the case for every message that could not be decoded; ``headers``
    are then the message's own. If the body is too large to be loaded, payload and ``raw`` are None and ``size`` is its
    length in bytes. ``at`` is in seconds since the epoch. ``handle`` is the store's own handle of this dead letter,
    empty until it is stored: the same transaction may be dead-lettered more than once.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64", serialize_by_alias=True
    )

    queue: str
    # A stored record has it as "place".
    handle: str = Field(default="", validation_alias=AliasChoices("handle", "place"), serialization_alias="place")
    envelope: TransactionEnvelope
    # Not in the representation, because representations appear in logs.
    payload: Any = Field(default=None, repr=False)
    raw: bytes | None = Field(default=None, repr=False)
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    reason: str
    failure: Failure | None = None
    deliveries: int
    at: float
    trace_id: str | None = None
    #: The length of a body that was not loaded; None if it was.
    size: int | None = None

    @classmethod
    def from_delivery(
        cls,
        delivery: Delivery,
        settlement: DeadLetter,
        *,
        queue: str,
        at: float,
        headers: dict[str, str] | None = None,
        handle: str = "",
        size: int | None = None,
    ) -> Self:
        """Return the record of *delivery*, dead-lettered by *settlement*."""
        transaction, payload, failure = delivery.transaction, delivery.transaction.payload, settlement.failure
        raw = bytes(payload) if isinstance(payload, (bytes, bytearray)) else None
        return cls(
            queue=queue,
            handle=handle,
            envelope=TransactionEnvelope.model_validate(transaction),
            payload=payload if raw is None else None,
            raw=raw,
            headers=headers or {},
            reason=settlement.reason,
            failure=failure,
            deliveries=delivery.deliveries,
            at=at,
            trace_id=failure.trace_id if failure is not None and failure.trace_id else _parse_trace_id(transaction),
            size=size,
        )

    @property
    def id(self) -> str:
        """The transaction's id."""
        return self.envelope.id

    def transaction(self) -> Transaction:
        """Return the transaction as it was dead-lettered."""
        fields = {name: getattr(self.envelope, name) for name in TransactionEnvelope.model_fields}
        return Transaction(payload=self.payload if self.raw is None else self.raw, **fields)

    def with_payload(self, payload: Any, *, by: str, at: float, summary: str) -> Transaction:
        """Return the transaction for a retry with another payload; *summary* says what the operator *by* has changed.

        The summary becomes an entry of the transaction's history. Earlier corrections stay there; attempts are
        removed, as by every replay.
        """
        # The history of the failure continues that of the envelope with the attempts of the last delivery.
        history = self.envelope.history if self.failure is None else self.failure.history
        correction = Attempt(
            attempt=0,
            category=Category.BUSINESS,
            code=EDITED_CODE,
            error=f"by {by}: {summary}"[:MAX_MESSAGE_CHARS],
            at=at,
            delay=None,
        )
        corrections = tuple(each for each in history if each.code == EDITED_CODE)
        return (
            self.transaction()
            .reset()
            .replace(payload=payload, history=trim_history((*corrections, correction), MAX_HISTORY))
        )

    def to_new_transaction(self) -> Transaction:
        """Return the transaction for a retry: the same id and correlation, with attempts and history reset."""
        return self.transaction().reset()


def _parse_trace_id(transaction: Transaction) -> str | None:
    parts = transaction.trace.get("traceparent", "").split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None  # noqa: PLR2004 - the format of a traceparent


class DeadLetterQuery(BaseModel):
    """A filter of dead letters: those that match every given field, and all of them if none is given.

    ``since`` and ``until`` are seconds since the epoch; ``until`` is exclusive.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: FilterText | None = None
    reason: FilterText | None = None
    type: FilterText | None = None
    key: FilterText | None = None
    tenant: FilterText | None = None
    correlation: FilterText | None = None
    task: FilterText | None = None
    error_type: FilterText | None = None
    category: Category | None = None
    since: EpochSeconds | None = None
    until: EpochSeconds | None = None

    @classmethod
    def load(cls, **fields: Any) -> Self:
        """Return the query of these fields, or raise a ConfigurationError that names the invalid ones."""
        try:
            return cls(**fields)
        except ValidationError as error:
            faults = error.errors(include_input=False, include_url=False)
            problems = "; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in faults)
            raise ConfigurationError(f"invalid dead-letter filter: {problems}") from error

    @property
    def is_unfiltered(self) -> bool:
        """Whether no field is given."""
        return self == DeadLetterQuery()

    def matches(self, record: DeadLetterRecord) -> bool:
        """Return whether *record* matches; a record without a failure matches no filter on failures."""
        envelope, failure = record.envelope, record.failure
        values = {
            "id": envelope.id,
            "reason": record.reason,
            "type": envelope.type,
            "key": envelope.key,
            "tenant": envelope.tenant,
            "correlation": envelope.correlation,
            "task": None if failure is None else failure.task_name,
            "error_type": None if failure is None else failure.error_type,
            "category": None if failure is None else failure.category,
        }
        if any((expected := getattr(self, name)) is not None and expected != value for name, value in values.items()):
            return False
        return (self.since is None or self.since <= record.at) and (self.until is None or record.at < self.until)


class DeadLetterResult(StrEnum):
    """The result of moving a dead letter."""

    REPLAYED = "replayed"
    DISCARDED = "discarded"
    #: It was not there: another caller has replayed or discarded it.
    GONE = "gone"
    #: It could not be moved, and is still in its place.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result for the dead letter with *handle*; ``message`` gives the reason of a failure."""

    handle: str
    outcome: DeadLetterResult
    message: str = ""


def paginate(
    records: Iterable[DeadLetterRecord], query: DeadLetterQuery, *, after: str | None, limit: int
) -> Sequence[DeadLetterRecord]:
    """Return one page of *records*, whose handles are growing numbers: ``list_dead`` of a store in memory."""
    last_handle = -1 if after is None else parse_handle(after)
    later_records = dropwhile(lambda record: int(record.handle) <= last_handle, records)
    return list(islice((record for record in later_records if query.matches(record)), limit))


def parse_handle(handle: str) -> int:
    """Return the number of *handle*, for stores whose handles are numbers."""
    # The length is checked first: Python rejects numbers of thousands of digits.
    if handle.isascii() and handle.isdigit() and len(handle) <= len(str(MAX_HANDLE)) and int(handle) <= MAX_HANDLE:
        return int(handle)
    raise ConnectorError(f"{handle[:20]!r} is not the handle of a dead letter here; pass a listed handle")
