"""Runtime: a Python executor. It reads requests, runs handlers one at a time, and answers each with one line."""

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
from contextvars import Context
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_json, to_jsonable_python

from ergon_framework import scope as scopes
from ergon_framework.errors import Category, ErgonError, is_sound, reduce_validation, text
from ergon_framework.executor import job
from ergon_framework.executor.lines import LineError, Overlong, parsed
from ergon_framework.executor.observe import Observer
from ergon_framework.executor.protocol import (
    LONGEST_MESSAGE,
    LONGEST_NAME,
    LONGEST_TRACEBACK,
    BadLine,
    ErrorType,
    ExecutionOutcome,
    ExecutionRequest,
    Status,
    cut,
    read_request,
    write_outcome,
)
from ergon_framework.executor.registry import Handler, InvalidArgumentError, Registry, Retry
from ergon_framework.executor.streams import Streams
from ergon_framework.scope import Scope
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.transaction import Transaction

log: Final = logging.getLogger(f"{LIBRARY}.executor")

#: The name of the step in a handler's scope.
STEP: Final = "process"
#: How many calls of a traceback are told, the innermost ones.
CALLS: Final = 50
#: Refused lines that are logged one by one; after them one log entry stands for this many.
LOGGED_REFUSALS: Final = 10
REFUSALS_PER_LOG: Final = 1_000


class Runtime:
    """Answers requests out of *registry*, one at a time and in their order."""

    def __init__(self, registry: Registry, *, now: Callable[[], float] = time.time) -> None:
        registry.prepare()
        self._registry = registry
        self._now = now
        self._observer = Observer()
        self._runner: asyncio.Runner | None = None
        self._stopping: str | None = None
        self._scope: Scope | None = None
        self._task: asyncio.Task[Any] | None = None
        self._pid = os.getpid()
        self._refusals = 0

    def serve(self, streams: Streams) -> None:
        """Answer every line that comes, until there are no more, nobody reads, or ``stop`` is called."""
        try:
            for line in streams.lines():
                reply = self.reply(line)
                if os.getpid() != self._pid:
                    # A handler has forked, and its child came back here: it has no request, and nobody to answer.
                    os._exit(0)
                if reply is not None:
                    streams.write(reply)
                if self._stopping is not None:
                    return
        except BrokenPipeError:
            logs.say(logging.WARNING, Event.EXECUTOR_STOPPING, {Field.REASON: "nobody reads the outcomes"}, to=log)

    def stop(self, reason: str) -> None:
        """No further request is taken, and the running handler is told; any thread may ask."""
        self._stopping = reason
        logs.say(logging.INFO, Event.EXECUTOR_STOPPING, {Field.REASON: reason}, to=log)
        scope, task = self._scope, self._task
        if scope is not None:
            scope.cancel()
        if task is not None:
            # The loop may have been closed in this moment.
            with suppress(RuntimeError):
                task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """End the event loop of async handlers, if there ever was one; waits for what they have left running there."""
        runner, self._runner = self._runner, None
        if runner is not None and os.getpid() == self._pid:
            runner.close()

    # -- one line ---------------------------------------------------------------------------------

    def reply(self, line: bytes | Overlong) -> bytes | None:
        """The answer to *line*; None for a line that names no job, which is only logged."""
        request = read_request(line)
        if isinstance(request, BadLine):
            return self._refused(request)
        handler = self._registry.get(request.function_name)
        if handler is None:
            told = self._registry.unknown(request.function_name)
            return write_outcome(_error(request.job_id, ErrorType.HANDLER_NOT_FOUND, told))
        variables = self._observer.begin(request)
        outcome, error = self._executed(handler, request, variables)
        line, outcome = _written(outcome)
        self._observer.end(outcome, error)
        return line

    def _refused(self, line: BadLine) -> bytes | None:
        if line.job_id is not None:
            return write_outcome(_error(line.job_id, line.error_type, line.message))
        self._refusals += 1
        if self._refusals <= LOGGED_REFUSALS or self._refusals % REFUSALS_PER_LOG == 0:
            reason = f"{line.message}; {self._refusals} lines refused so far"
            fields = {Field.REASON: line.reason.value, Field.BYTES: line.size, Field.ERROR: reason}
            logs.say(logging.WARNING, Event.LINE_REFUSED, fields, to=log)
        return None

    # -- one job ----------------------------------------------------------------------------------

    def _executed(
        self, handler: Handler, request: ExecutionRequest, variables: Context
    ) -> tuple[ExecutionOutcome, BaseException | None]:
        scope = self._scope = self._scoped(request)
        try:
            if scope.deadline is not None and scope.remaining() == 0.0:
                return _timeout(request, "the deadline had passed before the handler could start"), None
            variables.run(scopes.enter, scope)
            variables.run(job.enter, request.context)
            args, kwargs = handler.fit(request.args, request.kwargs)
            value = variables.run(handler.function, *args, **kwargs)
            if inspect.isawaitable(value):
                value = self._awaited(value, scope, variables)
        except InvalidArgumentError as error:
            return _error(request.job_id, ErrorType.INVALID_ARGUMENT, text(error)), error
        except _Expired as error:
            return _timeout(request, "the deadline passed while the handler ran; it was cancelled"), error
        except BaseException as error:  # noqa: BLE001 - the boundary of a handler: whatever it raises is its outcome
            return self._failed(request, error), error
        finally:
            self._scope = None
        if isinstance(value, Retry):
            return _retry(request, value), value
        return ExecutionOutcome.model_construct(job_id=request.job_id, status=Status.SUCCESS, result=value), None

    def _scoped(self, request: ExecutionRequest) -> Scope:
        context = request.context
        # One id: what a handler derives here is what it would derive in the orchestrator's own process.
        transaction = Transaction(
            request.job_id,
            source=context.queue_name,
            type=request.function_name,
            created_at=context.enqueue_time.timestamp(),
            attempts=context.attempt - 1,
            trace=context.carrier,
        )
        due = None
        if context.deadline is not None:
            due = time.monotonic() + context.deadline.timestamp() - self._now()
        return Scope(transaction, STEP, context.attempt - 1, due)

    def _awaited(self, value: Any, scope: Scope, variables: Context) -> Any:
        if self._runner is None:
            # One loop for all jobs, so that clients and connection pools of handlers outlive a job.
            self._runner = asyncio.Runner()
        ended, error = self._runner.run(self._body(value, scope), context=variables)
        if error is not None:
            raise error
        return ended

    async def _body(self, value: Any, scope: Scope) -> tuple[Any, BaseException | None]:
        self._task = task = asyncio.current_task()
        if self._stopping is not None and task is not None:
            # Told between the handler's call and here, when there was no task yet that could have been.
            task.cancel()
        try:
            async with asyncio.timeout(scope.remaining()) as limit:
                return await value, None
        except TimeoutError as error:
            # A handler may raise the same class by itself.
            return None, _Expired() if limit.expired() else error
        except BaseException as error:  # noqa: BLE001 - handed on as data, so that none of it ends the event loop
            return None, error
        finally:
            self._task = None

    def _failed(self, request: ExecutionRequest, error: BaseException) -> ExecutionOutcome:
        if isinstance(error, Retry):
            return _retry(request, error)
        if isinstance(error, asyncio.CancelledError) and self._stopping is not None:
            return _error(request.job_id, ErrorType.TERMINATED, f"the executor was told to end: {self._stopping}")
        if isinstance(error, ErgonError) and _later(error):
            return _retry(request, error)
        told = _trace(error)
        # An exception that a module keeps and raises again would gather the calls of all its jobs.
        error.__traceback__ = None
        return _error(request.job_id, _name(error), text(error), traceback=told)


