"""The worst case of a policy: how long a claim may be held, and how often a body may be called.

Every number is an upper bound that the engine keeps, not a forecast. A ``retry_after`` that an error
names is not part of the policy and is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from ergon_framework.connectors.base import Capabilities
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.mixins.policies import ConsumerPolicy, RetryPolicy

#: Growing waits that are added up one by one.
_MAX_STEPS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait after a failed attempt: as planned, as jitter may make it, and how much of it is slept at most."""

    planned: float
    shortest: float
    longest: float
    #: None where it is always too long to be slept: the broker holds it.
    slept: float | None


@dataclass(frozen=True, slots=True)
class StepCase:
    """One step at its worst: every attempt runs into its timeout, and every body uses its whole grace to leave."""

    name: str
    attempts: int
    timeout: float
    grace: float
    waits: tuple[Wait, ...]
    #: The longest that one delivery is busy with it; infinite where nothing limits an attempt.
    held: float

    @property
    def deferred(self) -> float:
        """Seconds that the transaction may spend at the broker between attempts."""
        return sum(wait.longest for wait in self.waits if wait.slept is None or wait.slept < wait.longest)


@dataclass(frozen=True, slots=True)
class WorstCase:
    """A transaction at its worst."""

    process: StepCase
    success: StepCase
    exception: StepCase
    settle: StepCase
    #: What ends process and success together, with the grace of the last body; infinite without.
    lifecycle: float
    #: Deliveries after which it becomes a dead letter.
    deliveries: int
    #: Lifecycles of others for which one that was fetched may have to wait.
    queued: int
    #: Seconds for which a transaction is deferred while a service is unavailable, since the first time.
    max_deferral: float
    #: How often that may be; infinite where nothing separates two deferrals. Waits for a circuit breaker are not in it.
    deferrals: float

    @property
    def steps(self) -> Sequence[StepCase]:
        return (self.process, self.success, self.exception, self.settle)

    @property
    def busy(self) -> float:
        """The longest from the first attempt of a delivery until it is settled."""
        return min(self.process.held + self.success.held, self.lifecycle) + self.exception.held + self.settle.held

    @property
    def held(self) -> float:
        """The longest that a claim is held: until others have made room, and then its own time."""
        return self.busy * (1 + self.queued)

    @property
    def calls(self) -> int:
        """How often process is called if no process dies and no service is unavailable: attempts count across waits."""
        return self.process.attempts

    @property
    def calls_with_crashes(self) -> int:
        """How often if the process dies at the last attempt of every delivery: nobody is left to count those."""
        return self.process.attempts * self.deliveries


def worst_case(policy: ConsumerPolicy) -> WorstCase:
    """What *policy* allows at most."""
    loop, steps = policy.loop, policy.steps
    grace = max(steps.process.retry.abandon_grace, steps.success.retry.abandon_grace)
    return WorstCase(
        process=_case("process", steps.process.retry, defers=True),
        success=_case("success", steps.success.retry),
        exception=_case("exception", steps.exception.retry),
        settle=_case("settle", steps.settle.retry, before=steps.settle.linger),
        lifecycle=inf if loop.transaction_timeout is None else loop.transaction_timeout + grace,
        deliveries=loop.max_deliveries,
        # The last permitted delivery runs alone: it waits for all that run, and for what was held beyond the slots.
        queued=1 + ceil(loop.prefetch / loop.concurrency.value),
        max_deferral=loop.max_deferral,
        deferrals=_count_deferrals(steps.process.retry, loop.max_deferral),
    )


def refuse_too_long(policy: ConsumerPolicy, capabilities: Capabilities, *, queue: str) -> None:
    """ConfigurationError where *policy* allows a claim to be held for longer than its broker lets it be."""
    deadline = capabilities.deadline
    if deadline is None:
        return
    held = worst_case(policy).held
    if held < deadline:
        return
    found = "for ever" if held == inf else f"for {held:,.0f} s"
    raise ConfigurationError(
        f"the broker of {queue!r} takes a delivery back after {deadline:,.0f} s and cannot be asked for more, but the "
        f"policy allows it to be held {found}; set loop.transaction_timeout, or lower the attempts and timeouts of the "
        "steps (ergon policy explain shows each), or raise the broker's deadline"
    )


def _count_deferrals(retry: RetryPolicy, limit: float) -> float:
    """Count the deferrals within *limit* seconds if every attempt fails at once and every wait is the shortest."""
    count, elapsed = 0, 0.0
    while elapsed < limit:
        wait, following = (retry.delay(number, lambda: 0.0) for number in (count, count + 1))
        if following <= wait or count == _MAX_STEPS:
            # The waits grow no more; if they do, this is still an upper bound.
            rest = (limit - elapsed) / wait if wait else inf
            return inf if rest == inf else count + ceil(rest)
        count, elapsed = count + 1, elapsed + wait
    return count


def _case(name: str, retry: RetryPolicy, *, defers: bool = False, before: float = 0.0) -> StepCase:
    waits = tuple(_wait(retry, number, defers=defers) for number in range(retry.max_attempts - 1))
    timeout = inf if retry.timeout is None else retry.timeout
    return StepCase(
        name=name,
        attempts=retry.max_attempts,
        timeout=timeout,
        grace=retry.abandon_grace,
        waits=waits,
        held=before + _longest_stretch(timeout + retry.abandon_grace, waits),
    )


def _wait(retry: RetryPolicy, number: int, *, defers: bool) -> Wait:
    planned, shortest, longest = (retry.delay(number, dice) for dice in (None, lambda: 0.0, lambda: 1.0))
    slept = longest if not defers else None if shortest > retry.hold else min(longest, retry.hold)
    return Wait(planned, shortest, longest, slept)


def _longest_stretch(attempt: float, waits: Sequence[Wait]) -> float:
    """The longest run of attempts that no deferral ends: a delivery lasts for one of them."""
    longest = running = attempt
    for wait in waits:
        running = attempt if wait.slept is None else running + wait.slept + attempt
        longest = max(longest, running)
    return longest
