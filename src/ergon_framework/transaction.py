"""Transaction: one unit of business work: a payload, and its envelope, the fields around the payload."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import is_dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Self, TypedDict, Unpack

from pydantic import BaseModel

from ergon_framework import scope
from ergon_framework.failure import Attempt, Deferral

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    #: The type of the payload: ``Transaction[Order]``; plain ``Transaction`` has a payload of any type.
    PayloadT = TypeVar("PayloadT", default=Any)
else:
    from typing import TypeVar

    PayloadT = TypeVar("PayloadT")


class EnvelopeFields(TypedDict, total=False):
    """The fields around the payload that the creator of a transaction can set."""

    id: str
    source: str
    type: str
    schema_version: int
    key: str | None
    tenant: str | None
    correlation: str | None
    causation: str | None
    created_at: float | None
    expires_at: float | None
    attempts: int
    history: tuple[Attempt, ...]
    deferral: Deferral | None
    trace: Mapping[str, str]
    not_before: float | None
    priority: int


#: Number of past attempts that a message stores.
MAX_HISTORY = 10
#: The longest delay of a transaction, which every connector that has delays keeps: 30 days.
MAX_DELAY_SECONDS: Final = 2_592_000.0

# Read-only: an entry added to it by mistake would appear in all other transactions.
_EMPTY_TRACE: Mapping[str, str] = MappingProxyType({})


#: Immutable types, which need no copy: all of JSON but dictionaries and lists, and bytes.
_IMMUTABLE_TYPES = frozenset((str, int, float, bool, bytes, type(None)))
_TIMESTAMP_TYPES = frozenset((float, int, type(None)))


class _Draft:
    """A transaction under construction.

    Setting the fields of a frozen object through ``object.__setattr__`` takes 2.5 times as long as this: a plain
    object whose class becomes Transaction at the end.
    """

    __slots__ = (
        "attempts",
        "causation",
        "correlation",
        "created_at",
        "deferral",
        "expires_at",
        "history",
        "id",
        "key",
        "not_before",
        "payload",
        "priority",
        "schema_version",
        "source",
        "tenant",
        "trace",
        "type",
    )

    id: str
    payload: Any
    source: str
    type: str
    schema_version: int
    key: str | None
    tenant: str | None
    correlation: str | None
    causation: str | None
    created_at: float | None
    expires_at: float | None
    attempts: int
    history: tuple[Attempt, ...]
    deferral: Deferral | None
    trace: Mapping[str, str]
    not_before: float | None
    priority: int


#: Seconds by which the clock that computes a remaining delay may be behind the clock that set the time.
_CLOCK_SLACK: Final = 60.0


def _parse_due_time(delay: Any, at: Any, *, now: float) -> float:
    """Return the time in seconds since the epoch that *delay* or *at* names; the other one is None."""
    if delay is not None:
        if isinstance(delay, timedelta):
            delay = delay.total_seconds()
        if isinstance(delay, bool) or not isinstance(delay, int | float):
            raise TypeError(f"a delay must be a number of seconds or a timedelta, not a {type(delay).__name__}")
        return now + _check_delay(delay)
    if isinstance(at, datetime):
        if at.tzinfo is None or at.utcoffset() is None:
            raise ValueError(f"at={at!r} has no time zone: pass an aware datetime, such as datetime.now(UTC)")
        at = at.timestamp()
    if isinstance(at, bool) or not isinstance(at, int | float):
        raise TypeError(f"at must be an aware datetime or seconds since the epoch, not a {type(at).__name__}")
    if not math.isfinite(at):
        raise ValueError(f"at must be a finite number of seconds since the epoch, not {at!r}")
    _check_delay(max(0.0, at - now))
    return float(at)


def _check_delay(delay: float, *, slack: float = 0.0) -> float:
    if not math.isfinite(delay) or delay < 0:
        raise ValueError(f"a delay must be a finite number of seconds >= 0, not {delay!r}")
    if delay > MAX_DELAY_SECONDS + slack:
        raise ValueError(
            f"a delay of {delay:.0f} s is longer than {MAX_DELAY_SECONDS:.0f} s (30 days), the longest: dispatch the "
            "transaction later, or from a schedule"
        )
    return float(delay)


def _copy_payload(payload: Any) -> Any:
    if type(payload) in _IMMUTABLE_TYPES:
        return payload
    try:
        return _copy(payload)
    except Exception:  # noqa: BLE001 - a user's class failed, or it is nested too deep; the handler gets the original
        return payload


def _copy(value: Any) -> Any:
    """Copy *value*, which is of no immutable type. The copy module takes ten times as long."""
    kind = type(value)
    if kind is dict:
        copied: Any = value.copy()
        for key, item in value.items():
            if type(item) not in _IMMUTABLE_TYPES:
                copied[key] = _copy(item)
        return copied
    if kind is list:
        copied = value.copy()
        for index, item in enumerate(value):
            if type(item) not in _IMMUTABLE_TYPES:
                copied[index] = _copy(item)
        return copied
    return deepcopy(value) if _is_mutable(value) else value


def _is_mutable(value: Any) -> bool:
    if isinstance(value, BaseModel):
        return not value.model_config.get("frozen", False)
    if is_dataclass(value):
        parameters: Any = getattr(value, "__dataclass_params__", None)
        return not parameters.frozen
    return type(value) is tuple or isinstance(value, dict | list | set | bytearray)


class Transaction(_Draft, Generic[PayloadT]):
    """One unit of business work; frozen, and fast to create because each message creates one.

    ``id`` is stable across redeliveries; ``source`` names the namespace in which ids are unique. ``key`` orders: two
    transactions with one key never run at once. ``correlation`` is the id that all transactions of one business process
    share, ``causation`` the id of the transaction whose handler created this one. ``attempts`` counts the attempts of
    the process step in earlier deliveries, ``history`` holds the last ten of them, ``deferral`` is the state of
    deferrals for an unavailable service (their number and the time of the first), ``trace`` is the trace carrier (the
    W3C headers). After ``expires_at`` a worker dead-letters the transaction instead of starting it. ``schema_version``
    is the version of the payload, for handlers. A dispatched transaction is not delivered earlier than ``not_before``;
    of two that are ready, the one with the higher ``priority`` is delivered first. Times are seconds since the epoch.
    """

    __slots__ = ()

    payload: PayloadT

    def __new__(
        cls,
        payload: PayloadT = None,  # type: ignore[assignment] # without a payload it is None, whatever the type
        *,
        id: str,  # noqa: A002 - the name of the envelope field
        source: str = "",
        type: str = "",  # noqa: A002 - the name of the envelope field
        schema_version: int = 1,
        key: str | None = None,
        tenant: str | None = None,
        correlation: str | None = None,
        causation: str | None = None,
        created_at: float | None = None,
        expires_at: float | None = None,
        attempts: int = 0,
        history: tuple[Attempt, ...] = (),
        deferral: Deferral | None = None,
        trace: Mapping[str, str] = _EMPTY_TRACE,
        not_before: float | None = None,
        priority: int = 0,
    ) -> Self:
        if not id:
            raise ValueError("transaction id is empty; pass an id that stays the same across redeliveries")
        # Not type(id): the parameter *type* hides the function.
        if id.__class__ is not str or (key is not None and key.__class__ is not str):
            raise TypeError(f"id and key must be str, not {id.__class__.__name__} and {key.__class__.__name__}")
        if expires_at.__class__ not in _TIMESTAMP_TYPES or created_at.__class__ not in _TIMESTAMP_TYPES:
            raise TypeError("created_at and expires_at must be numbers: seconds since the epoch")
        if not_before.__class__ not in _TIMESTAMP_TYPES or priority.__class__ is not int:
            raise TypeError("not_before must be a number, in seconds since the epoch, and priority an int")
        draft = _Draft()
        draft.id = id
        draft.payload = payload
        draft.source = source
        draft.type = type
        draft.schema_version = schema_version
        draft.key = key
        draft.tenant = tenant
        draft.correlation = correlation
        draft.causation = causation
        draft.created_at = created_at
        draft.expires_at = expires_at
        draft.attempts = attempts
        draft.history = history
        draft.deferral = deferral
        draft.trace = trace
        draft.not_before = not_before
        draft.priority = priority
        draft.__class__ = cls
        return draft  # type: ignore[return-value]

    @classmethod
    def new(
        cls,
        payload: PayloadT = None,  # type: ignore[assignment] # as above
        *,
        name: str | None = None,
        delay: float | timedelta | None = None,
        at: float | datetime | None = None,
        **fields: Unpack[EnvelopeFields],
    ) -> Self:
        """Create a transaction that is to be dispatched.

        With *delay*, in seconds or as a timedelta, or *at*, an aware datetime or seconds since the epoch, it is not
        delivered earlier than that: they set ``not_before``. A time in the past means at once. ValueError for a delay
        that is negative or longer than 30 days.

        Inside a handler, its id is derived from the transaction being handled, so that a second run of the handler
        creates the same one, and tenant and correlation are inherited. To create a transaction is a side effect of the
        handler, and the id depends on the name of that effect: ``source/type`` unless *name* is given;
        ConfigurationError if an attempt uses one name twice. Outside a handler the id is random.
        """
        current_scope = scope.current()
        fields.setdefault("created_at", time.time())
        if delay is not None or at is not None:
            if (delay is not None and at is not None) or fields.get("not_before") is not None:
                raise ValueError("delay, at and not_before exclude each other: pass one of them")
            fields["not_before"] = _parse_due_time(delay, at, now=time.time())
        if current_scope is None:
            fields.setdefault("id", os.urandom(16).hex())
            return cls(payload=payload, **fields)
        if "id" not in fields:
            fields["id"] = current_scope.derive(name or f"{fields.get('source', '')}/{fields.get('type', '')}")
        fields.setdefault("tenant", current_scope.tenant)
        fields.setdefault("correlation", current_scope.correlation)
        fields.setdefault("causation", current_scope.transaction_id)
        return cls(payload=payload, **fields)

    def derive(self, name: str) -> str:
        """Return the id of the effect called *name* that handling this transaction causes; a pure function.

        >>> Transaction(id="order-7", source="shop").derive("payments.charge")
        '54f91bcc4ace439188677154d913d596'
        """
        digest = hashlib.sha256()
        for part in (self.source, self.id, name):
            encoded = part.encode()
            # The length prefix keeps ("ab", "c") and ("a", "bc") apart.
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.hexdigest()[:32]

    def replace(self, **changes: Any) -> Self:
        """Return a copy with *changes*."""
        return type(self)(**{name: getattr(self, name) for name in _Draft.__slots__} | changes)

    def reset(self) -> Self:
        """Return a copy without attempts, history, deferrals and delay."""
        return self.replace(attempts=0, history=(), deferral=None, not_before=None)

    def compute_delay(self, now: float) -> float:
        """Return the seconds from *now*, in seconds since the epoch, to ``not_before``; 0 if it is due.

        Raises ValueError for more than ``MAX_DELAY_SECONDS``.
        """
        return 0.0 if self.not_before is None else _check_delay(max(0.0, self.not_before - now), slack=_CLOCK_SLACK)

    def isolate(self) -> Self:
        """Return this transaction for one attempt: changes that the attempt makes to the payload do not reach this one.

        Dictionaries, lists, sets, dataclasses and models are copied, at every depth. An object of any other type is
        shared, and so is one whose copy fails; an immutable payload needs no copy.
        """
        payload = _copy_payload(self.payload)
        if payload is self.payload:
            return self
        # Each field is copied here because replace() takes several times as long; a new field must be added here too.
        draft = _Draft()
        draft.id = self.id
        draft.payload = payload
        draft.source = self.source
        draft.type = self.type
        draft.schema_version = self.schema_version
        draft.key = self.key
        draft.tenant = self.tenant
        draft.correlation = self.correlation
        draft.causation = self.causation
        draft.created_at = self.created_at
        draft.expires_at = self.expires_at
        draft.attempts = self.attempts
        draft.history = self.history
        draft.deferral = self.deferral
        draft.trace = self.trace
        draft.not_before = self.not_before
        draft.priority = self.priority
        draft.__class__ = self.__class__
        return draft  # type: ignore[return-value]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a transaction is frozen; use replace({name}=...) for a changed copy")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a transaction is frozen; {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transaction):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _Draft.__slots__)

    def __hash__(self) -> int:
        return hash((self.source, self.id))

    def __repr__(self) -> str:
        # Without the payload: representations end up in logs.
        return f"Transaction(id={self.id!r}, type={self.type!r}, source={self.source!r}, attempts={self.attempts})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The trace may be a read-only view, which cannot be pickled.
        fields = {name: getattr(self, name) for name in _Draft.__slots__} | {"trace": dict(self.trace)}
        return _rebuild, (type(self), fields)


def _rebuild(transaction_class: type[Transaction], fields: dict[str, Any]) -> Transaction:
    return transaction_class(**fields)
