"""The two messages of executor protocol 1, as models: what may stand in them, and how they are read and written.

``docs/spec/executor.md`` is their readable form; the JSON Schemas beside it are made of these models.
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

from ergon_framework.executor import lines
from ergon_framework.executor.lines import MAX_LINE, LineError, Overlong, Reason

VERSION: Final = "1"
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
#: Longest id or name, in characters.
LONGEST_NAME: Final = 1024
#: The last attempt that has a number.
LAST_ATTEMPT: Final = 2**31 - 1
#: Longest error message that is kept, in characters; the rest is cut.
LONGEST_MESSAGE: Final = 4096
#: Longest traceback, in bytes of UTF-8.
LONGEST_TRACEBACK: Final = 16 * 1024
#: What of a trace carrier is passed on, and how long each may be; as for a transaction.
TRACE: Final = {"traceparent": 512, "tracestate": 4096, "baggage": 8192}


class ErrorType(StrEnum):
    """Error types with a meaning of their own; any other is the name of what went wrong in a handler."""

    #: The only one of the document: fatal.
    HANDLER_NOT_FOUND = "handler_not_found"
    UNSUPPORTED_VERSION = "unsupported_version"
    BAD_REQUEST = "bad_request"
    #: The arguments do not fit the handler's parameters.
    INVALID_ARGUMENT = "invalid_argument"
    #: What the handler returned cannot be sent.
    INVALID_RESULT = "invalid_result"
    #: The executor was told to end.
    TERMINATED = "terminated"


class Status(StrEnum):
    """How an execution ended, in the executor's words."""

    SUCCESS = "success"
    RETRY = "retry"
    TIMEOUT = "timeout"
    ERROR = "error"


# -- the forms of fields --------------------------------------------------------------------------

_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|\+00:00)").fullmatch


def _read_moment(value: Any) -> datetime:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("a time without its zone")
        return value.astimezone(UTC)
    if not (isinstance(value, str) and _MOMENT(value)):
        raise ValueError("no RFC 3339 time in UTC, such as 2026-01-31T23:59:59Z")
    return datetime.fromisoformat(value).astimezone(UTC)


def _write_moment(moment: datetime) -> str:
    return moment.isoformat().removesuffix("+00:00") + "Z"


def cut(text: str, longest: int) -> str:
    """The end of *text* in at most *longest* bytes of UTF-8; the end, because there a traceback names its error."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= longest:
        return data.decode()
    # A character that was cut in two leaves bytes that decode to nothing.
    return data[-longest:].decode(errors="ignore")


def _read_traceback(value: Any) -> str | None:
    # An extension field: whatever else somebody puts there is a field that we do not know.
    return cut(value, LONGEST_TRACEBACK) if isinstance(value, str) else None


def _shortened(longest: int) -> BeforeValidator:
    # Cut and not refused: an error is not to be lost for how much it says.
    return BeforeValidator(lambda value: value[:longest] if isinstance(value, str) else value)


Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
Moment: TypeAlias = Annotated[
    datetime,
    BeforeValidator(_read_moment),
    PlainSerializer(_write_moment),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
Message: TypeAlias = Annotated[str | None, _shortened(LONGEST_MESSAGE)]
Kind: TypeAlias = Annotated[str | None, _shortened(LONGEST_NAME)]
Traceback: TypeAlias = Annotated[str | None, BeforeValidator(_read_traceback)]


# -- the messages ---------------------------------------------------------------------------------


class _Message(BaseModel):
    """What both share: frozen, ``"1"`` is no number, unknown fields are ignored, and errors repeat no value."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, hide_input_in_errors=True, allow_inf_nan=False)


