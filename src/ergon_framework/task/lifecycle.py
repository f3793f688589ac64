"""The lifecycle: PROCESS, then SUCCESS; or EXCEPTION, exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ergon_framework.connectors.base import Ack, DeadLetter, Later, Settlement
from ergon_framework.engine.attempts import Deferred, Ended, Failed, Overrun, Step, StepWatch, attempts
from ergon_framework.engine.effects import NEVER, Script
from ergon_framework.engine.outcome import Ok, Stopped
from ergon_framework.errors import Category, ErgonError, is_sound, text
from ergon_framework.failure import Attempt, describe, latest
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.groups import classify_group
from ergon_framework.task.report import Kind, Outcome
from ergon_framework.transaction import HISTORY, Transaction

if TYPE_CHECKING:
    from ergon_framework.engine.senses import Senses


class Watch(Protocol):
    """Somebody who wants to see one transaction's lifecycle."""

    @property
    def recording(self) -> bool:
        """Whether anything of what it is told is kept."""

    def step(self, step: Step) -> StepWatch | None:
        """A step begins."""

    def stepped(self, ended: Ended) -> None:
        """It is over."""

    def ended(self, outcome: Outcome) -> None:
        """The lifecycle is over."""


class Course:
    """What all lifecycles of a loop have in common."""

    __slots__ = ("exception", "plain", "process", "senses", "success", "timeout")

    def __init__(
        self,
        process: Step,
        success: Step,
        exception: Step,
        *,
        senses: Senses,
        timeout: float | None = None,
        plain: bool = False,
    ) -> None:
        self.process = process
        self.success = success
        self.exception = exception
        self.senses = senses
        self.timeout = timeout
        #: Nobody wrote a success handler; none is called, unless this is recorded: a trace shows every step.
        self.plain = plain


def classify(error: BaseException) -> TransactionException:
    """Give any failure of process or produce its verdict; one that already has it keeps it."""
    if isinstance(error, TransactionException) and is_sound(error):
        return error
    if isinstance(error, ErgonError) and is_sound(error):
        return _wrapped(error, error.category, verdict=error)
    if isinstance(error, BaseExceptionGroup):
        return classify_group(error)
    return _wrapped(error, Category.SYSTEM)


def classify_handler(error: BaseException) -> TransactionException:
    """Handlers have no business failures: whatever they raise is ours to retry."""
    found = classify(error)
    if found.category is Category.SYSTEM:
        return found
    return _wrapped(error, Category.SYSTEM, verdict=found)


def expired(step: Step, overrun: Overrun, lifetime: float | None) -> TransactionException:
    """Return the TIMEOUT of *step*; it names the limit that is over and the key of the policy that sets it."""
    if overrun is Overrun.ATTEMPT:
        message = f"{step.name} did not finish within {step.retry.timeout:g} s (steps.{step.name}.retry.timeout)"
        return TransactionException(message, Category.TIMEOUT, code="step_timeout")
    verb = "start" if overrun is Overrun.UNSTARTED else "finish"
    message = f"{step.name} did not {verb} within the {lifetime:g} s of its transaction (loop.transaction_timeout)"
    return TransactionException(message, Category.TIMEOUT, code="lifecycle_timeout")


def _wrapped(error: BaseException, category: Category, verdict: ErgonError | None = None) -> TransactionException:
    message = f"{type(error).__name__}: {text(error, raw=True)}" if verdict is None else text(verdict, raw=True)
    wrapped = TransactionException(message, category)
    if verdict is not None:
        wrapped.retry_after, wrapped.final, wrapped.code = verdict.retry_after, verdict.final, verdict.code
        wrapped.later, wrapped.temporary = verdict.later, verdict.temporary
    wrapped.__cause__ = error
    return wrapped


class Start(Protocol):
    """Starts one lifecycle: ``lifecycle`` itself, or the method of a task that calls it."""

    def __call__(self, course: Course, transaction: Transaction, watch: Watch | None = None, /) -> Script[Outcome]: ...


