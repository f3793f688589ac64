"""The policies of the engine: all its numbers, as frozen trees that reject unknown keys.

A policy configures one loop of a task. Its steps (fetch, process, success, exception, settle, produce) have their own
retries and timeouts; docs/reference/policies.md lists every key with its default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, PlainSerializer, model_validator

from ergon_framework.engine import retry as waiting
from ergon_framework.policy import Count, Policy, Seconds

TimeLimit: TypeAlias = Annotated[float, Field(gt=0)] | None
#: What happens to a failed transaction in its broker: it becomes a dead letter, or is removed.
FailureSettlement: TypeAlias = Literal["dead_letter", "ack"]


class FrozenMapping(Mapping[str, Any]):
    """An immutable mapping whose representation shows no values: they may be secret.

    The values themselves are shared, not copied. Unlike the standard read-only view it can be pickled and copied, so
    a policy can be sent to another process.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"FrozenMapping({len(self)} hidden)"


# -- retries and delays ---------------------------------------------------------------------------


class RetryPolicy(Policy):
    """The number of attempts of a step, the timeout of each, and the delays between them."""

    max_attempts: Count = Field(default=3, description="Attempts in all, the first one included.")
    timeout: TimeLimit = Field(default=60.0, description="Timeout of one attempt in seconds; null means no limit.")
    backoff: Seconds = Field(default=1.0, description="Seconds to wait after the first attempt.")
    multiplier: float = Field(default=2.0, ge=1, description="Factor by which each delay exceeds the previous one.")
    cap: Seconds = Field(default=30.0, description="Maximum delay in seconds, before jitter; 0 means no cap.")
    jitter: float = Field(
        default=0.0, ge=0, le=1, description="Random variation of a delay, as a fraction: 0.2 means ±20 %."
    )
    max_inline_delay: Seconds = Field(
        default=30.0,
        description="Maximum delay in seconds that the worker waits itself; a longer one defers. Process step only.",
    )
    exit_grace: Seconds = Field(
        default=5.0, description="Seconds that a timed-out call has to exit before the lifecycle continues."
    )

    def delay(self, attempt: int, random: Callable[[], float] | None = None) -> float:
        """Return the seconds to wait after *attempt*, the first being 0; without *random* there is no jitter."""
        seconds = waiting.backoff_delay(attempt, backoff=self.backoff, multiplier=self.multiplier, cap=self.cap)
        return seconds if random is None else waiting.apply_jitter(seconds, self.jitter, random)


