"""The lifecycle of a transaction: PROCESS, then SUCCESS; or EXCEPTION, exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Settlement
from ergon_framework.engine.attempts import Deferred, Failed, Overrun, Step, StepObserver, StepResult, run_step
from ergon_framework.engine.effects import NEVER, Script
from ergon_framework.engine.outcome import Interrupted, Ok
from ergon_framework.errors import Category, ErgonError, error_message, has_valid_verdict
from ergon_framework.failure import Attempt, describe_error, trim_history
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.groups import classify_group
from ergon_framework.task.report import Outcome, OutcomeKind
from ergon_framework.transaction import MAX_HISTORY, Transaction

if TYPE_CHECKING:
    from ergon_framework.engine.senses import Clock


class TransactionObserver(Protocol):
    """An observer of one transaction's lifecycle."""

    @property
    def recording(self) -> bool:
        """Whether the observer records the lifecycle."""

    def on_step_start(self, step: Step) -> StepObserver | None:
        """Handle the start of a step; return the observer of its attempts, if any."""

    def on_step_end(self, result: StepResult) -> None:
        """Handle the end of the current step."""

    def on_end(self, outcome: Outcome) -> None:
        """Handle the end of the lifecycle."""


class LifecycleSpec:
    """The common parameters of all lifecycles of a loop."""

    __slots__ = ("clock", "exception", "process", "skips_success", "success", "timeout")

    def __init__(
        self,
        process: Step,
        success: Step,
        exception: Step,
        *,
        clock: Clock,
        timeout: float | None = None,
        skips_success: bool = False,
    ) -> None:
        self.process = process
        self.success = success
        self.exception = exception
        self.clock = clock
        self.timeout = timeout
        #: The task has no success handler; the step is skipped, unless it is recorded: a trace shows every step.
        self.skips_success = skips_success


def classify(error: BaseException) -> TransactionException:
    """Classify any failure of process or produce; a TransactionException with a valid verdict keeps it."""
    if isinstance(error, TransactionException) and has_valid_verdict(error):
        return error
    if isinstance(error, ErgonError) and has_valid_verdict(error):
        return _wrap(error, error.category, verdict=error)
    if isinstance(error, BaseExceptionGroup):
        return classify_group(error)
    return _wrap(error, Category.SYSTEM)


def classify_handler(error: BaseException) -> TransactionException:
    """Classify the error of a handler as SYSTEM: a handler has no business failures, so its errors are retried."""
    classified = classify(error)
    if classified.category is Category.SYSTEM:
        return classified
    return _wrap(error, Category.SYSTEM, verdict=classified)


def timeout_error(step: Step, overrun: Overrun, lifetime: float | None) -> TransactionException:
    """Return the TIMEOUT of *step*; it names the exceeded limit and the policy key that sets it."""
    if overrun is Overrun.ATTEMPT:
        message = f"{step.name} did not finish within {step.retry.timeout:g} s (steps.{step.name}.retry.timeout)"
        return TransactionException(message, Category.TIMEOUT, code="step_timeout")
    verb = "start" if overrun is Overrun.UNSTARTED else "finish"
    message = f"{step.name} did not {verb} within the {lifetime:g} s of its transaction (loop.transaction_timeout)"
    return TransactionException(message, Category.TIMEOUT, code="lifecycle_timeout")


def _wrap(error: BaseException, category: Category, verdict: ErgonError | None = None) -> TransactionException:
    message = (
        f"{type(error).__name__}: {error_message(error, raw=True)}"
        if verdict is None
        else error_message(verdict, raw=True)
    )
    wrapped = TransactionException(message, category)
    if verdict is not None:
        wrapped.retry_after, wrapped.final, wrapped.code = verdict.retry_after, verdict.final, verdict.code
        wrapped.not_attempted, wrapped.temporary = verdict.not_attempted, verdict.temporary
    wrapped.__cause__ = error
    return wrapped


class LifecycleStarter(Protocol):
    """Starts one lifecycle: ``run_lifecycle`` itself, or the method of a task that calls it."""

    def __call__(
        self, spec: LifecycleSpec, transaction: Transaction, observer: TransactionObserver | None = None, /
    ) -> Script[Outcome]: ...


