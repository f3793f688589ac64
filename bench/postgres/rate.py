"""How fast one worker is, beside asyncpg by hand and procrastinate; how much threads cost; how eight share a queue."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time

import asyncpg
import procrastinate
from ground import PAYLOAD, consumed_async, consumed_threads, filled, median, policy, run, say

BODY = json.dumps(PAYLOAD).encode()


# -- by hand ---------------------------------------------------------------------------------------


async def by_hand(dsn, count):
    """Claimed for good, handled and deleted, 100 at a time: what survives a crash of the worker in between."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("drop table if exists bare")
    await connection.execute("create table bare (id bigserial primary key, claimed bigint, body bytea not null)")
    await connection.execute("create index on bare (id) where claimed is null")
    await connection.executemany("insert into bare (body) values ($1)", [(BODY,)] * count)
    await connection.execute("analyze bare")
    claim = """
        update bare set claimed = 1 where id in (
            select id from bare where claimed is null order by id limit 100 for update skip locked
        ) returning id, body
    """
    began, done = time.perf_counter(), 0
    while done < count:
        rows = await connection.fetch(claim)
        for row in rows:
            json.loads(row["body"])
        await connection.execute("delete from bare where id = any($1)", [row["id"] for row in rows])
        done += len(rows)
    took = time.perf_counter() - began
    await connection.close()
    return took


async def in_one_transaction(dsn, count):
    """Locked, handled and deleted in one open transaction: faster, but a claim that nobody else can see."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("drop table if exists bare")
    await connection.execute("create table bare (id bigserial primary key, body bytea not null)")
    await connection.executemany("insert into bare (body) values ($1)", [(BODY,)] * count)
    await connection.execute("analyze bare")
    began, done = time.perf_counter(), 0
    while done < count:
        async with connection.transaction():
            rows = await connection.fetch("select id, body from bare order by id limit 100 for update skip locked")
            for row in rows:
                json.loads(row["body"])
            await connection.execute("delete from bare where id = any($1)", [row["id"] for row in rows])
        done += len(rows)
    took = time.perf_counter() - began
    await connection.close()
    return took


# -- procrastinate -----------------------------------------------------------------------------------


async def by_procrastinate(dsn, count, concurrency):
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))

    @app.task(name="nothing")
    async def nothing(**_payload):
        return None

    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        await nothing.batch_defer_async(*[PAYLOAD] * count)
        began = time.perf_counter()
        await app.run_worker_async(
            wait=False,
            concurrency=concurrency,
            install_signal_handlers=False,
            delete_jobs="always",
            listen_notify=False,
        )
        return time.perf_counter() - began


# -- several workers -----------------------------------------------------------------------------------


def several(dsn, count, workers):
    """Seconds from the first start to the last end of *workers* processes that share a queue."""
    filled(dsn, "several", count)
    command = [sys.executable, __file__, "--worker", dsn, str(count // workers)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(workers)]
    for process in started:
        process.stdout.readline()  # it is connected and waits
    began = time.perf_counter()
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        process.stdout.readline()
    took = time.perf_counter() - began
    for process in started:
        process.communicate()
    return took


def worker(dsn, count):
    from ground import Async, PostgresQueue  # noqa: PLC0415

    async def consume():
        task = Async()
        task.connector = PostgresQueue("several", dsn=dsn)
        await task.connector.open_async()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await task.consume_transactions(policy(100, limit=count, prefetch=100))
        print("done", flush=True)
        await task.connector.close_async()

    run(consume())


# -- all of it -----------------------------------------------------------------------------------------


def main(dsn, count, rounds):
    logging.disable(logging.CRITICAL)
    few = max(200, count // 20)
    sides = {
        "by hand": lambda: count / run(by_hand(dsn, count)),
        "in one transaction": lambda: count / run(in_one_transaction(dsn, count)),
        "asyncio 100": lambda: (filled(dsn, "a", count), count / consumed_async(dsn, "a", count, 100))[1],
        "asyncio 10": lambda: (filled(dsn, "b", count), count / consumed_async(dsn, "b", count, 10))[1],
        "threads 100": lambda: (filled(dsn, "c", count), count / consumed_threads(dsn, "c", count, 100))[1],
        "procrastinate 100": lambda: few / run(by_procrastinate(dsn, few, 100)),
        "procrastinate 10": lambda: few / run(by_procrastinate(dsn, few, 10)),
        "one process": lambda: count / several(dsn, count, 1),
        "eight processes": lambda: count / several(dsn, count, 8),
    }
    rates = {name: [] for name in sides}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            rates[name].append(sides[name]())
            say(f"rate: round {number + 1} of {rounds}: {name}: {rates[name][-1]:,.0f}/s")
    middle = {name: round(median(figures)) for name, figures in rates.items()}

    def ratio(one, other):
        # Neighbours in time: what slows the machine for a while slows both.
        return round(median([mine / theirs for mine, theirs in zip(rates[one], rates[other], strict=True)]), 3)

    bars = {
        "asyncio 100 / by hand": (ratio("asyncio 100", "by hand"), 0.3),
        "asyncio 100 / procrastinate 100": (ratio("asyncio 100", "procrastinate 100"), 10),
        "asyncio 10 / procrastinate 10": (ratio("asyncio 10", "procrastinate 10"), 10),
        "threads 100 / asyncio 100": (ratio("threads 100", "asyncio 100"), 0.6),
        "eight processes / one process": (ratio("eight processes", "one process"), 0.8),
    }
    judged = {name: {"ratio": got, "bar": bar, "ok": got >= bar} for name, (got, bar) in bars.items()}
    print(json.dumps({"per_second": middle, "ratios": judged, "ok": all(one["ok"] for one in judged.values())}))


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