class EmptyQueuePolicy(Policy):
    """How long a streaming loop waits after an empty fetch."""

    backoff: Seconds = Field(default=0.5, description="Seconds to wait after the first empty fetch.")
    multiplier: float = Field(default=2.0, ge=1, description="Factor by which each delay exceeds the previous one.")
    cap: Seconds = Field(default=5.0, description="Maximum delay in seconds; 0 means no cap.")

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after *attempt* consecutive empty fetches, the first being 0."""
        return waiting.backoff_delay(attempt, backoff=self.backoff, multiplier=self.multiplier, cap=self.cap)


class ConcurrencyPolicy(Policy):
    """How many transactions run at once."""

    value: Count = Field(default=10, description="Slots: maximum number of transactions that run at once.")


class BatchPolicy(Policy):
    """How many transactions one fetch or batch takes."""

    size: Count = Field(default=10, description="Maximum number of transactions in one fetch or one batch.")


# -- steps ----------------------------------------------------------------------------------------


class StepPolicy(Policy):
    """The common part of all step policies."""

    retry: RetryPolicy = Field(default=RetryPolicy(), description="How the step is retried.")


class FetchPolicy(StepPolicy):
    """How transactions are fetched from the connector."""

    retry: RetryPolicy = Field(default=RetryPolicy(timeout=30.0), description="How a failed fetch is retried.")
    # Kept out of representations: it is passed to the connector unchanged and may hold secrets.
    extra: Annotated[Mapping[str, Any], AfterValidator(FrozenMapping), PlainSerializer(dict)] = Field(
        default_factory=dict, repr=False, description="Keyword arguments of the connector's fetch; never logged."
    )


class ProcessPolicy(StepPolicy):
    """How a transaction is processed."""


class ProducePolicy(StepPolicy):
    """How a transaction is produced."""


class SuccessPolicy(StepPolicy):
    """How the success handler runs."""


class ExceptionPolicy(StepPolicy):
    """How the exception handler runs; its attempts always have a time limit."""

    @model_validator(mode="after")
    def _require_timeout(self) -> Self:
        if self.retry.timeout is None:
            raise ValueError(
                "retry.timeout of the exception step must be a number, not null: the transaction's own timeout "
                "does not limit this step, so a handler that hangs would never end"
            )
        return self


class SettlePolicy(StepPolicy):
    """How outcomes are settled with the broker, many at a time."""

    retry: RetryPolicy = Field(
        default=RetryPolicy(max_attempts=5, timeout=30.0, backoff=0.1, cap=5.0),
        description="How a failed settlement is retried.",
    )
    on_business: FailureSettlement = Field(default="dead_letter", description="Settlement of a BUSINESS failure.")
    on_system: FailureSettlement = Field(default="dead_letter", description="Settlement of a SYSTEM failure.")
    on_timeout: FailureSettlement = Field(default="dead_letter", description="Settlement of a TIMEOUT failure.")
    linger: Seconds = Field(default=0.002, description="Seconds that a settlement waits for others to join its call.")
    batch_size: Count = Field(default=100, description="Maximum number of settlements in one call.")
    max_pending: Count = Field(
        default=1000, description="Maximum number of transactions that wait for their settlement."
    )

    @model_validator(mode="after")
    def _check_batch_fits(self) -> Self:
        if self.batch_size > self.max_pending:
            raise ValueError(
                f"batch_size is {self.batch_size}, but max_pending is {self.max_pending}: a batch would never be full; "
                "lower batch_size or raise max_pending"
            )
        return self


# -- the consumer ---------------------------------------------------------------------------------


class ConsumerLoopPolicy(Policy):
    """How a consumer's loop runs, for any task."""

    concurrency: ConcurrencyPolicy = Field(
        default=ConcurrencyPolicy(), description="How many transactions run at once."
    )
    batch: BatchPolicy = Field(default=BatchPolicy(), description="How many transactions one fetch may return.")
    prefetch: int = Field(default=0, ge=0, description="Maximum number of transactions claimed beyond the free slots.")
    linger: Seconds = Field(default=0.002, description="Seconds to wait for more free slots before a fetch.")
    streaming: bool = Field(default=False, description="Whether the loop continues after an empty fetch.")
    empty_queue: EmptyQueuePolicy = Field(
        default=EmptyQueuePolicy(), description="How a streaming loop waits for work."
    )
    timeout: TimeLimit = Field(
        default=None, description="Timeout of the loop in seconds, without timeout_drain; null means no limit."
    )
    timeout_drain: Seconds = Field(
        default=0.0, description="Seconds that running work has to end after the loop's timeout."
    )
    transaction_timeout: TimeLimit = Field(
        default=None,
        description="Timeout of process and success of one transaction in seconds, delays included; null: no limit.",
    )
    limit: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Maximum number of transactions to start; null means no limit."
    )
    drain_timeout: Seconds = Field(default=30.0, description="Seconds that running work has to end after a stop.")
    duplicate_delay: Seconds = Field(
        default=1.0, description="Redelivery delay in seconds for a transaction that this worker already processes."
    )
    max_deliveries: Count = Field(
        default=10, description="Deliveries of one transaction before it becomes a dead letter."
    )
    max_deferral: Seconds = Field(
        default=3600.0,
        description="Seconds since its first deferral for which a transaction is deferred while a provider or the "
        "facts boundary is unavailable, or its encryption key is missing; 0 turns such deferrals off.",
    )


class ConsumerSteps(Policy):
    """The steps of a consumed transaction."""

    fetch: FetchPolicy = Field(default=FetchPolicy(), description="Fetching transactions from the connector.")
    process: ProcessPolicy = Field(default=ProcessPolicy(), description="The work itself.")
    success: SuccessPolicy = Field(default=SuccessPolicy(), description="The handler after success.")
    exception: ExceptionPolicy = Field(default=ExceptionPolicy(), description="The handler after failure.")
    settle: SettlePolicy = Field(default=SettlePolicy(), description="Settling the delivery with the broker.")


class ConsumerPolicy(Policy):
    """The complete policy of a consumer."""

    loop: ConsumerLoopPolicy = Field(default=ConsumerLoopPolicy(), description="How the loop runs.")
    steps: ConsumerSteps = Field(default=ConsumerSteps(), description="How each step runs.")


# -- the producer ---------------------------------------------------------------------------------


class ProducerLoopPolicy(Policy):
    """How a producer's call runs, for any task."""

    concurrency: ConcurrencyPolicy = Field(
        default=ConcurrencyPolicy(), description="How many transactions run at once."
    )
    batch: BatchPolicy = Field(default=BatchPolicy(), description="How many transactions make one batch.")
    timeout: TimeLimit = Field(
        default=None, description="Timeout of the call in seconds, without timeout_drain; null means no limit."
    )
    timeout_drain: Seconds = Field(
        default=0.0, description="Seconds that running work has to end after the call's timeout."
    )
    transaction_timeout: TimeLimit = Field(
        default=None,
        description="Timeout of produce and success of one transaction in seconds, delays included; null: no limit.",
    )
    limit: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Maximum number of transactions to start; null means no limit."
    )
    drain_timeout: Seconds = Field(default=30.0, description="Seconds that running work has to end after a stop.")


class ProducerSteps(Policy):
    """The steps of a produced transaction."""

    produce: ProducePolicy = Field(default=ProducePolicy(), description="The work itself.")
    success: SuccessPolicy = Field(default=SuccessPolicy(), description="The handler after success.")
    exception: ExceptionPolicy = Field(default=ExceptionPolicy(), description="The handler after failure.")


class ProducerPolicy(Policy):
    """The complete policy of a producer."""

    loop: ProducerLoopPolicy = Field(default=ProducerLoopPolicy(), description="How the call runs.")
    steps: ProducerSteps = Field(default=ProducerSteps(), description="How each step runs.")