class _Expired(ErgonError):
    """Our own limit has struck, and no other."""

    category = Category.TIMEOUT


# -- outcomes -------------------------------------------------------------------------------------


def _error(job_id: str, kind: str, message: str, *, traceback: str | None = None) -> ExecutionOutcome:
    return ExecutionOutcome.model_construct(
        job_id=job_id,
        status=Status.ERROR,
        error_type=str(kind),
        error_message=message[:LONGEST_MESSAGE],
        error_traceback=traceback,
    )


def _timeout(request: ExecutionRequest, message: str) -> ExecutionOutcome:
    return ExecutionOutcome(job_id=request.job_id, status=Status.TIMEOUT, error_message=message)


def _retry(request: ExecutionRequest, error: ErgonError) -> ExecutionOutcome:
    return ExecutionOutcome.model_construct(
        job_id=request.job_id,
        status=Status.RETRY,
        error_message=text(error)[:LONGEST_MESSAGE] or None,
        error_type=_name(error),
        retry_after_seconds=error.retry_after,
    )


def _later(error: ErgonError) -> bool:
    """Whether an error of ours asks for another attempt at a time of its own."""
    if not is_sound(error) or error.final or error.category is Category.BUSINESS:
        return False
    return error.later or error.retry_after is not None


def _name(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__
    # A class may be called what it likes, but not pass for a word of the protocol.
    return f"{kind.__module__}.{name}"[:LONGEST_NAME] if name in set(ErrorType) else name[:LONGEST_NAME]


def _trace(error: BaseException) -> str | None:
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    try:
        told = "".join(traceback.format_exception(type(error), error, inner, limit=-CALLS))
        told = reduce_validation(told, error)
    except Exception:  # noqa: BLE001 - an exception that cannot be told must not replace its outcome
        return None
    return cut(told, LONGEST_TRACEBACK)


def _written(outcome: ExecutionOutcome) -> tuple[bytes, ExecutionOutcome]:
    """The line, and the outcome that it says: a result that cannot be sent is an error."""
    try:
        return write_outcome(outcome, default=_translated), outcome
    except LineError as error:
        told = text(error)
    except BaseException as error:  # noqa: BLE001 - a result may run code of its own while it is written
        told = f"{_name(error)}: {text(error)}"
    failed = _error(outcome.job_id, ErrorType.INVALID_RESULT, f"the result cannot be sent: {told}")
    return write_outcome(failed), failed


#: What a result may be made of besides JSON. Iterators are not: they may have no end.
_ATOMS: Final = (dt.date, dt.time, dt.timedelta, decimal.Decimal, uuid.UUID)
_CONTAINERS: Final = (BaseModel, enum.Enum, set, frozenset)


def _translated(value: Any) -> Any:
    if isinstance(value, _ATOMS):
        return to_jsonable_python(value)
    if isinstance(value, _CONTAINERS) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        # By way of its text: as a value, one of two keys that are written alike would be gone without a word.
        return parsed(to_json(value))
    raise TypeError(f"a {type(value).__qualname__} is no JSON")
