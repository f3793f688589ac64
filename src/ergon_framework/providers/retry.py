"""The retry policy of provider calls; clocks, sleep and random source can be injected.

A canonical error is one of ``providers.errors``, to which every exception of a call is mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeAlias, TypeVar

from pydantic import Field

from ergon_framework.clock import Clock, block
from ergon_framework.engine import retry
from ergon_framework.policy import Count, Policy, Seconds
from ergon_framework.providers.error_mapping import to_provider_error
from ergon_framework.providers.errors import AttemptInfo, ProviderError, ProviderTimeoutError

T = TypeVar("T")

_CLOCK: Final = Clock()


class GiveUpReason(StrEnum):
    """The reason why no further attempt follows."""

    NOT_RETRYABLE = "not_retryable"
    ATTEMPTS_EXHAUSTED = "attempts_spent"
    NO_TIME_LEFT = "no_time_left"


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Another attempt follows after *delay* seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class DoNotRetry:
    """No further attempt follows."""

    reason: GiveUpReason


RetryDecision: TypeAlias = RetryAfter | DoNotRetry


@dataclass(frozen=True, slots=True)
class RetryResult(Generic[T]):
    """The return value of a call, and all its attempts."""

    value: T
    attempts: tuple[AttemptInfo, ...]


class RetryPolicy(Policy):
    """The number of attempts and the delays between them; attempts count from 1."""

    max_attempts: Count = Field(default=3, description="Maximum attempts, including the first one.")
    base_delay_seconds: Seconds = Field(default=0.5, description="Seconds to wait after the first attempt.")
    max_delay_seconds: Seconds = Field(default=30.0, description="Maximum delay in seconds, before jitter.")
    jitter_ratio: float = Field(
        default=0.2, ge=0, le=1, description="Maximum jitter, as a share of the delay in both directions."
    )

    def compute_delay(self, attempt_number: int, random: Callable[[], float] | None = None) -> float:
        """Return the delay after an attempt, ``min(max, base * 2**(attempt_number - 1))``, changed by jitter.

        The jitter is added after the cap, so that a fleet at its cap is spread too: a delay may exceed
        ``max_delay_seconds`` by that share. *random* returns numbers in [0, 1); without it there is no jitter.
        """
        if attempt_number < 1:
            raise ValueError(f"attempt_number must be >= 1, got {attempt_number}")
        if self.max_delay_seconds == 0:  # elsewhere a cap of 0 means no cap; in this formula it means 0
            return 0.0
        seconds = retry.backoff_delay(
            attempt_number - 1, backoff=self.base_delay_seconds, multiplier=2, cap=self.max_delay_seconds
        )
        return seconds if random is None else retry.apply_jitter(seconds, self.jitter_ratio, random)

    def decide(
        self, attempt_number: int, error: ProviderError, *, remaining: float | None, random: Callable[[], float] | None
    ) -> RetryDecision:
        """Decide what follows after attempt *attempt_number* failed with *error* and *remaining* seconds are left.

        A pause that the provider requested is never shortened: if it does not fit, no attempt follows.
        """
        if error.final or not error.retryable:
            return DoNotRetry(GiveUpReason.NOT_RETRYABLE)
        if attempt_number >= self.max_attempts:
            return DoNotRetry(GiveUpReason.ATTEMPTS_EXHAUSTED)
        wait = max(self.compute_delay(attempt_number, random), error.retry_after or 0.0)
        # A delay that uses all remaining time would leave none for the call.
        if remaining is not None and wait >= remaining:
            return DoNotRetry(GiveUpReason.NO_TIME_LEFT)
        return RetryAfter(wait)

    def run(
        self,
        call: Callable[[], T],
        *,
        clock: Callable[[], float] = _CLOCK.monotonic,
        wall: Callable[[], float] = _CLOCK.wall,
        sleep: Callable[[float], object] = block,
        random: Callable[[], float] | None = _CLOCK.random,
        budget: float | None = None,
    ) -> RetryResult[T]:
        """Call until it succeeds or no further attempt follows; then raise the last canonical error.

        *budget* seconds of *clock* limit the delays and the starts of attempts; a running call is not interrupted.
        *wall* is the time that dates in headers are compared with. By default clocks and random source are real, and
        delays block the calling thread.
        """
        deadline = None if budget is None else clock() + budget
        attempts: list[AttemptInfo] = []
        error: ProviderError = ProviderTimeoutError("no time left for a first attempt", sent=False, fault=False)
        while True:
            started_at = clock()
            if deadline is not None and started_at >= deadline:
                break
            try:
                value = call()
            except Exception as caught:  # noqa: BLE001 - the boundary to third-party code; mapped to a canonical error
                error = to_provider_error(caught, now=wall())
            else:
                attempts.append(AttemptInfo(len(attempts) + 1, started_at, clock() - started_at))
                return RetryResult(value, tuple(attempts))
            ended_at = clock()
            seconds_left = None if deadline is None else deadline - ended_at
            decision = self.decide(len(attempts) + 1, error, remaining=seconds_left, random=random)
            delay = decision.delay if isinstance(decision, RetryAfter) else None
            attempts.append(AttemptInfo(len(attempts) + 1, started_at, ended_at - started_at, error, delay))
            if delay is None:
                break
            sleep(delay)
        error.attempts = tuple(attempts)
        raise error from error.__cause__