def lifecycle(course: Course, transaction: Transaction, watch: Watch | None = None) -> Script[Outcome]:
    """Take one transaction from its start to exactly one outcome."""
    outcome = Outcome(transaction)
    step, began = course.process, course.senses.clock()
    limit = NEVER if course.timeout is None else began + course.timeout
    # Attempts of earlier deliveries count (what is produced has none), but a transaction that was delivered is tried.
    carried = transaction.attempts if step.defers else 0
    first = min(carried, step.retry.max_attempts - 1) if carried else 0
    seen = None if watch is None else watch.step(step)
    done = yield from attempts(
        step,
        (),
        outcome.notes,
        transaction,
        course.senses,
        limit=limit,
        lifetime=course.timeout,
        watch=seen,
        first=first,
    )
    _stepped(course, outcome, step, done, began, watch)
    # Every attempt has left a note, but a successful one, and one that could not even try, which does not count.
    outcome.attempts = carried + len(outcome.notes)
    if type(done) is Ok:
        outcome.attempts += 1
        outcome.started = outcome.processed = True
        outcome.result = done.value
        if not course.plain or (watch is not None and watch.recording):
            done = yield from _step(course, course.success, (done.value,), outcome, limit, watch)
    else:
        outcome.started = bool(outcome.notes) or _was_called(done)
    if type(done) is Ok:
        outcome.kind = Kind.SUCCEEDED
        if done.value is not None or outcome.result is not None:
            outcome.settlement = _asked(done.value) or _asked(outcome.result)
    elif type(done) is Failed:
        done = yield from _failed(course, outcome, done, watch)
    if type(done) is Deferred:
        _deferred(outcome, done)
    elif type(done) is Stopped:
        _stopped(outcome, done, carried)
    # Attempts that an executor made are counted by the store, and not here.
    made: Any = getattr(outcome.error, "attempts_made", None)
    if isinstance(made, int) and made >= 0:  # a subclass may use the name for something else
        outcome.attempts = made
    if watch is not None:
        watch.ended(outcome)
    return outcome


def _failed(course: Course, outcome: Outcome, failed: Failed, watch: Watch | None) -> Script[Ended]:
    """Tell the exception handler. The lifecycle's deadline does not bind it: it has to be told of that too."""
    error: Any = failed.error
    error.still_running = failed.body is not None
    outcome.error, outcome.body = error, failed.body
    done = yield from _step(course, course.exception, (error,), outcome, NEVER, watch)
    if type(done) is Ok:
        outcome.kind = Kind.FAILED
        outcome.settlement = _asked(done.value)
    elif type(done) is Failed:
        outcome.kind = Kind.HANDLER_FAILED
        outcome.handler_error = done.error
        outcome.body = done.body or outcome.body
    return done


def _step(  # noqa: PLR0917 - keywords cost more, and this is done for every transaction
    course: Course, step: Step, more: tuple[Any, ...], outcome: Outcome, limit: float, watch: Watch | None
) -> Script[Ended]:
    began = course.senses.clock()
    seen = None if watch is None else watch.step(step)
    done = yield from attempts(
        step, more, outcome.notes, outcome.transaction, course.senses, limit=limit, lifetime=course.timeout, watch=seen
    )
    _stepped(course, outcome, step, done, began, watch)
    return done


def _stepped(  # noqa: PLR0917 - as above
    course: Course, outcome: Outcome, step: Step, done: Ended, began: float, watch: Watch | None
) -> None:
    if watch is not None:
        watch.stepped(done)
    outcome.durations[step.name] = course.senses.clock() - began


def _deferred(outcome: Outcome, deferred: Deferred) -> None:
    outcome.kind = Kind.DEFERRED
    outcome.error = deferred.error
    outcome.settlement = Later(deferred.delay, outcome.attempts, history(outcome), deferred.deferral)


def _was_called(done: Ended) -> bool:
    """Whether a step that left no note had called its body: a stop or the lifecycle's end can come before the call."""
    return type(done) is Deferred or (type(done) is Stopped and done.body is not None)


def _stopped(outcome: Outcome, stopped: Stopped, carried: int) -> None:
    """Release it unchanged: no attempt of this delivery counts. The loop replaces the reason by its own."""
    outcome.kind = Kind.RELEASED
    outcome.reason = "stop"
    outcome.attempts = carried
    outcome.error = None
    outcome.body = stopped.body or outcome.body


def _asked(value: Any) -> Settlement | None:
    return value if isinstance(value, Ack | Later | DeadLetter) else None


def history(outcome: Outcome) -> tuple[Attempt, ...]:
    """The last attempts, those of earlier deliveries included, as they travel with the transaction."""
    new = tuple(
        Attempt(
            attempt=note.attempt,
            category=note.error.category,
            code=note.error.code,
            error=describe(note.error),
            at=note.at,
            delay=note.delay,
        )
        for note in outcome.notes
        if note.step not in ("success", "exception")
    )
    return latest(outcome.transaction.history + new, HISTORY)
