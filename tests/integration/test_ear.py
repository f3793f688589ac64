"""SocketWaiter: an asyncio connection waits for a real server, and its event loop unregisters the socket in time."""

from __future__ import annotations

import asyncio
import gc
import time

import psycopg
import pytest
import uvloop

from ergon_framework.database.connection import AsyncDeadlineConnection
from ergon_framework.database.errors import ServerTimeout
from ergon_framework.database.operation import PreparedTextQuery, Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import ConnectionLostError

ECHO_SQL = "select $1::text"
SLEEP_SQL = "select pg_sleep($1::float8)::text"
LONG_SECONDS = 30.0


@pytest.fixture(scope="module")
def dsn(postgres):
    return postgres.create_database("ear")


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    def run(body):
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(body, 60))

    return run


def run_query(sql, *values):
    ((value,),) = yield PreparedTextQuery(sql, values)
    return value


async def open_connection(dsn, timeout=LONG_SECONDS):
    connection = await AsyncDeadlineConnection.connect(dsn, autocommit=True)
    connection.deadline = asyncio.get_running_loop().time() + timeout
    return connection


async def fetch_row(connection, sql="select 1"):
    return await (await connection.execute(sql)).fetchone()


def terminate_backend(dsn, pid):
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("select pg_terminate_backend(%s, 10000)", [pid])


def has_no_reader(file):
    """Return whether the running loop has no reader for *file*; the reader is removed in any case."""
    return not asyncio.get_running_loop().remove_reader(file)


def test_the_socket_stays_registered_between_two_queries(dsn, monkeypatch):
    async def body():
        loop, calls = asyncio.get_running_loop(), []

        def record_calls(name):
            original = getattr(loop, name)

            def call(*args, **options):
                calls.append(name)
                return original(*args, **options)

            monkeypatch.setattr(loop, name, call)

        record_calls("add_reader")
        record_calls("call_at")
        connection = await AsyncDeadlineConnection.connect(dsn, autocommit=True)
        calls.clear()
        connection.deadline = loop.time() + LONG_SECONDS
        for number in range(20):
            assert await fetch_row(connection, f"select {number}") == (number,)
        assert sorted(calls) == ["add_reader", "call_at"]
        await connection.close()

    asyncio.run(body())


def test_a_later_deadline_applies_and_so_does_an_earlier_one(dsn, run):
    async def body():
        connection, loop = await open_connection(dsn, 0.3), asyncio.get_running_loop()
        await fetch_row(connection)
        connection.deadline = loop.time() + LONG_SECONDS
        await fetch_row(connection, "select pg_sleep(0.6)")  # longer than the first deadline
        connection.deadline = loop.time() + 0.3
        began = loop.time()
        with pytest.raises(ServerTimeout, match="did not answer in time"):
            await fetch_row(connection, "select pg_sleep(20)")
        assert 0.25 < loop.time() - began < 3
        assert connection.is_under_way
        file = connection.fileno()
        assert has_no_reader(file)
        connection.abort()

    run(body())


def test_a_deadline_in_the_past_raises_a_timeout(dsn, run):
    async def body():
        connection = await open_connection(dsn, -1.0)
        with pytest.raises(ServerTimeout):
            await fetch_row(connection, "select pg_sleep(20)")
        connection.abort()

    run(body())


def test_a_large_statement_is_written_while_answers_are_read(dsn, run):
    async def body():
        connection = await open_connection(dsn)
        large = "x" * 20_000_000
        assert await (await connection.execute("select %s::text, length(%s)", [large, large])).fetchone() == (
            large,
            len(large),
        )
        assert await fetch_row(connection) == (1,)
        await connection.close()

    run(body())


def test_a_connection_closed_during_a_query_is_unregistered_immediately(dsn, run):
    async def body():
        connection = await open_connection(dsn)
        await fetch_row(connection)
        file, pid = connection.fileno(), connection.info.backend_pid
        waiting = asyncio.create_task(fetch_row(connection, "select pg_sleep(20)"))
        await asyncio.to_thread(terminate_backend, dsn, pid)
        with pytest.raises(psycopg.OperationalError):
            await waiting
        assert has_no_reader(file)
        connection.abort()

    run(body())


