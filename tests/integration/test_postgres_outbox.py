"""Outbox: what is dispatched inside the caller's database transaction is there if that commits, and only then."""

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
from tests.integration.boxes import opened, taken
from tests.integration.libraries import ASYNC, SYNC, url
from tests.servers.databases import migrated

pytestmark = pytest.mark.invariant


@pytest.fixture(scope="module")
def dsn(postgres):
    return migrated(postgres)


@pytest.fixture
def queue(dsn):
    with opened(dsn) as queue:
        yield queue


class Undone(Exception):
    """What the caller raises to have everything taken back."""


MANY = [
    Transaction(f"order-{n}", {"total": n, "text": "Käse %s :x"}, key=f"k{n % 3}" if n % 2 else None) for n in range(50)
]


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", SYNC)
def test_it_is_there_once_the_callers_database_transaction_commits(library, dsn, queue):
    with SYNC[library](dsn) as (connection, _):
        confirmed = queue.dispatch_on(connection, MANY)
        assert queue.depth().ready == 0
    assert [one.transaction_id for one in confirmed] == [one.id for one in MANY]
    found = [one for _ in range(40) for one in taken(queue)]
    assert {one.id: (one.payload, one.key, one.source) for one in found} == {
        one.id: (one.payload, one.key, queue.name) for one in MANY
    }


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", ASYNC)
def test_it_is_there_once_the_callers_async_database_transaction_commits(library, dsn, queue):
    async def dispatched():
        async with ASYNC[library](dsn) as (connection, _):
            await queue.dispatch_on_async(connection, MANY)
            assert queue.depth().ready == 0

    asyncio.run(dispatched())
    found = [one for _ in range(40) for one in taken(queue)]
    assert {one.id: (one.payload, one.key) for one in found} == {one.id: (one.payload, one.key) for one in MANY}


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", SYNC)
def test_it_is_nowhere_if_the_callers_database_transaction_is_rolled_back(library, dsn, queue):
    with suppress(Undone), SYNC[library](dsn) as (connection, _):
        queue.dispatch_on(connection, MANY)
        raise Undone
    assert taken(queue) == []


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", ASYNC)
def test_it_is_nowhere_if_the_callers_async_database_transaction_is_rolled_back(library, dsn, queue):
    async def dispatched():
        async with ASYNC[library](dsn) as (connection, _):
            await queue.dispatch_on_async(connection, MANY)
            raise Undone

    with pytest.raises(Undone):
        asyncio.run(dispatched())
    assert taken(queue) == []


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", SYNC)
def test_a_savepoint_that_is_rolled_back_takes_back_what_was_dispatched_in_it(library, dsn, queue):
    with SYNC[library](dsn) as (connection, savepoint):
        queue.dispatch_on(connection, [Transaction("kept")])
        with suppress(Undone), savepoint():
            queue.dispatch_on(connection, [Transaction("undone")])
            raise Undone
    assert [one.id for one in taken(queue)] == ["kept"]


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("library", ASYNC)
def test_an_async_savepoint_that_is_rolled_back_takes_back_what_was_dispatched_in_it(library, dsn, queue):
    async def dispatched():
        async with ASYNC[library](dsn) as (connection, savepoint):
            await queue.dispatch_on_async(connection, [Transaction("kept")])
            with suppress(Undone):
                async with savepoint():
                    await queue.dispatch_on_async(connection, [Transaction("undone")])
                    raise Undone

    asyncio.run(dispatched())
    assert [one.id for one in taken(queue)] == ["kept"]


DJANGO = """
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
        queue.dispatch_on(connection, [Transaction(f"kept-{n}", {"percent": "%s"}, key=None) for n in range(3)])
        try:
            with transaction.atomic():
                queue.dispatch_on(connection, [Transaction("savepoint")])
                raise LookupError
        except LookupError:
            pass
        assert queue.dispatch_on(connection, [Transaction("keyed", key="k")])[0].transaction_id == "keyed"
    try:
        with transaction.atomic():
            # The proxy that everybody imports, and what is behind it.
            queue.dispatch_on(connections[DEFAULT_DB_ALIAS], [Transaction("rolled-back")])
            assert queue.mark_on(connection, Transaction("marked"))
            raise LookupError
    except LookupError:
        pass
    with transaction.atomic():
        first = queue.mark_on(connection, Transaction("marked"))
        second = queue.mark_on(connection, Transaction("marked"))
    try:
        queue.dispatch_on(connection, [Transaction("alone")])
    except ConfigurationError as error:
        print(json.dumps({"marks": [first, second], "refused": str(error)}))
"""


