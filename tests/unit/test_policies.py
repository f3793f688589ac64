"""Policies: accepted values, rejected values and the error messages."""

from __future__ import annotations

import copy
import json
import pickle
from types import MappingProxyType

import pytest
from pydantic import ValidationError

from ergon_framework.errors import ConfigurationError
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.facts.policy import AppendRetry
from ergon_framework.worker import policies
from ergon_framework.worker.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    EmptyQueuePolicy,
    ExceptionPolicy,
    FetchPolicy,
    FrozenMapping,
    Policy,
    ProducerLoopPolicy,
    ProducerPolicy,
    RetryPolicy,
    SettlePolicy,
)

SECRET = "correct horse battery staple"


def list_policy_types():
    kinds = [kind for kind in vars(policies).values() if isinstance(kind, type) and issubclass(kind, Policy)]
    return sorted(set(kinds) - {Policy}, key=lambda kind: kind.__name__)


# -- defaults -------------------------------------------------------------------------------------


def list_fields_with_custom_defaults():
    """Return every field whose default is a policy that differs from the default of its type."""
    return [
        (kind, name)
        for kind in [*list_policy_types(), PoolPolicy]
        for name, field in kind.model_fields.items()
        if isinstance(field.default, Policy) and field.default != type(field.default)()
    ]


@pytest.mark.spec("DX-17")
@pytest.mark.parametrize("kind, name", list_fields_with_custom_defaults())
def test_the_defaults_of_a_field_survive_a_partial_policy_in_both_forms(kind, name):
    default = kind.model_fields[name].default
    part = {"max_attempts": 7}

    built = getattr(kind(**{name: RetryPolicy(**part)}), name)

    assert built == getattr(kind.load({name: part}), name) == default.model_copy(update=part)
    assert getattr(kind(**{name: RetryPolicy()}), name) == default
    all_settings = RetryPolicy().model_dump()
    assert getattr(kind(**{name: RetryPolicy(**all_settings)}), name) == RetryPolicy()


@pytest.mark.spec("DX-17")
def test_more_attempts_of_the_fetch_step_keep_its_timeout():
    assert {(kind.__name__, name) for kind, name in list_fields_with_custom_defaults()} == {
        ("FetchPolicy", "retry"),
        ("SettlePolicy", "retry"),
        ("PoolPolicy", "restart"),
    }
    retry = RetryPolicy(max_attempts=5)
    policy = ConsumerPolicy(steps=ConsumerSteps(fetch=FetchPolicy(retry=retry)))

    assert (policy.steps.fetch.retry.max_attempts, policy.steps.fetch.retry.timeout) == (5, 30.0)
    assert retry.timeout == 60.0


@pytest.mark.spec("DX-17")
def test_a_subclass_keeps_the_defaults_of_its_own():
    assert SettlePolicy(retry=AppendRetry()).retry == AppendRetry()


def test_the_defaults_are_the_documented_ones():
    retry = RetryPolicy().model_dump()
    assert retry == {
        "max_attempts": 3,
        "timeout": 60,
        "backoff": 1,
        "multiplier": 2,
        "cap": 30,
        "jitter": 0,
        "max_inline_delay": 30,
        "exit_grace": 5,
    }
    loop = {"concurrency": {"value": 10}, "batch": {"size": 10}, "timeout": None, "transaction_timeout": None}
    loop |= {"limit": None, "drain_timeout": 30, "timeout_drain": 0}
    assert ConsumerPolicy().model_dump() == {
        "loop": loop
        | {
            "prefetch": 0,
            "linger": 0.002,
            "streaming": False,
            "duplicate_delay": 1,
            "max_deliveries": 10,
            "max_deferral": 3600,
        }
        | {"empty_queue": {"backoff": 0.5, "multiplier": 2, "cap": 5}},
        "steps": {
            "fetch": {"retry": retry | {"timeout": 30}, "extra": {}},
            "process": {"retry": retry},
            "success": {"retry": retry},
            "exception": {"retry": retry},
            "settle": {
                "retry": retry | {"max_attempts": 5, "timeout": 30, "backoff": 0.1, "cap": 5},
                "on_business": "dead_letter",
                "on_system": "dead_letter",
                "on_timeout": "dead_letter",
                "linger": 0.002,
                "batch_size": 100,
                "max_pending": 1000,
            },
        },
    }
    assert ProducerPolicy().model_dump() == {
        "loop": loop,
        "steps": {"produce": {"retry": retry}, "success": {"retry": retry}, "exception": {"retry": retry}},
    }


