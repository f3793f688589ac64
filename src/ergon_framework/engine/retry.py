"""The attempts of one step of a transaction, under its retry policy, and the delays of every policy with a backoff.

A step is one stage of the lifecycle of a transaction (process, then success or exception), and an attempt is one call
of its handler. A deferred transaction returns to its broker, which redelivers it after a delay. ``run_step`` is a
script: a generator that yields each call and each delay for a driver to perform. The delays are pure arithmetic: their
random source is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from ergon_framework.engine.effects import NEVER, Call, Err, Expired, Interrupted, Ok, Script, await_exit, sleep
from ergon_framework.errors import Category, ErgonError
from ergon_framework.failure import Deferral, describe_error
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:
    from ergon_framework.clock import Clock


class StepRetryRules(Protocol):
    """The part of a retry policy that ``run_step`` reads, in seconds.

    ``timeout`` limits one attempt. ``exit_grace`` is the time that a timed-out call has to exit before the step ends.
    ``max_inline_delay`` is the longest delay that is slept in the slot of the transaction. ``delay`` returns the wait
    after an attempt, the first being 0.
    """

    @property
    def max_attempts(self) -> int: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def max_inline_delay(self) -> float: ...
    @property
    def exit_grace(self) -> float: ...
    def delay(self, attempt: int, random: Callable[[], float] | None = None) -> float: ...


class StepObserver(Protocol):
    """An observer of the attempts of one step."""

    def on_attempt_start(self, number: int) -> Context | None:
        """Handle the start of an attempt; return the context to run its call in, or None for the default."""

    def on_attempt_end(self, number: int, error: BaseException | None) -> None:
        """Handle the end of an attempt; *error* is None after a success."""


class Overrun(Enum):
    """The time limit that was exceeded."""

    #: The timeout of the attempt itself.
    ATTEMPT = "attempt"
    #: The timeout of the lifecycle, while an attempt ran.
    LIFECYCLE = "lifecycle"
    #: The timeout of the lifecycle, before an attempt started.
    UNSTARTED = "unstarted"


class Step:
    """One step: the function to call, its retry policy, and the classification of its failures.

    *classify* turns an exception of the function into an error with a category; *timeout_error* creates the error for
    an exceeded time limit. If *defers* is true, the step ends as deferred instead of sleeping when a delay exceeds
    ``retry.max_inline_delay``. An error with ``not_attempted`` (nothing was attempted) defers too, and so does one
    with ``temporary`` (a service is unavailable), whatever the delay; temporary errors do so for *max_deferral* seconds
    after the first one. *on_retry* is called with each failed attempt that another attempt follows, before the delay.
    """

    __slots__ = ("classify", "defers", "fn", "max_deferral", "name", "on_retry", "retry", "timeout_error")

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        retry: StepRetryRules,
        *,
        classify: Callable[[BaseException], ErgonError],
        timeout_error: Callable[[Step, Overrun, float | None], ErgonError],
        defers: bool = False,
        max_deferral: float = 0.0,
        on_retry: Callable[[Transaction, FailedAttempt], None] | None = None,
    ) -> None:
        self.name = name
        self.fn = fn
        self.retry = retry
        self.classify = classify
        self.timeout_error = timeout_error
        self.defers = defers
        self.max_deferral = max_deferral
        self.on_retry = on_retry


class FailedAttempt:
    """One failed attempt; *delay* is the delay before the next attempt, None if there is none."""

    __slots__ = ("attempt", "delay", "error", "occurred_at", "step")

    def __init__(self, step: str, attempt: int, error: ErgonError, *, occurred_at: float) -> None:
        self.step = step
        self.attempt = attempt
        self.error = error
        self.occurred_at = occurred_at
        self.delay: float | None = None


class Failed:
    """No further attempt follows; *abandoned_call* is the call that still runs, if there is one."""

    __slots__ = ("abandoned_call", "attempt", "error")

    def __init__(self, error: ErgonError, attempt: int, abandoned_call: Call | None = None) -> None:
        self.error = error
        self.attempt = attempt
        self.abandoned_call = abandoned_call


class Deferred:
    """The broker redelivers the transaction after *delay* seconds; its message stores *deferral*.

    The delay is too long to sleep inline, nothing could be attempted, or a service is unavailable.
    """

    __slots__ = ("attempt", "deferral", "delay", "error")

    def __init__(self, error: ErgonError, attempt: int, delay: float, deferral: Deferral | None = None) -> None:
        self.error = error
        self.attempt = attempt
        self.delay = delay
        self.deferral = deferral


StepResult: TypeAlias = Ok | Failed | Deferred | Interrupted


def run_step(
    step: Step,
    extra_args: tuple[Any, ...],
    failed_attempts: list[FailedAttempt],
    transaction: Transaction,
    clock: Clock,
    *,
    first: int = 0,
    limit: float = NEVER,
    lifetime: float | None = None,
    observer: StepObserver | None = None,
) -> Script[StepResult]:
    """Call *step* until it succeeds, its attempts are used up, or *limit* leaves no time.

    *limit* is the end of the lifecycle, which has *lifetime* seconds in all. Each attempt is called with *extra_args*
    and the transaction as delivered, even if an earlier attempt changed its payload. *first* is the number of the first
    attempt: attempts of earlier deliveries count. Failed attempts are added to *failed_attempts*.
    """
    monotonic, timeout, number = clock.monotonic, step.retry.timeout, first
    while True:
        now = monotonic()
        if now >= limit:
            return Failed(step.timeout_error(step, Overrun.UNSTARTED, lifetime), number)
        until = limit if timeout is None or limit < now + timeout else now + timeout
        isolated = transaction.isolate()
        scope = Scope(isolated, step.name, number, None if until == NEVER else until, monotonic)
        context = None if observer is None else observer.on_attempt_start(number)
        answer = yield Call(step.name, step.fn, (isolated, *extra_args), until, scope, context)
        if observer is not None:
            observer.on_attempt_end(number, _to_error(answer))
        if type(answer) is Ok or type(answer) is Interrupted:
            return answer
        if isinstance(answer, Err):
            error = step.classify(answer.error)
        else:
            own_timeout = timeout is not None and now + timeout <= until
            error = step.timeout_error(step, Overrun.ATTEMPT if own_timeout else Overrun.LIFECYCLE, lifetime)
        if step.defers:
            deferred = _defer(step, error, number, transaction.deferral, clock)
            if deferred is not None:
                return deferred
        failed_attempt = FailedAttempt(step.name, number, error, occurred_at=clock.wall())
        failed_attempts.append(failed_attempt)
        result = yield from _await_next_attempt(step, answer, failed_attempt, transaction, clock=clock, limit=limit)
        if result is not None:
            return result
        number += 1


def _defer(step: Step, error: ErgonError, number: int, previous: Deferral | None, clock: Clock) -> Deferred | None:
    """Return a deferral that counts neither as an attempt nor in the history; None if *error* is a failed attempt."""
    # Nothing was attempted, for example because a circuit breaker is open: this delay does not use up max_deferral.
    if _is_unattempted(error):
        delay = _compute_delay(step.retry, number, error, clock)
        return Deferred(error, number, delay, None if previous is None else previous.add_exempt(delay))
    if not error.temporary or error.category is Category.BUSINESS:
        return None
    deferral = Deferral.from_previous(
        previous, now=clock.wall(), limit=step.max_deferral, code=error.code, error=describe_error(error)
    )
    if deferral is None:
        return None
    # A deferral counts no attempt, so the delays grow with the number of deferrals instead.
    return Deferred(error, number, _compute_delay(step.retry, deferral.count - 1, error, clock), deferral)


def _await_next_attempt(
    step: Step,
    answer: Err | Expired,
    failed_attempt: FailedAttempt,
    transaction: Transaction,
    *,
    clock: Clock,
    limit: float,
) -> Script[StepResult | None]:
    """Wait for the next attempt and return None, or return the result of the step."""
    error, number, retry = failed_attempt.error, failed_attempt.attempt, step.retry
    if isinstance(answer, Expired):
        # Nothing else of this transaction may run while the timed-out call still runs.
        has_exited = yield from await_exit(answer.call, clock.monotonic() + retry.exit_grace)
        if has_exited is not True:
            return (
                Interrupted(answer.call) if isinstance(has_exited, Interrupted) else Failed(error, number, answer.call)
            )
    now = clock.monotonic()
    if _is_permanent(error) or number + 1 >= retry.max_attempts or now >= limit:
        return Failed(error, number)
    delay = _compute_delay(retry, number, error, clock)
    defers = step.defers and delay > retry.max_inline_delay
    if not defers and now + delay >= limit:
        return Failed(error, number)
    failed_attempt.delay = delay
    if step.on_retry is not None:
        step.on_retry(transaction, failed_attempt)
    if defers:
        return Deferred(error, number, delay, transaction.deferral)
    interrupted = (yield from sleep(now + delay)) if delay > 0 else None
    if interrupted is not None:
        # No attempt follows an interrupted delay.
        failed_attempt.delay = None
    return interrupted


def _compute_delay(retry: StepRetryRules, number: int, error: ErgonError, clock: Clock) -> float:
    return max(retry.delay(number, clock.random), error.retry_after or 0.0)


def _is_permanent(error: ErgonError) -> bool:
    return error.category is Category.BUSINESS or error.final


def _is_unattempted(error: ErgonError) -> bool:
    # An error that is also permanent must not be redelivered without limit.
    return error.not_attempted and not _is_permanent(error)


def _to_error(answer: Any) -> BaseException | None:
    if isinstance(answer, Err):
        return answer.error
    if isinstance(answer, Expired):
        return TimeoutError("the deadline passed")
    return None


# -- delays -----------------------------------------------------------------------------------------

#: A century in seconds, the limit where a policy has no cap: the sleep functions of operating systems
#: reject numbers not much larger, and a failed sleep is worse than a short one.
MAX_DELAY_SECONDS: Final = 100 * 365.25 * 86_400


def backoff_delay(attempt: int, *, backoff: float, multiplier: float, cap: float) -> float:
    """Return the seconds to wait after *attempt*, the first being 0: ``backoff * multiplier**attempt``, at most *cap*.

    A cap of 0 means no cap; the delay then grows up to ``MAX_DELAY_SECONDS``.

    >>> [backoff_delay(attempt, backoff=1, multiplier=3, cap=10) for attempt in range(5)]
    [1.0, 3.0, 9.0, 10.0, 10.0]
    >>> backoff_delay(1_000_000, backoff=1, multiplier=2, cap=0) == MAX_DELAY_SECONDS
    True
    """
    if attempt < 0:
        raise ValueError(f"attempt must be >= 0, got {attempt}; pass the number of the attempt that failed")
    limit = float(cap) if cap > 0 else MAX_DELAY_SECONDS
    if backoff == 0 or multiplier == 1:  # a constant delay must not reach the limit by overflow
        return min(float(backoff), limit)
    try:
        # As a float: an integer to a large power is computed exactly, which may take hours.
        return min(backoff * float(multiplier) ** attempt, limit)
    except OverflowError:
        return limit


def apply_jitter(seconds: float, ratio: float, random: Callable[[], float]) -> float:
    """Return *seconds* plus or minus at most *ratio* of it, uniformly distributed; *random* returns [0, 1).

    Jitter applies after the cap, which spreads a fleet at its cap too: the result may exceed the cap.

    >>> [apply_jitter(10, 0.2, lambda: value) for value in (0.0, 0.5, 0.75)]
    [8.0, 10.0, 11.0]
    """
    return seconds * (1 + ratio * (2 * random() - 1))


def min_or_none(*limits: float | None) -> float | None:
    """Return the smallest of *limits*; None means no limit.

    >>> min_or_none(30.0, None, 5.0), min_or_none(None), min_or_none()
    (5.0, None, None)
    """
    return min((limit for limit in limits if limit is not None), default=None)
