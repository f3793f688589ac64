"""A reused database is as new; one whose schema a test has changed is not reused."""

from __future__ import annotations

import psycopg
import pytest

from ergon_framework.database import migrate
from ergon_framework.transaction import Transaction
from tests.integration.boxes import open_queue
from tests.servers.databases import DatabasePool


@pytest.fixture
def databases(postgres):
    return DatabasePool(postgres)


def execute(dsn, statement):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def test_a_reused_database_is_empty_and_its_clients_are_disconnected(databases):
    first = databases.borrow()
    with open_queue(first, "orders") as queue:
        queue.dispatch([Transaction(1, id="a")])
    execute(first, "insert into effect values ('a')")
    with psycopg.connect(first) as connection:
        connection.execute("select * from ergon.queue")
        databases.release(first)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    assert databases.borrow() == first
    assert execute(first, "select count(*) from effect") == [(0,)]
    assert migrate.check(first).missing == ()
    with open_queue(first, "orders") as queue:
        assert queue.fetch_transactions(1) == []
    assert databases.borrow() != first  # one borrower at a time


@pytest.mark.parametrize(
    "change",
    [
        "create table more (n int)",
        "alter table ergon.job add column more int",
        "drop table ergon.cron cascade",
        "drop schema ergon cascade",
        "create or replace function ergon.more() returns int language sql as 'select 1'",
        "alter table effect add constraint short check (length(name) < 5)",
        "update ergon.revision set version_num = '0000'",
        "do $$ begin execute format('alter database %I set work_mem = 64', current_database()); end $$",
    ],
)
def test_a_database_with_a_changed_schema_is_not_reused(postgres, databases, change):
    dsn = databases.borrow()
    execute(dsn, change)
    databases.release(dsn)
    assert databases.borrow() != dsn
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        execute(dsn, "select 1")
