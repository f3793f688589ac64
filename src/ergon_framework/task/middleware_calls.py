"""Calls of middleware around the lifecycle of a transaction and around each attempt.

A part is one method of one middleware. The parts of an attempt run inside the call of its handler. Those of a
transaction are entered by the first call, and again tried by the next one where entering fails. They are left when the
outcome is decided and the last call has exited: in a call of their own, or by an abandoned call, one that timed out,
when it exits late. They run in a context of their own, and each attempt gets the context variables that they set.

The rules are scripts, generators that yield operations. A runner of each variant performs them: it calls them, or
awaits them. A loop without middleware uses nothing of this module.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, Final, TypeAlias

from ergon_framework import scope
from ergon_framework.engine.aio import await_in_context
from ergon_framework.engine.effects import (
    NEVER,
    Call,
    Err,
    Expired,
    Interrupted,
    Ok,
    Script,
    await_exit,
    call,
    reject_unstarted_coroutine,
)
from ergon_framework.errors import Category, error_message
from ergon_framework.scope import Scope
from ergon_framework.task.middleware import (
    METHODS,
    AsyncMiddleware,
    AttemptContext,
    Middleware,
    TransactionContext,
    check_middleware,
)
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import Event, Field
from ergon_framework.transaction import Transaction
from ergon_framework.worker.events import TransactionObserver
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.lifecycle import LifecycleSpec, LifecycleStarter
from ergon_framework.worker.report import Outcome, OutcomeKind

#: Maximum seconds in which the middleware of a released transaction is left: the loop waits for it while it ends.
RELEASE_EXIT_SECONDS: Final = 0.5

_MISSING: Final = object()

Operation: TypeAlias = Callable[[], Any]
#: Yields operations, and returns the result of the call that they surround.
OperationScript: TypeAlias = Generator[Operation, Any, Ok | Err]


class Part:
    """One method of one middleware."""

    __slots__ = ("create", "name")

    def __init__(self, middleware: Any, method: str) -> None:
        self.name = type(middleware).__name__
        self.create: Callable[[Any], Any] = getattr(middleware, method)


class MiddlewareSet:
    """The middleware of one loop, and how it is called in the variant of the task."""

    def __init__(self, middleware: Sequence[Any], *, task: str, queue: str, is_async: bool) -> None:
        self.task = task
        self.queue = queue
        base: Any = AsyncMiddleware if is_async else Middleware
        self.transaction_parts, self.attempt_parts = (
            [Part(each, name) for each in middleware if _is_overridden(each, name, base)] for name in METHODS
        )
        self.enter, self.exit = ("__aenter__", "__aexit__") if is_async else ("__enter__", "__exit__")
        self.run: Callable[[OperationScript], Any] = _run_async if is_async else _run
        self.run_in: Callable[..., Any] = await_in_context if is_async else Context.run

    def open_part(self, part: Part, context: Any) -> Any:
        """Return the context manager of *part*, not entered."""
        manager = part.create(context)
        if not (hasattr(type(manager), self.enter) and hasattr(type(manager), self.exit)):
            raise TypeError(f"it returned a {type(manager).__name__}, which has no {self.enter} and {self.exit}")
        return manager


def _is_overridden(middleware: Any, name: str, base: Any) -> bool:
    return getattr(getattr(middleware, name), "__func__", None) is not getattr(base, name)


def choose_middleware(task: Any, *, is_async: bool) -> MiddlewareSet | None:
    """Return the middleware of *task*, None if it has none."""
    middleware = getattr(task, "middleware", ())
    if not middleware:
        return None
    name = str(getattr(task, "name", type(task).__name__))
    checked = check_middleware(middleware, task=name, is_async=is_async)
    return MiddlewareSet(checked, task=name, queue=task.connector.name, is_async=is_async)


def wrap_lifecycle(
    middleware: MiddlewareSet, spec: LifecycleSpec, start: LifecycleStarter, *, handles_exception: bool
) -> tuple[LifecycleSpec, LifecycleStarter]:
    """Return *spec* and *start* with the middleware around them.

    A step whose handler the task does not define has no middleware: it runs no user code.
    """
    steps = ["process"]
    if not spec.skips_success:
        steps.append("success")
    if handles_exception:
        steps.append("exception")
    if middleware.attempt_parts:
        spec = _wrap_steps(spec, steps, lambda fn: partial(_call_attempt, middleware, fn))
    if middleware.transaction_parts:
        start = partial(_run_transaction, middleware, start, tuple(steps))
    return spec, start


def _wrap_steps(
    spec: LifecycleSpec, steps: Sequence[str], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> LifecycleSpec:
    wrapped = copy.copy(spec)
    for name in steps:
        step = copy.copy(getattr(spec, name))
        step.fn = wrap(step.fn)
        setattr(wrapped, name, step)
    return wrapped


# -- runners ----------------------------------------------------------------------------------------


def _run(script: OperationScript) -> Any:
    """Perform the operations of *script* by calling them; return the value of its result, or raise its error."""
    try:
        operation = next(script)
        while True:
            try:
                value = operation()
            except BaseException as error:  # noqa: BLE001 - the script decides what follows
                operation = script.throw(error)
            else:
                operation = script.send(value)
    except StopIteration as stop:
        answer = stop.value
    return _unpack(answer)


async def _run_async(script: OperationScript) -> Any:
    """Perform the operations of *script* by awaiting them, as ``_run`` does by calling them."""
    try:
        operation = next(script)
        while True:
            try:
                value = operation()
                if inspect.isawaitable(value):
                    value = await value
            except BaseException as error:  # noqa: BLE001 - the script decides what follows
                operation = script.throw(error)
            else:
                operation = script.send(value)
    except StopIteration as stop:
        answer = stop.value
    return _unpack(answer)


def _unpack(answer: Ok | Err) -> Any:
    if isinstance(answer, Ok):
        return answer.value
    try:
        raise answer.error
    finally:
        del answer  # breaks the reference cycle between the frame and the exception


# -- attempts ---------------------------------------------------------------------------------------


def _call_attempt(middleware: MiddlewareSet, fn: Callable[..., Any], transaction: Transaction, *extra_args: Any) -> Any:
    return middleware.run(
        _surround_attempt(middleware, _get_scope(), transaction, partial(fn, transaction, *extra_args))
    )


def _surround_attempt(
    middleware: MiddlewareSet, own_scope: Scope, transaction: Transaction, handler: Operation
) -> OperationScript:
    """Enter the parts, call the handler, and exit the parts in reverse order, also after an error."""
    context = AttemptContext(
        task=middleware.task,
        queue=middleware.queue,
        transaction=transaction,
        step=own_scope.step,
        attempt=own_scope.attempt,
    )
    entered: list[tuple[Part, Any]] = []
    answer: Ok | Err
    try:
        for part in middleware.attempt_parts:
            try:
                manager = middleware.open_part(part, context)
                yield partial(getattr(type(manager), middleware.enter), manager)
            except Exception as error:
                raise _middleware_error(part, "enter", error) from error
            entered.append((part, manager))
        answer = Ok(reject_unstarted_coroutine((yield handler)))
    except BaseException as error:  # noqa: BLE001 - a result is data; it is raised when the parts have exited
        answer = Err(error)
    while entered:
        # The engine discards the result of an abandoned attempt, so a part must not commit what it did.
        if isinstance(answer, Ok) and (own_scope.cancelled or own_scope.remaining() == 0.0):
            answer = Err(_abandoned_error())
        part, manager = entered.pop()
        error_now = answer.error if isinstance(answer, Err) else None
        try:
            yield partial(getattr(type(manager), middleware.exit), manager, *_exit_arguments(error_now))
        except Exception as error:  # noqa: BLE001 - the boundary of user code
            if error_now is None:
                answer = Err(_middleware_error(part, "exit", error))
            elif error is not error_now:
                # The error of the handler decides; this one must not replace its category.
                _log_failure(part, "exit", error, context)
        except BaseException as error:  # noqa: BLE001 - a cancellation, or the end of the interpreter
            answer = Err(error)
    return answer


def _get_scope() -> Scope:
    own_scope = scope.current()
    assert own_scope is not None  # noqa: S101 - every driver sets it before it calls a handler
    return own_scope


def _exit_arguments(error: BaseException | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


def _middleware_error(part: Part, verb: str, error: BaseException) -> TransactionException:
    message = f"middleware {part.name} failed on {verb}: {type(error).__name__}: {error_message(error, raw=True)}"
    wrapped = TransactionException(message, Category.SYSTEM, code="middleware_failed")
    wrapped.__cause__ = error
    return wrapped


def _abandoned_error() -> TransactionException:
    message = "attempt was abandoned: its time limit has passed or its loop has ended; its result is discarded"
    return TransactionException(message, Category.TIMEOUT, code="attempt_abandoned")


def _log_failure(part: Part, verb: str, error: BaseException, context: AttemptContext | TransactionContext) -> None:
    fields = {
        Field.TASK: context.task,
        Field.TRANSACTION_ID: context.transaction.id,
        Field.QUEUE: context.queue,
        Field.MIDDLEWARE: part.name,
        Field.STEP: getattr(context, "step", None),
        Field.REASON: f"failed on {verb}",
        Field.ERROR: error_message(error, raw=True),
        Field.ERROR_TYPE: type(error).__name__,
    }
    logs.log_event(logging.ERROR, Event.MIDDLEWARE_FAILED, fields, exc_info=error)


# -- transactions -----------------------------------------------------------------------------------


class OpenTransaction:
    """The entered parts of one transaction, and the number of its calls that run; thread-safe."""

    def __init__(self, middleware: MiddlewareSet, transaction: Transaction) -> None:
        self._middleware = middleware
        self._context = TransactionContext(
            task=middleware.task, queue=middleware.queue, transaction=transaction.isolate()
        )
        self._lock = threading.Lock()
        self._calls = 0
        self._entered: list[tuple[Part, Any]] = []
        self._is_entering = False
        self._is_decided = False
        #: Passed to the parts when they exit.
        self._error: BaseException | None = None
        #: The part that exits now.
        self._exiting: Part | None = None
        #: The context of the first call, and the context in which the parts run, which begins as a copy of it.
        self._base = self._own_context = Context()
        #: The context variables that the parts have set.
        self._variables: list[tuple[ContextVar[Any], Any]] = []

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call *fn* inside the parts."""
        return self._middleware.run(self._surround_call(partial(fn, *args)))

    def leave(self) -> Any:
        """Exit the parts in reverse order."""
        return self._middleware.run(self._exit_parts())

    @property
    def has_entered(self) -> bool:
        return bool(self._entered)

    def decide(self, outcome: Outcome) -> bool:
        """Record the outcome; return whether no call runs. Otherwise the last one leaves the parts when it exits."""
        object.__setattr__(self._context, "outcome", _copy_outcome(outcome))
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            self._error = outcome.error or TransactionException("transaction was released", code="released")
        with self._lock:
            self._is_decided = True
            return self._calls == 0

    def _surround_call(self, handler: Operation) -> OperationScript:
        own_scope = _get_scope()
        with self._lock:
            if self._is_decided:  # abandoned before it started
                return Err(_abandoned_error())
            self._calls += 1
        answer: Ok | Err
        try:
            yield from self._enter_parts()
            for variable, value in self._variables:
                variable.set(value)
            scope.set_scope(own_scope)
            answer = Ok((yield handler))
        except BaseException as error:  # noqa: BLE001 - a result is data; it is raised when the call has ended
            answer = Err(error)
        with self._lock:
            self._calls -= 1
            is_last = self._is_decided and self._calls == 0
        if is_last:
            yield from self._exit_parts()
        return answer

    def _enter_parts(self) -> Iterator[Operation]:
        """Enter the parts that are not entered; the call fails if one of them fails."""
        middleware, entered = self._middleware, self._entered
        with self._lock:
            waiting = middleware.transaction_parts[len(entered) :]
            if self._is_entering:
                raise TransactionException(
                    f"middleware of {middleware.task} cannot be entered: an abandoned attempt is still entering it",
                    code="middleware_failed",
                )
            if not waiting:
                return
            self._is_entering = True
        if not entered:
            self._base = copy_context()
            self._own_context = self._base.copy()
        try:
            for part in waiting:
                try:
                    manager = self._own_context.run(middleware.open_part, part, self._context)
                    yield partial(
                        middleware.run_in, self._own_context, getattr(type(manager), middleware.enter), manager
                    )
                except Exception as error:
                    raise _middleware_error(part, "enter", error) from error
                entered.append((part, manager))
                if self._is_decided:
                    raise _abandoned_error()
        finally:
            base = self._base
            self._variables = [
                (variable, value)
                for variable, value in self._own_context.items()
                if base.get(variable, _MISSING) is not value
            ]
            with self._lock:
                self._is_entering = False

    def _exit_parts(self) -> OperationScript:
        """Exit the parts; an error of one of them is logged, because the outcome is decided."""
        middleware, error = self._middleware, self._error
        trace = None if error is None else error.__traceback__
        while self._entered:
            part, manager = self._entered.pop()
            self._exiting = part
            exit_part = getattr(type(manager), middleware.exit)
            try:
                yield partial(middleware.run_in, self._own_context, exit_part, manager, *_exit_arguments(error))
            except BaseException as raised:  # noqa: BLE001 - the boundary of user code; the outcome stays
                if raised is not error:
                    _log_failure(part, "exit", raised, self._context)
        self._exiting = None
        if error is not None:
            error.__traceback__ = trace
        return Ok(None)

    def log_slow_exit(self, seconds: float) -> None:
        """Log that the part that exits now needs longer than *seconds*."""
        part = self._exiting
        if part is not None:
            _log_failure(part, "exit", TimeoutError(f"it did not exit within {seconds:g} s"), self._context)