@pytest.mark.parametrize("kind", list_policy_types())
def test_a_policy_without_settings_is_its_defaults(kind):
    assert kind.load({}) == kind()


@pytest.mark.parametrize("kind", list_policy_types())
def test_every_field_is_described_in_one_line(kind):
    assert kind.model_json_schema()["properties"].keys() == kind.model_fields.keys()
    for name, field in kind.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
        assert "\n" not in field.description, name


@pytest.mark.parametrize("kind", list_policy_types())
def test_the_schema_rejects_unknown_keys_too(kind):
    assert kind.model_json_schema()["additionalProperties"] is False


# -- bounds ---------------------------------------------------------------------------------------

REJECTED_VALUES = [
    (RetryPolicy, "max_attempts", [0, -1, 1.5, "3", True, None]),
    (RetryPolicy, "timeout", [0, -1, "60", True]),
    (RetryPolicy, "backoff", [-0.1, "1", None, True]),
    (RetryPolicy, "multiplier", [0.99, "2", None]),
    (RetryPolicy, "cap", [-1, None]),
    (RetryPolicy, "jitter", [-0.1, 1.1, None]),
    (RetryPolicy, "max_inline_delay", [-1, None]),
    (RetryPolicy, "exit_grace", [-1, None]),
    (EmptyQueuePolicy, "backoff", [-1, None]),
    (EmptyQueuePolicy, "multiplier", [0.5]),
    (EmptyQueuePolicy, "cap", [-1]),
    (ConcurrencyPolicy, "value", [0, 1.0, None]),
    (BatchPolicy, "size", [0, "10"]),
    (ConsumerLoopPolicy, "prefetch", [-1, 0.5]),
    (ConsumerLoopPolicy, "linger", [-0.001]),
    (ConsumerLoopPolicy, "streaming", [1, "yes", None]),
    (ConsumerLoopPolicy, "timeout", [0, -1]),
    (ConsumerLoopPolicy, "transaction_timeout", [0, -1]),
    (ConsumerLoopPolicy, "limit", [-1, 1.5]),
    (ConsumerLoopPolicy, "drain_timeout", [-1, None]),
    (ConsumerLoopPolicy, "duplicate_delay", [-1]),
    (ConsumerLoopPolicy, "max_deliveries", [0]),
    (ConsumerLoopPolicy, "concurrency", [10, None]),
    (ProducerLoopPolicy, "timeout", [0]),
    (ProducerLoopPolicy, "transaction_timeout", [0]),
    (ProducerLoopPolicy, "limit", [-1]),
    (ProducerLoopPolicy, "drain_timeout", [-1]),
    (SettlePolicy, "on_business", ["retry", None]),
    (SettlePolicy, "on_system", ["later"]),
    (SettlePolicy, "on_timeout", ["ACK"]),
    (SettlePolicy, "linger", [-1]),
    (SettlePolicy, "batch_size", [0]),
    (SettlePolicy, "max_pending", [0]),
    (FetchPolicy, "extra", [None, "text", {1: "one"}]),
]


@pytest.mark.parametrize(
    "kind, field, value", [(kind, field, v) for kind, field, values in REJECTED_VALUES for v in values]
)
def test_a_value_out_of_bounds_is_rejected_and_named(kind, field, value):
    with pytest.raises(ConfigurationError, match=field):
        kind.load({field: value})
    with pytest.raises(ValidationError, match=field):
        kind(**{field: value})


NUMBER_FIELDS = [
    (kind, name)
    for kind in list_policy_types()
    for name, field in kind.model_json_schema()["properties"].items()
    if "number" in {field.get("type"), *(choice.get("type") for choice in field.get("anyOf", ()))}
]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind, field", NUMBER_FIELDS)
def test_no_number_may_be_infinite_or_not_a_number(kind, field, value):
    with pytest.raises(ConfigurationError, match=field):
        kind.load({field: value})


