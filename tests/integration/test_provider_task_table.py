"""The host's own table of task executions, named by configuration."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psycopg
import pytest

from ergon_framework.providers.health import ProviderHealthState
from ergon_framework.providers.sql import operator, retention
from ergon_framework.providers.sql.ledger import Ledger
from ergon_framework.providers.sql.retention import Retention
from ergon_framework.providers.sql.writer import MetricsWriter
from tests.integration.metering import ask, attempt
from tests.integration.test_provider_ledger import letter

KINDS = {"uuid": str(uuid.uuid4()), "text": "host-1", "bigint": "17"}


def upgrade(dsn, table):
    env = {**os.environ, "ERGON_POSTGRES__DSN": dsn, "ERGON_PROVIDERS__TASK_TABLE": table}
    command = [Path(sys.executable).with_name("ergon"), "db", "upgrade"]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=60, check=False)


@pytest.mark.spec("DX-30", "PRV-29")
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_attempts_refer_to_the_table_that_the_host_names(database, kind):
    known, schema = KINDS[kind], f"host_{kind}"
    ask(database, f"create schema {schema}")
    ask(database, f"create table {schema}.task_executions (id {kind} primary key)")
    ask(database, f"insert into {schema}.task_executions values ('{known}')")
    for _ in range(2):  # twice is once
        ran = upgrade(database, f"{schema}.task_executions")
        assert ran.returncode == 0, ran.stderr
    writer = MetricsWriter(database)
    for execution in (known, "nobody's", str(uuid.uuid4()), None):
        writer.record(attempt(task_execution_id=execution))
    assert writer.close(20)
    ledger = Ledger(database)
    ledger.bury(letter("t-1", task_execution_id=known))
    ledger.bury(letter("t-2", task_execution_id="nobody's"))
    ledger.close()
    found = ask(
        database,
        "select outcome, task_execution_id::text, count(*)::int from ergon.provider_execution_metrics "
        "group by 1, 2 order by 1, 2",
    )
    assert found == [
        ("dead_letter", known, 1),
        ("dead_letter", None, 1),
        ("success", known, 1),
        ("success", None, 3),
    ]
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        ask(database, f"delete from {schema}.task_executions")
    retention.run(database, Retention())
    ask(database, f"truncate ergon.provider_execution_metrics; drop schema {schema} cascade")
    ask(
        database,
        "alter table ergon.provider_execution_metrics alter column task_execution_id type text; "
        "alter table ergon.provider_execution_metrics add foreign key (task_execution_id) "
        "references ergon.task_executions (id)",
    )


@pytest.mark.spec("DX-30", "PRV-29")
def test_a_table_that_cannot_be_referred_to_is_refused(database):
    ran = upgrade(database, "public.nothing")
    assert ran.returncode == 2
    assert "providers.task_table 'public.nothing' is invalid" in ran.stderr


@pytest.mark.spec("DX-30")
def test_executions_that_no_attempt_refers_to_any_more_are_removed(database):
    writer = MetricsWriter(database)
    writer.record(attempt(task_execution_id="kept"))
    assert writer.close(20)
    ask(database, "insert into ergon.task_executions (id) values ('old')")
    ask(database, "update ergon.task_executions set created_at = now() - interval '40 days'")
    retention.run(database, Retention())
    assert ask(database, "select id from ergon.task_executions") == [("kept",)]


@pytest.mark.spec("DX-30", "PRV-10")
def test_a_health_state_is_a_model_with_the_columns_of_the_document(database):
    writer = MetricsWriter(database)
    writer.record(attempt(duration_ms=2.0))
    assert writer.close(20)
    (state,) = operator.health_states(database, "acme")
    assert isinstance(state, ProviderHealthState)
    assert (state.provider_name, state.capability, state.breaker_state) == ("pay", "charging", "closed")
    assert (state.success_rate_1h, state.p95_latency_ms_1h, state.last_error_code) == (1.0, 2.0, None)
    assert operator.health_states(database, "another") == []