class ExecutionContext(_Message):
    """What a request says about the job around the call."""

    job_id: Name = Field(description="The same as outside.")
    attempt: int = Field(ge=1, le=LAST_ATTEMPT, description="The number of this attempt; the first is 1.")
    enqueue_time: Moment = Field(description="When the job was enqueued.")
    queue_name: Name = Field(default="default", description="The queue it waited in.")
    deadline: Moment | None = Field(default=None, description="When the orchestrator stops waiting.")
    trace_context: dict[str, Any] | None = Field(
        default=None, description="A propagation carrier: traceparent, tracestate and baggage as W3C defines them."
    )
    worker_id: Name | None = Field(default=None, description="Who sent the request.")

    @property
    def carrier(self) -> dict[str, str]:
        """What of the trace context can be used; a trace that is broken never costs the job."""
        given = self.trace_context or {}
        return {
            name: value
            for name, longest in TRACE.items()
            if isinstance(value := given.get(name), str) and len(value) <= longest
        }


class ExecutionRequest(_Message):
    """One job for an executor: which handler, with what, and in which circumstances."""

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
        kwargs: Mapping[str, Any] = _NONE,
    ) -> Self:
        """A request for the job that *context* speaks of."""
        return cls(
            protocol_version=VERSION,
            job_id=context.job_id,
            function_name=function_name,
            args=list(args),
            kwargs=dict(kwargs),
            context=context,
        )

    @model_validator(mode="after")
    def _of_one_job(self) -> ExecutionRequest:
        if self.context.job_id != self.job_id:
            raise ValueError("context.job_id names another job")
        return self


class ExecutionOutcome(_Message):
    """What became of one job."""

    job_id: Name = Field(description="The job of the request.")
    status: Status = Field(strict=False, description="How it ended.")
    result: Any = Field(default=None, description="What the handler returned, on success.")
    error_message: Message = Field(default=None, description="What went wrong, for people.")
    error_type: Kind = Field(default=None, description="What went wrong, in one word.")
    retry_after_seconds: float | None = Field(default=None, description="The delay that a retry asks for.")
    error_traceback: Traceback = Field(
        default=None, description=f"Extension: the end of the traceback, at most {LONGEST_TRACEBACK} bytes."
    )


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no message: why, in words that repeat nothing of it, and whose it is if that can be told."""

    reason: Reason
    message: str
    size: int
    job_id: str | None = None

    @property
    def error_type(self) -> ErrorType:
        """What a request of this kind is answered with."""
        unsupported = self.reason is Reason.UNSUPPORTED_VERSION
        return ErrorType.UNSUPPORTED_VERSION if unsupported else ErrorType.BAD_REQUEST


# -- reading --------------------------------------------------------------------------------------


def read_request(line: bytes | Overlong) -> ExecutionRequest | BadLine:
    """The request in *line*; the line feed at its end may be there or not."""
    if isinstance(line, Overlong):
        return _overlong(line)
    try:
        found = lines.read(line)
        _check_version(found)
        return ExecutionRequest.model_validate(found)
    except (LineError, ValidationError) as error:
        return _bad(line, error)


def _check_version(found: dict[str, Any]) -> None:
    # Before all other fields: of another version nobody knows what they mean.
    version = found.get("protocol_version")
    if isinstance(version, str) and version != VERSION:
        message = f"this executor speaks protocol version {VERSION}, and the request is of another"
        raise LineError(message, reason=Reason.UNSUPPORTED_VERSION)


def read_outcome(line: bytes | Overlong, *, yielding: bool = False) -> ExecutionOutcome | BadLine:
    """The outcome in *line*; the line feed at its end may be there or not.

    *yielding* takes longer, and lets other threads run meanwhile.
    """
    if isinstance(line, Overlong):
        return _overlong(line)
    try:
        return ExecutionOutcome.model_validate(lines.read(line, yielding=yielding))
    except (LineError, ValidationError) as error:
        return _bad(line, error, yielding=yielding)


def _overlong(line: Overlong) -> BadLine:
    return BadLine(Reason.TOO_LONG, f"a line of {line.size} bytes, and {MAX_LINE} are allowed", line.size)


def _bad(line: bytes, error: LineError | ValidationError, *, yielding: bool = False) -> BadLine:
    # Its frames hold all that was read of the line, and it is about to be read again.
    error.__traceback__ = error.__context__ = None
    job_id = lines.job_id_of(line, yielding=yielding)
    known = job_id if job_id is not None and 1 <= len(job_id) <= LONGEST_NAME else None
    if isinstance(error, LineError):
        return BadLine(error.reason, str(error), len(line), known)
    return BadLine(Reason.BAD_FIELD, _faults(error), len(line), known)


#: How many faults of one message are named.
_NAMED: Final = 5


def _faults(error: ValidationError) -> str:
    """Each field that is wrong and what is wrong with it, without its value."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    told = [f"{_place(fault['loc'])}: {fault['msg'].removeprefix('Value error, ')}" for fault in faults[:_NAMED]]
    more = len(faults) - _NAMED
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def _place(loc: tuple[int | str, ...]) -> str:
    # Unknown fields are ignored, so every name here is one of the protocol's.
    return ".".join(str(part) for part in loc) or "request"


