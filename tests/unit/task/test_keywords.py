"""The keywords of the decorators, and the keys of the policy that they set."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework import ConfigurationError, ConsumerPolicy, MemoryConnector, ProducerPolicy, consumer, producer


def declare(decorator: Any = consumer, **options: Any) -> Any:
    def charge(order: Any) -> None: ...

    return decorator(MemoryConnector("orders"), **options)(charge).policy


def test_keywords_set_the_keys_of_the_policy_tree() -> None:
    policy = declare(retries=5, timeout=30, backoff=0.5, concurrency=20, max_deliveries=7)
    assert policy == ConsumerPolicy.load(
        {
            "loop": {"concurrency": {"value": 20}, "max_deliveries": 7},
            "steps": {"process": {"retry": {"max_attempts": 6, "timeout": 30, "backoff": 0.5}}},
        }
    )
    policy = declare(producer, retries=0, timeout=1, backoff=0, concurrency=2)
    assert policy == ProducerPolicy.load(
        {
            "loop": {"concurrency": {"value": 2}},
            "steps": {"produce": {"retry": {"max_attempts": 1, "timeout": 1, "backoff": 0}}},
        }
    )


def test_keywords_and_a_policy_complete_each_other() -> None:
    given = ConsumerPolicy.load({"loop": {"streaming": True}, "steps": {"process": {"retry": {"jitter": 0.2}}}})
    policy = declare(retries=1, concurrency=3, policy=given)
    assert (policy.loop.streaming, policy.loop.concurrency.value) == (True, 3)
    assert (policy.steps.process.retry.jitter, policy.steps.process.retry.max_attempts) == (0.2, 2)
    assert (given.loop.concurrency.value, given.steps.process.retry.max_attempts) == (10, 3), "it was not changed"
    assert declare(policy=given) is given
    assert declare() is None


def test_a_key_in_both_is_rejected_even_with_equal_values() -> None:
    policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 6}}}})
    with pytest.raises(
        ConfigurationError,
        match=r"retries= of charge and steps.process.retry.max_attempts of its policy= set the same value",
    ):
        declare(retries=5, policy=policy)
    with pytest.raises(ConfigurationError, match=r"concurrency= of mail and loop.concurrency.value"):
        declare(concurrency=1, name="mail", policy=ConsumerPolicy.load({"loop": {"concurrency": {"value": 1}}}))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"retries": -1}, "retries= of charge must be a whole number of at least 0, not -1"),
        ({"retries": 1.5}, "retries= of charge must be a whole number of at least 0, not 1.5"),
        ({"retries": True}, "retries= of charge must be a whole number of at least 0, not True"),
        ({"timeout": -1}, "timeout= of charge: .*steps.process.retry.timeout: Input should be greater"),
        ({"concurrency": 0, "backoff": 1}, "backoff=, concurrency= of charge: .*loop.concurrency.value"),
        ({"max_deliveries": "ten"}, "max_deliveries= of charge: .*Input should be a valid integer"),
    ],
)
def test_an_invalid_value_names_its_keyword(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        declare(**options)
