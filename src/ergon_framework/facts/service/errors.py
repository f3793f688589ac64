"""Errors of a facts service: conversion of fact errors to faults on the wire and back, and the end of failed calls.

A verdict is an error's classification: its category, whether a retry can help, and after which time.

A fault contains the class, message, verdict and attributes of an error. Callers get the reason of a failure, but no
internal details of the service.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import grpc
from google.protobuf.message import DecodeError

from ergon_framework.errors import Category, ConnectionLostError, ErgonError, error_message
from ergon_framework.facts import errors, metrics
from ergon_framework.facts.errors import AccessDenied, FactError, InvalidFactError, LimitExceeded, ServiceError
from ergon_framework.facts.service import boundary_pb2 as pb
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

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


def to_wire(error: FactError) -> pb.Fault:
    """Convert *error* to a fault. A class known only to this store is sent as its nearest known base class."""
    kind = next(_wire_name(each) for each in type(error).__mro__ if each in _KINDS.values())
    return pb.Fault(
        kind=kind,
        message=_truncate(error_message(error), MAX_FAULT_MESSAGE_BYTES),
        category=error.category.value,
        retry_after=error.retry_after,
        final=error.final,
        later=error.not_attempted,
        code=error.code or "",
        attributes={name: getattr(error, name) for name in _ATTRIBUTES.get(kind, ())},
    )


def from_wire(fault: pb.Fault) -> FactError:
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
                return from_wire(pb.Fault.FromString(value))
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
        return _FINAL_ERRORS[code](f"{method} was rejected with {code.name}: {message}")
    if code is grpc.StatusCode.INTERNAL or code is grpc.StatusCode.UNKNOWN:
        return ServiceError(f"{method} failed in the service, {code.name}: {message}; its log says why")
    return unavailable_error(f"{method} has no answer, {code.name}: {message}; its outcome is unknown, retry it")


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


# -- failed calls -----------------------------------------------------------------------------------

log: Final = logging.getLogger(f"{LIBRARY}.facts.service")
#: Seconds between two log entries about the same kind of rejection, and maximum number of kinds counted separately.
LOG_INTERVAL_SECONDS: Final = 60.0
MAX_KINDS: Final = 100


class RejectionHandler:
    """Ends calls that fail, and logs rejections: the first of a kind immediately, repeated ones as a count.

    A kind is the combination of method, address and reason. For one event loop.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[_RejectionKind, _RepeatedRejection] = {}

    def record(self, event: str, method: str, reason: str, peer: str) -> None:
        """Log a rejection, or count it."""
        kind = _RejectionKind(event, method, reason, peer.rpartition(":")[0])
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = _RejectionKind(event, None, "further kinds of rejections are not distinguished", None)
        repeated = self._kinds.get(kind)
        if repeated is None:
            self._kinds[kind] = _RepeatedRejection(self._clock() + LOG_INTERVAL_SECONDS)
            kind.log(None)
        else:
            repeated.count += 1

    def report(self, *, everything: bool = False) -> None:
        """Log the counts that are due; with *everything*, at the end of the service, all of them."""
        now = self._clock()
        for kind, repeated in list(self._kinds.items()):
            if everything or now >= repeated.due:
                if repeated.count:
                    kind.log(repeated.count)
                    self._kinds[kind] = _RepeatedRejection(now + LOG_INTERVAL_SECONDS)
                else:
                    del self._kinds[kind]

    @asynccontextmanager
    async def abort_on_error(
        self, method: str, context: Any, *, before_abort: Callable[[FactError], Awaitable[None]] | None = None
    ) -> AsyncIterator[None]:
        """End the call of *method* with a status if it fails; count it, and log it if an operator must act.

        *before_abort* is awaited before a rejection ends the call.
        """
        try:
            yield
        except FactError as error:
            if isinstance(error, AccessDenied | LimitExceeded):
                event = Event.ACCESS_DENIED if isinstance(error, AccessDenied) else Event.LIMIT_REACHED
                self.record(event, method, error_message(error), context.peer())
            await _abort(method, context, to_status_code(error), error, before_abort=before_abort)
        except ConnectionLostError as error:
            await _abort(method, context, grpc.StatusCode.UNAVAILABLE, error)
        except TimeoutError:
            timeout_error = ConnectionLostError(f"{method} took longer than the service allows; retry it")
            await _abort(method, context, grpc.StatusCode.DEADLINE_EXCEEDED, timeout_error)
        except grpc.aio.BaseError:
            # The connection is lost: no answer can reach the caller.
            metrics.record_call(method, "cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - a defect of the service or store; its details are not sent
            reference = uuid.uuid4().hex[:12]
            fields = {Field.OPERATION: method, Field.CODE: reference, Field.ERROR_TYPE: _describe_origin(error)}
            logs.log_event(logging.ERROR, Event.CALL_FAILED, fields, to=log)
            service_error = ServiceError(f"{method} failed in the service; its log says more under {reference}")
            await _abort(method, context, grpc.StatusCode.INTERNAL, service_error)
        except BaseException:
            metrics.record_call(method, "cancelled")
            raise
        else:
            metrics.record_call(method, "answered")


class BrokenConnectionFilter(logging.Filter):
    """Drops what gRPC logs as an error, with a traceback, when a caller closes its connection during a call."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def ignore_broken_connections() -> None:
    """Keep broken connections out of the log, because a caller could fill it with them. Call once per process."""
    core = logging.getLogger("grpc._cython.cygrpc")
    if not any(isinstance(each, BrokenConnectionFilter) for each in core.filters):
        core.addFilter(BrokenConnectionFilter())


class _RejectionKind(NamedTuple):
    event: str
    method: str | None
    reason: str
    address: str | None

    def log(self, count: int | None) -> None:
        fields = {
            Field.OPERATION: self.method,
            Field.REASON: self.reason,
            Field.SOURCE: self.address,
            Field.COUNT: count,
        }
        logs.log_event(logging.WARNING, self.event, fields, to=log)


@dataclass(slots=True)
class _RepeatedRejection:
    """The number of rejections of a kind since its last log entry, and the time of the next entry."""

    due: float
    count: int = 0


async def _abort(method: str, context: Any, status: grpc.StatusCode, error: Any, *, before_abort: Any = None) -> None:
    metrics.record_call(method, status.name.lower())
    if before_abort is not None:
        await before_abort(error)
    fault = ((METADATA_KEY, to_wire(error).SerializeToString()),) if isinstance(error, FactError) else ()
    await context.abort(status, to_status_message(error), trailing_metadata=fault)


def _describe_origin(error: BaseException) -> str:
    """Return the type of *error* and its origin; messages of third-party libraries may contain payloads."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" at {trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}"
    return f"{type(error).__qualname__}{where}"
