"""The two messages of executor protocol 1 as models: their fields, and how they are parsed and formatted.

An orchestrator writes requests to the stdin of an executor, a process that runs handlers; the executor answers each
with an outcome on stdout. Both are one JSON object per line.

``docs/spec/executor.md`` is the readable specification; the JSON Schemas next to it are generated from these models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from ergon_framework.executors import json_lines
from ergon_framework.executors.json_lines import MAX_LINE_BYTES, LineError, LineErrorReason, OverlongLine

VERSION: Final = "1"
_EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})
#: Maximum length of an id or a name, in characters.
MAX_NAME_CHARS: Final = 1024
#: The highest valid attempt number.
MAX_ATTEMPT_NUMBER: Final = 2**31 - 1
#: Maximum length of an error message, in characters; the rest is truncated.
MAX_MESSAGE_CHARS: Final = 4096
#: Maximum length of a traceback, in bytes of UTF-8.
MAX_TRACEBACK_BYTES: Final = 16 * 1024
#: Fields of a trace carrier that are passed on, with the maximum length of each in characters; as for a transaction.
CARRIER_FIELD_LIMITS: Final = {"traceparent": 512, "tracestate": 4096, "baggage": 8192}


class ErrorType(StrEnum):
    """Error types that the protocol defines; any other is the name of an error in a handler."""

    #: The only fatal error type: the orchestrator does not retry the job.
    HANDLER_NOT_FOUND = "handler_not_found"
    UNSUPPORTED_VERSION = "unsupported_version"
    BAD_REQUEST = "bad_request"
    #: The arguments do not match the handler's parameters.
    INVALID_ARGUMENT = "invalid_argument"
    #: The handler's return value cannot be sent.
    INVALID_RESULT = "invalid_result"
    #: The executor was stopped.
    TERMINATED = "terminated"


class Status(StrEnum):
    """How an execution ended, as the executor reports it."""

    SUCCESS = "success"
    RETRY = "retry"
    TIMEOUT = "timeout"
    ERROR = "error"


# -- field types ----------------------------------------------------------------------------------

_match_rfc3339_utc = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|\+00:00)"
).fullmatch


def _parse_time(value: Any) -> datetime:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"the time {value.isoformat()} has no time zone; pass one with tzinfo=UTC")
        return value.astimezone(UTC)
    if not (isinstance(value, str) and _match_rfc3339_utc(value)):
        raise ValueError("not an RFC 3339 time in UTC, such as 2026-01-31T23:59:59Z")
    return datetime.fromisoformat(value).astimezone(UTC)


def _format_time(moment: datetime) -> str:
    return moment.isoformat().removesuffix("+00:00") + "Z"


def truncate_utf8_tail(text: str, max_bytes: int) -> str:
    """Return the end of *text* in at most *max_bytes* bytes of UTF-8; a traceback names its error at the end."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= max_bytes:
        return data.decode()
    # A character that is split at the cut leaves bytes that decode to nothing.
    return data[-max_bytes:].decode(errors="ignore")


def _parse_traceback(value: Any) -> str | None:
    # An extension field: a value of another type is an unknown field of another extension.
    return truncate_utf8_tail(value, MAX_TRACEBACK_BYTES) if isinstance(value, str) else None