def run_lifecycle(
    spec: LifecycleSpec, transaction: Transaction, observer: TransactionObserver | None = None
) -> Script[Outcome]:
    """Run one transaction from its start to exactly one outcome."""
    outcome = Outcome(transaction)
    step, started_at = spec.process, spec.clock.monotonic()
    limit = NEVER if spec.timeout is None else started_at + spec.timeout
    # Attempts of earlier deliveries count (a producer has none), but every delivery gets at least one attempt.
    earlier_attempts = transaction.attempts if step.defers else 0
    first = min(earlier_attempts, step.retry.max_attempts - 1) if earlier_attempts else 0
    step_observer = None if observer is None else observer.on_step_start(step)
    result = yield from run_step(
        step,
        (),
        outcome.failed_attempts,
        transaction,
        spec.clock,
        limit=limit,
        lifetime=spec.timeout,
        observer=step_observer,
        first=first,
    )
    _record_step_end(spec, outcome, step, result, started_at, observer)
    # Successful attempts, and attempts that could not even try (not counted), are not among the failed ones.
    outcome.attempts = earlier_attempts + len(outcome.failed_attempts)
    if type(result) is Ok:
        outcome.attempts += 1
        outcome.started = outcome.processed = True
        outcome.result = result.value
        if not spec.skips_success or (observer is not None and observer.recording):
            result = yield from _run_handler_step(spec, spec.success, (result.value,), outcome, limit, observer)
    else:
        outcome.started = bool(outcome.failed_attempts) or _was_called(result)
    if type(result) is Ok:
        outcome.kind = OutcomeKind.SUCCEEDED
        if result.value is not None or outcome.result is not None:
            outcome.settlement = _to_settlement(result.value) or _to_settlement(outcome.result)
    elif type(result) is Failed:
        result = yield from _handle_failure(spec, outcome, result, observer)
    if type(result) is Deferred:
        _set_deferred(outcome, result)
    elif type(result) is Interrupted:
        _set_released(outcome, result, earlier_attempts)
    # The store counts the attempts that an executor made; they are not counted here.
    attempts_made: Any = getattr(outcome.error, "attempts_made", None)
    if isinstance(attempts_made, int) and attempts_made >= 0:  # a subclass may use the name for something else
        outcome.attempts = attempts_made
    if observer is not None:
        observer.on_end(outcome)
    return outcome


def _handle_failure(
    spec: LifecycleSpec, outcome: Outcome, failed: Failed, observer: TransactionObserver | None
) -> Script[StepResult]:
    """Run the exception handler, without the lifecycle's deadline: it must also handle an expired lifecycle."""
    error: Any = failed.error
    error.still_running = failed.abandoned_call is not None
    outcome.error, outcome.abandoned_call = error, failed.abandoned_call
    result = yield from _run_handler_step(spec, spec.exception, (error,), outcome, NEVER, observer)
    if type(result) is Ok:
        outcome.kind = OutcomeKind.FAILED
        outcome.settlement = _to_settlement(result.value)
    elif type(result) is Failed:
        outcome.kind = OutcomeKind.HANDLER_FAILED
        outcome.handler_error = result.error
        outcome.abandoned_call = result.abandoned_call or outcome.abandoned_call
    return result


def _run_handler_step(  # noqa: PLR0917 - keywords cost more, and this is done for every transaction
    spec: LifecycleSpec,
    step: Step,
    extra_args: tuple[Any, ...],
    outcome: Outcome,
    limit: float,
    observer: TransactionObserver | None,
) -> Script[StepResult]:
    started_at = spec.clock.monotonic()
    step_observer = None if observer is None else observer.on_step_start(step)
    result = yield from run_step(
        step,
        extra_args,
        outcome.failed_attempts,
        outcome.transaction,
        spec.clock,
        limit=limit,
        lifetime=spec.timeout,
        observer=step_observer,
    )
    _record_step_end(spec, outcome, step, result, started_at, observer)
    return result


def _record_step_end(  # noqa: PLR0917 - as above
    spec: LifecycleSpec,
    outcome: Outcome,
    step: Step,
    result: StepResult,
    started_at: float,
    observer: TransactionObserver | None,
) -> None:
    if observer is not None:
        observer.on_step_end(result)
    outcome.durations[step.name] = spec.clock.monotonic() - started_at


def _set_deferred(outcome: Outcome, deferred: Deferred) -> None:
    outcome.kind = OutcomeKind.DEFERRED
    outcome.error = deferred.error
    outcome.settlement = Defer(deferred.delay, outcome.attempts, attempt_history(outcome), deferred.deferral)


def _was_called(result: StepResult) -> bool:
    """Return whether a step without a failed attempt called its function: a stop or timeout may precede the call."""
    return type(result) is Deferred or (type(result) is Interrupted and result.call is not None)


def _set_released(outcome: Outcome, interrupted: Interrupted, earlier_attempts: int) -> None:
    """Release the transaction unchanged: this delivery counts no attempt. The loop replaces the reason by its own."""
    outcome.kind = OutcomeKind.RELEASED
    outcome.reason = "stop"
    outcome.attempts = earlier_attempts
    outcome.error = None
    outcome.abandoned_call = interrupted.call or outcome.abandoned_call


def _to_settlement(value: Any) -> Settlement | None:
    return value if isinstance(value, Ack | Defer | DeadLetter) else None


def attempt_history(outcome: Outcome) -> tuple[Attempt, ...]:
    """Return the last attempts, including those of earlier deliveries, as they travel with the transaction."""
    new = tuple(
        Attempt(
            attempt=failed_attempt.attempt,
            category=failed_attempt.error.category,
            code=failed_attempt.error.code,
            error=describe_error(failed_attempt.error),
            at=failed_attempt.occurred_at,
            delay=failed_attempt.delay,
        )
        for failed_attempt in outcome.failed_attempts
        if failed_attempt.step not in ("success", "exception")
    )
    return trim_history(outcome.transaction.history + new, MAX_HISTORY)
