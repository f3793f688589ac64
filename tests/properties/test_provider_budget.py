"""Whatever the upstream does: execute ends within its budget, and its provider state is consistent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ergon_framework.providers.circuit_breaker import BreakerPolicy, is_provider_fault
from ergon_framework.providers.errors import (
    ERROR_BY_REASON,
    ProviderConnectionError,
    ProviderError,
    ReasonCode,
)
from ergon_framework.providers.health import AttemptOutcome
from ergon_framework.providers.models import ProviderExecutionResult
from ergon_framework.providers.policy import QuotaPolicy
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.state import ProviderScope
from tests.both_drivers.provider_harness import Act, Ask, make_policy, run_story

seconds = some.floats(0.0, 30.0) | some.sampled_from([0.0, 1e6])
reasons = [reason for reason in ReasonCode if reason not in (ReasonCode.CIRCUIT_OPEN, ReasonCode.QUOTA_EXHAUSTED)]


@some.composite
def acts(draw):
    takes = draw(seconds)
    kind = draw(some.none() | some.sampled_from(reasons))
    if kind is None:
        return Act(takes)
    after, sent = draw(some.none() | some.floats(0.0, 40.0)), draw(some.booleans())
    if kind is ReasonCode.CONNECTION_ERROR:
        return Act(takes, lambda: ProviderConnectionError("no", retry_after=after, sent=sent))
    return Act(takes, lambda: ERROR_BY_REASON[kind]("no", retry_after=after))


policies = some.builds(
    make_policy,
    timeout=some.floats(0.01, 60.0),
    retry=some.builds(
        RetryPolicy,
        max_attempts=some.integers(1, 5),
        base_delay_seconds=some.floats(0.0, 10.0),
        max_delay_seconds=some.floats(0.0, 20.0),
        jitter_ratio=some.floats(0.0, 1.0),
    ),
    breaker=some.builds(
        BreakerPolicy, failure_threshold=some.integers(1, 4), open_cooldown_seconds=some.floats(0.0, 20.0)
    ),
    quota=some.builds(QuotaPolicy, month=some.none() | some.integers(0, 6)),
)


@pytest.mark.spec("PRV-19", "PRV-20", "PRV-21")
@pytest.mark.parametrize("variant", ["threads", "asyncio"])
@given(
    script=some.lists(acts(), max_size=12),
    provider_policy=policies,
    calls=some.integers(1, 4),
    pause=some.floats(0.0, 30.0),
)
def test_wall_time_never_exceeds_the_budget_and_the_counts_add_up(variant, script, provider_policy, calls, pause):
    results = []

    def run_calls(world):
        for _ in range(calls):
            results.append((yield Ask()))
            yield pause

    world = run_story(variant, run_calls, *script, policy=provider_policy)
    for began, ended in world.call_times:
        assert ended - began <= provider_policy.timeout + 1e-9
    rows = world.state_store.list_attempts()
    rejected_rows = [row for row in rows if row.reason_code in (ReasonCode.CIRCUIT_OPEN, ReasonCode.QUOTA_EXHAUSTED)]
    assert len(rows) - len(rejected_rows) == len(world.requests)
    quota = world.state_store.get_quota(ProviderScope("acme", "payments", "charging"), WindowKind.MONTH)
    if quota is not None:
        attempts = [one for result in results for one in get_attempts(result)]
        sent = sum(one.error is None or one.error.sent for one in attempts)
        assert quota.used_count == sent <= quota.limit_count
    for result in results:
        check_result(result, provider_policy)


def get_attempts(result):
    return result.attempt_history if isinstance(result, ProviderExecutionResult) else result.attempts


def check_result(result, provider_policy):
    attempts = get_attempts(result)
    assert len(attempts) <= provider_policy.retry.max_attempts
    for one in attempts[:-1]:
        assert one.error.retryable
        assert one.delay >= (one.error.retry_after or 0.0)
    if isinstance(result, ProviderExecutionResult):
        assert (result.outcome, result.reason_code) == (AttemptOutcome.SUCCESS, None)
        return
    assert isinstance(result, ProviderError)
    assert result.result.reason_code is result.reason_code
    assert not (result.final and result.not_attempted)
    assert is_provider_fault(result) in (True, False, None)
    if result.reason_code is ReasonCode.CIRCUIT_OPEN:
        assert result.not_attempted
    elif attempts and not result.not_attempted and result.retry_after is None:
        assert result.final or result.reason_code is ReasonCode.QUOTA_EXHAUSTED