@pytest.mark.spec("CNN-15")
def test_django_commits_and_rolls_back_what_was_dispatched_inside_atomic(dsn, queue):
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(DJANGO), dsn, queue.name]
    env = {"ERGON_POSTGRES__DSN": dsn}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["marks"] == [True, False]
    assert "no database transaction is open" in told["refused"]
    assert sorted(one.id for one in taken(queue)) == ["kept-0", "kept-1", "kept-2", "keyed"]


# -- a statement for everybody else ---------------------------------------------------------------------------


@pytest.mark.spec("CNN-15")
def test_the_statement_can_be_executed_by_hand(dsn, queue):
    with psycopg.connect(dsn) as connection:
        connection.execute(*queue.statement([Transaction("by-psycopg")]))
    sql, given = queue.statement([Transaction("by-django")], style="django")
    with psycopg.connect(dsn) as connection:
        connection.execute(sql, given)
    engine = sa.create_engine(url(dsn, "psycopg"))
    sql, given = queue.statement([Transaction("by-SQLAlchemy")], style="sqlalchemy")
    with engine.begin() as connection:
        connection.execute(sa.text(sql), given)
    engine.dispose()

    async def by_asyncpg():
        connection = await asyncpg.connect(dsn)
        sql, given = queue.statement([Transaction("by-asyncpg")], style="asyncpg")
        await connection.fetch(sql, *given)
        await connection.close()

    asyncio.run(by_asyncpg())
    assert {one.id for one in taken(queue)} == {"by-psycopg", "by-django", "by-SQLAlchemy", "by-asyncpg"}


def test_an_unknown_style_is_refused_with_the_known_ones(queue):
    with pytest.raises(
        ConfigurationError, match="no style 'oracle'; the styles are psycopg, sqlalchemy, asyncpg, django"
    ):
        queue.statement([Transaction("a")], style="oracle")


# -- what it carries ------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-15")
def test_the_trace_of_the_moment_is_stamped_and_a_trace_of_its_own_kept(dsn, queue):
    own = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    tracer = TracerProvider().get_tracer("test")
    with psycopg.connect(dsn) as connection, tracer.start_as_current_span("request") as span:
        assert trace.get_current_span() is span
        queue.dispatch_on(connection, [Transaction("stamped"), Transaction("own", trace=own)])
    found = {one.id: one.trace for one in taken(queue)}
    assert f"{span.get_span_context().trace_id:032x}" in found["stamped"]["traceparent"]
    assert found["own"] == own


def test_of_several_that_cannot_all_be_written_none_is_dispatched_and_the_caller_can_go_on(dsn, queue):
    with psycopg.connect(dsn) as connection:
        with pytest.raises(UnencodableError):
            queue.dispatch_on(connection, [Transaction("good"), Transaction("bad", {1, 2})])
        queue.dispatch_on(connection, [])
        queue.dispatch_on(connection, [Transaction("next")])
    assert [one.id for one in taken(queue)] == ["next"]


@pytest.mark.spec("CNN-15")
def test_a_queue_that_nobody_has_named_before_is_made_in_the_same_database_transaction(dsn):
    with opened(dsn, "brand-new-opened"):
        pass
    from ergon_framework.connectors.postgres import PostgresQueue  # noqa: PLC0415 - never opened

    queue = PostgresQueue("brand-new", dsn=dsn)
    with psycopg.connect(dsn) as connection:
        queue.dispatch_on(connection, [Transaction("first")])
        connection.rollback()
        queue.dispatch_on(connection, [Transaction("second")])
    assert [one.id for one in taken(queue)] == ["second"]
    queue.close()


def test_it_wakes_a_consumer_that_waits(dsn, queue):
    """A fetch that waits looks at least four times a second, so this proves arrival and not the doorbell."""

    async def both():
        waiting = asyncio.create_task(queue.fetch_transactions_async(1, wait=30))
        connection = await asyncpg.connect(dsn)
        async with connection.transaction():
            await queue.dispatch_on_async(connection, [Transaction("woken")])
        await connection.close()
        deliveries = await asyncio.wait_for(waiting, 20)
        await queue.close_async()
        return deliveries

    assert [one.transaction.id for one in asyncio.run(both())] == ["woken"]


# -- what is no open database transaction ---------------------------------------------------------------------


@pytest.mark.parametrize("thing", [object(), "postgresql://", None, 7])
def test_what_is_no_connection_is_refused_with_words(queue, thing):
    words = "no connection of psycopg, SQLAlchemy, asyncpg or Django; statement\\(\\)"
    with pytest.raises(ConfigurationError, match=words):
        queue.dispatch_on(thing, [Transaction("a")])
    with pytest.raises(ConfigurationError, match=words):
        asyncio.run(queue.dispatch_on_async(thing, [Transaction("a")]))


