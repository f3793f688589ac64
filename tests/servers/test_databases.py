"""A database that is lent again is as it was made; what a test has changed in it for good is not lent again."""

from __future__ import annotations

import psycopg
import pytest

from ergon_framework.schema import migrate
from ergon_framework.transaction import Transaction
from tests.integration.boxes import opened
from tests.servers.databases import Databases


@pytest.fixture
def databases(postgres):
    return Databases(postgres)


def execute(dsn, statement):
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute(statement)
        return found.fetchall() if found.description else []


def test_what_was_in_it_is_gone_and_so_is_whoever_was_connected(databases):
    first = databases.borrow()
    with opened(first, "orders") as queue:
        queue.dispatch([Transaction("a", 1)])
    execute(first, "insert into effect values ('a')")
    with psycopg.connect(first) as left:
        left.execute("select * from ergon.queue")
        databases.give_back(first)
        with pytest.raises(psycopg.OperationalError):
            left.execute("select 1")
    assert databases.borrow() == first
    assert execute(first, "select count(*) from effect") == [(0,)]
    assert migrate.check(first).missing == ()
    with opened(first, "orders") as queue:
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
def test_a_database_of_another_shape_is_not_lent_again(postgres, databases, change):
    dsn = databases.borrow()
    execute(dsn, change)
    databases.give_back(dsn)
    assert databases.borrow() != dsn
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        execute(dsn, "select 1")
