"""Check the host's own table of task executions, named by configuration."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psycopg
import pytest

from ergon_framework.providers.celery.ledger import TaskLedger
from ergon_framework.providers.health import ProviderHealthState
from ergon_framework.providers.postgres import admin, retention
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from ergon_framework.providers.postgres.retention import ProviderRetention
from tests.integration.metering import make_attempt, query
from tests.integration.test_provider_ledger import make_dead_letter

#: The largest bigint, as ids of generators such as snowflake have 19 digits.
EXECUTION_IDS = {"uuid": str(uuid.uuid4()), "text": "host-1", "bigint": "9223372036854775807"}


def run_upgrade(dsn, table):
    env = {**os.environ, "ERGON_POSTGRES__DSN": dsn, "ERGON_PROVIDERS__TASK_TABLE": table}
    command = [Path(sys.executable).with_name("ergon"), "db", "upgrade"]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=60, check=False)


@pytest.mark.spec("DX-30", "PRV-29")
@pytest.mark.parametrize("kind", sorted(EXECUTION_IDS))
def test_attempts_refer_to_the_table_that_the_host_names(database, kind):
    execution_id, schema = EXECUTION_IDS[kind], f"host_{kind}"
    query(database, f"create schema {schema}")
    query(database, f"create table {schema}.task_executions (id {kind} primary key)")
    query(database, f"insert into {schema}.task_executions values ('{execution_id}')")
    for _ in range(2):  # the second upgrade changes nothing
        result = run_upgrade(database, f"{schema}.task_executions")
        assert result.returncode == 0, result.stderr
    writer = MetricsWriter(database)
    for execution in (execution_id, "not-a-task", "9223372036854775808", str(uuid.uuid4()), None):
        writer.record(make_attempt(task_execution_id=execution))
    assert writer.close(20)
    ledger = TaskLedger(database)
    ledger.fail(make_dead_letter("t-1", task_execution_id=execution_id))
    ledger.fail(make_dead_letter("t-2", task_execution_id="not-a-task"))
    ledger.close()
    rows = query(
        database,
        "select outcome, task_execution_id::text, count(*)::int from ergon.provider_execution_metrics "
        "group by 1, 2 order by 1, 2",
    )
    assert rows == [
        ("dead_letter", execution_id, 1),
        ("dead_letter", None, 1),
        ("success", execution_id, 1),
        ("success", None, 4),
    ]
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        query(database, f"delete from {schema}.task_executions")
    retention.run_retention(database, ProviderRetention())
    query(database, f"truncate ergon.provider_execution_metrics; drop schema {schema} cascade")
    query(
        database,
        "alter table ergon.provider_execution_metrics alter column task_execution_id type text; "
        "alter table ergon.provider_execution_metrics add foreign key (task_execution_id) "
        "references ergon.task_executions (id)",
    )


@pytest.mark.spec("DX-30", "PRV-29")
def test_a_table_that_cannot_be_referenced_is_rejected(database):
    result = run_upgrade(database, "public.nothing")
    assert result.returncode == 2
    # The upgrade itself has succeeded, and the error says so.
    assert "the database is up to date, at revision" in result.stderr
    assert "but setting providers.task_table failed: providers.task_table 'public.nothing' is invalid" in result.stderr


@pytest.mark.spec("DX-30", "PRV-29")
def test_an_upgrade_of_a_newer_database_reports_that_it_changed_the_referenced_table(database):
    ((revision,),) = query(database, "select version_num from ergon.revision")
    query(database, "create table public.later_executions (id text primary key)")
    query(database, "update ergon.revision set version_num = '9999'")
    try:
        first, second = (run_upgrade(database, "public.later_executions") for _ in range(2))
        run_upgrade(database, "ergon.task_executions")
    finally:
        query(database, f"update ergon.revision set version_num = '{revision}'")
        query(database, "drop table public.later_executions")
    newer = "the database is at revision 9999, created by a later release; the schema was not changed"
    assert first.stdout == f"{newer}; provider attempts now refer to the table public.later_executions\n"
    assert second.stdout == f"{newer}\n"


@pytest.mark.spec("DX-30")
def test_executions_without_attempts_are_removed(database):
    writer = MetricsWriter(database)
    writer.record(make_attempt(task_execution_id="kept"))
    assert writer.close(20)
    query(database, "insert into ergon.task_executions (id) values ('old')")
    query(database, "update ergon.task_executions set created_at = now() - interval '40 days'")
    retention.run_retention(database, ProviderRetention())
    assert query(database, "select id from ergon.task_executions") == [("kept",)]


@pytest.mark.spec("DX-30", "PRV-10")
def test_a_health_state_is_a_model_with_the_columns_of_the_document(database):
    writer = MetricsWriter(database)
    writer.record(make_attempt(duration_ms=2.0))
    assert writer.close(20)
    (state,) = admin.list_health_states(database, "acme")
    assert isinstance(state, ProviderHealthState)
    assert (state.provider_name, state.capability, state.breaker_state) == ("pay", "charging", "closed")
    assert (state.success_rate_1h, state.p95_latency_ms_1h, state.last_error_code) == (1.0, 2.0, None)
    assert admin.list_health_states(database, "another") == []
