"""How often a fact is appended again, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from pydantic import Field

from ergon_framework.engine import backoff as waiting
from ergon_framework.errors import ConfigurationError
from ergon_framework.policy import Count, Seconds
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
