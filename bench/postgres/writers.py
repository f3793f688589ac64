"""The cost of a dispatch for programs that write business data to the same database.

Each of 64 writers reads a customer, changes the customer's balance and inserts an order; then it dispatches, or inserts
the same bytes into a plain table instead.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import asyncpg
from ground import PAYLOAD, PostgresQueue, median, run, say

WRITER_COUNT = 64
MEASURE_SECONDS = 4.0
#: The headers that a dispatch writes with the body.
HEADERS = json.dumps(
    {"ergon-id": "0" * 32, "ergon-source": "business", "ergon-created-at": "2026-01-01T00:00:00.000000Z"}
)
BODY = json.dumps(PAYLOAD, separators=(",", ":")).encode()


async def measure_commits(dsn, dispatching):
    """Return commits per second of all writers together."""
    queue = PostgresQueue("business", dsn=dsn)
    await queue.open_async()
    done = [0] * WRITER_COUNT
    deadline = time.perf_counter() + 0.5 + MEASURE_SECONDS
    began = deadline - MEASURE_SECONDS

    async def write(number):
        connection = await asyncpg.connect(dsn)
        while time.perf_counter() < deadline:
            async with connection.transaction():
                await connection.fetchrow("select balance from customers where id = $1", number)
                await connection.execute("update customers set balance = balance - $2 where id = $1", number, 4711)
                await connection.execute("insert into orders (customer, total) values ($1, $2)", number, 4711)
                if dispatching:
                    await queue.dispatch_on_async(connection, [queue.transaction(PAYLOAD)])
                else:
                    await connection.execute("insert into plain (headers, body) values ($1, $2)", HEADERS, BODY)
            done[number] += time.perf_counter() > began
        await connection.close()

    await asyncio.gather(*(write(number) for number in range(WRITER_COUNT)))
    await queue.close_async()
    return sum(done) / MEASURE_SECONDS


async def prepare_tables(dsn):
    connection = await asyncpg.connect(dsn)
    await connection.execute("drop table if exists orders; drop table if exists plain; drop table if exists customers")
    await connection.execute("create table customers (id int primary key, balance bigint) with (fillfactor = 50)")
    await connection.execute(f"insert into customers select n, 0 from generate_series(0, {WRITER_COUNT}) as n")
    await connection.execute("create table orders (id bigserial primary key, customer int, total int)")
    await connection.execute("create table plain (id bigserial primary key, headers text, body bytea)")
    await connection.close()


def main(dsn, rounds):
    run(prepare_tables(dsn))
    rates = {True: [], False: []}
    for number in range(rounds):
        for dispatching in (True, False) if number % 2 == 0 else (False, True):
            rates[dispatching].append(run(measure_commits(dsn, dispatching)))
            say(f"writers: {'dispatch' if dispatching else 'insert'}: {rates[dispatching][-1]:,.0f} commits/s")
    ratio = median([ours / plain for ours, plain in zip(rates[True], rates[False], strict=True)])
    figures = {"dispatching": round(median(rates[True])), "inserting": round(median(rates[False]))}
    bar = {"ratio": round(ratio, 3), "bar": 0.8, "ok": ratio >= 0.8}
    print(json.dumps({"commits_per_second": figures, "ratios": {"dispatch / insert": bar}, "ok": bar["ok"]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