def _copy_outcome(outcome: Outcome) -> Outcome:
    """Return a copy that a middleware can change without an effect on the transaction."""
    copied = copy.copy(outcome)
    copied.durations = dict(outcome.durations)
    copied.failed_attempts = list(outcome.failed_attempts)
    return copied


def _run_transaction(  # noqa: PLR0917 - the last three are those of a LifecycleStarter
    middleware: MiddlewareSet,
    start: LifecycleStarter,
    steps: Sequence[str],
    spec: LifecycleSpec,
    transaction: Transaction,
    observer: TransactionObserver | None = None,
) -> Script[Outcome]:
    """Run one lifecycle inside the parts of its transaction."""
    opened = OpenTransaction(middleware, transaction)
    wrapped = _wrap_steps(spec, steps, lambda fn: partial(opened.call, fn))
    outcome = yield from start(wrapped, transaction, observer)
    if opened.decide(outcome) and opened.has_entered:
        yield from _leave(opened, spec, outcome)
    return outcome


def _leave(opened: OpenTransaction, spec: LifecycleSpec, outcome: Outcome) -> Script[None]:
    """Leave the parts in a call of their own, within the timeout of process or produce."""
    limit = NEVER if spec.process.retry.timeout is None else spec.process.retry.timeout
    if outcome.kind is OutcomeKind.RELEASED:
        limit = min(limit, RELEASE_EXIT_SECONDS)
    while True:
        exit_call = Call("middleware", opened.leave, (), spec.clock.monotonic() + limit)
        answer = yield from call(exit_call)
        # An interrupt that arrived before the call has started nothing; the loop waits for this script then.
        if not isinstance(answer, Interrupted) or answer.call is not None:
            break
        limit = min(limit, RELEASE_EXIT_SECONDS)
    if isinstance(answer, Expired | Interrupted):
        # Cancelled where the driver can do that. A redelivery of the transaction must not overlap with it.
        yield from await_exit(exit_call, spec.clock.monotonic())
        outcome.abandoned_calls = (*outcome.abandoned_calls, exit_call)
        opened.log_slow_exit(limit)
