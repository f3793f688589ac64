"""Policies for facts: retries of appends, retention, and replication between zones.

A zone is a site with its own store of facts. A reader is a named consumer of facts; retention keeps what it has not
confirmed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from pydantic import Field

from ergon_framework.engine import retry as waiting
from ergon_framework.errors import ConfigurationError
from ergon_framework.policy import Count, Policy, Seconds
from ergon_framework.worker.policies import (
    ProducePolicy,
    ProducerLoopPolicy,
    ProducerPolicy,
    ProducerSteps,
    RetryPolicy,
)

#: Number of retries with exponential backoff; later retries wait for the cap.
_BACKOFF_RETRIES: Final = 3


class AppendRetry(RetryPolicy):
    """Retries after 100, 200 and 400 ms, then once a second until 10 s have been spent waiting.

    This extends the schedule of the facts document, whose three retries end before a store that has lost its leader
    has elected a new one. ``AppendRetry.with_retries(3)`` is the document's schedule.
    """

    max_attempts: Count = Field(default=13, description="Attempts in all, the first one included.")
    backoff: Seconds = Field(default=0.1, description="Seconds to wait after the first attempt.")
    cap: Seconds = Field(default=1.0, description="Longest wait in seconds, and that of all retries after the third.")
    within: Seconds = Field(default=10.0, description="Seconds after which publish begins no further attempt.")

    @classmethod
    def with_retries(cls, max_retries: int) -> Self:
        """Return this policy with at most that many retries, 0 for none."""
        if max_retries < 0:
            raise ConfigurationError(f"max_retries must be 0 or more, not {max_retries}")
        return cls(max_attempts=min(max_retries, cls().max_attempts - 1) + 1)

    def delay(self, attempt: int, random: Callable[[], float] | None = None) -> float:
        """Return the seconds to wait after *attempt*, counted from 0."""
        if attempt < _BACKOFF_RETRIES or not self.cap:
            return super().delay(attempt, random)
        return self.cap if random is None else waiting.apply_jitter(self.cap, self.jitter, random)


class FactProducePolicy(ProducePolicy):
    """The produce step: how a fact is appended."""

    retry: AppendRetry = Field(default=AppendRetry(), description="How a failed append is retried.")


class FactProducerSteps(ProducerSteps):
    """The steps of producing a fact."""

    produce: FactProducePolicy = Field(default=FactProducePolicy(), description="Artifact and fact.")


class FactProducerPolicy(ProducerPolicy):
    """The policy of a producer of facts."""

    loop: ProducerLoopPolicy = Field(default=ProducerLoopPolicy(), description="How the call runs.")
    steps: FactProducerSteps = Field(default=FactProducerSteps(), description="How each step runs.")


class RetentionPolicy(Policy):
    """How long facts are kept after every reader has confirmed them, and how often retention runs."""

    keep: Seconds = Field(
        default=7 * 24 * 3600.0, description="Minimum seconds to keep facts and unreferenced artifacts."
    )
    interval: float = Field(default=3600.0, gt=0, description="Seconds between two retention runs.")
    jitter: float = Field(default=0.1, ge=0, le=1, description="Fraction of a delay that jitter may subtract.")

    def before_unix_ms(self, now: float) -> int:
        """Return the time before which stored data may be removed; *now* is the wall clock in seconds."""
        return max(0, int((now - self.keep) * 1000))

    def next_delay(self, random: Callable[[], float]) -> float:
        """Return the seconds until the next run, with jitter so that services of one store start at different times."""
        return waiting.apply_jitter(self.interval, self.jitter, random)


class ReplicationPolicy(Policy):
    """How the facts of another zone are replicated."""

    batch: int = Field(default=1_000, ge=1, le=100_000, description="Maximum facts per fetch.")
    batch_bytes: Count = Field(default=4 * 1024 * 1024, description="Target size of a batch, in bytes of its objects.")
    copies: int = Field(default=4, ge=1, le=100, description="Artifacts that are copied concurrently.")
    copy_bytes: Count = Field(
        default=64 * 1024 * 1024, description="Bytes of artifacts after which the facts that name them are forwarded."
    )
    recognise: bool = Field(
        default=True,
        description="Whether the source must return a fact that this zone has before replication continues. "
        "Turn it off if this zone's store does not keep ids forever.",
    )
    timeout: float = Field(
        default=30.0, gt=0, description="Seconds after which a call, or a copy without progress, is abandoned."
    )
    poll: Seconds = Field(default=1.0, description="Seconds between two polls of a source without new facts.")
    survey: float = Field(default=10.0, gt=0, description="Seconds between two lag measurements.")
    backoff: Seconds = Field(default=0.2, description="Seconds to wait after the first failure in a row.")
    cap: Seconds = Field(default=10.0, description="Longest wait in seconds, before jitter.")
    jitter: float = Field(default=0.3, ge=0, le=1, description="Fraction by which a delay varies in either direction.")
    drain: Seconds = Field(default=5.0, description="Seconds that running calls have to finish after a stop.")

    def delay(self, attempt: int, random: Callable[[], float]) -> float:
        """Return the seconds to wait after consecutive failures; *attempt* counts from 0."""
        seconds = waiting.backoff_delay(attempt, backoff=self.backoff, multiplier=2.0, cap=self.cap)
        return waiting.apply_jitter(seconds, self.jitter, random)

    def idle_delay(self, random: Callable[[], float]) -> float:
        """Return the seconds until a source without new facts is polled again."""
        return waiting.apply_jitter(self.poll, self.jitter, random)
