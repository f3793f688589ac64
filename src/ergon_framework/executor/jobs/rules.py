"""Rules: a consumer's policy, as the engine is to obey it where attempts are the store's and places the pool's."""

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

#: At most so many jobs for each place are claimed beyond those that run.
MOST_AHEAD: Final = 16
#: Counted are attempts, by the store; a message may come as often as it likes.
_DELIVERIES: Final = 2**31 - 1
#: One attempt, without a limit, and no wait of its own after it.
_ONCE: Final = {"max_attempts": 1, "timeout": None, "backoff": 0.0, "jitter": 0.0}


def engine_rules(policy: ConsumerPolicy, places: int) -> ConsumerPolicy:
    """*policy* with a process step that is tried once and takes as long as it takes."""
    process = ProcessPolicy(retry=policy.steps.process.retry.model_copy(update=_ONCE))
    most = places * (1 + MOST_AHEAD)
    loop = {
        "concurrency": ConcurrencyPolicy(value=most),
        "batch": BatchPolicy(size=most),
        "max_deliveries": _DELIVERIES,
        "transaction_timeout": None,
    }
    return policy.model_copy(
        update={
            "loop": policy.loop.model_copy(update=loop),
            "steps": policy.steps.model_copy(update={"process": process}),
        }
    )


def streams_by_default(policy: ConsumerPolicy | None) -> ConsumerPolicy:
    """Return *policy*, or the default one; its loop goes on at an empty queue, unless it says otherwise."""
    policy = policy or ConsumerPolicy()
    if "streaming" in policy.loop.model_fields_set:
        return policy
    return policy.model_copy(update={"loop": policy.loop.model_copy(update={"streaming": True})})


def with_attempts(policy: RetryPolicy, most: int) -> RetryPolicy:
    """*policy* with *most* attempts."""
    return policy if policy.max_attempts == most else _changed(policy, most)


@lru_cache(64)
def _changed(policy: RetryPolicy, most: int) -> RetryPolicy:
    return policy.model_copy(update={"max_attempts": most})