def _truncate_to(max_chars: int) -> BeforeValidator:
    # Truncated instead of rejected: an error must not be lost because it is long.
    return BeforeValidator(lambda value: value[:max_chars] if isinstance(value, str) else value)


Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
UtcTime: TypeAlias = Annotated[
    datetime,
    BeforeValidator(_parse_time),
    PlainSerializer(_format_time),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
ErrorText: TypeAlias = Annotated[str | None, _truncate_to(MAX_MESSAGE_CHARS)]
ErrorTypeName: TypeAlias = Annotated[str | None, _truncate_to(MAX_NAME_CHARS)]
Traceback: TypeAlias = Annotated[str | None, BeforeValidator(_parse_traceback)]


# -- the messages ---------------------------------------------------------------------------------


class _ProtocolMessage(BaseModel):
    """The base of both messages: frozen, ``"1"`` is not a number, unknown fields are ignored, errors omit values."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, hide_input_in_errors=True, allow_inf_nan=False)


class ExecutionContext(_ProtocolMessage):
    """Metadata of the job in a request."""

    job_id: Name = Field(description="The same as outside.")
    attempt: int = Field(ge=1, le=MAX_ATTEMPT_NUMBER, description="The number of this attempt; the first is 1.")
    enqueue_time: UtcTime = Field(description="When the job was enqueued.")
    queue_name: Name = Field(default="default", description="The queue it waited in.")
    deadline: UtcTime | None = Field(default=None, description="When the orchestrator stops waiting.")
    trace_context: dict[str, Any] | None = Field(
        default=None, description="A propagation carrier: traceparent, tracestate and baggage as W3C defines them."
    )
    worker_id: Name | None = Field(default=None, description="Who sent the request.")

    @property
    def carrier(self) -> dict[str, str]:
        """The usable fields of the trace context; a broken trace never fails the job."""
        fields = self.trace_context or {}
        return {
            name: value
            for name, max_chars in CARRIER_FIELD_LIMITS.items()
            if isinstance(value := fields.get(name), str) and len(value) <= max_chars
        }


class ExecutionRequest(_ProtocolMessage):
    """One job for an executor: the handler, its arguments and the job's metadata."""

    protocol_version: Literal["1"] = Field(description="The version of the protocol.")
    job_id: Name = Field(description="Unique, and named again by the outcome.")
    function_name: Name = Field(description="The handler, without the prefix that selects an executor.")
    args: list[Any] = Field(description="Positional arguments.")
    kwargs: dict[str, Any] = Field(description="Keyword arguments.")
    context: ExecutionContext

    @classmethod
    def make(
        cls,
        function_name: str,
        *,
        context: ExecutionContext,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _EMPTY,
    ) -> Self:
        """Return a request for the job of *context*."""
        return cls(
            protocol_version=VERSION,
            job_id=context.job_id,
            function_name=function_name,
            args=list(args),
            kwargs=dict(kwargs),
            context=context,
        )

    @model_validator(mode="after")
    def _check_job_id(self) -> ExecutionRequest:
        if self.context.job_id != self.job_id:
            raise ValueError("context.job_id names another job")
        return self


class ExecutionOutcome(_ProtocolMessage):
    """The outcome of one job."""

    job_id: Name = Field(description="The job of the request.")
    status: Status = Field(strict=False, description="How it ended.")
    result: Any = Field(default=None, description="What the handler returned, on success.")
    error_message: ErrorText = Field(default=None, description="What went wrong, for people.")
    error_type: ErrorTypeName = Field(default=None, description="What went wrong, in one word.")
    retry_after_seconds: float | None = Field(default=None, description="The delay that a retry asks for.")
    error_traceback: Traceback = Field(
        default=None, description=f"Extension: the end of the traceback, at most {MAX_TRACEBACK_BYTES} bytes."
    )


@dataclass(frozen=True, slots=True)
class InvalidMessage:
    """A line that is not a valid message: a reason without values of the line, and the job id if it is known."""

    reason: LineErrorReason
    message: str
    size: int
    job_id: str | None = None

    @property
    def error_type(self) -> ErrorType:
        """The error type of the answer to such a request."""
        unsupported = self.reason is LineErrorReason.UNSUPPORTED_VERSION
        return ErrorType.UNSUPPORTED_VERSION if unsupported else ErrorType.BAD_REQUEST


# -- reading --------------------------------------------------------------------------------------


def read_request(line: bytes | OverlongLine) -> ExecutionRequest | InvalidMessage:
    """Return the request in *line*; the line feed at its end is optional."""
    if isinstance(line, OverlongLine):
        return _too_long_message(line)
    try:
        fields = json_lines.parse_line(line)
        _check_version(fields)
        return ExecutionRequest.model_validate(fields)
    except (LineError, ValidationError) as error:
        return _to_invalid_message(line, error)


def _check_version(fields: dict[str, Any]) -> None:
    # Checked before all other fields: their meaning in another version is unknown.
    version = fields.get("protocol_version")
    if isinstance(version, str) and version != VERSION:
        message = f"this executor supports protocol version {VERSION}; the request has another version"
        raise LineError(message, reason=LineErrorReason.UNSUPPORTED_VERSION)


def read_outcome(line: bytes | OverlongLine, *, yielding: bool = False) -> ExecutionOutcome | InvalidMessage:
    """Return the outcome in *line*; the line feed at its end is optional.

    *yielding* takes longer and lets other threads run meanwhile.
    """
    if isinstance(line, OverlongLine):
        return _too_long_message(line)
    try:
        return ExecutionOutcome.model_validate(json_lines.parse_line(line, yielding=yielding))
    except (LineError, ValidationError) as error:
        return _to_invalid_message(line, error, yielding=yielding)


def _too_long_message(line: OverlongLine) -> InvalidMessage:
    return InvalidMessage(
        LineErrorReason.TOO_LONG, f"a line of {line.size} bytes exceeds the limit of {MAX_LINE_BYTES}", line.size
    )


def _to_invalid_message(line: bytes, error: LineError | ValidationError, *, yielding: bool = False) -> InvalidMessage:
    # The frames of the traceback hold all values of the line, which is about to be parsed again: free the memory first.
    error.__traceback__ = error.__context__ = None
    job_id = json_lines.extract_job_id(line, yielding=yielding)
    valid_job_id = job_id if job_id is not None and 1 <= len(job_id) <= MAX_NAME_CHARS else None
    if isinstance(error, LineError):
        return InvalidMessage(error.reason, str(error), len(line), valid_job_id)
    return InvalidMessage(LineErrorReason.BAD_FIELD, _describe_faults(error), len(line), valid_job_id)


#: Maximum number of faults of one message that an error names.
_MAX_NAMED_FAULTS: Final = 5


def _describe_faults(error: ValidationError) -> str:
    """Return each invalid field and its fault, without its value."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    descriptions = [
        f"{_format_location(fault['loc'])}: {fault['msg'].removeprefix('Value error, ')}"
        for fault in faults[:_MAX_NAMED_FAULTS]
    ]
    more = len(faults) - _MAX_NAMED_FAULTS
    return "; ".join(descriptions) + (f"; and {more} more" if more > 0 else "")


def _format_location(loc: tuple[int | str, ...]) -> str:
    # Unknown fields are ignored, so every name here is one of the protocol's.
    return ".".join(str(part) for part in loc) or "request"


# -- writing --------------------------------------------------------------------------------------


def write_request(request: ExecutionRequest) -> bytes:
    """Return *request* as a line with its line feed; raise LineError if it exceeds a limit or is not JSON."""
    context = request.context
    return format_request_line(
        request.function_name,
        request.args,
        request.kwargs,
        job_id=request.job_id,
        attempt_number=context.attempt,
        enqueue_time=context.enqueue_time,
        queue_name=context.queue_name,
        deadline=context.deadline,
        trace_context=context.trace_context,
        worker_id=context.worker_id,
    )


def format_request_line(
    function_name: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = _EMPTY,
    *,
    job_id: str,
    attempt_number: int,
    enqueue_time: datetime,
    queue_name: str = "default",
    deadline: datetime | None = None,
    trace_context: Mapping[str, Any] | None = None,
    worker_id: str | None = None,
) -> bytes:
    """Return the line of a request without building its model; raise LineError as ``write_request`` does.

    Times are in UTC.
    """
    context: dict[str, Any] = {
        "job_id": _check_name("job_id", job_id),
        "attempt": _check_attempt_number(attempt_number),
        "enqueue_time": _format_time(enqueue_time),
        "queue_name": _check_name("context.queue_name", queue_name),
    }
    if deadline is not None:
        context["deadline"] = _format_time(deadline)
    if trace_context is not None:
        context["trace_context"] = dict(trace_context)
    if worker_id is not None:
        context["worker_id"] = _check_name("context.worker_id", worker_id)
    for name in kwargs:
        if not isinstance(name, str):
            raise LineError("kwargs: a name that is not a string", reason=LineErrorReason.BAD_FIELD)
    return json_lines.format_line(
        {
            "protocol_version": VERSION,
            "job_id": job_id,
            "function_name": _check_name("function_name", function_name),
            "args": list(args),
            "kwargs": dict(kwargs),
            "context": context,
        }
    )


def _check_name(field: str, value: Any) -> str:
    """Return *value* if it is a valid Name."""
    if isinstance(value, str) and 1 <= len(value) <= MAX_NAME_CHARS:
        return value
    raise LineError(f"{field}: not a string of 1 to {MAX_NAME_CHARS} characters", reason=LineErrorReason.BAD_FIELD)


def _check_attempt_number(attempt_number: int) -> int:
    if type(attempt_number) is int and 1 <= attempt_number <= MAX_ATTEMPT_NUMBER:
        return attempt_number
    raise LineError(f"context.attempt: not a number from 1 to {MAX_ATTEMPT_NUMBER}", reason=LineErrorReason.BAD_FIELD)


def write_outcome(outcome: ExecutionOutcome, *, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return *outcome* as a line with its line feed; raise LineError if its result exceeds a limit or is not JSON.

    *default* converts types that JSON lacks. Text that is too long is truncated; a result never is.
    """
    fields: dict[str, Any] = {
        "job_id": outcome.job_id,
        "status": outcome.status.value,
        "result": outcome.result,
        "error_message": _to_sendable(outcome.error_message, MAX_MESSAGE_CHARS),
        "error_type": _to_sendable(outcome.error_type, MAX_NAME_CHARS),
        "retry_after_seconds": outcome.retry_after_seconds,
    }
    if outcome.error_traceback is not None:
        fields["error_traceback"] = outcome.error_traceback
    return json_lines.format_line(fields, default=default)


def _to_sendable(text: str | None, max_chars: int) -> str | None:
    """Return *text*, truncated and with characters that UTF-8 can encode, so that no error is lost for its wording."""
    return None if text is None else text[:max_chars].encode(errors="backslashreplace").decode()
