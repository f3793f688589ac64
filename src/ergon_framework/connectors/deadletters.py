"""Dead letters, the same on every broker: what is kept of each, how they are chosen, what became of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import dropwhile, islice
from typing import Annotated, Any, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.failure import EDITED, MESSAGE, Attempt, Deferral, Failure, latest
from ergon_framework.transaction import HISTORY, Transaction

#: The largest number that can be a place: what stores can count to.
LAST = 2**63 - 1


def _storable(text: str) -> str:
    # PostgreSQL refuses to be asked for one, with an error of its own.
    if "\0" in text:
        raise ValueError("a NUL is in it, which no store keeps")
    return text


#: What a filter may say.
Word: TypeAlias = Annotated[str, Field(max_length=1000), AfterValidator(_storable)]
#: From the year 1 to the year 9999: what a date can be.
Moment: TypeAlias = Annotated[float, Field(ge=-62_135_596_800, le=253_402_300_799, allow_inf_nan=False)]


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
    deferral: Deferral | None = None
    trace: dict[str, str] = Field(default_factory=dict)


class DeadLetterRecord(BaseModel):
    """One dead letter: the original message, why it is here, and since when.

    ``raw`` holds the payload where it is bytes, which is so for everything that could not be
    decoded; ``headers`` are then the message's own. Where the body is too large to be loaded, payload
    and ``raw`` are None and ``size`` has its bytes. ``at`` is in seconds since the epoch.
    ``place`` is the store's own handle of this one dead letter, empty until it is stored: the
    same transaction may be dead more than once.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64")

    queue: str
    place: str = ""
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
    #: Bytes of a body that was not loaded; None where it was.
    size: int | None = None

    @classmethod
    def of(
        cls,
        delivery: Delivery,
        settlement: DeadLetter,
        *,
        queue: str,
        at: float,
        headers: dict[str, str] | None = None,
        place: str = "",
        size: int | None = None,
    ) -> Self:
        """The record of *delivery*, put aside by *settlement*."""
        transaction, payload, failure = delivery.transaction, delivery.transaction.payload, settlement.failure
        raw = bytes(payload) if isinstance(payload, (bytes, bytearray)) else None
        return cls(
            queue=queue,
            place=place,
            envelope=Envelope.model_validate(transaction),
            payload=payload if raw is None else None,
            raw=raw,
            headers=headers or {},
            reason=settlement.reason,
            failure=failure,
            deliveries=delivery.deliveries,
            at=at,
            trace_id=failure.trace_id if failure is not None and failure.trace_id else _trace_id(transaction),
            size=size,
        )

    @property
    def id(self) -> str:
        """The transaction's id."""
        return self.envelope.id

    def transaction(self) -> Transaction:
        """The transaction as it was put aside."""
        fields = {name: getattr(self.envelope, name) for name in Envelope.model_fields}
        return Transaction(payload=self.payload if self.raw is None else self.raw, **fields)

    def corrected(self, payload: Any, *, by: str, at: float, words: str) -> Transaction:
        """The transaction for another try with another payload; *words* say what *by* has changed, and travel with it.

        Corrections that were made before stay in its history; attempts do not, as with every replay.
        """
        past = self.envelope.history if self.failure is None else self.failure.history
        note = Attempt(
            attempt=0, category=Category.BUSINESS, code=EDITED, error=f"by {by}: {words}"[:MESSAGE], at=at, delay=None
        )
        edits = tuple(each for each in past if each.code == EDITED)
        return self.transaction().reset().replace(payload=payload, history=latest((*edits, note), HISTORY))

    def fresh(self) -> Transaction:
        """The transaction for another try: the same id and correlation, nothing counted against it."""
        return self.transaction().reset()


def _trace_id(transaction: Transaction) -> str | None:
    parts = transaction.trace.get("traceparent", "").split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None  # noqa: PLR2004 - the form of a traceparent


class DeadLetterQuery(BaseModel):
    """Which dead letters are meant: those that fit everything that is given, and all if nothing is.

    ``since`` and ``until`` are seconds since the epoch; what died at ``until`` is no longer meant.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Word | None = None
    reason: Word | None = None
    type: Word | None = None
    key: Word | None = None
    tenant: Word | None = None
    correlation: Word | None = None
    task: Word | None = None
    error_type: Word | None = None
    category: Category | None = None
    since: Moment | None = None
    until: Moment | None = None

    @classmethod
    def load(cls, **given: Any) -> Self:
        """The query that *given* describes, or a ConfigurationError that names what is wrong."""
        try:
            return cls(**given)
        except ValidationError as error:
            faults = error.errors(include_input=False, include_url=False)
            told = "; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in faults)
            raise ConfigurationError(f"dead letters cannot be chosen so: {told}") from error

    @property
    def everything(self) -> bool:
        """Whether nothing is given."""
        return self == DeadLetterQuery()

    def matches(self, record: DeadLetterRecord) -> bool:
        """Whether *record* is meant; a record without a failure fits no filter on one."""
        envelope, failure = record.envelope, record.failure
        has = {
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
        if any((wanted := getattr(self, name)) is not None and wanted != value for name, value in has.items()):
            return False
        return (self.since is None or self.since <= record.at) and (self.until is None or record.at < self.until)


class Became(StrEnum):
    """What became of a dead letter that was to be moved."""

    REPLAYED = "replayed"
    DISCARDED = "discarded"
    #: It was not there: somebody else has replayed or discarded it.
    GONE = "gone"
    #: It could not be moved, and is where it was.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What became of the dead letter at *place*; ``words`` say why where it failed."""

    place: str
    became: Became
    words: str = ""


def page(
    records: Iterable[DeadLetterRecord], query: DeadLetterQuery, *, after: str | None, limit: int
) -> Sequence[DeadLetterRecord]:
    """One page of *records*, whose places are numbers that grow: what ``list_dead`` of a store in memory answers."""
    last = -1 if after is None else number(after)
    behind = dropwhile(lambda record: int(record.place) <= last, records)
    return list(islice((record for record in behind if query.matches(record)), limit))


def number(place: str) -> int:
    """The number that *place* is, for stores whose places are numbers."""
    # The length first: Python refuses to read a number of thousands of digits.
    if place.isascii() and place.isdigit() and len(place) <= len(str(LAST)) and int(place) <= LAST:
        return int(place)
    raise ConnectorError(f"{place[:20]!r} is no place of a dead letter here; give one that was listed")