# -- writing --------------------------------------------------------------------------------------


def write_request(request: ExecutionRequest) -> bytes:
    """*request* as a line with its line feed; LineError if it breaks a limit or is not JSON."""
    context = request.context
    return write_call(
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


def write_call(
    function_name: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = _NONE,
    *,
    job_id: str,
    attempt_number: int,
    enqueue_time: datetime,
    queue_name: str = "default",
    deadline: datetime | None = None,
    trace_context: Mapping[str, Any] | None = None,
    worker_id: str | None = None,
) -> bytes:
    """The line of a request without its model, which who sends it has no use for; LineError as ``write_request``.

    Times are in UTC.
    """
    context: dict[str, Any] = {
        "job_id": _named("job_id", job_id),
        "attempt": _counted(attempt_number),
        "enqueue_time": _write_moment(enqueue_time),
        "queue_name": _named("context.queue_name", queue_name),
    }
    if deadline is not None:
        context["deadline"] = _write_moment(deadline)
    if trace_context is not None:
        context["trace_context"] = dict(trace_context)
    if worker_id is not None:
        context["worker_id"] = _named("context.worker_id", worker_id)
    for name in kwargs:
        if not isinstance(name, str):
            raise LineError("kwargs: a name that is no text", reason=Reason.BAD_FIELD)
    return lines.write(
        {
            "protocol_version": VERSION,
            "job_id": job_id,
            "function_name": _named("function_name", function_name),
            "args": list(args),
            "kwargs": dict(kwargs),
            "context": context,
        }
    )


def _named(field: str, value: Any) -> str:
    """*value*, if it may be a Name."""
    if isinstance(value, str) and 1 <= len(value) <= LONGEST_NAME:
        return value
    raise LineError(f"{field}: not a text of 1 to {LONGEST_NAME} characters", reason=Reason.BAD_FIELD)


def _counted(attempt_number: int) -> int:
    if type(attempt_number) is int and 1 <= attempt_number <= LAST_ATTEMPT:
        return attempt_number
    raise LineError(f"context.attempt: not a number from 1 to {LAST_ATTEMPT}", reason=Reason.BAD_FIELD)


def write_outcome(outcome: ExecutionOutcome, *, default: Callable[[Any], Any] | None = None) -> bytes:
    """*outcome* as a line with its line feed; LineError if its result breaks a limit or is not JSON.

    *default* translates what JSON does not know. Text that is too long is cut; a result never is.
    """
    told: dict[str, Any] = {
        "job_id": outcome.job_id,
        "status": outcome.status.value,
        "result": outcome.result,
        "error_message": _sendable(outcome.error_message, LONGEST_MESSAGE),
        "error_type": _sendable(outcome.error_type, LONGEST_NAME),
        "retry_after_seconds": outcome.retry_after_seconds,
    }
    if outcome.error_traceback is not None:
        told["error_traceback"] = outcome.error_traceback
    return lines.write(told, default=default)


def _sendable(text: str | None, longest: int) -> str | None:
    """*text* short enough, and in characters that UTF-8 has: an error must not be lost for how it is worded."""
    return None if text is None else text[:longest].encode(errors="backslashreplace").decode()
