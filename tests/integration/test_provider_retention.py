"""Retention: partitions are there before they are needed and gone when they are old; nobody waits long for it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.sql import retention
from ergon_framework.providers.sql.reaching import connect
from ergon_framework.providers.sql.retention import Retention
from ergon_framework.providers.sql.writer import MetricsWriter
from tests.integration.metering import ask, attempt, both, rows_of, until
from tests.log_events import events_of

DAY = 86_400
PARTITIONS = """
select relname from pg_inherits join pg_class on pg_class.oid = inhrelid
where inhparent = 'ergon.provider_execution_metrics'::regclass order by relname
"""


@pytest.fixture
def dsn(database):
    return database


def partitions(dsn):
    return {name.removeprefix("provider_execution_metrics_") for (name,) in ask(dsn, PARTITIONS)}


def day(shift=0):
    return f"d{datetime.now(UTC) + timedelta(days=shift):%Y%m%d}"


def written(dsn, *rows):
    writer = MetricsWriter(dsn)
    for row in rows:
        writer.record(row)
    assert writer.close(20)


@pytest.mark.spec("PRV-26")
def test_partitions_are_made_ahead_by_whoever_writes(dsn):
    written(dsn, attempt())
    assert partitions(dsn) == {"rest", *(day(shift) for shift in range(-1, 4))}
    assert ask(dsn, "select count(*) from ergon.provider_execution_metrics_rest") == [(0,)]


@pytest.mark.spec("PRV-26")
def test_what_came_before_its_partition_moves_into_it(dsn):
    written(dsn, attempt(), attempt(created_at=time.time() + 5 * DAY, task_execution_id="e1"))
    before = both(dsn)
    done = retention.run(dsn, Retention(ahead=6))
    assert {name.rpartition("_")[2] for name in done.made} == {day(shift) for shift in (4, 5, 6)}
    assert ask(dsn, "select count(*) from ergon.provider_execution_metrics_rest") == [(0,)]
    assert rows_of(dsn) == 2
    assert both(dsn) == before


@pytest.mark.spec("PRV-26")
def test_what_is_old_is_removed_and_what_is_not_stays(dsn):
    now = time.time()
    written(
        dsn, *(attempt(created_at=now - age * DAY) for age in (0, 5, 12, 45, 500)), attempt(created_at=now + 99 * DAY)
    )
    with connect(dsn, patience=20) as line:
        today = datetime.now(UTC).date()
        for age in (45, 12, 5):
            with line.transaction():
                for statement in retention._make(today - timedelta(days=age)):
                    line.execute(statement)
    ask(
        dsn,
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end, "
        "limit_count, remaining_count) select 'acme', 'pay', 'x', now() - age, now() - age, 5, 5 "
        "from unnest(array['1 day', '20 days', '90 days']::interval[]) as ages (age)",
    )
    ask(dsn, "update ergon.provider_batches set at = now() - interval '3 hours'")
    ask(dsn, "insert into ergon.provider_batches values (gen_random_uuid())")
    done = retention.run(dsn)
    assert [name.rpartition("_")[2] for name in done.dropped] == [day(-45)]
    assert partitions(dsn) == {"rest", *(day(shift) for shift in (-12, -5, -1, 0, 1, 2, 3))}
    assert rows_of(dsn) == 3
    ages = ask(dsn, "select date_part('day', now() - minute)::int from ergon.provider_minutes order by 1 desc")
    assert ages == [(5,), (0,), (-98,)]
    assert ask(dsn, "select count(*) from ergon.provider_quota_states") == [(2,)]
    assert ask(dsn, "select count(*) from ergon.provider_batches") == [(1,)]
    assert not done.left
    assert not retention.run(dsn).dropped


def test_an_account_that_nobody_calls_any_more_has_no_last_hour(dsn):
    written(dsn, attempt())
    ask(dsn, "update ergon.provider_health_states set last_success_at = now() - interval '61 minutes'")
    retention.run(dsn)
    rates = "select success_rate_1h, p95_latency_ms_1h from ergon.provider_health_states"
    assert ask(dsn, rates) == [(None, None)]


@pytest.mark.spec("PRV-26")
def test_one_of_the_fleet_does_it(dsn):
    with psycopg.connect(dsn) as other:
        other.execute("select pg_advisory_xact_lock(%s)", [retention._TURN])
        done = retention.run(dsn)
        assert done.others
        assert not done.made
    assert retention.run(dsn).made


@pytest.mark.spec("PRV-26")
def test_nobody_waits_long_for_it_and_what_it_cannot_have_it_leaves(dsn):
    written(dsn, attempt())
    with connect(dsn, patience=20) as line, line.transaction():
        for statement in retention._make(datetime.now(UTC).date() - timedelta(days=40)):
            line.execute(statement)
    with psycopg.connect(dsn) as reader:
        reader.execute("select count(*) from ergon.provider_execution_metrics")
        began = time.monotonic()
        done = retention.run(dsn)
        assert time.monotonic() - began < 5
        assert [name.rpartition("_")[2] for name in done.left] == [day(-40)]
    assert retention.run(dsn).dropped


def test_a_worker_without_the_right_to_make_tables_writes_all_the_same(dsn, caplog):
    ask(
        dsn,
        "do $$ begin create role worker login; exception when duplicate_object then null; end $$",
    )
    ask(dsn, "grant usage on schema ergon to worker")
    ask(dsn, "grant select, insert, update, delete on all tables in schema ergon to worker")
    written(dsn.replace("//postgres@", "//worker@"), attempt())
    assert rows_of(dsn) == 1
    assert partitions(dsn) == {"rest"}
    assert "provider retention failed" in events_of(caplog.records)
    assert retention.run(dsn).made
    assert ask(dsn, "select count(*) from ergon.provider_execution_metrics_rest") == [(0,)]


def test_a_writer_tidies_up_now_and_then_without_being_fed(dsn):
    writer = MetricsWriter(dsn, every=0.01, retention=Retention(interval=0.1))
    writer.record(attempt())
    until(lambda: day(3) in partitions(dsn))
    for _ in range(2):
        ask(dsn, f"drop table ergon.provider_execution_metrics_{day(3)}")
        until(lambda: day(3) in partitions(dsn))
        # Nor does it mind that its line was lost while it slept.
        ask(
            dsn,
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name = 'ergon' and datname = current_database()",
        )
    assert writer.close(20)


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"ahead": -1}, {"interval": 0.0}, {"row": 3}])
def test_a_retention_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ConfigurationError):
        Retention.load(wrong)