@pytest.mark.parametrize("library", ASYNC)
def test_an_async_connection_is_refused_by_the_sync_method(library, dsn, queue):
    async def dispatched():
        async with ASYNC[library](dsn) as (connection, _):
            with pytest.raises(
                ConfigurationError, match="is an async connection; use the method whose name ends in _async"
            ):
                queue.dispatch_on(connection, [Transaction("a")])

    asyncio.run(dispatched())
    assert taken(queue) == []


@pytest.mark.parametrize("library", SYNC)
def test_a_sync_connection_is_refused_by_the_async_method(library, dsn, queue):
    words = "is a sync connection; use the method without _async"
    with SYNC[library](dsn) as (connection, _), pytest.raises(ConfigurationError, match=words):
        asyncio.run(queue.dispatch_on_async(connection, [Transaction("a")]))
    assert taken(queue) == []


@pytest.mark.spec("CNN-15")
def test_pools_and_engines_are_refused_because_no_database_transaction_is_open_on_them(dsn, queue):
    engine = sa.create_engine(url(dsn, "psycopg"))
    with psycopg_pool.ConnectionPool(dsn, min_size=1, open=True) as pool:
        for thing in (pool, engine):
            with pytest.raises(ConfigurationError, match="is no connection"):
                queue.dispatch_on(thing, [Transaction("a")])
    engine.dispose()

    async def pooled():
        async with asyncpg.create_pool(dsn, min_size=1) as pool:
            with pytest.raises(ConfigurationError, match="is no connection"):
                await queue.dispatch_on_async(pool, [Transaction("a")])
        engine = create_async_engine(url(dsn, "asyncpg"))
        with pytest.raises(ConfigurationError, match="is no connection"):
            await queue.dispatch_on_async(engine, [Transaction("a")])
        await engine.dispose()

    asyncio.run(pooled())
    assert taken(queue) == []


ALONE = "no database transaction is open"


@pytest.mark.spec("CNN-15")
def test_a_sync_connection_that_would_commit_each_statement_is_refused(dsn, queue):
    with psycopg.connect(dsn, autocommit=True) as connection, pytest.raises(ConfigurationError, match=ALONE):
        queue.dispatch_on(connection, [Transaction("a")])
    for options in ({"isolation_level": "AUTOCOMMIT"}, {"execution_options": {"isolation_level": "AUTOCOMMIT"}}):
        engine = sa.create_engine(url(dsn, "psycopg"), **options)
        with engine.connect() as connection, pytest.raises(ConfigurationError, match=ALONE):
            queue.dispatch_on(connection, [Transaction("a")])
        with Session(engine) as session, pytest.raises(ConfigurationError, match=ALONE):
            queue.dispatch_on(session, [Transaction("a")])
        engine.dispose()
    assert taken(queue) == []


@pytest.mark.spec("CNN-15")
def test_an_async_connection_that_would_commit_each_statement_is_refused(dsn, queue):
    async def dispatched():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            with pytest.raises(ConfigurationError, match=ALONE):
                await queue.dispatch_on_async(connection, [Transaction("a")])
        connection = await asyncpg.connect(dsn)
        with pytest.raises(ConfigurationError, match=ALONE):
            await queue.dispatch_on_async(connection, [Transaction("a")])
        await connection.close()
        for driver in ("psycopg", "asyncpg"):
            engine = create_async_engine(url(dsn, driver), isolation_level="AUTOCOMMIT")
            async with engine.connect() as connection:
                with pytest.raises(ConfigurationError, match=ALONE):
                    await queue.dispatch_on_async(connection, [Transaction("a")])
            async with AsyncSession(engine) as session:
                with pytest.raises(ConfigurationError, match=ALONE):
                    await queue.dispatch_on_async(session, [Transaction("a")])
            await engine.dispose()

    asyncio.run(dispatched())
    assert taken(queue) == []


def test_an_error_of_the_callers_library_comes_through_without_the_payload(postgres, queue):
    bare = postgres.create_database(f"bare_{queue.name[-8:]}")
    engine = sa.create_engine(url(bare, "psycopg"))
    with engine.connect() as connection, pytest.raises(sa.exc.ProgrammingError) as caught:
        queue.dispatch_on(connection, [Transaction("a", {"card": "4111-1111"})])
    engine.dispose()
    assert "ergon" in str(caught.value)
    assert "4111" not in str(caught.value)
