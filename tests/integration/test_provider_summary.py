"""Check the summary of one tenant: the current state of all of its providers, and no data of other tenants."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ergon_framework.providers.circuit_breaker import BreakerState
from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import AttemptOutcome
from ergon_framework.providers.http import health_reader as module
from ergon_framework.providers.http.health_reader import MAX_PROVIDERS, QuotaSummary, read_summary
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from tests.integration.metering import make_attempt, make_random_attempt, query


@pytest.fixture
def dsn(database):
    return database


def read_tenant(dsn, tenant="acme"):
    with psycopg.connect(dsn) as connection:
        return read_summary(connection, tenant)


def record_attempts(dsn, *rows):
    writer = MetricsWriter(dsn)
    for row in rows:
        writer.record(row)
    assert writer.close(20)


def insert_breaker(dsn, state, until=None, *, tenant="acme", provider="pay", override=None, override_until=None):
    query(
        dsn,
        "insert into ergon.provider_breakers (tenant_id, provider_name, capability, state, open_until, override_kind, "
        "override_until) values (%s, %s, 'charging', %s, now() + %s::interval, %s, now() + %s::interval)",
        tenant,
        provider,
        state,
        until,
        override,
        override_until,
    )


def insert_quota(dsn, limit, used, *, start="-1 hour", end="1 hour", tenant="acme"):
    query(
        dsn,
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end, "
        "limit_count, used_count, remaining_count) values (%s, 'pay', 'charging', now() + %s::interval, "
        "now() + %s::interval, %s, %s, %s)",
        tenant,
        start,
        end,
        limit,
        used,
        limit - used,
    )


@pytest.mark.spec("PRV-10", "PRV-14")
def test_the_summary_covers_the_last_hour_of_each_provider(dsn):
    now = time.time()
    old = make_attempt(created_at=now - 3_700, outcome=AttemptOutcome.FAILED, reason_code=ReasonCode.AUTH_FAILED)
    bad = make_attempt(
        created_at=now - 30, outcome=AttemptOutcome.FAILED, reason_code=ReasonCode.TIMEOUT, duration_ms=900.0
    )
    record_attempts(
        dsn, old, bad, *(make_attempt(duration_ms=100.0) for _ in range(3)), make_attempt(provider_name="rank")
    )
    summary_of_acme = read_tenant(dsn)
    assert summary_of_acme.tenant_id == "acme"
    assert abs(summary_of_acme.generated_at.timestamp() - now) < 60
    pay, rank = summary_of_acme.providers
    assert (pay.provider_name, pay.capability, rank.provider_name) == ("pay", "charging", "rank")
    assert (pay.success_rate_1h, pay.p95_latency_ms_1h) == (0.75, 900.0)
    assert (pay.last_error_code, pay.quota, pay.breaker_state) == ("timeout", None, "closed")
    assert pay.last_error_at == datetime.fromtimestamp(now - 30, UTC)
    assert (rank.success_rate_1h, rank.last_error_code, rank.last_error_at) == (1.0, None, None)


@pytest.mark.spec("PRV-14")
def test_the_summary_of_an_unknown_tenant_is_empty(dsn):
    result = read_tenant(dsn, "unknown")
    assert result.providers == ()
    assert abs(result.generated_at.timestamp() - time.time()) < 60


@pytest.mark.spec("PRV-14")
@pytest.mark.parametrize(
    "stored, expected",
    [
        ({"state": "closed"}, "closed"),
        ({"state": "open", "until": "1 minute"}, "open"),
        ({"state": "open", "until": "-1 second"}, "half_open"),
        ({"state": "open"}, "half_open"),
        ({"state": "half_open"}, "half_open"),
        ({"state": "closed", "override": "force_open", "override_until": "1 minute"}, "open"),
        ({"state": "closed", "override": "force_open", "override_until": "-1 second"}, "closed"),
        ({"state": "open", "until": "1 minute", "override": "disable", "override_until": "1 minute"}, "closed"),
        ({"state": "open", "until": "1 minute", "override": "disable", "override_until": "-1 second"}, "open"),
    ],
)
def test_the_breaker_state_is_the_one_a_call_would_meet_now(dsn, stored, expected):
    insert_breaker(dsn, **stored)
    assert [one.breaker_state for one in read_tenant(dsn).providers] == [expected]


@pytest.mark.spec("PRV-09", "PRV-14")
def test_of_several_quota_windows_the_one_with_the_least_left_is_shown(dsn):
    insert_quota(dsn, 10, 10, start="-2 days", end="-1 day")
    insert_quota(dsn, 10, 10, start="1 hour", end="2 hours")
    insert_quota(dsn, 100, 20, start="-1 minute", end="1 minute")
    insert_quota(dsn, 1_000, 995, start="-3 hours", end="3 hours")
    insert_quota(dsn, 5, 0, start="-4 hours", end="1 hour")
    insert_quota(dsn, 9_000, 0, start="-5 hours", end="9 hours")
    (provider,) = read_tenant(dsn).providers
    assert (provider.quota.limit_count, provider.quota.used_count, provider.quota.remaining_count) == (1_000, 995, 5)
    assert isinstance(provider.quota, QuotaSummary)
    assert timedelta(hours=2) < provider.quota.window_end - datetime.now(UTC) < timedelta(hours=4)
    assert provider.success_rate_1h is None


@pytest.mark.spec("PRV-18")
def test_a_breaker_for_all_tenants_is_shown_to_tenants_that_call_the_provider(dsn):
    insert_breaker(dsn, "open", "1 minute", tenant="*")
    insert_breaker(dsn, "open", "1 minute", tenant="*", provider="secret-deal")
    insert_quota(dsn, 100, 99, tenant="*")
    assert read_tenant(dsn).providers == ()
    record_attempts(dsn, make_attempt())
    (provider,) = read_tenant(dsn).providers
    assert (provider.breaker_state, provider.quota) == (BreakerState.OPEN, None)
    insert_breaker(dsn, "half_open")
    assert [one.breaker_state for one in read_tenant(dsn).providers] == ["open"]
    (all_tenants,) = [one for one in read_tenant(dsn, "*").providers if one.provider_name == "pay"]
    assert all_tenants.quota.remaining_count == 1


@pytest.mark.spec("PRV-18")
def test_other_tenants_do_not_change_the_summary(dsn):
    rng, now = random.Random(5), time.time()
    record_attempts(dsn, *(make_random_attempt(rng, now=now) for _ in range(300)))
    insert_quota(dsn, 10, 3, tenant="t0")
    before = read_tenant(dsn, "t0").providers
    rows = [make_random_attempt(rng, now=now)._replace(tenant_id="t1") for _ in range(300)]
    record_attempts(dsn, *rows, *(row._replace(tenant_id="t00") for row in rows))
    for tenant in ("t1", "t00"):
        insert_breaker(dsn, "open", "1 minute", tenant=tenant)
        insert_quota(dsn, 10, 10, tenant=tenant)
    assert read_tenant(dsn, "t0").providers == before


def test_the_number_of_providers_is_limited(dsn):
    query(
        dsn,
        "insert into ergon.provider_health_states (tenant_id, provider_name, capability) "
        "select 'acme', 'p' || n, 'x' from generate_series(1, %s) as n",
        MAX_PROVIDERS + 5,
    )
    assert len(read_tenant(dsn).providers) == MAX_PROVIDERS


@pytest.mark.spec("PRV-14")
def test_the_summary_is_read_by_index(dsn):
    record_attempts(dsn, make_attempt())
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "insert into ergon.provider_minute_rollups (tenant_id, provider_name, capability, minute, buckets) "
            "select 't' || n % 50, 'p', 'c', now() - n * interval '1 minute', array_fill(0::bigint, array[52]) "
            "from generate_series(1, 20000) as n"
        )
        plan = connection.execute("explain " + module._SELECT_SUMMARY, module._build_parameters("t1")).fetchall()
    assert "Seq Scan on provider_minute_rollups" not in str(plan)