def test_a_connection_closed_while_idle_does_not_spin_the_loop(dsn):
    async def body():
        loop, connection = asyncio.get_running_loop(), await open_connection(dsn)
        await fetch_row(connection)
        file = connection.fileno()
        await asyncio.to_thread(terminate_backend, dsn, connection.info.backend_pid)
        await asyncio.sleep(0.1)
        began = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - began < 0.2
        assert has_no_reader(file)
        connection.deadline = loop.time() + LONG_SECONDS
        with pytest.raises(psycopg.OperationalError):
            await fetch_row(connection)
        connection.abort()

    asyncio.run(body())


@pytest.mark.parametrize("close", ["close", "finish", "drop"])
def test_closing_a_connection_unregisters_its_socket(dsn, run, close):
    async def body():
        connection = await open_connection(dsn)
        await fetch_row(connection)
        file = connection.fileno()
        if close == "drop":
            del connection
            gc.collect()
        elif close == "close":
            await connection.close()
        else:
            connection.abort()
        assert has_no_reader(file)
        # The file number is reused by the next socket, which must find it unregistered.
        reader, writer = await asyncio.open_connection("127.0.0.1", psycopg.conninfo.conninfo_to_dict(dsn)["port"])
        writer.close()
        del reader

    run(body())


def test_the_driver_waits_without_the_socket_waiter_when_there_is_no_deadline(dsn, run):
    async def body():
        connection = await open_connection(dsn)
        await fetch_row(connection)
        connection.deadline = None
        assert await fetch_row(connection, "select 2") == (2,)
        connection.deadline = asyncio.get_running_loop().time() + LONG_SECONDS
        assert await fetch_row(connection, "select 3") == (3,)
        await connection.close()

    run(body())


def test_a_connection_works_in_another_event_loop(dsn):
    connections = []

    async def query_in_first_loop():
        connections.append(await open_connection(dsn))
        await fetch_row(connections[0])

    async def query_in_second_loop():
        connections[0].deadline = asyncio.get_running_loop().time() + LONG_SECONDS
        assert await fetch_row(connections[0], "select 4") == (4,)
        await connections[0].close()

    asyncio.run(query_in_first_loop())
    asyncio.run(query_in_second_loop())


def test_a_cancelled_caller_does_not_disturb_the_next_query(dsn, run):
    async def body():
        pool = ConnectionPool(dsn, max_size=1)
        assert await pool.run_async(run_query(ECHO_SQL, "a"), timeout_seconds=10.0) == "a"
        waiting = asyncio.create_task(pool.run_async(run_query(SLEEP_SQL, "0.5"), timeout_seconds=10.0))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await pool.run_async(run_query(ECHO_SQL, "b"), timeout_seconds=10.0) == "b"
        with pytest.raises(ConnectionLostError):
            await pool.run_async(run_query(SLEEP_SQL, "20"), timeout_seconds=0.2)
        await pool.close_async()

    run(body())


def test_concurrent_callers_receive_their_own_results(dsn, run):
    async def body():
        pool = ConnectionPool(dsn, max_size=8)

        async def run_queries(number):
            for turn in range(50):
                expected = f"{number}-{turn}"
                assert await pool.run_async(run_query(ECHO_SQL, expected), timeout_seconds=20.0) == expected

        await asyncio.gather(*(run_queries(number) for number in range(16)))

        def divide_by_zero():
            yield Query("select 1/0")

        with pytest.raises(Exception, match="zero"):
            await pool.run_async(divide_by_zero(), timeout_seconds=5.0)
        assert await pool.run_async(run_query(ECHO_SQL, "after"), timeout_seconds=5.0) == "after"
        await pool.close_async()

    run(body())
