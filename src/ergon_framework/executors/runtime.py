"""A Python executor: it reads requests, runs handlers one at a time, and answers each request with one line.

An orchestrator writes requests to the stdin of the executor, one JSON object per line, and reads the outcomes from its
stdout.

A handler can read the context of its job, in addition to its arguments and its scope. ``SignalWatcher`` (in
``runtime_io``) calls ``Runtime.stop`` from its thread when a signal arrives.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import decimal
import enum
import inspect
import logging
import os
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_json, to_jsonable_python

from ergon_framework import scope as scopes
from ergon_framework.errors import Category, ErgonError, error_message, has_valid_verdict, reduce_validation
from ergon_framework.executors.json_lines import LineError, OverlongLine, parse_json
from ergon_framework.executors.metrics import ExecutorTelemetry
from ergon_framework.executors.protocol import (
    MAX_MESSAGE_CHARS,
    MAX_NAME_CHARS,
    MAX_TRACEBACK_BYTES,
    ErrorType,
    ExecutionContext,
    ExecutionOutcome,
    ExecutionRequest,
    InvalidMessage,
    Status,
    read_request,
    truncate_utf8_tail,
    write_outcome,
)
from ergon_framework.executors.registry import Handler, HandlerRegistry, InvalidArgumentError, Retry
from ergon_framework.executors.runtime_io import ProtocolStreams
from ergon_framework.scope import Scope
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.transaction import Transaction

_current_context: Final[ContextVar[ExecutionContext | None]] = ContextVar("ergon_job", default=None)


def current_job() -> ExecutionContext | None:
    """Return the context of the request that is handled here, if any."""
    return _current_context.get()


#: Makes a job context the current one in the running ``contextvars.Context``.
set_current_job: Final = _current_context.set


# -- runtime ----------------------------------------------------------------------------------------

log: Final = logging.getLogger(f"{LIBRARY}.executors")

#: The step name in a handler's scope.
SCOPE_STEP: Final = "process"
#: Maximum number of calls in a traceback, the innermost ones.
MAX_TRACEBACK_CALLS: Final = 50
#: Rejected lines that are logged individually; after them one log entry stands for this many.
MAX_LOGGED_REJECTIONS: Final = 10
REJECTIONS_PER_LOG: Final = 1_000


class Runtime:
    """Answers requests with the handlers of *registry*, one at a time and in order."""

    def __init__(self, registry: HandlerRegistry, *, now: Callable[[], float] = time.time) -> None:
        registry.prepare()
        self._registry = registry
        self._now = now
        self._telemetry = ExecutorTelemetry()
        #: Created for the first async handler.
        self._runner: asyncio.Runner | None = None
        #: Set by ``stop``, from another thread.
        self._stop_reason: str | None = None
        #: The scope and the task of the running handler, which ``stop`` cancels; None between two requests.
        self._scope: Scope | None = None
        self._task: asyncio.Task[Any] | None = None
        #: The process that answers requests; a handler may fork.
        self._pid = os.getpid()
        self._rejections = 0

    def serve(self, streams: ProtocolStreams) -> None:
        """Answer every line until the input ends, the outcomes have no reader, or ``stop`` is called."""
        try:
            for line in streams.read_lines():
                reply = self.reply(line)
                if os.getpid() != self._pid:
                    # A handler has forked, and its child returned here: it has no request to answer.
                    os._exit(0)
                if reply is not None:
                    streams.write(reply)
                if self._stop_reason is not None:
                    return
        except BrokenPipeError:
            logs.log_event(
                logging.WARNING, Event.EXECUTOR_STOPPING, {Field.REASON: "the outcomes have no reader"}, to=log
            )

    def stop(self, reason: str) -> None:
        """Take no more requests and cancel the running handler; thread-safe."""
        self._stop_reason = reason
        logs.log_event(logging.INFO, Event.EXECUTOR_STOPPING, {Field.REASON: reason}, to=log)
        scope, task = self._scope, self._task
        if scope is not None:
            scope.cancel()
        if task is not None:
            # The loop may be closed by now.
            with suppress(RuntimeError):
                task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Close the event loop of async handlers, if there is one; wait for tasks that they have left running."""
        runner, self._runner = self._runner, None
        if runner is not None and os.getpid() == self._pid:
            runner.close()

    # -- one line ---------------------------------------------------------------------------------

    def reply(self, line: bytes | OverlongLine) -> bytes | None:
        """Return the answer to *line*; None for a line without a job id, which is only logged."""
        request = read_request(line)
        if isinstance(request, InvalidMessage):
            return self._reject(request)
        handler = self._registry.get(request.function_name)
        if handler is None:
            message = self._registry.describe_unknown_handler(request.function_name)
            return write_outcome(_error_outcome(request.job_id, ErrorType.HANDLER_NOT_FOUND, message))
        variables = self._telemetry.begin(request)
        outcome, error = self._execute(handler, request, variables)
        line, outcome = _format_outcome(outcome)
        self._telemetry.end(outcome, error)
        return line

    def _reject(self, line: InvalidMessage) -> bytes | None:
        if line.job_id is not None:
            return write_outcome(_error_outcome(line.job_id, line.error_type, line.message))
        self._rejections += 1
        if self._rejections <= MAX_LOGGED_REJECTIONS or self._rejections % REJECTIONS_PER_LOG == 0:
            reason = f"{line.message}; {self._rejections} lines rejected so far"
            fields = {Field.REASON: line.reason.value, Field.BYTES: line.size, Field.ERROR: reason}
            logs.log_event(logging.WARNING, Event.LINE_REJECTED, fields, to=log)
        return None

    # -- one job ----------------------------------------------------------------------------------

    def _execute(
        self, handler: Handler, request: ExecutionRequest, variables: Context
    ) -> tuple[ExecutionOutcome, BaseException | None]:
        scope = self._scope = self._create_scope(request)
        try:
            if scope.deadline is not None and scope.remaining() == 0.0:
                return _timeout_outcome(request, "the deadline had passed before the handler could start"), None
            variables.run(scopes.set_scope, scope)
            variables.run(set_current_job, request.context)
            args, kwargs = handler.validate_arguments(request.args, request.kwargs)
            value = variables.run(handler.function, *args, **kwargs)
            if inspect.isawaitable(value):
                value = self._run_awaitable(value, scope, variables)
        except InvalidArgumentError as error:
            return _error_outcome(request.job_id, ErrorType.INVALID_ARGUMENT, error_message(error)), error
        except _DeadlinePassed as error:
            return _timeout_outcome(request, "the deadline passed while the handler ran; it was cancelled"), error
        except BaseException as error:  # noqa: BLE001 - the boundary of a handler: any exception is its outcome
            return self._failed_outcome(request, error), error
        finally:
            self._scope = None
        if isinstance(value, Retry):
            return _retry_outcome(request, value), value
        return ExecutionOutcome.model_construct(job_id=request.job_id, status=Status.SUCCESS, result=value), None

    def _create_scope(self, request: ExecutionRequest) -> Scope:
        context = request.context
        # The same id as in the orchestrator: ids that a handler derives here equal those derived in its process.
        transaction = Transaction(
            id=request.job_id,
            source=context.queue_name,
            type=request.function_name,
            created_at=context.enqueue_time.timestamp(),
            attempts=context.attempt - 1,
            trace=context.carrier,
        )
        due = None
        if context.deadline is not None:
            due = time.monotonic() + context.deadline.timestamp() - self._now()
        return Scope(transaction, SCOPE_STEP, context.attempt - 1, due)

    def _run_awaitable(self, value: Any, scope: Scope, variables: Context) -> Any:
        if self._runner is None:
            # One loop for all jobs, so that clients and connection pools of handlers outlive a job.
            self._runner = asyncio.Runner()
        result, error = self._runner.run(self._await_until_deadline(value, scope), context=variables)
        if error is not None:
            raise error
        return result

    async def _await_until_deadline(self, value: Any, scope: Scope) -> tuple[Any, BaseException | None]:
        self._task = task = asyncio.current_task()
        if self._stop_reason is not None and task is not None:
            # Stopped between the handler's call and here, when there was no task yet to cancel.
            task.cancel()
        try:
            async with asyncio.timeout(scope.remaining()) as limit:
                return await value, None
        except TimeoutError as error:
            # A handler may raise the same class itself.
            return None, _DeadlinePassed() if limit.expired() else error
        except BaseException as error:  # noqa: BLE001 - returned as data, so that it does not end the event loop
            return None, error
        finally:
            self._task = None

    def _failed_outcome(self, request: ExecutionRequest, error: BaseException) -> ExecutionOutcome:
        if isinstance(error, Retry):
            return _retry_outcome(request, error)
        if isinstance(error, asyncio.CancelledError) and self._stop_reason is not None:
            return _error_outcome(
                request.job_id, ErrorType.TERMINATED, f"the executor was stopped: {self._stop_reason}"
            )
        if isinstance(error, ErgonError) and _requests_retry(error):
            return _retry_outcome(request, error)
        stack = _format_traceback(error)
        # An exception that a module keeps and raises repeatedly would collect the frames of all its jobs.
        error.__traceback__ = None
        return _error_outcome(request.job_id, _error_type_name(error), error_message(error), traceback=stack)


