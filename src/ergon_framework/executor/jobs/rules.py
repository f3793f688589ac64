"""The engine's policy of a consumer whose attempts the job store counts and whose concurrency the pool limits."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ergon_framework.task.mixins.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerPolicy,
    ProcessPolicy,
    RetryPolicy,
)

#: Maximum number of jobs per slot that are claimed beyond the running ones.
MAX_CLAIMS_AHEAD: Final = 16
#: The store counts attempts; deliveries of a message are not limited.
_MAX_DELIVERIES: Final = 2**31 - 1
#: One attempt, without a timeout and without a delay after it.
_SINGLE_ATTEMPT: Final = {"max_attempts": 1, "timeout": None, "backoff": 0.0, "jitter": 0.0}


def engine_policy(policy: ConsumerPolicy, slot_count: int) -> ConsumerPolicy:
    """Return *policy* with a process step that has one attempt and no timeout."""
    process = ProcessPolicy(retry=policy.steps.process.retry.model_copy(update=_SINGLE_ATTEMPT))
    max_claims = slot_count * (1 + MAX_CLAIMS_AHEAD)
    loop = {
        "concurrency": ConcurrencyPolicy(value=max_claims),
        "batch": BatchPolicy(size=max_claims),
        "max_deliveries": _MAX_DELIVERIES,
        "transaction_timeout": None,
    }
    return policy.model_copy(
        update={
            "loop": policy.loop.model_copy(update=loop),
            "steps": policy.steps.model_copy(update={"process": process}),
        }
    )


def with_default_streaming(policy: ConsumerPolicy | None) -> ConsumerPolicy:
    """Return *policy*, or the default one; its loop continues at an empty queue, unless it says otherwise."""
    policy = policy or ConsumerPolicy()
    if "streaming" in policy.loop.model_fields_set:
        return policy
    return policy.model_copy(update={"loop": policy.loop.model_copy(update={"streaming": True})})


def with_max_attempts(policy: RetryPolicy, max_attempts: int) -> RetryPolicy:
    """Return *policy* with *max_attempts* attempts."""
    return policy if policy.max_attempts == max_attempts else _copy_with_max_attempts(policy, max_attempts)


@lru_cache(64)
def _copy_with_max_attempts(policy: RetryPolicy, max_attempts: int) -> RetryPolicy:
    return policy.model_copy(update={"max_attempts": max_attempts})
