"""Check the provider tables: those that the document names, with its names, added to the existing schema."""

from __future__ import annotations

import itertools
import os
import re

import psycopg
import pytest
from alembic import command

from ergon_framework.database import migrate
from ergon_framework.database.migrations.versions import r0002_providers

_numbers = itertools.count(1)

#: Tables, columns and indexes of the document, in its order; then window_kind and the index of task_execution_id,
#: which the framework adds.
DOCUMENTED_TABLES = """
provider_quota_states: id tenant_id provider_name capability window_start window_end limit_count used_count
    remaining_count last_exhausted_at updated_at window_kind
  unique (tenant_id, provider_name, capability, window_start)
  (tenant_id, window_end)
provider_health_states: id tenant_id provider_name capability breaker_state consecutive_failures success_rate_1h
    p95_latency_ms_1h last_error_code last_error_at last_success_at updated_at
  unique (tenant_id, provider_name, capability)
  (tenant_id, breaker_state)
provider_execution_metrics: id tenant_id task_execution_id provider_name capability operation idempotency_key
    correlation_id attempt_number max_attempts duration_ms timeout_budget_ms outcome reason_code retryable http_status
    created_at
  (tenant_id, provider_name, capability, created_at)
  (tenant_id, outcome, created_at)
  (correlation_id)
  (task_execution_id)
"""


def parse_documented_tables():
    """Return each table with its columns, and its indexes as (unique, columns)."""
    tables = {}
    for table, rest in re.findall(r"^(\w+):((?:.|\n)*?)(?=^\w|\Z)", DOCUMENTED_TABLES, re.MULTILINE):
        indexes = re.findall(r"^  (unique )?\(([^)]*)\)", rest, re.MULTILINE)
        columns = re.sub(r"^  (unique )?\(.*$", "", rest, flags=re.MULTILINE).split()
        tables[table] = columns, {(bool(unique), tuple(names.split(", "))) for unique, names in indexes}
    return tables


@pytest.fixture
def dsn(postgres):
    return postgres.create_database(f"providers_{os.getpid()}_{next(_numbers)}")


def query_rows(dsn, statement, *parameters):
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(statement, parameters).fetchall()


def list_columns(dsn, table):
    return query_rows(
        dsn,
        "select column_name, data_type, is_nullable from information_schema.columns"
        " where table_schema = 'ergon' and table_name = %s order by ordinal_position",
        table,
    )


def list_indexes(dsn, table):
    """Return all indexes but the primary key, which the document does not choose."""
    return {
        (unique, tuple(names))
        for unique, names in query_rows(
            dsn,
            "select i.indisunique, array(select a.attname::text from unnest(i.indkey) with ordinality k(n, place)"
            " join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.n order by place)"
            " from pg_index i where i.indrelid = ('ergon.' || %s)::regclass and not i.indisprimary",
            table,
        )
    }


def run_alembic(dsn, direction, revision):
    with migrate._connect(dsn) as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        getattr(command, direction)(config, revision)
        connection.commit()


def describe_schema(dsn):
    """Return everything in the framework's schema, by name and definition."""
    return query_rows(
        dsn,
        """
        select 'column', table_name || '.' || column_name, data_type || coalesce(column_default, '') || is_nullable
        from information_schema.columns where table_schema = 'ergon'
        union all select 'index', indexname, indexdef from pg_indexes where schemaname = 'ergon'
        union all select 'check', conname || conrelid::regclass, pg_get_constraintdef(oid) from pg_constraint
            where connamespace = 'ergon'::regnamespace
        union all select 'function', p.oid::regprocedure::text, md5(p.prosrc) from pg_proc p
            where pronamespace = 'ergon'::regnamespace
        order by 1, 2, 3
        """,
    )


@pytest.mark.spec("PRV-09", "PRV-10", "PRV-11", "PRV-15")
@pytest.mark.parametrize("table", sorted(parse_documented_tables()))
def test_the_tables_have_the_columns_and_indexes_that_the_document_names_and_no_others(dsn, table):
    migrate.upgrade(dsn)
    expected_columns, expected_indexes = parse_documented_tables()[table]
    assert [name for name, _, _ in list_columns(dsn, table)] == expected_columns
    assert list_indexes(dsn, table) == expected_indexes