ACCEPTED_SETTINGS = [
    (RetryPolicy, {"max_attempts": 1, "timeout": None, "backoff": 0, "multiplier": 1, "cap": 0, "jitter": 1}),
    (RetryPolicy, {"max_inline_delay": 0, "exit_grace": 0, "jitter": 0, "timeout": 0.001}),
    (EmptyQueuePolicy, {"backoff": 0, "multiplier": 1, "cap": 0}),
    (ConcurrencyPolicy, {"value": 1}),
    (BatchPolicy, {"size": 1}),
    (ConsumerLoopPolicy, {"prefetch": 0, "linger": 0, "limit": 0, "drain_timeout": 0, "duplicate_delay": 0}),
    (ConsumerLoopPolicy, {"max_deliveries": 1, "timeout": 0.1, "transaction_timeout": 0.1}),
    (ProducerLoopPolicy, {"limit": 0, "drain_timeout": 0}),
    (SettlePolicy, {"batch_size": 1, "max_pending": 1, "linger": 0, "on_business": "ack"}),
]


@pytest.mark.parametrize("kind, settings", ACCEPTED_SETTINGS)
def test_the_bounds_themselves_are_allowed(kind, settings):
    assert kind.load(settings).model_dump(include=set(settings)) == settings


def test_whole_numbers_are_accepted_as_seconds():
    timeout = RetryPolicy(timeout=5).timeout
    assert (timeout, type(timeout)) == (5.0, float)


@pytest.mark.parametrize("kind", [ConsumerPolicy, ProducerPolicy])
def test_the_exception_step_needs_a_time_limit_and_says_why(kind):
    reason = "a handler that hangs would never end"
    with pytest.raises(ConfigurationError, match=reason):
        kind.load({"steps": {"exception": {"retry": {"timeout": None}}}})
    with pytest.raises(ValidationError, match=reason):
        ExceptionPolicy(retry=RetryPolicy(timeout=None))


def test_the_other_steps_may_go_without_a_time_limit():
    loaded = ConsumerPolicy.load({"steps": {"process": {"retry": {"timeout": None}}}})
    assert loaded.steps.process.retry.timeout is None


def test_a_batch_of_settlements_must_not_be_larger_than_max_pending():
    with pytest.raises(ConfigurationError, match="batch_size is 100, but max_pending is 99: a batch would never be"):
        SettlePolicy.load({"max_pending": 99})
    assert SettlePolicy.load({"max_pending": 100}).batch_size == 100


# -- unknown keys ---------------------------------------------------------------------------------


def test_the_error_for_a_misspelt_key_names_the_nearest_known_one():
    with pytest.raises(ConfigurationError, match="unknown key 'max_atempts' in RetryPolicy; did you mean 'max_att"):
        RetryPolicy.load({"max_atempts": 3})


def test_the_error_for_a_misspelt_argument_names_the_nearest_known_one():
    with pytest.raises(ValidationError, match=r"did you mean 'max_attempts'\?"):
        RetryPolicy(max_atempts=3)


def test_the_error_for_an_unknown_key_names_all_known_ones():
    with pytest.raises(ConfigurationError, match="unknown key 'zzz' in EmptyQueuePolicy; valid keys: backoff, mul"):
        EmptyQueuePolicy.load({"zzz": 3})


def test_a_key_that_is_not_text_is_an_unknown_key():
    with pytest.raises(ConfigurationError, match="unknown key 1 in RetryPolicy"):
        RetryPolicy.load({1: 3})


def test_every_fault_is_reported_with_its_path():
    settings = {"loop": {"concurency": {}}, "steps": {"process": {"retry": {"max_attempts": 0}}}}
    with pytest.raises(ConfigurationError) as caught:
        ConsumerPolicy.load(settings)
    assert str(caught.value) == (
        "ConsumerPolicy cannot be loaded: "
        "loop: unknown key 'concurency' in ConsumerLoopPolicy; did you mean 'concurrency'?; "
        "steps.process.retry.max_attempts: Input should be greater than or equal to 1, not 0"
    )
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.final


def test_a_value_that_is_not_a_mapping_is_rejected():
    with pytest.raises(ConfigurationError, match=r"RetryPolicy: Input should be a valid dictionary .*, not 3"):
        RetryPolicy.load(3)


# -- loading --------------------------------------------------------------------------------------


def test_nested_mappings_become_nested_policies():
    loaded = ConsumerPolicy.load({"loop": {"concurrency": {"value": 3}}, "steps": {"settle": {"on_system": "ack"}}})
    assert loaded.loop.concurrency == ConcurrencyPolicy(value=3)
    assert loaded.steps.settle == SettlePolicy(on_system="ack")


def test_mappings_and_policies_may_be_mixed():
    loaded = ProducerPolicy.load(MappingProxyType({"loop": {"batch": BatchPolicy(size=7)}}))
    assert loaded.loop.batch.size == 7


