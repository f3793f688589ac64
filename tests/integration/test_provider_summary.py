"""The summary of one tenant: all of its providers as they are now, and nothing of anybody else's."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ergon_framework.providers.circuit_breaker import BreakerState
from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import Outcome
from ergon_framework.providers.sql import summary as module
from ergon_framework.providers.sql.summary import MOST, Quota, summary
from ergon_framework.providers.sql.writer import MetricsWriter
from tests.integration.metering import ask, attempt, chance


@pytest.fixture
def dsn(database):
    return database


def read(dsn, tenant="acme"):
    with psycopg.connect(dsn) as connection:
        return summary(connection, tenant)


def written(dsn, *rows):
    writer = MetricsWriter(dsn)
    for row in rows:
        writer.record(row)
    assert writer.close(20)


def breaker(dsn, state, until=None, *, tenant="acme", provider="pay", override=None, override_until=None):
    ask(
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


def quota(dsn, limit, used, *, start="-1 hour", end="1 hour", tenant="acme"):
    ask(
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
def test_it_is_the_last_hour_of_each_provider(dsn):
    now = time.time()
    old = attempt(created_at=now - 3_700, outcome=Outcome.FAILED, reason_code=ReasonCode.AUTH_FAILED)
    bad = attempt(created_at=now - 30, outcome=Outcome.FAILED, reason_code=ReasonCode.TIMEOUT, duration_ms=900.0)
    written(dsn, old, bad, *(attempt(duration_ms=100.0) for _ in range(3)), attempt(provider_name="rank"))
    found = read(dsn)
    assert found.tenant_id == "acme"
    assert abs(found.generated_at.timestamp() - now) < 60
    pay, rank = found.providers
    assert (pay.provider_name, pay.capability, rank.provider_name) == ("pay", "charging", "rank")
    assert (pay.success_rate_1h, pay.p95_latency_ms_1h) == (0.75, 900.0)
    assert (pay.last_error_code, pay.quota, pay.breaker_state) == ("timeout", None, "closed")
    assert pay.last_error_at == datetime.fromtimestamp(now - 30, UTC)
    assert (rank.success_rate_1h, rank.last_error_code, rank.last_error_at) == (1.0, None, None)


@pytest.mark.spec("PRV-14")
def test_nobody_has_heard_of_it(dsn):
    found = read(dsn, "nobody")
    assert found.providers == ()
    assert abs(found.generated_at.timestamp() - time.time()) < 60


@pytest.mark.spec("PRV-14")
@pytest.mark.parametrize(
    "stored, seen",
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
def test_the_breaker_is_as_it_would_meet_a_call_now(dsn, stored, seen):
    breaker(dsn, **stored)
    assert [one.breaker_state for one in read(dsn).providers] == [seen]


@pytest.mark.spec("PRV-09", "PRV-14")
def test_of_several_windows_it_is_the_one_with_least_left(dsn):
    quota(dsn, 10, 10, start="-2 days", end="-1 day")
    quota(dsn, 10, 10, start="1 hour", end="2 hours")
    quota(dsn, 100, 20, start="-1 minute", end="1 minute")
    quota(dsn, 1_000, 995, start="-3 hours", end="3 hours")
    quota(dsn, 5, 0, start="-4 hours", end="1 hour")
    quota(dsn, 9_000, 0, start="-5 hours", end="9 hours")
    (found,) = read(dsn).providers
    assert (found.quota.limit_count, found.quota.used_count, found.quota.remaining_count) == (1_000, 995, 5)
    assert isinstance(found.quota, Quota)
    assert timedelta(hours=2) < found.quota.window_end - datetime.now(UTC) < timedelta(hours=4)
    assert found.success_rate_1h is None


@pytest.mark.spec("PRV-18")
def test_of_a_breaker_for_all_tenants_it_shows_the_word_to_those_who_call_the_provider(dsn):
    breaker(dsn, "open", "1 minute", tenant="*")
    breaker(dsn, "open", "1 minute", tenant="*", provider="secret-deal")
    quota(dsn, 100, 99, tenant="*")
    assert read(dsn).providers == ()
    written(dsn, attempt())
    (found,) = read(dsn).providers
    assert (found.breaker_state, found.quota) == (BreakerState.OPEN, None)
    breaker(dsn, "half_open")
    assert [one.breaker_state for one in read(dsn).providers] == ["open"]
    (whole,) = [one for one in read(dsn, "*").providers if one.provider_name == "pay"]
    assert whole.quota.remaining_count == 1


@pytest.mark.spec("PRV-18")
def test_nothing_of_another_tenant_changes_it(dsn):
    dice, now = random.Random(5), time.time()
    written(dsn, *(chance(dice, now=now) for _ in range(300)))
    quota(dsn, 10, 3, tenant="t0")
    before = read(dsn, "t0").providers
    rows = [chance(dice, now=now)._replace(tenant_id="t1") for _ in range(300)]
    written(dsn, *rows, *(row._replace(tenant_id="t00") for row in rows))
    for tenant in ("t1", "t00"):
        breaker(dsn, "open", "1 minute", tenant=tenant)
        quota(dsn, 10, 10, tenant=tenant)
    assert read(dsn, "t0").providers == before


def test_there_is_an_end_to_how_many_are_shown(dsn):
    ask(
        dsn,
        "insert into ergon.provider_health_states (tenant_id, provider_name, capability) "
        "select 'acme', 'p' || n, 'x' from generate_series(1, %s) as n",
        MOST + 5,
    )
    assert len(read(dsn).providers) == MOST


@pytest.mark.spec("PRV-14")
def test_it_reads_by_index_whatever_the_planner_believes(dsn):
    written(dsn, attempt())
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "insert into ergon.provider_minutes (tenant_id, provider_name, capability, minute, buckets) "
            "select 't' || n % 50, 'p', 'c', now() - n * interval '1 minute', array_fill(0::bigint, array[52]) "
            "from generate_series(1, 20000) as n"
        )
        plan = connection.execute("explain " + module._SUMMARY, module._values("t1")).fetchall()
    assert "Seq Scan on provider_minutes" not in str(plan)
