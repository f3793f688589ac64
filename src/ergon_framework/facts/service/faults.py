"""Faults: errors of facts as they travel, with class, words, verdict and attributes, and as they come out again."""

from __future__ import annotations

from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import DecodeError

from ergon_framework.errors import Category, ConnectionLost, ErgonError, text
from ergon_framework.facts import errors
from ergon_framework.facts.errors import AccessDenied, FactError, InvalidFactError, ServiceFailed
from ergon_framework.facts.service import boundary_pb2 as wire

#: Where a fault stands in the trailing metadata.
KEY: Final = "ergon-fault-bin"
#: Bytes of a fault's words, so that it fits into the metadata; and of the words in a status, which are escaped there.
WORDS: Final = 2_000
SHORT: Final = 300
#: Seconds; whoever is told to wait longer was told nonsense.
LONGEST: Final = 1e9

_KINDS: Final[dict[str, type[FactError]]] = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FactError)
}
#: What these have besides their words, each a text.
_ATTRIBUTES: Final[dict[str, tuple[str, ...]]] = {
    "FactConflict": ("from_zone", "message_id"),
    "ArtifactLost": ("from_zone", "message_id", "bucket", "key"),
}
_STATUS: Final[dict[str, grpc.StatusCode]] = {
    "InvalidFactError": grpc.StatusCode.INVALID_ARGUMENT,
    "FactConflict": grpc.StatusCode.ALREADY_EXISTS,
    "ArtifactConflict": grpc.StatusCode.ALREADY_EXISTS,
    "ArtifactMismatch": grpc.StatusCode.DATA_LOSS,
    "UploadLost": grpc.StatusCode.ABORTED,
    "ArtifactRefused": grpc.StatusCode.FAILED_PRECONDITION,
    "ArtifactUnknown": grpc.StatusCode.NOT_FOUND,
    "ArtifactLost": grpc.StatusCode.DATA_LOSS,
    "BufferFull": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "EpochChanged": grpc.StatusCode.FAILED_PRECONDITION,
    "OffsetGone": grpc.StatusCode.OUT_OF_RANGE,
    "OffsetAhead": grpc.StatusCode.OUT_OF_RANGE,
    "ReaderUnknown": grpc.StatusCode.NOT_FOUND,
    "TooManyReaders": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "AccessDenied": grpc.StatusCode.PERMISSION_DENIED,
    "LimitExceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "NotOffered": grpc.StatusCode.UNIMPLEMENTED,
    "ServiceFailed": grpc.StatusCode.INTERNAL,
}


class Broken(Protocol):
    """What gRPC raises, in either flavour, when a call has failed."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Any: ...


def write(error: FactError) -> wire.Fault:
    """*error* as it travels. A class that only this store has arrives as its nearest known one."""
    kind = next(each.__name__ for each in type(error).__mro__ if each in _KINDS.values())
    return wire.Fault(
        kind=kind,
        message=_cut(text(error), WORDS),
        category=error.category.value,
        retry_after=error.retry_after,
        final=error.final,
        later=error.later,
        code=error.code or "",
        attributes={name: getattr(error, name) for name in _ATTRIBUTES.get(kind, ())},
    )


def read(fault: wire.Fault) -> FactError:
    """The error as it was; of a class that is not known here, a FactError with its verdict."""
    kind = _KINDS.get(fault.kind, FactError)
    verdict: dict[str, Any] = {
        "category": Category(fault.category) if fault.category in Category.__members__ else None,
        "retry_after": fault.retry_after
        if fault.HasField("retry_after") and 0 <= fault.retry_after < LONGEST
        else None,
        "final": fault.final,
        "later": fault.later,
        "code": fault.code or None,
    }
    attributes = {name: fault.attributes.get(name, "") for name in _ATTRIBUTES.get(kind.__name__, ())}
    return kind(fault.message, **attributes, **verdict)


def status(error: FactError) -> grpc.StatusCode:
    """The status under which *error* travels, for those who know nothing of faults."""
    if isinstance(error, AccessDenied) and not error.final:
        return grpc.StatusCode.UNAUTHENTICATED
    return next((_STATUS[each.__name__] for each in type(error).__mro__ if each.__name__ in _STATUS), _OTHER)


_OTHER: Final = grpc.StatusCode.FAILED_PRECONDITION


def details(error: ErgonError) -> str:
    """What stands beside the status."""
    return _cut(text(error), SHORT)


def carried(error: Broken) -> FactError | None:
    """The error that the service has sent with a status; None if it has sent none."""
    for key, value in error.trailing_metadata() or ():
        if key == KEY and isinstance(value, bytes):
            try:
                return read(wire.Fault.FromString(value))
            except DecodeError:
                return None
    return None


def raised(error: Broken, what: str) -> ErgonError:
    """What a caller is to be told: the error that the service has sent, or that nobody knows whether it was done."""
    sent = carried(error)
    if sent is not None:
        return sent
    code, said = error.code(), _cut(error.details() or "", SHORT)
    if code in _FINAL:
        return _FINAL[code](f"{what} was refused with {code.name}: {said}")
    if code is grpc.StatusCode.INTERNAL or code is grpc.StatusCode.UNKNOWN:
        return ServiceFailed(f"{what} failed in the service, {code.name}: {said}; its log says why")
    return unavailable_error(f"{what} has no answer, {code.name}: {said}; nobody knows whether it was done, ask again")


def unavailable_error(message: str) -> ConnectionLost:
    """Return the error of a call that the service has not answered: a consumer that meets it defers."""
    return ConnectionLost(message, temporary=True)


#: What came without a fault and will not change by asking again.
_FINAL: Final[dict[grpc.StatusCode, type[FactError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidFactError,
    grpc.StatusCode.UNIMPLEMENTED: errors.NotOffered,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
}


def _cut(words: str, longest: int) -> str:
    """*words* in at most so many bytes; halves of characters are dropped."""
    return words.encode(errors="replace")[:longest].decode(errors="ignore")
