"""How often a fact is appended again, and for how long; and how facts are copied between zones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from pydantic import Field

from ergon_framework.engine import backoff as waiting
from ergon_framework.errors import ConfigurationError
from ergon_framework.policy import Count, Policy, Seconds
from ergon_framework.task.mixins.policies import (
    ProducePolicy,
    ProducerLoopPolicy,
    ProducerPolicy,
    ProducerSteps,
    RetryPolicy,
)

#: Retries that come soon, each after twice the wait of the one before; those behind them come after a cap.
_SOON: Final = 3


class AppendRetry(RetryPolicy):
    """Retries after 100, 200 and 400 ms, then once a second until 10 s of waiting are over.

    It is the schedule of the facts document, made longer: three retries are over before a store that has
    lost its leader has another. ``AppendRetry.times(3)`` is the document's own.
    """

    max_attempts: Count = Field(default=13, description="Attempts in all, the first one included.")
    backoff: Seconds = Field(default=0.1, description="Seconds to wait after the first attempt.")
    cap: Seconds = Field(default=1.0, description="Longest wait in seconds, and that of all retries after the third.")
    within: Seconds = Field(default=10.0, description="Seconds after which publish begins no further attempt.")

    @classmethod
    def times(cls, max_retries: int) -> Self:
        """The same with so many retries at most, 0 for none."""
        if max_retries < 0:
            raise ConfigurationError(f"max_retries is 0 or more, not {max_retries}")
        return cls(max_attempts=min(max_retries, cls().max_attempts - 1) + 1)

    def delay(self, attempt: int, dice: Callable[[], float] | None = None) -> float:
        """Seconds to wait after *attempt*, the first being 0."""
        if attempt < _SOON or not self.cap:
            return super().delay(attempt, dice)
        return self.cap if dice is None else waiting.jittered(self.cap, self.jitter, dice)


class FactProducePolicy(ProducePolicy):
    """How a fact is appended."""

    retry: AppendRetry = Field(default=AppendRetry(), description="How a failed append is tried again.")


class FactProducerSteps(ProducerSteps):
    """The steps of a fact that is produced."""

    produce: FactProducePolicy = Field(default=FactProducePolicy(), description="Artifact and fact.")


class FactProducerPolicy(ProducerPolicy):
    """Everything a producer of facts obeys."""

    loop: ProducerLoopPolicy = Field(default=ProducerLoopPolicy(), description="How the call runs.")
    steps: FactProducerSteps = Field(default=FactProducerSteps(), description="How each step runs.")


class RetentionPolicy(Policy):
    """For how long facts are kept that every reader has confirmed, and how often it is looked."""

    keep: Seconds = Field(
        default=7 * 24 * 3600.0, description="Seconds for which facts and unnamed artifacts are kept at least."
    )
    interval: float = Field(default=3600.0, gt=0, description="Seconds between two rounds.")
    jitter: float = Field(default=0.1, ge=0, le=1, description="Share of a wait that chance may take off.")

    def before_unix_ms(self, now: float) -> int:
        """What was stored before that moment may go; *now* is the clock in seconds."""
        return max(0, int((now - self.keep) * 1000))

    def wait(self, dice: Callable[[], float]) -> float:
        """Seconds until the next round: services of one store do not all begin at once."""
        return waiting.jittered(self.interval, self.jitter, dice)


class ReplicationPolicy(Policy):
    """How the facts of another zone are copied here."""

    batch: int = Field(default=1_000, ge=1, le=100_000, description="Facts that are fetched at once, at most.")
    batch_bytes: Count = Field(
        default=4 * 1024 * 1024, description="Bytes of their objects that a batch is meant to have, at most."
    )
    copies: int = Field(default=4, ge=1, le=100, description="Artifacts that are copied at the same time.")
    copy_bytes: Count = Field(
        default=64 * 1024 * 1024, description="Bytes of artifacts after which the facts that name them are forwarded."
    )
    recognise: bool = Field(
        default=True,
        description="Whether a source must show a fact that this zone has, before it is read on. "
        "Turn it off where this zone's store does not keep ids for ever.",
    )
    timeout: float = Field(
        default=30.0, gt=0, description="Seconds after which a call, or a copy that does not get on, is given up."
    )
    poll: Seconds = Field(default=1.0, description="Seconds between two looks at a source that has nothing new.")
    survey: float = Field(default=10.0, gt=0, description="Seconds between two questions how far behind this zone is.")
    backoff: Seconds = Field(default=0.2, description="Seconds to wait after the first failure in a row.")
    cap: Seconds = Field(default=10.0, description="Longest wait in seconds, before jitter.")
    jitter: float = Field(default=0.3, ge=0, le=1, description="Share of a wait by which it varies to either side.")
    drain: Seconds = Field(default=5.0, description="Seconds that calls under way have after a stop.")

    def delay(self, attempt: int, dice: Callable[[], float]) -> float:
        """Seconds to wait after that many failures in a row, the first being 0."""
        seconds = waiting.delay(attempt, backoff=self.backoff, multiplier=2.0, cap=self.cap)
        return waiting.jittered(seconds, self.jitter, dice)

    def idle(self, dice: Callable[[], float]) -> float:
        """Seconds until a source that had nothing is asked again."""
        return waiting.jittered(self.poll, self.jitter, dice)
