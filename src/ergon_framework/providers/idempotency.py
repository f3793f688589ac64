"""The idempotency keys of calls: the owner of a key, its result, and the next owner; pure functions.

An idempotency key names a call, so that repeating the call does not carry it out twice. The owner of a key is the call
that has claimed it; it counts as dead when its lease, the time for which it may hold the key, has ended. A fingerprint
identifies the payload.

Times are in seconds since the epoch. Each function takes an entry and returns the next one, or None if nothing is to be
stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ergon_framework.providers.errors import ProviderBadRequestError, ProviderError, ReasonCode


@dataclass(frozen=True, slots=True)
class StoredResult:
    """The stored result of a call, which is replayed."""

    value: dict[str, Any]
    http_status: int | None = None


@dataclass(frozen=True, slots=True)
class KeyInFlightState:
    """The call *owner* holds the key until *until*. *outcome_unknown*: an earlier owner may have made its call."""

    fingerprint: str
    owner: str
    until: float
    outcome_unknown: bool = False


@dataclass(frozen=True, slots=True)
class KeyCompleted:
    """The call was made; its result is replayed until *until*."""

    fingerprint: str
    stored_result: StoredResult
    until: float


@dataclass(frozen=True, slots=True)
class KeyUnknown:
    """The call may have been made. Until *until* it may be retried with the same payload only."""

    fingerprint: str
    until: float


KeyEntry: TypeAlias = KeyInFlightState | KeyCompleted | KeyUnknown


@dataclass(frozen=True, slots=True)
class KeyClaimed:
    """The claimant owns the key."""

    entry: KeyInFlightState


@dataclass(frozen=True, slots=True)
class KeyHeld:
    """Another owner holds the key until *until* at the latest."""

    until: float


KeyClaim: TypeAlias = KeyClaimed | KeyHeld | StoredResult


def claim_key(entry: KeyEntry | None, *, fingerprint: str, owner: str, now: float, lease: float) -> KeyClaim:
    """Claim a key; raise an error for another payload under the key of a call that was made or may have been."""
    # A dead owner may have made its call: the end of its lease frees the key for the same payload only.
    if entry is not None and (isinstance(entry, KeyInFlightState) or now < entry.until):
        if entry.fingerprint != fingerprint:
            raise key_conflict_error()
        if isinstance(entry, KeyCompleted):
            return entry.stored_result
        if isinstance(entry, KeyInFlightState) and entry.owner != owner and now < entry.until:
            return KeyHeld(entry.until)
        # Whatever the result of the new call, the provider may have carried out the earlier one.
        outcome_unknown = isinstance(entry, KeyUnknown) or entry.outcome_unknown or entry.owner != owner
        return KeyClaimed(KeyInFlightState(fingerprint, owner, now + lease, outcome_unknown))
    return KeyClaimed(KeyInFlightState(fingerprint, owner, now + lease))


def complete_key(entry: KeyEntry | None, *, owner: str, stored_result: StoredResult, until: float) -> KeyEntry | None:
    """Store the result of a call that was made; an owner that has lost the key changes nothing."""
    return (
        KeyCompleted(entry.fingerprint, stored_result, until)
        if isinstance(entry, KeyInFlightState) and entry.owner == owner
        else entry
    )


def fail_key(entry: KeyEntry | None, *, owner: str, outcome_unknown: bool, until: float) -> KeyEntry | None:
    """Record a failed call: a definite failure deletes the key; an unknown outcome keeps its payload.

    A failed call does not settle the unknown outcome of an earlier one.
    """
    if not isinstance(entry, KeyInFlightState) or entry.owner != owner:
        return entry
    return KeyUnknown(entry.fingerprint, until) if outcome_unknown or entry.outcome_unknown else None


#: The code of the error of a key that belongs to another payload.
CONFLICT_CODE: Final = "idempotency_conflict"


def key_conflict_error(name: str = "") -> ProviderBadRequestError:
    """Return the error of a key that has another payload; *name* is the effect that was, or may have been, made."""
    key_description = f"the idempotency key of the effect {name!r}" if name else "this idempotency key"
    return ProviderBadRequestError(
        f"{key_description} belongs to a call with another payload, which may have been made; give each call its own "
        "key or name=",
        code=CONFLICT_CODE,
        sent=False,
    )


#: Reasons with which the provider rejects a call, so that it was not carried out.
_NOT_EXECUTED_REASONS: Final = frozenset({ReasonCode.BAD_REQUEST, ReasonCode.AUTH_FAILED, ReasonCode.RATE_LIMITED})


def is_outcome_unknown(error: ProviderError) -> bool:
    """Return whether the provider may have carried out a call that ended with *error*."""
    return error.sent and error.reason_code not in _NOT_EXECUTED_REASONS


def effect_name(provider_name: str, operation: str, name: str | None = None) -> str:
    """Return the name of a call's effect in its transaction; the call's key derives from it."""
    operation_name = f"{provider_name}.{operation}"
    return operation_name if name is None else f"{operation_name}/{name}"


#: Created once: json.dumps creates an encoder per call unless all options are the defaults.
_encode_canonical: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def compute_fingerprint(operation: str, payload: Mapping[str, Any]) -> str:
    """Return the SHA-256 of operation and payload as canonical JSON, which distinguishes the calls of one key.

    >>> compute_fingerprint("charge", {"b": 1, "a": 2}) == compute_fingerprint("charge", {"a": 2, "b": 1})
    True
    """
    try:
        text = _encode_canonical([operation, payload])
    except (TypeError, ValueError) as error:
        raise ProviderBadRequestError(
            "the payload of a call with an idempotency key is not plain JSON; pass only JSON values",
            code="payload_not_json",
            sent=False,
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()
