"""Check retention: partitions exist before they are needed and are dropped when old, without long waits for others."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.postgres import retention
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from ergon_framework.providers.postgres.connection import connect
from ergon_framework.providers.postgres.retention import ProviderRetention
from tests.integration.metering import count_rows, make_attempt, query, read_rollups, wait_until
from tests.log_events import list_events

DAY_SECONDS = 86_400
PARTITIONS_QUERY = """
select relname from pg_inherits join pg_class on pg_class.oid = inhrelid
where inhparent = 'ergon.provider_execution_metrics'::regclass order by relname
"""


@pytest.fixture
def dsn(database):
    return database


def list_partitions(dsn):
    return {name.removeprefix("provider_execution_metrics_") for (name,) in query(dsn, PARTITIONS_QUERY)}


def format_day(shift=0):
    return f"d{datetime.now(UTC) + timedelta(days=shift):%Y%m%d}"


def record_attempts(dsn, *rows):
    writer = MetricsWriter(dsn)
    for row in rows:
        writer.record(row)
    assert writer.close(20)


@pytest.mark.spec("PRV-26")
def test_partitions_are_created_in_advance_by_any_writer(dsn):
    record_attempts(dsn, make_attempt())
    assert list_partitions(dsn) == {"default", *(format_day(shift) for shift in range(-1, 4))}
    assert query(dsn, "select count(*) from ergon.provider_execution_metrics_default") == [(0,)]


@pytest.mark.spec("PRV-26")
def test_rows_written_before_their_partition_existed_move_into_it(dsn):
    record_attempts(dsn, make_attempt(), make_attempt(created_at=time.time() + 5 * DAY_SECONDS, task_execution_id="e1"))
    before = read_rollups(dsn)
    result = retention.run_retention(dsn, ProviderRetention(ahead=6))
    assert {name.rpartition("_")[2] for name in result.made} == {format_day(shift) for shift in (4, 5, 6)}
    assert query(dsn, "select count(*) from ergon.provider_execution_metrics_default") == [(0,)]
    assert count_rows(dsn) == 2
    assert read_rollups(dsn) == before


@pytest.mark.spec("PRV-26")
def test_expired_rows_are_removed_and_others_stay(dsn):
    now = time.time()
    record_attempts(
        dsn,
        *(make_attempt(created_at=now - age * DAY_SECONDS) for age in (0, 5, 12, 45, 500)),
        make_attempt(created_at=now + 99 * DAY_SECONDS),
    )
    with connect(dsn, answer_timeout=20) as connection:
        today = datetime.now(UTC).date()
        for age in (45, 12, 5):
            with connection.transaction():
                for statement in retention._build_create_statements(today - timedelta(days=age)):
                    connection.execute(statement)
    query(
        dsn,
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end, "
        "limit_count, remaining_count) select 'acme', 'pay', 'x', now() - age, now() - age, 5, 5 "
        "from unnest(array['1 day', '20 days', '90 days']::interval[]) as ages (age)",
    )
    query(dsn, "update ergon.provider_batches set at = now() - interval '3 hours'")
    query(dsn, "insert into ergon.provider_batches values (gen_random_uuid())")
    result = retention.run_retention(dsn)
    assert [name.rpartition("_")[2] for name in result.dropped] == [format_day(-45)]
    assert list_partitions(dsn) == {"default", *(format_day(shift) for shift in (-12, -5, -1, 0, 1, 2, 3))}
    assert count_rows(dsn) == 3
    ages = query(dsn, "select date_part('day', now() - minute)::int from ergon.provider_minute_rollups order by 1 desc")
    assert ages == [(5,), (0,), (-98,)]
    assert query(dsn, "select count(*) from ergon.provider_quota_states") == [(2,)]
    assert query(dsn, "select count(*) from ergon.provider_batches") == [(1,)]
    assert not result.left
    assert not retention.run_retention(dsn).dropped


def test_a_scope_without_recent_calls_has_no_last_hour(dsn):
    record_attempts(dsn, make_attempt())
    query(dsn, "update ergon.provider_health_states set last_success_at = now() - interval '61 minutes'")
    retention.run_retention(dsn)
    rates = "select success_rate_1h, p95_latency_ms_1h from ergon.provider_health_states"
    assert query(dsn, rates) == [(None, None)]


@pytest.mark.spec("PRV-26")
def test_one_process_at_a_time_applies_retention(dsn):
    with psycopg.connect(dsn) as other:
        other.execute("select pg_advisory_xact_lock(%s)", [retention._RETENTION_LOCK_ID])
        result = retention.run_retention(dsn)
        assert result.others
        assert not result.made
    assert retention.run_retention(dsn).made


@pytest.mark.spec("PRV-26")
def test_retention_blocks_no_session_for_long_and_skips_locked_partitions(dsn):
    record_attempts(dsn, make_attempt())
    with connect(dsn, answer_timeout=20) as connection, connection.transaction():
        for statement in retention._build_create_statements(datetime.now(UTC).date() - timedelta(days=40)):
            connection.execute(statement)
    with psycopg.connect(dsn) as reader:
        reader.execute("select count(*) from ergon.provider_execution_metrics")
        started_at = time.monotonic()
        result = retention.run_retention(dsn)
        assert time.monotonic() - started_at < 5
        assert [name.rpartition("_")[2] for name in result.left] == [format_day(-40)]
    assert retention.run_retention(dsn).dropped


def test_a_worker_without_the_right_to_create_tables_still_writes(dsn, caplog):
    query(
        dsn,
        "do $$ begin create role worker login; exception when duplicate_object then null; end $$",
    )
    query(dsn, "grant usage on schema ergon to worker")
    query(dsn, "grant select, insert, update, delete on all tables in schema ergon to worker")
    record_attempts(dsn.replace("//postgres@", "//worker@"), make_attempt())
    assert count_rows(dsn) == 1
    assert list_partitions(dsn) == {"default"}
    assert "provider retention failed" in list_events(caplog.records)
    assert retention.run_retention(dsn).made
    assert query(dsn, "select count(*) from ergon.provider_execution_metrics_default") == [(0,)]


def test_a_writer_applies_retention_at_intervals_without_new_rows(dsn):
    writer = MetricsWriter(dsn, every=0.01, retention=ProviderRetention(interval=0.1))
    writer.record(make_attempt())
    wait_until(lambda: format_day(3) in list_partitions(dsn))
    for _ in range(2):
        query(dsn, f"drop table ergon.provider_execution_metrics_{format_day(3)}")
        wait_until(lambda: format_day(3) in list_partitions(dsn))
        # It also tolerates a connection that was lost while it slept.
        query(
            dsn,
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name = 'ergon' and datname = current_database()",
        )
    assert writer.close(20)


@pytest.mark.parametrize("options", [{"rows": 0}, {"ahead": -1}, {"interval": 0.0}, {"row": 3}])
def test_an_invalid_retention_is_rejected(options):
    with pytest.raises(ConfigurationError):
        ProviderRetention.load(options)
