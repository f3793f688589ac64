"""Conversion of fact errors to faults on the wire (class, message, verdict, attributes) and back."""

from __future__ import annotations

from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import DecodeError

from ergon_framework.errors import Category, ConnectionLostError, ErgonError, error_message
from ergon_framework.facts import errors
from ergon_framework.facts.errors import AccessDenied, FactError, InvalidFactError, ServiceError
from ergon_framework.facts.service import boundary_pb2 as wire

#: The key of a fault in the trailing metadata.
METADATA_KEY: Final = "ergon-fault-bin"
#: Maximum bytes of a fault's message, so that it fits into the metadata; and of a status message, which is escaped.
MAX_FAULT_MESSAGE_BYTES: Final = 2_000
MAX_STATUS_MESSAGE_BYTES: Final = 300
#: Seconds; a longer delay from a service is ignored as invalid.
MAX_RETRY_AFTER_SECONDS: Final = 1e9

#: Names on the wire where they differ from the names of the classes.
_WIRE_NAMES: Final = {"NotSupportedRemotely": "NotOffered", "ServiceError": "ServiceFailed"}


def _wire_name(kind: type) -> str:
    return _WIRE_NAMES.get(kind.__name__, kind.__name__)


_KINDS: Final[dict[str, type[FactError]]] = {
    _wire_name(kind): kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FactError)
}
#: Attributes of these classes besides the message, each a text.
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


class RpcErrorLike(Protocol):
    """The interface of the errors that gRPC raises for failed calls, sync and async."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Any: ...


def to_wire(error: FactError) -> wire.Fault:
    """Convert *error* to a fault. A class known only to this store is sent as its nearest known base class."""
    kind = next(_wire_name(each) for each in type(error).__mro__ if each in _KINDS.values())
    return wire.Fault(
        kind=kind,
        message=_truncate(error_message(error), MAX_FAULT_MESSAGE_BYTES),
        category=error.category.value,
        retry_after=error.retry_after,
        final=error.final,
        later=error.not_attempted,
        code=error.code or "",
        attributes={name: getattr(error, name) for name in _ATTRIBUTES.get(kind, ())},
    )


def from_wire(fault: wire.Fault) -> FactError:
    """Convert a fault to the original error; an unknown class becomes a FactError with the same verdict."""
    kind = _KINDS.get(fault.kind, FactError)
    verdict: dict[str, Any] = {
        "category": Category(fault.category) if fault.category in Category.__members__ else None,
        "retry_after": fault.retry_after
        if fault.HasField("retry_after") and 0 <= fault.retry_after < MAX_RETRY_AFTER_SECONDS
        else None,
        "final": fault.final,
        "not_attempted": fault.later,
        "code": fault.code or None,
    }
    attributes = {name: fault.attributes.get(name, "") for name in _ATTRIBUTES.get(_wire_name(kind), ())}
    return kind(fault.message, **attributes, **verdict)


def to_status_code(error: FactError) -> grpc.StatusCode:
    """Return the gRPC status code for *error*, for clients that do not read faults."""
    if isinstance(error, AccessDenied) and not error.final:
        return grpc.StatusCode.UNAUTHENTICATED
    names = map(_wire_name, type(error).__mro__)
    return next((_STATUS[name] for name in names if name in _STATUS), _DEFAULT_STATUS)


_DEFAULT_STATUS: Final = grpc.StatusCode.FAILED_PRECONDITION


def to_status_message(error: ErgonError) -> str:
    """Return the message of the status."""
    return _truncate(error_message(error), MAX_STATUS_MESSAGE_BYTES)


def error_from_status(error: RpcErrorLike) -> FactError | None:
    """Return the error that the service has sent with a status; None if it has sent none."""
    for key, value in error.trailing_metadata() or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            try:
                return from_wire(wire.Fault.FromString(value))
            except DecodeError:
                return None
    return None


def to_client_error(error: RpcErrorLike, method: str) -> ErgonError:
    """Return the error to raise at the caller: the one sent by the service, or an error for an unknown outcome."""
    sent_error = error_from_status(error)
    if sent_error is not None:
        return sent_error
    code, message = error.code(), _truncate(error.details() or "", MAX_STATUS_MESSAGE_BYTES)
    if code in _FINAL_ERRORS:
        return _FINAL_ERRORS[code](f"{method} was refused with {code.name}: {message}")
    if code is grpc.StatusCode.INTERNAL or code is grpc.StatusCode.UNKNOWN:
        return ServiceError(f"{method} failed in the service, {code.name}: {message}; its log says why")
    return unavailable_error(
        f"{method} has no answer, {code.name}: {message}; nobody knows whether it was done, ask again"
    )


def unavailable_error(message: str) -> ConnectionLostError:
    """Return the error of a call that the service did not answer; a consumer that receives it defers."""
    return ConnectionLostError(message, temporary=True)


#: Status codes that arrive without a fault and will not change on retry.
_FINAL_ERRORS: Final[dict[grpc.StatusCode, type[FactError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidFactError,
    grpc.StatusCode.UNIMPLEMENTED: errors.NotSupportedRemotely,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
}


def _truncate(message: str, max_bytes: int) -> str:
    """Truncate *message* to at most that many bytes; partial characters are dropped."""
    return message.encode(errors="replace")[:max_bytes].decode(errors="ignore")
