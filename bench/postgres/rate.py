"""The rate of one worker, of asyncpg by hand and of procrastinate; the cost of threads; eight workers on one queue."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time

import asyncpg
import procrastinate
from ground import PAYLOAD, build_policy, consume_async, consume_threads, fill_queue, median, run, say

BODY = json.dumps(PAYLOAD).encode()


# -- bare client -----------------------------------------------------------------------------------


async def run_by_hand(dsn, count):
    """Claim permanently, handle and delete, 100 at a time: what survives a crash of the worker in between."""
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
    seconds = time.perf_counter() - began
    await connection.close()
    return seconds


async def run_in_one_transaction(dsn, count):
    """Lock, handle and delete in one open transaction: faster, but the claim is invisible to other connections."""
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
    seconds = time.perf_counter() - began
    await connection.close()
    return seconds


# -- procrastinate -----------------------------------------------------------------------------------


async def run_procrastinate(dsn, count, concurrency):
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


def run_workers(dsn, count, workers):
    """Return seconds from the first start to the last end of *workers* processes that share a queue."""
    fill_queue(dsn, "several", count)
    command = [sys.executable, __file__, "--worker", dsn, str(count // workers)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(workers)]
    for process in processes:
        process.stdout.readline()  # it is connected and waits
    began = time.perf_counter()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.stdout.readline()
    seconds = time.perf_counter() - began
    for process in processes:
        process.communicate()
    return seconds


def run_worker(dsn, count):
    from ground import AsyncNoopTask, PostgresQueue  # noqa: PLC0415

    async def consume():
        task = AsyncNoopTask()
        task.connector = PostgresQueue("several", dsn=dsn)
        await task.connector.open_async()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await task.consume_transactions(build_policy(100, limit=count, prefetch=100))
        print("done", flush=True)
        await task.connector.close_async()

    run(consume())


# -- all parts -----------------------------------------------------------------------------------------


def main(dsn, count, rounds):
    logging.disable(logging.CRITICAL)
    small_count = max(200, count // 20)
    contestants = {
        "by hand": lambda: count / run(run_by_hand(dsn, count)),
        "in one transaction": lambda: count / run(run_in_one_transaction(dsn, count)),
        "asyncio 100": lambda: (fill_queue(dsn, "a", count), count / consume_async(dsn, "a", count, 100))[1],
        "asyncio 10": lambda: (fill_queue(dsn, "b", count), count / consume_async(dsn, "b", count, 10))[1],
        "threads 100": lambda: (fill_queue(dsn, "c", count), count / consume_threads(dsn, "c", count, 100))[1],
        "procrastinate 100": lambda: small_count / run(run_procrastinate(dsn, small_count, 100)),
        "procrastinate 10": lambda: small_count / run(run_procrastinate(dsn, small_count, 10)),
        "one process": lambda: count / run_workers(dsn, count, 1),
        "eight processes": lambda: count / run_workers(dsn, count, 8),
    }
    rates = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants) if number % 2 == 0 else list(contestants)[::-1]
        for name in order:
            rates[name].append(contestants[name]())
            say(f"rate: round {number + 1} of {rounds}: {name}: {rates[name][-1]:,.0f}/s")
    medians = {name: round(median(values)) for name, values in rates.items()}

    def compute_ratio(first, second):
        # Adjacent rounds are compared: other load on the machine slows both.
        return round(median([mine / theirs for mine, theirs in zip(rates[first], rates[second], strict=True)]), 3)

    bars = {
        "asyncio 100 / by hand": (compute_ratio("asyncio 100", "by hand"), 0.3),
        "asyncio 100 / procrastinate 100": (compute_ratio("asyncio 100", "procrastinate 100"), 10),
        "asyncio 10 / procrastinate 10": (compute_ratio("asyncio 10", "procrastinate 10"), 10),
        "threads 100 / asyncio 100": (compute_ratio("threads 100", "asyncio 100"), 0.6),
        "eight processes / one process": (compute_ratio("eight processes", "one process"), 0.8),
    }
    results = {name: {"ratio": value, "bar": bar, "ok": value >= bar} for name, (value, bar) in bars.items()}
    print(
        json.dumps({"per_second": medians, "ratios": results, "ok": all(result["ok"] for result in results.values())})
    )


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        run_worker(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
