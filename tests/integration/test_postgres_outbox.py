"""Check the outbox: a dispatch inside the caller's database transaction exists if and only if that commits."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from contextlib import suppress

import asyncpg
import psycopg
import psycopg_pool
import pytest
import sqlalchemy as sa
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from ergon_framework.connectors.codec import UnencodableError
from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction
from tests.integration.boxes import fetch_and_ack, open_queue
from tests.integration.libraries import ASYNC_LIBRARIES, SYNC_LIBRARIES, to_driver_url
from tests.servers.databases import create_migrated_database

pytestmark = pytest.mark.invariant


@pytest.fixture(scope="module")
def dsn(postgres):
    return create_migrated_database(postgres)


@pytest.fixture
def queue(dsn):
    with open_queue(dsn) as queue:
        yield queue


class RollbackRequested(Exception):
    """The exception that a caller raises to roll everything back."""


TRANSACTIONS = [
    Transaction({"total": n, "text": "Käse %s :x"}, id=f"order-{n}", key=f"k{n % 3}" if n % 2 else None)
    for n in range(50)
]


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", SYNC_LIBRARIES)
def test_a_dispatch_exists_once_the_callers_database_transaction_commits(library, dsn, queue):
    with SYNC_LIBRARIES[library](dsn) as (connection, _):
        confirmed = queue.dispatch_on(connection, TRANSACTIONS)
        assert queue.depth().ready == 0
    assert [one.transaction_id for one in confirmed] == [one.id for one in TRANSACTIONS]
    transactions = [one for _ in range(40) for one in fetch_and_ack(queue)]
    assert {one.id: (one.payload, one.key, one.source) for one in transactions} == {
        one.id: (one.payload, one.key, queue.name) for one in TRANSACTIONS
    }


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", ASYNC_LIBRARIES)
def test_a_dispatch_exists_once_the_callers_async_database_transaction_commits(library, dsn, queue):
    async def dispatch():
        async with ASYNC_LIBRARIES[library](dsn) as (connection, _):
            await queue.dispatch_on_async(connection, TRANSACTIONS)
            assert queue.depth().ready == 0

    asyncio.run(dispatch())
    transactions = [one for _ in range(40) for one in fetch_and_ack(queue)]
    assert {one.id: (one.payload, one.key) for one in transactions} == {
        one.id: (one.payload, one.key) for one in TRANSACTIONS
    }


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", SYNC_LIBRARIES)
def test_no_dispatch_exists_if_the_callers_database_transaction_is_rolled_back(library, dsn, queue):
    with suppress(RollbackRequested), SYNC_LIBRARIES[library](dsn) as (connection, _):
        queue.dispatch_on(connection, TRANSACTIONS)
        raise RollbackRequested
    assert fetch_and_ack(queue) == []


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", ASYNC_LIBRARIES)
def test_no_dispatch_exists_if_the_callers_async_database_transaction_is_rolled_back(library, dsn, queue):
    async def dispatch():
        async with ASYNC_LIBRARIES[library](dsn) as (connection, _):
            await queue.dispatch_on_async(connection, TRANSACTIONS)
            raise RollbackRequested

    with pytest.raises(RollbackRequested):
        asyncio.run(dispatch())
    assert fetch_and_ack(queue) == []


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", SYNC_LIBRARIES)
def test_a_savepoint_that_is_rolled_back_removes_the_dispatches_in_it(library, dsn, queue):
    with SYNC_LIBRARIES[library](dsn) as (connection, savepoint):
        queue.dispatch_on(connection, [Transaction(id="kept")])
        with suppress(RollbackRequested), savepoint():
            queue.dispatch_on(connection, [Transaction(id="undone")])
            raise RollbackRequested
    assert [one.id for one in fetch_and_ack(queue)] == ["kept"]


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", ASYNC_LIBRARIES)
def test_an_async_savepoint_that_is_rolled_back_removes_the_dispatches_in_it(library, dsn, queue):
    async def dispatch():
        async with ASYNC_LIBRARIES[library](dsn) as (connection, savepoint):
            await queue.dispatch_on_async(connection, [Transaction(id="kept")])
            with suppress(RollbackRequested):
                async with savepoint():
                    await queue.dispatch_on_async(connection, [Transaction(id="undone")])
                    raise RollbackRequested

    asyncio.run(dispatch())
    assert [one.id for one in fetch_and_ack(queue)] == ["kept"]


DJANGO_PROGRAM = """
    import json, os, sys
    import django
    from django.conf import settings

    dsn, name = sys.argv[1:]
    port, database = dsn.rpartition(":")[2].split("/")
    settings.configure(DATABASES={"default": {
        "ENGINE": "django.db.backends.postgresql", "HOST": "127.0.0.1", "PORT": port, "USER": "postgres",
        "NAME": database,
    }}, USE_TZ=True)
    django.setup()
    from django.db import DEFAULT_DB_ALIAS, connection, connections, transaction

    from ergon_framework.connectors.postgres import PostgresQueue
    from ergon_framework.errors import ConfigurationError
    from ergon_framework.transaction import Transaction

    queue = PostgresQueue(name, inbox=True)
    with transaction.atomic():
        queue.dispatch_on(connection, [Transaction({"percent": "%s"}, id=f"kept-{n}", key=None) for n in range(3)])
        try:
            with transaction.atomic():
                queue.dispatch_on(connection, [Transaction(id="savepoint")])
                raise LookupError
        except LookupError:
            pass
        assert queue.dispatch_on(connection, [Transaction(id="keyed", key="k")])[0].transaction_id == "keyed"
    try:
        with transaction.atomic():
            # The proxy that everybody imports, and what is behind it.
            queue.dispatch_on(connections[DEFAULT_DB_ALIAS], [Transaction(id="rolled-back")])
            assert queue.record_processed_on(connection, Transaction(id="marked"))
            raise LookupError
    except LookupError:
        pass
    with transaction.atomic():
        first = queue.record_processed_on(connection, Transaction(id="marked"))
        second = queue.record_processed_on(connection, Transaction(id="marked"))
    try:
        queue.dispatch_on(connection, [Transaction(id="alone")])
    except ConfigurationError as error:
        print(json.dumps({"marks": [first, second], "refused": str(error)}))