def test_a_partial_policy_keeps_the_other_defaults_of_its_field():
    steps = ConsumerPolicy.load(
        {"steps": {"fetch": {"retry": {"max_attempts": 9}}, "settle": {"retry": {"multiplier": 4}}}}
    ).steps
    assert (steps.fetch.retry.max_attempts, steps.fetch.retry.timeout) == (9, 30)
    assert steps.settle.retry == RetryPolicy(max_attempts=5, timeout=30, backoff=0.1, multiplier=4, cap=5)


def test_loading_leaves_the_settings_as_they_were():
    settings = {"steps": {"fetch": {"retry": {"max_attempts": 9}, "extra": {"token": SECRET}}}}
    before = copy.deepcopy(settings)
    ConsumerPolicy.load(settings)
    assert settings == before


@pytest.mark.parametrize("kind", [ConsumerPolicy, ProducerPolicy])
def test_a_policy_survives_a_file(kind):
    policy = kind.load({"loop": {"limit": 5}})
    assert kind.load(json.loads(policy.model_dump_json())) == policy


def test_a_policy_can_travel_to_another_process():
    policy = ConsumerPolicy.load({"steps": {"fetch": {"extra": {"wait": 1}}}})
    for copied in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert copied == policy
        assert copied.steps.fetch.extra == {"wait": 1}


# -- never mutated --------------------------------------------------------------------------------


@pytest.mark.spec("CON-25", "PRO-16")
@pytest.mark.parametrize("kind", list_policy_types())
def test_no_field_of_a_policy_can_be_changed(kind):
    policy = kind()
    for name in kind.model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(policy, name, getattr(policy, name))
        with pytest.raises(ValidationError, match="frozen"):
            delattr(policy, name)


@pytest.mark.spec("CON-25", "PRO-16")
def test_the_extra_arguments_of_a_fetch_are_a_copy_that_cannot_be_changed():
    arguments = {"wait": 1}
    extra = FetchPolicy(extra=arguments).extra
    arguments["wait"] = 2
    assert extra == {"wait": 1}
    assert dict(**extra) == {"wait": 1}
    assert (len(extra), list(extra)) == (1, ["wait"])
    with pytest.raises(TypeError):
        extra["wait"] = 3


# -- secrets --------------------------------------------------------------------------------------


def test_the_extra_arguments_of_a_fetch_are_never_shown():
    policy = ConsumerPolicy.load({"steps": {"fetch": {"extra": {"token": SECRET}}}})
    text = f"{policy!r} {policy} {policy.steps.fetch!r} {policy.steps.fetch.extra!r} {FrozenMapping({'token': SECRET})}"
    assert SECRET not in text
    assert "extra" not in repr(policy.steps.fetch)
    assert repr(policy.steps.fetch.extra) == "FrozenMapping(1 hidden)"


@pytest.mark.parametrize(
    "settings",
    [
        {"extra": {"token": SECRET}, "unknown": 1},
        {"extra": SECRET},
        {"extra": {"token": SECRET}, "retry": SECRET},
        {"extra": {1: SECRET}},
    ],
)
def test_no_error_repeats_a_secret(settings):
    with pytest.raises(ConfigurationError) as loaded:
        FetchPolicy.load(settings)
    with pytest.raises(ValidationError) as built:
        FetchPolicy.model_validate(settings)
    assert SECRET not in f"{loaded.value} {loaded.value.__cause__} {built.value}"


# -- delays ---------------------------------------------------------------------------------------


@pytest.mark.spec("CON-13", "PRO-08")
def test_retries_wait_longer_and_longer_up_to_the_cap():
    policy = RetryPolicy(backoff=1, multiplier=3, cap=10)
    assert [policy.delay(attempt) for attempt in range(5)] == [1, 3, 9, 10, 10]


def test_an_idle_loop_waits_longer_and_longer_up_to_the_cap():
    assert [EmptyQueuePolicy().delay(attempt) for attempt in range(5)] == [0.5, 1, 2, 4, 5]


def test_jitter_comes_after_the_cap():
    policy = RetryPolicy(backoff=1, multiplier=3, cap=10, jitter=0.5)
    assert policy.delay(9, lambda: 0.75) == 12.5
    assert policy.delay(9, lambda: 0.0) == 5


def test_random_numbers_change_nothing_without_jitter():
    assert RetryPolicy().delay(1, lambda: 0.9) == RetryPolicy().delay(1)
