"""Ear: how a line of asyncio waits for a real server, and that its event loop forgets it in time."""

from __future__ import annotations

import asyncio
import gc
import time

import psycopg
import pytest
import uvloop

from ergon_framework.errors import ConnectionLost
from ergon_framework.schema.failures import Silent
from ergon_framework.schema.line import AsyncLine
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Query, Text

ONE = "select $1::text"
SLEEP = "select pg_sleep($1::float8)::text"
LONG = 30.0


@pytest.fixture(scope="module")
def dsn(postgres):
    return postgres.create_database("ear")


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    def run(body):
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(body, 60))

    return run


def asked(sql, *values):
    ((found,),) = yield Text(sql, values)
    return found


async def dialled(dsn, until=LONG):
    line = await AsyncLine.connect(dsn, autocommit=True)
    line.until = asyncio.get_running_loop().time() + until
    return line


async def answer(line, sql="select 1"):
    return await (await line.execute(sql)).fetchone()


def end(dsn, pid):
    with psycopg.connect(dsn, autocommit=True) as other:
        other.execute("select pg_terminate_backend(%s, 10000)", [pid])


def forgotten(file):
    """Whether the running loop does not know *file*; it does not know it afterwards in any case."""
    return not asyncio.get_running_loop().remove_reader(file)


def test_it_stays_between_two_answers(dsn, monkeypatch):
    async def body():
        loop, made = asyncio.get_running_loop(), []

        def noted(name):
            real = getattr(loop, name)

            def call(*given, **options):
                made.append(name)
                return real(*given, **options)

            monkeypatch.setattr(loop, name, call)

        noted("add_reader")
        noted("call_at")
        line = await AsyncLine.connect(dsn, autocommit=True)
        made.clear()
        line.until = loop.time() + LONG
        for number in range(20):
            assert await answer(line, f"select {number}") == (number,)
        assert sorted(made) == ["add_reader", "call_at"]
        await line.close()

    asyncio.run(body())


def test_a_later_moment_counts_and_so_does_an_earlier_one(dsn, run):
    async def body():
        line, loop = await dialled(dsn, 0.3), asyncio.get_running_loop()
        await answer(line)
        line.until = loop.time() + LONG
        await answer(line, "select pg_sleep(0.6)")  # beyond the first moment
        line.until = loop.time() + 0.3
        began = loop.time()
        with pytest.raises(Silent, match="did not answer in time"):
            await answer(line, "select pg_sleep(20)")
        assert 0.25 < loop.time() - began < 3
        assert line.is_under_way
        file = line.fileno()
        assert forgotten(file)
        line.finish()

    run(body())


def test_a_moment_that_has_passed_says_so(dsn, run):
    async def body():
        line = await dialled(dsn, -1.0)
        with pytest.raises(Silent):
            await answer(line, "select pg_sleep(20)")
        line.finish()

    run(body())


def test_a_large_statement_is_written_while_answers_are_read(dsn, run):
    async def body():
        line = await dialled(dsn)
        large = "x" * 20_000_000
        assert await (await line.execute("select %s::text, length(%s)", [large, large])).fetchone() == (
            large,
            len(large),
        )
        assert await answer(line) == (1,)
        await line.close()

    run(body())


def test_a_connection_that_ends_under_an_answer_is_forgotten_at_once(dsn, run):
    async def body():
        line = await dialled(dsn)
        await answer(line)
        file, pid = line.fileno(), line.info.backend_pid
        waiting = asyncio.create_task(answer(line, "select pg_sleep(20)"))
        await asyncio.to_thread(end, dsn, pid)
        with pytest.raises(psycopg.OperationalError):
            await waiting
        assert forgotten(file)
        line.finish()

    run(body())


def test_one_that_ends_while_nobody_waits_does_not_turn_the_loop(dsn):
    async def body():
        loop, line = asyncio.get_running_loop(), await dialled(dsn)
        await answer(line)
        file = line.fileno()
        await asyncio.to_thread(end, dsn, line.info.backend_pid)
        await asyncio.sleep(0.1)
        began = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - began < 0.2
        assert forgotten(file)
        line.until = loop.time() + LONG
        with pytest.raises(psycopg.OperationalError):
            await answer(line)
        line.finish()

    asyncio.run(body())


@pytest.mark.parametrize("close", ["close", "finish", "drop"])
def test_whoever_closes_it_leaves_nothing_with_the_loop(dsn, run, close):
    async def body():
        line = await dialled(dsn)
        await answer(line)
        file = line.fileno()
        if close == "drop":
            del line
            gc.collect()
        elif close == "close":
            await line.close()
        else:
            line.finish()
        assert forgotten(file)
        # The number goes to the next one, who must find it free.
        reader, writer = await asyncio.open_connection("127.0.0.1", psycopg.conninfo.conninfo_to_dict(dsn)["port"])
        writer.close()
        del reader

    run(body())


def test_the_driver_waits_for_itself_where_there_is_no_moment(dsn, run):
    async def body():
        line = await dialled(dsn)
        await answer(line)
        line.until = None
        assert await answer(line, "select 2") == (2,)
        line.until = asyncio.get_running_loop().time() + LONG
        assert await answer(line, "select 3") == (3,)
        await line.close()

    run(body())


def test_a_line_goes_on_in_another_loop(dsn):
    lines = []

    async def first():
        lines.append(await dialled(dsn))
        await answer(lines[0])

    async def second():
        lines[0].until = asyncio.get_running_loop().time() + LONG
        assert await answer(lines[0], "select 4") == (4,)
        await lines[0].close()

    asyncio.run(first())
    asyncio.run(second())


def test_whoever_is_called_away_leaves_the_line_to_its_statement(dsn, run):
    async def body():
        lines = Lines(dsn, most=1)
        assert await lines.run_async(asked(ONE, "a"), within=10.0) == "a"
        waiting = asyncio.create_task(lines.run_async(asked(SLEEP, "0.5"), within=10.0))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await lines.run_async(asked(ONE, "b"), within=10.0) == "b"
        with pytest.raises(ConnectionLost):
            await lines.run_async(asked(SLEEP, "20"), within=0.2)
        await lines.close_async()

    run(body())


def test_many_at_once_hear_their_own(dsn, run):
    async def body():
        lines = Lines(dsn, most=8)

        async def one(number):
            for turn in range(50):
                wanted = f"{number}-{turn}"
                assert await lines.run_async(asked(ONE, wanted), within=20.0) == wanted

        await asyncio.gather(*(one(number) for number in range(16)))

        def failing():
            yield Query("select 1/0")

        with pytest.raises(Exception, match="zero"):
            await lines.run_async(failing(), within=5.0)
        assert await lines.run_async(asked(ONE, "after"), within=5.0) == "after"
        await lines.close_async()

    run(body())