"""


@pytest.mark.spec("CNN-15")
def test_django_commits_and_rolls_back_dispatches_inside_atomic(dsn, queue):
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(DJANGO_PROGRAM), dsn, queue.name]
    env = {"ERGON_POSTGRES__DSN": dsn}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert output["marks"] == [True, False]
    assert "no database transaction is open" in output["refused"]
    assert sorted(one.id for one in fetch_and_ack(queue)) == ["kept-0", "kept-1", "kept-2", "keyed"]


# -- the statement for other libraries ------------------------------------------------------------------------


@pytest.mark.spec("CNN-15")
def test_the_statement_can_be_executed_by_hand(dsn, queue):
    with psycopg.connect(dsn) as connection:
        connection.execute(*queue.dispatch_statement([Transaction(id="by-psycopg")]))
    sql, parameters = queue.dispatch_statement([Transaction(id="by-django")], style="django")
    with psycopg.connect(dsn) as connection:
        connection.execute(sql, parameters)
    engine = sa.create_engine(to_driver_url(dsn, "psycopg"))
    sql, parameters = queue.dispatch_statement([Transaction(id="by-SQLAlchemy")], style="sqlalchemy")
    with engine.begin() as connection:
        connection.execute(sa.text(sql), parameters)
    engine.dispose()

    async def run_by_asyncpg():
        connection = await asyncpg.connect(dsn)
        sql, parameters = queue.dispatch_statement([Transaction(id="by-asyncpg")], style="asyncpg")
        await connection.fetch(sql, *parameters)
        await connection.close()

    asyncio.run(run_by_asyncpg())
    assert {one.id for one in fetch_and_ack(queue)} == {"by-psycopg", "by-django", "by-SQLAlchemy", "by-asyncpg"}


def test_an_unknown_style_is_rejected_with_the_known_ones(queue):
    with pytest.raises(
        ConfigurationError, match="unknown style 'oracle': the styles are psycopg, sqlalchemy, asyncpg, django"
    ):
        queue.dispatch_statement([Transaction(id="a")], style="oracle")


# -- what a dispatch carries ----------------------------------------------------------------------------------


@pytest.mark.spec("CNN-15")
def test_the_current_trace_is_attached_and_an_explicit_trace_is_kept(dsn, queue):
    explicit = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    tracer = TracerProvider().get_tracer("test")
    with psycopg.connect(dsn) as connection, tracer.start_as_current_span("request") as span:
        assert trace.get_current_span() is span
        queue.dispatch_on(connection, [Transaction(id="stamped"), Transaction(id="own", trace=explicit)])
    traces = {one.id: one.trace for one in fetch_and_ack(queue)}
    assert f"{span.get_span_context().trace_id:032x}" in traces["stamped"]["traceparent"]
    assert traces["own"] == explicit


def test_one_unencodable_transaction_prevents_the_whole_dispatch_and_the_caller_can_continue(dsn, queue):
    with psycopg.connect(dsn) as connection:
        with pytest.raises(UnencodableError):
            queue.dispatch_on(connection, [Transaction(id="good"), Transaction(object(), id="bad")])
        queue.dispatch_on(connection, [])
        queue.dispatch_on(connection, [Transaction(id="next")])
    assert [one.id for one in fetch_and_ack(queue)] == ["next"]


@pytest.mark.spec("CNN-15")
def test_a_queue_without_a_row_is_created_in_the_same_database_transaction(dsn):
    with open_queue(dsn, "brand-new-opened"):
        pass
    from ergon_framework.connectors.postgres import PostgresQueue  # noqa: PLC0415 - never opened

    queue = PostgresQueue("brand-new", dsn=dsn)
    with psycopg.connect(dsn) as connection:
        queue.dispatch_on(connection, [Transaction(id="first")])
        connection.rollback()
        queue.dispatch_on(connection, [Transaction(id="second")])
    assert [one.id for one in fetch_and_ack(queue)] == ["second"]
    queue.close()


def test_a_dispatch_wakes_a_waiting_consumer(dsn, queue):
    """A waiting fetch polls at least four times a second, so this proves arrival and not the notification."""

    async def main():
        waiting = asyncio.create_task(queue.fetch_transactions_async(1, wait=30))
        connection = await asyncpg.connect(dsn)
        async with connection.transaction():
            await queue.dispatch_on_async(connection, [Transaction(id="woken")])
        await connection.close()
        deliveries = await asyncio.wait_for(waiting, 20)
        await queue.close_async()
        return deliveries

    assert [one.transaction.id for one in asyncio.run(main())] == ["woken"]


# -- objects without an open database transaction -------------------------------------------------------------


@pytest.mark.parametrize("thing", [object(), "postgresql://", None, 7])
def test_an_object_that_is_not_a_connection_is_rejected_with_a_reason(queue, thing):
    message = "is not a connection of psycopg, SQLAlchemy, asyncpg or Django; dispatch_statement\\(\\)"
    with pytest.raises(ConfigurationError, match=message):
        queue.dispatch_on(thing, [Transaction(id="a")])
    with pytest.raises(ConfigurationError, match=message):
        asyncio.run(queue.dispatch_on_async(thing, [Transaction(id="a")]))


@pytest.mark.parametrize("library", ASYNC_LIBRARIES)
def test_an_async_connection_is_rejected_by_the_sync_method(library, dsn, queue):
    async def dispatch():
        async with ASYNC_LIBRARIES[library](dsn) as (connection, _):
            with pytest.raises(
                ConfigurationError, match="is an async connection; use the method whose name ends in _async"
            ):
                queue.dispatch_on(connection, [Transaction(id="a")])

    asyncio.run(dispatch())
    assert fetch_and_ack(queue) == []


@pytest.mark.parametrize("library", SYNC_LIBRARIES)
def test_a_sync_connection_is_rejected_by_the_async_method(library, dsn, queue):
    message = "is a sync connection; use the method without _async"
    with SYNC_LIBRARIES[library](dsn) as (connection, _), pytest.raises(ConfigurationError, match=message):
        asyncio.run(queue.dispatch_on_async(connection, [Transaction(id="a")]))
    assert fetch_and_ack(queue) == []


@pytest.mark.spec("CNN-15")
def test_pools_and_engines_are_rejected_because_they_have_no_open_database_transaction(dsn, queue):
    engine = sa.create_engine(to_driver_url(dsn, "psycopg"))
    with psycopg_pool.ConnectionPool(dsn, min_size=1, open=True) as pool:
        for thing in (pool, engine):
            with pytest.raises(ConfigurationError, match="is not a connection"):
                queue.dispatch_on(thing, [Transaction(id="a")])
    engine.dispose()

    async def dispatch_async():
        async with asyncpg.create_pool(dsn, min_size=1) as pool:
            with pytest.raises(ConfigurationError, match="is not a connection"):
                await queue.dispatch_on_async(pool, [Transaction(id="a")])
        engine = create_async_engine(to_driver_url(dsn, "asyncpg"))
        with pytest.raises(ConfigurationError, match="is not a connection"):
            await queue.dispatch_on_async(engine, [Transaction(id="a")])
        await engine.dispose()

    asyncio.run(dispatch_async())
    assert fetch_and_ack(queue) == []


NO_TRANSACTION_ERROR = "no database transaction is open"


@pytest.mark.spec("CNN-15")
def test_a_sync_connection_in_autocommit_mode_is_rejected(dsn, queue):
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        pytest.raises(ConfigurationError, match=NO_TRANSACTION_ERROR),
    ):
        queue.dispatch_on(connection, [Transaction(id="a")])
    for options in ({"isolation_level": "AUTOCOMMIT"}, {"execution_options": {"isolation_level": "AUTOCOMMIT"}}):
        engine = sa.create_engine(to_driver_url(dsn, "psycopg"), **options)
        with engine.connect() as connection, pytest.raises(ConfigurationError, match=NO_TRANSACTION_ERROR):
            queue.dispatch_on(connection, [Transaction(id="a")])
        with Session(engine) as session, pytest.raises(ConfigurationError, match=NO_TRANSACTION_ERROR):
            queue.dispatch_on(session, [Transaction(id="a")])
        engine.dispose()
    assert fetch_and_ack(queue) == []


@pytest.mark.spec("CNN-15")
def test_an_async_connection_in_autocommit_mode_is_rejected(dsn, queue):
    async def dispatch():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            with pytest.raises(ConfigurationError, match=NO_TRANSACTION_ERROR):
                await queue.dispatch_on_async(connection, [Transaction(id="a")])
        connection = await asyncpg.connect(dsn)
        with pytest.raises(ConfigurationError, match=NO_TRANSACTION_ERROR):
            await queue.dispatch_on_async(connection, [Transaction(id="a")])
        await connection.close()
        for driver in ("psycopg", "asyncpg"):
            engine = create_async_engine(to_driver_url(dsn, driver), isolation_level="AUTOCOMMIT")
            async with engine.connect() as connection:
                with pytest.raises(ConfigurationError, match=NO_TRANSACTION_ERROR):
                    await queue.dispatch_on_async(connection, [Transaction(id="a")])
            async with AsyncSession(engine) as session:
                with pytest.raises(ConfigurationError, match=NO_TRANSACTION_ERROR):
                    await queue.dispatch_on_async(session, [Transaction(id="a")])
            await engine.dispose()

    asyncio.run(dispatch())
    assert fetch_and_ack(queue) == []


def test_an_error_of_the_callers_library_is_raised_without_the_payload(postgres, queue):
    empty_database = postgres.create_database(f"bare_{queue.name[-8:]}")
    engine = sa.create_engine(to_driver_url(empty_database, "psycopg"))
    with engine.connect() as connection, pytest.raises(sa.exc.ProgrammingError) as caught:
        queue.dispatch_on(connection, [Transaction({"card": "4111-1111"}, id="a")])
    engine.dispose()
    assert "ergon" in str(caught.value)
    assert "4111" not in str(caught.value)
