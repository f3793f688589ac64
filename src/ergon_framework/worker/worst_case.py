"""The worst case of a policy: how long a claim may be held, and how often a handler may be called.

A claim is the exclusive right to process a delivery, until it is settled. Every number is an upper bound that the
engine keeps, not a forecast. A ``retry_after`` of an error is not part of the policy and is not counted.

The grace period of a step is the time that a timed-out call has to exit before the lifecycle continues. A deferred
transaction returns to the broker, which delays it: its claim ends, and the next delivery takes a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from ergon_framework.connectors.base import Capabilities
from ergon_framework.errors import ConfigurationError
from ergon_framework.worker.policies import ConsumerPolicy, RetryPolicy

#: Maximum number of growing backoff delays that are summed one by one; further ones are bounded by the last.
_MAX_STEPS: Final = 10_000


@dataclass(frozen=True, slots=True)
class RetryDelay:
    """A delay in seconds after a failed attempt: as planned, its range with jitter, and the longest inline sleep."""

    planned: float
    shortest: float
    longest: float
    #: None if the delay is always too long to sleep inline, in the worker: the broker delays the redelivery.
    slept: float | None


@dataclass(frozen=True, slots=True)
class StepWorstCase:
    """The worst case of one step: every attempt times out, and every call uses its whole grace period to exit."""

    name: str
    attempts: int
    timeout: float
    grace: float
    waits: tuple[RetryDelay, ...]
    #: The longest time that one delivery spends in this step; infinite if nothing limits an attempt.
    held: float

    @property
    def deferred(self) -> float:
        """The seconds that the transaction may spend at the broker between attempts."""
        return sum(wait.longest for wait in self.waits if wait.slept is None or wait.slept < wait.longest)


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The worst case of a transaction."""

    process: StepWorstCase
    success: StepWorstCase
    exception: StepWorstCase
    settle: StepWorstCase
    #: The limit of process and success together, with the grace period of the last call; infinite without a limit.
    lifecycle: float
    #: The number of deliveries after which the transaction becomes a dead letter.
    deliveries: int
    #: The number of other lifecycles that a fetched transaction may have to wait for.
    lifecycles_ahead: int
    #: The seconds since the first deferral for which a transaction is deferred while a service is unavailable.
    max_deferral: float
    #: The number of such deferrals, without waits for a circuit breaker; infinite if nothing separates two of them.
    deferrals: float

    @property
    def steps(self) -> Sequence[StepWorstCase]:
        return (self.process, self.success, self.exception, self.settle)

    @property
    def max_busy_seconds(self) -> float:
        """The longest time from the first attempt of a delivery to its settlement."""
        return min(self.process.held + self.success.held, self.lifecycle) + self.exception.held + self.settle.held

    @property
    def max_claim_seconds(self) -> float:
        """The longest time that a claim is held: the wait for others, then its own lifecycle."""
        return self.max_busy_seconds * (1 + self.lifecycles_ahead)

    @property
    def calls(self) -> int:
        """The number of process calls without crashes and outages: attempts count across redeliveries."""
        return self.process.attempts

    @property
    def calls_with_crashes(self) -> int:
        """The number of process calls if the process crashes at the last attempt of every delivery, uncounted."""
        return self.process.attempts * self.deliveries


def compute_worst_case(policy: ConsumerPolicy) -> WorstCase:
    """Return the worst case that *policy* allows."""
    loop, steps = policy.loop, policy.steps
    grace = max(steps.process.retry.exit_grace, steps.success.retry.exit_grace)
    return WorstCase(
        process=_compute_step("process", steps.process.retry, defers=True),
        success=_compute_step("success", steps.success.retry),
        exception=_compute_step("exception", steps.exception.retry),
        settle=_compute_step("settle", steps.settle.retry, initial_delay=steps.settle.linger),
        lifecycle=inf if loop.transaction_timeout is None else loop.transaction_timeout + grace,
        deliveries=loop.max_deliveries,
        # The last permitted delivery runs alone: it waits for all running ones and for those prefetched.
        lifecycles_ahead=1 + ceil(loop.prefetch / loop.concurrency.value),
        max_deferral=loop.max_deferral,
        deferrals=_count_deferrals(steps.process.retry, loop.max_deferral),
    )


def check_fits_broker_deadline(policy: ConsumerPolicy, capabilities: Capabilities, *, queue: str) -> None:
    """Raise ConfigurationError if *policy* allows a claim to be held beyond the broker's deadline."""
    deadline = capabilities.deadline
    if deadline is None:
        return
    max_claim = compute_worst_case(policy).max_claim_seconds
    if max_claim < deadline:
        return
    duration = "without limit" if max_claim == inf else f"for {max_claim:,.0f} s"
    raise ConfigurationError(
        f"broker of {queue!r} redelivers a claim after {deadline:,.0f} s and does not extend it, but the "
        f"policy lets claims last {duration}; set loop.transaction_timeout, or lower the attempts and timeouts of the "
        "steps (ergon policy explain shows each), or raise the broker's deadline"
    )


def _count_deferrals(retry: RetryPolicy, limit: float) -> float:
    """Count the deferrals in *limit* seconds if every attempt fails immediately and every delay is the shortest."""
    count, elapsed = 0, 0.0
    while elapsed < limit:
        delay, next_delay = (retry.delay(number, lambda: 0.0) for number in (count, count + 1))
        if next_delay <= delay or count == _MAX_STEPS:
            # The delays no longer grow; if they do, this is still an upper bound.
            remaining = (limit - elapsed) / delay if delay else inf
            return inf if remaining == inf else count + ceil(remaining)
        count, elapsed = count + 1, elapsed + delay
    return count


def _compute_step(name: str, retry: RetryPolicy, *, defers: bool = False, initial_delay: float = 0.0) -> StepWorstCase:
    waits = tuple(_compute_delay(retry, number, defers=defers) for number in range(retry.max_attempts - 1))
    timeout = inf if retry.timeout is None else retry.timeout
    return StepWorstCase(
        name=name,
        attempts=retry.max_attempts,
        timeout=timeout,
        grace=retry.exit_grace,
        waits=waits,
        held=initial_delay + _compute_longest_run(timeout + retry.exit_grace, waits),
    )


def _compute_delay(retry: RetryPolicy, number: int, *, defers: bool) -> RetryDelay:
    # Without a random source there is no jitter; the values 0 and 1 give the limits of the jitter.
    planned, shortest, longest = (retry.delay(number, random) for random in (None, lambda: 0.0, lambda: 1.0))
    limit = retry.max_inline_delay if defers else inf
    slept = None if shortest > limit else min(longest, limit)
    return RetryDelay(planned, shortest, longest, slept)


def _compute_longest_run(attempt: float, waits: Sequence[RetryDelay]) -> float:
    """Return the longest run of attempts without a deferral in between: one delivery lasts for one such run."""
    longest = running = attempt
    for wait in waits:
        running = attempt if wait.slept is None else running + wait.slept + attempt
        longest = max(longest, running)
    return longest