class _DeadlinePassed(ErgonError):
    """The deadline of the job has passed, as opposed to a timeout inside the handler."""

    category = Category.TIMEOUT


# -- outcomes ---------------------------------------------------------------------------------------


def _error_outcome(job_id: str, kind: str, message: str, *, traceback: str | None = None) -> ExecutionOutcome:
    return ExecutionOutcome.model_construct(
        job_id=job_id,
        status=Status.ERROR,
        error_type=str(kind),
        error_message=message[:MAX_MESSAGE_CHARS],
        error_traceback=traceback,
    )


def _timeout_outcome(request: ExecutionRequest, message: str) -> ExecutionOutcome:
    return ExecutionOutcome(job_id=request.job_id, status=Status.TIMEOUT, error_message=message)


def _retry_outcome(request: ExecutionRequest, error: ErgonError) -> ExecutionOutcome:
    return ExecutionOutcome.model_construct(
        job_id=request.job_id,
        status=Status.RETRY,
        error_message=error_message(error)[:MAX_MESSAGE_CHARS] or None,
        error_type=_error_type_name(error),
        retry_after_seconds=error.retry_after,
    )


def _requests_retry(error: ErgonError) -> bool:
    """Whether a framework error requests another attempt at its own time."""
    if not has_valid_verdict(error) or error.final or error.category is Category.BUSINESS:
        return False
    return error.not_attempted or error.retry_after is not None


