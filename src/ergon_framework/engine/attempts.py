"""One step of a transaction inside its own retry envelope."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ergon_framework.engine.effects import NEVER, Call, Script, gone, sleep
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.errors import Category, ErgonError
from ergon_framework.failure import Deferral, describe
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:
    from ergon_framework.engine.senses import Senses


class Retry(Protocol):
    """The part of a retry policy that is read here."""

    @property
    def max_attempts(self) -> int: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def hold(self) -> float: ...
    @property
    def abandon_grace(self) -> float: ...
    def delay(self, attempt: int, dice: Callable[[], float] | None = None) -> float: ...


class StepWatch(Protocol):
    """Somebody who wants to see every attempt of one step."""

    def attempt(self, number: int) -> Context | None:
        """An attempt begins; the context its body is to run in, if it matters."""

    def attempted(self, number: int, error: BaseException | None) -> None:
        """It is over, with *error* or without."""


class Overrun(Enum):
    """Which limit is over."""

    #: The timeout of the attempt itself.
    ATTEMPT = "attempt"
    #: The lifecycle's, while an attempt ran.
    LIFECYCLE = "lifecycle"
    #: The lifecycle's, before an attempt could start.
    UNSTARTED = "unstarted"


class Step:
    """One step: what to call, under which policy, and how its failures are to be read.

    *defers* says that a wait beyond ``retry.hold`` goes back to the broker instead of being slept. So does
    every error that says that nothing was tried, and every temporary one, however short the wait is; the
    temporary ones for *max_deferral* seconds since the first of them. *on_retry* is called with the note of each failed
    attempt that another follows, before the wait.
    """

    __slots__ = ("classify", "defers", "expired", "fn", "max_deferral", "name", "on_retry", "retry")

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        retry: Retry,
        *,
        classify: Callable[[BaseException], ErgonError],
        expired: Callable[[Step, Overrun, float | None], ErgonError],
        defers: bool = False,
        max_deferral: float = 0.0,
        on_retry: Callable[[Transaction, Note], None] | None = None,
    ) -> None:
        self.name = name
        self.fn = fn
        self.retry = retry
        self.classify = classify
        self.expired = expired
        self.defers = defers
        self.max_deferral = max_deferral
        self.on_retry = on_retry


class Note:
    """What became of one failed attempt, and how long the wait after it is; None when there is none."""

    __slots__ = ("at", "attempt", "delay", "error", "step")

    def __init__(self, step: str, attempt: int, error: ErgonError, *, at: float) -> None:
        self.step = step
        self.attempt = attempt
        self.error = error
        self.at = at
        self.delay: float | None = None


class Failed:
    """No further attempt will be made; *body* is the call that would not leave, if there is one."""

    __slots__ = ("attempt", "body", "error")

    def __init__(self, error: ErgonError, attempt: int, body: Call | None = None) -> None:
        self.error = error
        self.attempt = attempt
        self.body = body


class Deferred:
    """The broker holds the transaction for *delay* seconds; *deferral* is what it carries from then on.

    The wait is too long to be slept through here, nothing could be tried, or a service is unavailable.
    """

    __slots__ = ("attempt", "deferral", "delay", "error")

    def __init__(self, error: ErgonError, attempt: int, delay: float, deferral: Deferral | None = None) -> None:
        self.error = error
        self.attempt = attempt
        self.delay = delay
        self.deferral = deferral


Ended: TypeAlias = Ok | Failed | Deferred | Stopped


def attempts(
    step: Step,
    more: tuple[Any, ...],
    notes: list[Note],
    transaction: Transaction,
    senses: Senses,
    *,
    first: int = 0,
    limit: float = NEVER,
    lifetime: float | None = None,
    watch: StepWatch | None = None,
) -> Script[Ended]:
    """Try *step* until it succeeds, its budget is spent, or *limit* leaves no room.

    *limit* is the end of the lifecycle, which has *lifetime* seconds in all. Each attempt is called with the
    transaction as it was delivered, whatever others did to its payload, and *more*.
    """
    clock, timeout, number = senses.clock, step.retry.timeout, first
    while True:
        now = clock()
        if now >= limit:
            return Failed(step.expired(step, Overrun.UNSTARTED, lifetime), number)
        until = limit if timeout is None or limit < now + timeout else now + timeout
        isolated = transaction.isolate()
        scope = Scope(isolated, step.name, number, None if until == NEVER else until, clock)
        context = None if watch is None else watch.attempt(number)
        answer = yield Call(step.name, step.fn, (isolated, *more), until, scope, context)
        if watch is not None:
            watch.attempted(number, _seen(answer))
        if type(answer) is Ok or type(answer) is Stopped:
            return answer
        if isinstance(answer, Err):
            error = step.classify(answer.error)
        else:
            own = timeout is not None and now + timeout <= until
            error = step.expired(step, Overrun.ATTEMPT if own else Overrun.LIFECYCLE, lifetime)
        if step.defers:
            deferred = _defer(step, error, number, transaction.deferral, senses)
            if deferred is not None:
                return deferred
        note = Note(step.name, number, error, at=senses.wall())
        notes.append(note)
        ended = yield from _after(step, answer, note, transaction, senses=senses, limit=limit)
        if ended is not None:
            return ended
        number += 1


def _defer(step: Step, error: ErgonError, number: int, past: Deferral | None, senses: Senses) -> Deferred | None:
    """Return a deferral that counts neither as an attempt nor in the history; None if *error* is a failed attempt."""
    if _untried(error):
        delay = _delay(step.retry, number, error, senses)
        return Deferred(error, number, delay, None if past is None else past.add_exempt(delay))
    if not error.temporary or error.category is Category.BUSINESS:
        return None
    deferral = Deferral.following(
        past, now=senses.wall(), limit=step.max_deferral, code=error.code, error=describe(error)
    )
    if deferral is None:
        return None
    return Deferred(error, number, _delay(step.retry, deferral.count - 1, error, senses), deferral)


def _after(
    step: Step, answer: Err | Expired, note: Note, transaction: Transaction, *, senses: Senses, limit: float
) -> Script[Ended | None]:
    """After a failed attempt: wait for the next one and answer None, or say how the step ends."""
    error, number, retry = note.error, note.attempt, step.retry
    if isinstance(answer, Expired):
        # Nothing else of this transaction may run while the body is still in there.
        has_left = yield from gone(answer.body, senses.clock() + retry.abandon_grace)
        if has_left is not True:
            return Stopped(answer.body) if isinstance(has_left, Stopped) else Failed(error, number, answer.body)
    now = senses.clock()
    if _hopeless(error) or number + 1 >= retry.max_attempts or now >= limit:
        return Failed(error, number)
    delay = _delay(retry, number, error, senses)
    defers = step.defers and delay > retry.hold
    if not defers and now + delay >= limit:
        return Failed(error, number)
    note.delay = delay
    if step.on_retry is not None:
        step.on_retry(transaction, note)
    if defers:
        return Deferred(error, number, delay, transaction.deferral)
    stopped = (yield from sleep(now + delay)) if delay > 0 else None
    if stopped is not None:
        # A wait that was interrupted is none: no attempt follows it.
        note.delay = None
    return stopped


def _delay(retry: Retry, number: int, error: ErgonError, senses: Senses) -> float:
    return max(retry.delay(number, senses.dice), error.retry_after or 0.0)


def _hopeless(error: ErgonError) -> bool:
    return error.category is Category.BUSINESS or error.final


def _untried(error: ErgonError) -> bool:
    # An error that contradicts itself must not come back for ever.
    return error.later and not _hopeless(error)


def _seen(answer: Any) -> BaseException | None:
    if isinstance(answer, Err):
        return answer.error
    if isinstance(answer, Expired):
        return TimeoutError("the deadline passed")
    return None
