"""Whatever the upstream does: execute ends within its budget, and its books add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ergon_framework.providers.books import Account
from ergon_framework.providers.circuit_breaker import BreakerPolicy, fault_of
from ergon_framework.providers.errors import (
    BY_REASON,
    ProviderConnectionError,
    ProviderError,
    ReasonCode,
)
from ergon_framework.providers.execution import ProviderExecutionResult
from ergon_framework.providers.health import Outcome
from ergon_framework.providers.policy import QuotaPolicy
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy
from tests.twins.providing import Act, Ask, policy, tell

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
    return Act(takes, lambda: BY_REASON[kind]("no", retry_after=after))


policies = some.builds(
    policy,
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
@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
@given(script=some.lists(acts(), max_size=12), rules=policies, calls=some.integers(1, 4), pause=some.floats(0.0, 30.0))
def test_wall_time_never_exceeds_the_budget_and_the_books_add_up(flavour, script, rules, calls, pause):
    came = []

    def story(world):
        for _ in range(calls):
            came.append((yield Ask()))
            yield pause

    world = tell(flavour, story, *script, policy=rules)
    for began, ended in world.asked:
        assert ended - began <= rules.timeout + 1e-9
    rows = world.books.rows()
    refused = [row for row in rows if row.reason_code in (ReasonCode.CIRCUIT_OPEN, ReasonCode.QUOTA_EXHAUSTED)]
    assert len(rows) - len(refused) == len(world.made)
    quota = world.books.quota(Account("acme", "payments", "charging"), WindowKind.MONTH)
    if quota is not None:
        tried = [one for result in came for one in tried_of(result)]
        sent = sum(one.error is None or one.error.sent for one in tried)
        assert quota.used_count == sent <= quota.limit_count
    for result in came:
        check(result, rules)


def tried_of(result):
    return result.tried if isinstance(result, ProviderExecutionResult) else result.attempts


def check(result, rules):
    tried = tried_of(result)
    assert len(tried) <= rules.retry.max_attempts
    for one in tried[:-1]:
        assert one.error.retryable
        assert one.delay >= (one.error.retry_after or 0.0)
    if isinstance(result, ProviderExecutionResult):
        assert (result.outcome, result.reason_code) == (Outcome.SUCCESS, None)
        return
    assert isinstance(result, ProviderError)
    assert result.result.reason_code is result.reason_code
    assert not (result.final and result.later)
    assert fault_of(result) in (True, False, None)
    if result.reason_code is ReasonCode.CIRCUIT_OPEN:
        assert result.later
    elif tried and not result.later and result.retry_after is None:
        assert result.final or result.reason_code is ReasonCode.QUOTA_EXHAUSTED
