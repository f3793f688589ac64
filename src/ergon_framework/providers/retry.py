"""When a failed call is tried again, and when not; clocks, sleeps and dice can be handed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeAlias, TypeVar

from pydantic import Field

from ergon_framework.engine import backoff
from ergon_framework.engine.senses import Senses, block
from ergon_framework.policy import Count, Policy, Seconds
from ergon_framework.providers.errors import ProviderError, ProviderTimeoutError
from ergon_framework.providers.mapping import canonical

T = TypeVar("T")

_SENSES: Final = Senses()


class Why(StrEnum):
    """Why there is no further attempt."""

    NOT_RETRYABLE = "not_retryable"
    ATTEMPTS_SPENT = "attempts_spent"
    NO_TIME_LEFT = "no_time_left"


@dataclass(frozen=True, slots=True)
class Again:
    """There is another attempt, after *delay* seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """There is none."""

    why: Why


Decision: TypeAlias = Again | GiveUp


@dataclass(frozen=True, slots=True)
class Tried:
    """One attempt: when it began, how long it took, how it failed if it did, and the wait after it."""

    attempt_number: int
    began: float
    duration: float
    error: ProviderError | None = None
    delay: float | None = None


@dataclass(frozen=True, slots=True)
class Ran(Generic[T]):
    """What a call returned, and all attempts it took."""

    value: T
    attempts: tuple[Tried, ...]


class RetryPolicy(Policy):
    """How often a call is tried, and how long the waits are; the attempts count from 1."""

    max_attempts: Count = Field(default=3, description="Attempts in all, the first one included.")
    base_delay_seconds: Seconds = Field(default=0.5, description="Seconds to wait after the first attempt.")
    max_delay_seconds: Seconds = Field(default=30.0, description="Longest wait in seconds, before jitter.")
    jitter_ratio: float = Field(
        default=0.2, ge=0, le=1, description="Share of a wait by which it varies to either side."
    )

    def delay(self, attempt_number: int, dice: Callable[[], float] | None = None) -> float:
        """Seconds to wait after that attempt, ``min(max, base * 2**(attempt_number - 1))``, then moved by jitter.

        The jitter comes after the cap, so that a fleet at its cap is spread too: a wait may exceed
        ``max_delay_seconds`` by that share. Without *dice*, which give [0, 1), there is none.
        """
        if attempt_number < 1:
            raise ValueError(f"attempts of a call count from 1, so {attempt_number} is none")
        if self.max_delay_seconds == 0:  # elsewhere a cap of 0 means none; in this formula it means 0
            return 0.0
        seconds = backoff.delay(
            attempt_number - 1, backoff=self.base_delay_seconds, multiplier=2, cap=self.max_delay_seconds
        )
        return seconds if dice is None else backoff.jittered(seconds, self.jitter_ratio, dice)

    def next(
        self, attempt_number: int, error: ProviderError, *, remaining: float | None, dice: Callable[[], float] | None
    ) -> Decision:
        """What follows when attempt *attempt_number* failed with *error* and *remaining* seconds are left.

        What the provider asked to wait is never shortened: where it does not fit, there is no attempt.
        """
        if error.final or not error.retryable:
            return GiveUp(Why.NOT_RETRYABLE)
        if attempt_number >= self.max_attempts:
            return GiveUp(Why.ATTEMPTS_SPENT)
        wait = max(self.delay(attempt_number, dice), error.retry_after or 0.0)
        # A wait that takes all that is left would leave nothing for the call.
        if remaining is not None and wait >= remaining:
            return GiveUp(Why.NO_TIME_LEFT)
        return Again(wait)

    def run(
        self,
        call: Callable[[], T],
        *,
        clock: Callable[[], float] = _SENSES.clock,
        wall: Callable[[], float] = _SENSES.wall,
        sleep: Callable[[float], object] = block,
        dice: Callable[[], float] | None = _SENSES.dice,
        budget: float | None = None,
    ) -> Ran[T]:
        """Call until it succeeds or there is no further attempt; then the last canonical error is raised.

        *budget* seconds of *clock* bind the waits and the beginnings of attempts; a call that is
        running is not ended by it. *wall* is the time that dates in headers are compared with. By default
        clocks and dice are real, and waits block the calling thread.
        """
        end = None if budget is None else clock() + budget
        attempts: list[Tried] = []
        error: ProviderError = ProviderTimeoutError("no time was left for a first attempt", sent=False, fault=False)
        while True:
            began = clock()
            if end is not None and began >= end:
                break
            try:
                value = call()
            except Exception as caught:  # noqa: BLE001 - the boundary to foreign code; handed on as data
                error = canonical(caught, now=wall())
            else:
                attempts.append(Tried(len(attempts) + 1, began, clock() - began))
                return Ran(value, tuple(attempts))
            over = clock()
            left = None if end is None else end - over
            decision = self.next(len(attempts) + 1, error, remaining=left, dice=dice)
            delay = decision.delay if isinstance(decision, Again) else None
            attempts.append(Tried(len(attempts) + 1, began, over - began, error, delay))
            if delay is None:
                break
            sleep(delay)
        error.attempts = tuple(attempts)
        raise error from error.__cause__
