"""The keywords of ProviderPolicy: each sets a key of a section, and a section excludes its keywords."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
from pydantic import ValidationError

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers import BreakerPolicy, ProviderPolicy, QuotaPolicy, RetryPolicy
from ergon_framework.providers.policy import _KEYWORDS


def test_keywords_are_the_short_form_of_the_sections():
    short = ProviderPolicy(
        retries=5,
        backoff=0.25,
        timeout=10,
        attempt_timeout=3,
        calls_per_minute=1,
        calls_per_hour=2,
        calls_per_day=3,
        calls_per_month=4,
        breaker_threshold=7,
        breaker_cooldown=8,
        scope="provider",
    )
    assert short == ProviderPolicy(
        timeout=10,
        attempt_timeout=3,
        retry=RetryPolicy(max_attempts=6, base_delay_seconds=0.25),
        quota=QuotaPolicy(minute=1, hour=2, day=3, month=4),
        breaker=BreakerPolicy(failure_threshold=7, open_cooldown_seconds=8),
        scope="provider",
    )
    assert ProviderPolicy(retries=0).retry.max_attempts == 1
    assert ProviderPolicy.load({"retries": 5, "calls_per_day": 3}).quota == QuotaPolicy(day=3)


def test_keywords_of_one_section_go_with_another_section():
    policy = ProviderPolicy(retries=1, quota=QuotaPolicy(day=3))
    assert (policy.retry.max_attempts, policy.retry.base_delay_seconds, policy.quota.day) == (2, 0.5, 3)


@pytest.mark.parametrize("keyword", sorted(_KEYWORDS))
def test_a_section_and_its_keyword_exclude_each_other(keyword):
    section, key = _KEYWORDS[keyword]
    with pytest.raises(ConfigurationError, match=f"{keyword} and {section} are both set; pass {key} in {section}"):
        ProviderPolicy.load({keyword: 1, section: {}})


@pytest.mark.parametrize("value, shown", [(-1, "-1"), (1.0, "1.0"), (True, "True"), ("3", "str"), (None, "NoneType")])
def test_retries_must_be_a_count(value, shown):
    with pytest.raises(ValidationError, match=f"retries must be an integer >= 0, got {shown}; 0 makes one attempt"):
        ProviderPolicy(retries=value)


def test_the_signature_for_type_checkers_has_every_keyword_and_field_with_its_default():
    declared = ast.parse(textwrap.dedent(inspect.getsource(ProviderPolicy)))
    (init,) = (node for node in ast.walk(declared) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    defaults = {
        argument.arg: ast.literal_eval(default)
        for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
        if default is not None
    }
    assert set(defaults) == set(ProviderPolicy.model_fields) | set(_KEYWORDS)
    policy = ProviderPolicy()
    for name, default in defaults.items():
        if default is ...:
            continue
        section, key = _KEYWORDS.get(name, (None, name))
        value = getattr(policy if section is None else getattr(policy, section), key)
        assert default == (value - 1 if name == "retries" else value), name
