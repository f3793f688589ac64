"""The lifecycle of a transaction: the step process, then success; or exception, exactly once.

Each step calls a handler of the task, with retries. The lifecycle is a script: a generator that yields effects, such as
calls, for a driver to perform. A delivery is a transaction with its claim, the exclusive right to process it. It is
handled here from its start until its settlement is queued: the instruction to the broker to ack, defer (redeliver after
a delay), release (redeliver now) or dead-letter it. A delivery without a settlement keeps its claim, or has lost it;
the settler then only records its outcome. An observer receives what happens and decides nothing; ``recording`` says
whether it records the lifecycle, as it does if the trace of the transaction is sampled.

The verdict of an error is its category (BUSINESS, SYSTEM or TIMEOUT) and what it says about retries. The failures of a
TaskGroup, an exception group, get one verdict.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Delivery, Settlement
from ergon_framework.engine.effects import NEVER, Call, Interrupted, Ok, Script, await_exit, on_exit
from ergon_framework.engine.retry import Deferred, Failed, Overrun, Step, StepResult, run_step
from ergon_framework.errors import Category, ErgonError, error_message, has_valid_verdict
from ergon_framework.failure import Failure
from ergon_framework.transaction import Transaction
from ergon_framework.worker.events import LoopObserver, TransactionObserver
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.report import Outcome, OutcomeKind, StopReason, attempt_history
from ergon_framework.worker.settle import (
    PendingSettlement,
    Settler,
    failure_record,
    requires_exited_call,
    settlement_for,
)

if TYPE_CHECKING:
    from ergon_framework.clock import Clock
    from ergon_framework.worker.policies import SettlePolicy


#: Number of errors of a group whose texts are kept, and the characters that they share; a failure record keeps 500.
MAX_MEMBERS: Final = 5
MAX_MEMBERS_CHARS: Final = 400
#: Maximum number of characters of the group's own message.
_MAX_NAME_CHARS: Final = 80
#: The verdict of an exception that carries none.
_DEFAULT_VERDICT: Final = ErgonError()


def classify_group(group: BaseExceptionGroup[BaseException]) -> TransactionException:
    """Return one error with the verdict of all members of *group*, nested ones included; *group* becomes its cause.

    The error is BUSINESS if all members are, otherwise SYSTEM. It is final if no member can succeed in another attempt,
    not attempted if no member has attempted anything, and temporary if every member may be deferred. Its
    ``retry_after`` is the longest of its members.
    """
    members = _flatten(group)
    verdicts = [
        each if isinstance(each, ErgonError) and has_valid_verdict(each) else _DEFAULT_VERDICT for each in members
    ]
    is_business = all(each.category is Category.BUSINESS for each in verdicts)
    codes = {each.code for each in verdicts}
    error = TransactionException(
        _describe_members(group, members),
        Category.BUSINESS if is_business else Category.SYSTEM,
        retry_after=max((each.retry_after for each in verdicts if each.retry_after is not None), default=None),
        final=all(each.final or (not is_business and each.category is Category.BUSINESS) for each in verdicts),
        not_attempted=all(each.not_attempted for each in verdicts),
        temporary=all(each.temporary or each.not_attempted for each in verdicts),
        code=codes.pop() if len(codes) == 1 else None,
    )
    error.__cause__ = group
    return error


def _flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    members: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:  # a loop, because groups may be nested deeper than functions may call
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending.extend(reversed(error.exceptions))
        else:
            members.append(error)
    return members


def _describe_members(group: BaseExceptionGroup[BaseException], members: list[BaseException]) -> str:
    shown_members = members[:MAX_MEMBERS]
    length = MAX_MEMBERS_CHARS // len(shown_members)
    texts = [
        _shorten(f"{type(member).__name__}: {error_message(member, raw=True)}", length) for member in shown_members
    ]
    if len(members) > len(shown_members):
        texts.append(f"and {len(members) - len(shown_members)} more")
    return f"{_shorten(error_message(group, raw=True), _MAX_NAME_CHARS)}: {'; '.join(texts)}"


def _shorten(message: str, length: int) -> str:
    return message if len(message) <= length else message[: length - 1] + "…"


# -- the lifecycle ----------------------------------------------------------------------------------


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
    """Classify the error of a success or exception handler as SYSTEM: the work is done or has failed already.

    Such a handler has no business failures, so its errors are retried.
    """
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
    """Return a TransactionException caused by *error*, with the message and the rest of the verdict of *verdict*."""
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
    # failed_attempts has no successful attempt, and none whose error says that nothing was attempted.
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
    # Attempts of a job in an executor are counted by the job store and not here: each is one call of process.
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
    # Set here for the exception handler: a call that still runs may still act.
    error.still_running = failed.abandoned_call is not None
    outcome.error = error
    _add_abandoned_call(outcome, failed.abandoned_call)
    result = yield from _run_handler_step(spec, spec.exception, (error,), outcome, NEVER, observer)
    if type(result) is Ok:
        outcome.kind = OutcomeKind.FAILED
        outcome.settlement = _to_settlement(result.value)
    elif type(result) is Failed:
        outcome.kind = OutcomeKind.EXCEPTION_HANDLER_FAILED
        outcome.handler_error = result.error
        _add_abandoned_call(outcome, result.abandoned_call)
    return result


def _run_handler_step(  # noqa: PLR0917 - keywords cost more, and this is done for every transaction
    spec: LifecycleSpec,
    step: Step,
    extra_args: tuple[Any, ...],
    outcome: Outcome,
    limit: float,
    observer: TransactionObserver | None,
) -> Script[StepResult]:
    """Run the success or the exception step; *extra_args* are the result or the error that its handler gets."""
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


def _record_step_end(  # noqa: PLR0917 - keywords cost more, and this is done for every transaction
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
    _add_abandoned_call(outcome, interrupted.call)


def _add_abandoned_call(outcome: Outcome, call: Call | None) -> None:
    """Add *call* to those that may still run: that of process may still run when a handler is abandoned too."""
    if call is not None:
        outcome.abandoned_calls = (*outcome.abandoned_calls, call)


def _to_settlement(value: Any) -> Settlement | None:
    return value if isinstance(value, Ack | Defer | DeadLetter) else None


class DeliveryHandler:
    """Runs the lifecycles of one loop's deliveries, and queues the settlement that follows from each outcome."""

    def __init__(
        self,
        spec: LifecycleSpec,
        policy: SettlePolicy,
        settler: Settler,
        *,
        name: str,
        observer: LoopObserver,
        start: LifecycleStarter = run_lifecycle,
    ) -> None:
        self._start = start
        self._spec = spec
        self._clock = spec.clock
        self._policy = policy
        self._settler = settler
        self._name = name
        self._observer = observer
        #: Receipts (the connector's handles) of lost claims whose deliveries wait or run in this loop.
        self.lost_receipts: set[Any] = set()
        #: By receipt: settlements that may redeliver a transaction whose call still runs; they wait for its exit.
        self.postponed: dict[Any, PendingSettlement] = {}
        #: Why the loop stops running work; the reason of the outcomes that it releases.
        self.stop_reason = StopReason.STOP

    def run(self, delivery: Delivery) -> Script[None]:
        """Run the lifecycle of *delivery* and queue its settlement."""
        transaction = delivery.transaction
        outcome = yield from self._start(
            self._spec, transaction, self._observer.on_transaction_start(transaction, delivery)
        )
        if delivery.receipt in self.lost_receipts:
            outcome.kind, outcome.reason = OutcomeKind.RELEASED, "lost"
            self._settler.enqueue(PendingSettlement(delivery, None, outcome))
            return
        is_released = outcome.kind is OutcomeKind.RELEASED
        if is_released:
            outcome.reason = self.stop_reason.value
        settlement = settlement_for(outcome, self._policy)
        if type(settlement) is DeadLetter and settlement.failure is None:
            settlement = DeadLetter(settlement.reason, self.failure_record(outcome, delivery, settlement.reason))
        item = PendingSettlement(delivery, settlement, outcome)
        # A settlement that may redeliver the transaction waits for its calls: two runs of it must not overlap.
        if not outcome.still_running or not requires_exited_call(settlement):
            self._settler.enqueue(item)
        elif is_released:
            # Calls are cancelled where the driver can do that, but there is no time left to wait for their exit.
            for call in outcome.abandoned_calls:
                yield from await_exit(call, self._clock.monotonic())
            have_exited = all(call.exited for call in outcome.abandoned_calls)
            self._settler.enqueue(item if have_exited else PendingSettlement(delivery, None, outcome))
        else:
            self.postponed[delivery.receipt] = item
            # Settled when the call exits, and not by the loop, which may be in a long fetch at that moment.
            yield from on_exit(partial(self._settle_postponed, delivery.receipt, keep_claim=False))

    def _settle_postponed(self, receipt: Any, *, keep_claim: bool) -> None:
        """Queue a postponed settlement, unless it is queued already: calls exit on their own threads."""
        item = self.postponed.pop(receipt, None)
        if item is not None:
            self._settler.enqueue(PendingSettlement(item.delivery, None, item.outcome) if keep_claim else item)

    def keep_postponed_claims(self) -> None:
        """Keep the claims of calls that still run when the loop ends; the claims end with the process."""
        for receipt in list(self.postponed):
            self._settle_postponed(receipt, keep_claim=True)

    def failure_record(self, outcome: Outcome, delivery: Delivery, reason: str) -> Failure:
        """Return the failure record of *outcome*."""
        trace_id = self._observer.trace_id(outcome)
        return failure_record(
            outcome,
            delivery,
            reason,
            task=self._name,
            occurred_at=self._clock.wall(),
            trace_id=trace_id,
            options=self._observer.options,
        )