def _error_type_name(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__
    # A class may have any name, but must not be mistaken for an error type of the protocol.
    return f"{kind.__module__}.{name}"[:MAX_NAME_CHARS] if name in set(ErrorType) else name[:MAX_NAME_CHARS]


def _format_traceback(error: BaseException) -> str | None:
    inner_traceback = error.__traceback__
    while inner_traceback is not None and inner_traceback.tb_frame.f_code.co_filename == __file__:
        inner_traceback = inner_traceback.tb_next
    try:
        formatted = "".join(traceback.format_exception(type(error), error, inner_traceback, limit=-MAX_TRACEBACK_CALLS))
        formatted = reduce_validation(formatted, error)
    except Exception:  # noqa: BLE001 - an exception that cannot be formatted must not replace its outcome
        return None
    return truncate_utf8_tail(formatted, MAX_TRACEBACK_BYTES)


def _format_outcome(outcome: ExecutionOutcome) -> tuple[bytes, ExecutionOutcome]:
    """Return the line and the outcome that it reports: a result that cannot be sent is an error."""
    try:
        return write_outcome(outcome, default=_to_jsonable), outcome
    except LineError as error:
        reason = error_message(error)
    except BaseException as error:  # noqa: BLE001 - a result may run its own code while it is serialized
        reason = f"{_error_type_name(error)}: {error_message(error)}"
    failed = _error_outcome(outcome.job_id, ErrorType.INVALID_RESULT, f"the result cannot be sent: {reason}")
    return write_outcome(failed), failed


#: Types that a result may contain in addition to JSON types. Iterators are excluded: they may be infinite.
_ATOMIC_TYPES: Final = (dt.date, dt.time, dt.timedelta, decimal.Decimal, uuid.UUID)
_CONTAINER_TYPES: Final = (BaseModel, enum.Enum, set, frozenset)


def _to_jsonable(value: Any) -> Any:
    if isinstance(value, _ATOMIC_TYPES):
        return to_jsonable_python(value)
    if isinstance(value, _CONTAINER_TYPES) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        # Converted through its text: as a value, one of two keys with the same JSON form would be lost silently.
        return parse_json(to_json(value))
    raise TypeError(f"a {type(value).__qualname__} is not JSON")
