"""One key, one call: who holds a key, what it came to, and who may have it next; pure functions.

Moments are seconds since the epoch. Each function takes an entry and answers the next one, and None
where nothing is to be kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ergon_framework.providers.errors import ProviderBadRequestError, ProviderError, ReasonCode


@dataclass(frozen=True, slots=True)
class Kept:
    """The result of a call, as it is played back."""

    value: dict[str, Any]
    http_status: int | None = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """*owner* makes the call; at *until* he is taken for dead. *doubt*: one before him may have made it too."""

    fingerprint: str
    owner: str
    until: float
    doubt: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """The call was made, and until *until* its result is played back."""

    fingerprint: str
    kept: Kept
    until: float


@dataclass(frozen=True, slots=True)
class Unknown:
    """The call may have been made. It may be tried again with the same payload, and with no other before *until*."""

    fingerprint: str
    until: float


Entry: TypeAlias = InFlight | Done | Unknown


@dataclass(frozen=True, slots=True)
class Claimed:
    """The key is his who asked."""

    entry: InFlight


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody else has it, at the latest until *until*."""

    until: float


Claim: TypeAlias = Claimed | Held | Kept


def claim(entry: Entry | None, *, fingerprint: str, owner: str, now: float, lease: float) -> Claim:
    """Ask for a key; another payload under the key of a call that was made, or may have been, is an error."""
    # An owner that died may have made his call: the end of his lease frees the key for the same payload only.
    if entry is not None and (isinstance(entry, InFlight) or now < entry.until):
        if entry.fingerprint != fingerprint:
            raise conflict()
        if isinstance(entry, Done):
            return entry.kept
        if isinstance(entry, InFlight) and entry.owner != owner and now < entry.until:
            return Held(entry.until)
        # Whatever comes of the call that is made now, the one before it may have been carried out.
        doubt = isinstance(entry, Unknown) or entry.doubt or entry.owner != owner
        return Claimed(InFlight(fingerprint, owner, now + lease, doubt))
    return Claimed(InFlight(fingerprint, owner, now + lease))


def succeed(entry: Entry | None, *, owner: str, kept: Kept, until: float) -> Entry | None:
    """The call was made; one who has lost the key says nothing of it any more."""
    return Done(entry.fingerprint, kept, until) if isinstance(entry, InFlight) and entry.owner == owner else entry


def fail(entry: Entry | None, *, owner: str, doubt: bool, until: float) -> Entry | None:
    """The call failed: definitely, and the key is forgotten; or in *doubt*, and its payload is remembered.

    A doubt that one before it has left is not settled by a call that failed.
    """
    if not isinstance(entry, InFlight) or entry.owner != owner:
        return entry
    return Unknown(entry.fingerprint, until) if doubt or entry.doubt else None


#: The code of a key that stands for another payload.
CONFLICT: Final = "idempotency_conflict"


def conflict(name: str = "") -> ProviderBadRequestError:
    """The error of a key that stands for another payload; *name* is the effect that was made, or may have been."""
    whose = f"the idempotency key of the effect {name!r}" if name else "this idempotency key"
    return ProviderBadRequestError(
        f"{whose} belongs to a call with another payload, which was made or may have been; give each call a key, or a "
        "name=, of its own",
        code=CONFLICT,
        sent=False,
    )


#: The provider has said no, so the call was not carried out.
_REFUSED: Final = frozenset({ReasonCode.BAD_REQUEST, ReasonCode.AUTH_FAILED, ReasonCode.RATE_LIMITED})


def doubtful(error: ProviderError) -> bool:
    """Whether a call that ended with *error* may have been carried out all the same."""
    return error.sent and error.reason_code not in _REFUSED


def effect(provider_name: str, operation: str, name: str | None = None) -> str:
    """The name of the effect that a call has in its transaction; the call's key follows from it."""
    plain = f"{provider_name}.{operation}"
    return plain if name is None else f"{plain}/{name}"


#: Made once: json.dumps makes an encoder for each text that is not written by its defaults.
_canonical: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def fingerprint(operation: str, payload: Mapping[str, Any]) -> str:
    """What tells two calls of one key apart: the SHA-256 of operation and payload as canonical JSON.

    >>> fingerprint("charge", {"b": 1, "a": 2}) == fingerprint("charge", {"a": 2, "b": 1})
    True
    """
    try:
        text = _canonical([operation, payload])
    except (TypeError, ValueError) as error:
        raise ProviderBadRequestError(
            "the payload of a call with a key must be plain JSON, so that the same call is recognised",
            code="payload_not_json",
            sent=False,
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()