@pytest.mark.spec("PRV-29")
def test_a_metric_may_name_its_task_execution_and_only_the_documented_columns_are_nullable(dsn):
    migrate.upgrade(dsn)
    nullable = {name for name, _, can in list_columns(dsn, "provider_execution_metrics") if can == "YES"}
    assert nullable == {"task_execution_id", "idempotency_key", "reason_code", "http_status"}
    (reference,) = query_rows(
        dsn,
        "select pg_get_constraintdef(oid) from pg_constraint where contype = 'f'"
        " and conrelid = 'ergon.provider_execution_metrics'::regclass",
    )
    assert reference == ("FOREIGN KEY (task_execution_id) REFERENCES ergon.task_executions(id)",)


@pytest.mark.spec("DX-31", "PRV-09")
def test_at_midnight_of_the_first_each_window_has_its_kind_and_exact_start(dsn):
    migrate.upgrade(dsn, "0002")
    midnight = "timestamptz '2026-03-01 00:00:00+00'"
    insert_windows = (
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end,"
        f" limit_count, remaining_count) select %s, 'p', 'c', ergon.provider_window_start(kind, {midnight}),"
        f" ergon.provider_window_end(kind, {midnight}), 5, 5 from generate_series(1, 4) kind returning 1"
    )
    query_rows(dsn, insert_windows, "t")
    rows = query_rows(
        dsn,
        f"select window_kind, window_start = {midnight} from ergon.provider_quota_windows order by window_end",
    )
    assert rows == [("minute", True), ("hour", True), ("day", True), ("month", True)]
    assert query_rows(dsn, "select count(distinct window_start) from ergon.provider_quota_states") == [(4,)]


@pytest.mark.spec("PRV-29")
@pytest.mark.parametrize(
    "statement",
    [
        (
            "insert into ergon.provider_health_states (tenant_id, provider_name, capability, breaker_state)"
            " values ('t', 'p', 'c', 'ajar')"
        ),
        (
            "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end,"
            " limit_count, used_count, remaining_count) values ('t', 'p', 'c', now(), now(), 10, 3, 8)"
        ),
    ],
)
def test_contradictory_rows_are_rejected_by_the_tables(dsn, statement):
    migrate.upgrade(dsn)
    with psycopg.connect(dsn) as connection, pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(statement)


@pytest.mark.spec("PRV-15")
def test_the_migration_adds_and_changes_nothing_that_existed(dsn):
    migrate.upgrade(dsn, "0001")
    before = describe_schema(dsn)
    migrate.upgrade(dsn, "0002")
    after = describe_schema(dsn)
    assert set(before) <= set(after)
    assert all(
        re.match(r"(provider_|task_executions|ergon\.provider_)", name) for _, name, _ in set(after) - set(before)
    )


@pytest.mark.spec("PRV-15")
def test_up_and_down_and_up_again_is_the_same(dsn):
    migrate.upgrade(dsn, "0001")
    first = describe_schema(dsn)
    migrate.upgrade(dsn)
    second = describe_schema(dsn)
    run_alembic(dsn, "downgrade", "0001")
    assert describe_schema(dsn) == first
    run_alembic(dsn, "upgrade", "head")
    assert describe_schema(dsn) == second


@pytest.mark.spec("PRV-15")
def test_every_table_and_function_of_the_migration_is_dropped_by_name(dsn):
    migrate.upgrade(dsn, "0002")
    functions = query_rows(
        dsn,
        "select proname::text from pg_proc where pronamespace = 'ergon'::regnamespace and proname like 'provider%%'",
    )
    assert sorted(name for (name,) in functions) == sorted(r0002_providers.FUNCTION_NAMES)
    tables = query_rows(
        dsn,
        "select c.relname::text from pg_class c where relnamespace = 'ergon'::regnamespace and relkind in ('r', 'p')"
        " and not relispartition and (relname like 'provider%%' or relname = 'task_executions')",
    )
    assert sorted(name for (name,) in tables) == sorted(r0002_providers.TABLE_NAMES)
