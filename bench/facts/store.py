"""The store in PostgreSQL beside bare inserts, in one run against one server that syncs.

One writer: the middle append beside the middle insert with commit, in turns. 256 writers: facts a second beside single
inserts with commit over 16 connections. The last line is JSON; the exit code is 1 if a bar was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psycopg
import uvloop

from ergon_framework.facts.model import Envelope, Fact
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.schema import migrate

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.postgres import PrivatePostgres

WRITERS, CONNECTIONS = 256, 16
#: What is inserted barely has the columns and the unique id that a store needs at least.
TABLE = """
create table bare (
    zone text, id text, at bigint, subject text, predicate text, object text, digest bytea, primary key (zone, id)
)
"""
INSERT = "insert into bare values (%s, %s, %s, %s, %s, %s, %s)"
OBJECT = {"order": 4711, "total": 12.5, "text": "x" * 150}
BARS = {"p50_more_ms": 0.5, "p99_ms": 10.0, "ratio": 3.0}


@contextlib.contextmanager
def server():
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        Path(folder).chmod(0o755)
        settings = {"shared_buffers": "256MB", "max_wal_size": "4GB"}
        postgres = PrivatePostgres(Path(folder) / "data", settings=settings)
        postgres.start()
        try:
            dsn = postgres.create_database("bench")
            migrate.upgrade(dsn)
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(TABLE)
            yield dsn
        finally:
            postgres.stop("fast")


def made(prefix, count):
    """Facts, made beforehand: what is measured is the store."""
    return [
        (
            Envelope(message_id=f"{prefix}-{n}", from_zone="Plant A", to_zone="HQ", produced_at_unix_ms=n),
            Fact.of(f"order:{n}", "paid", {**OBJECT, "n": n}),
        )
        for n in range(count)
    ]


def row(prefix, n):
    text = json.dumps({**OBJECT, "n": n})
    return "Plant A", f"{prefix}-{n}", n, f"order:{n}", "paid", text, os.urandom(32)


def quantile(figures, share):
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def timed(act, *args):
    began = time.perf_counter()
    act(*args)
    return (time.perf_counter() - began) * 1000


def one_writer(dsn, count, part):
    """Milliseconds of each, in turns, so that both see the same moods of the disk."""
    ours, bare = [], []
    with PostgresBoundary(dsn) as boundary, psycopg.connect(dsn, autocommit=True, prepare_threshold=2) as line:
        facts = made(f"one-{part}", count + 50)
        for n, fact in enumerate(facts):
            ours.append(timed(boundary.append_fact, *fact))
            bare.append(timed(line.execute, INSERT, row(f"one-{part}", n)))
    return ours[50:], bare[50:]


def bare_rate(dsn, seconds, part):
    """Inserts a second over so many connections, each with its own commit."""
    done, until = [0] * CONNECTIONS, [0.0]
    ready = threading.Barrier(CONNECTIONS + 1)

    def write(number):
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=2) as line:
            rows = [row(f"many-{part}-{number}", n) for n in range(4000)]
            line.execute(INSERT, row(f"warm-{part}-{number}", 0))
            ready.wait()
            for each in rows:
                if time.perf_counter() > until[0]:
                    return
                line.execute(INSERT, each)
                done[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    until[0] = time.perf_counter() + seconds + 60
    ready.wait()
    began = time.perf_counter()
    until[0] = began + seconds
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)


def many_threads(dsn, count, part):
    """Facts a second of as many threads as there are writers."""
    portions = [made(f"threads-{part}-{number}", count // WRITERS) for number in range(WRITERS)]
    ready = threading.Barrier(WRITERS + 1)

    with PostgresBoundary(dsn) as boundary:

        def write(facts):
            ready.wait()
            for fact in facts:
                boundary.append_fact(*fact)

        threads = [threading.Thread(target=write, args=(facts,)) for facts in portions]
        for thread in threads:
            thread.start()
        ready.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
    return sum(map(len, portions)) / took


def many_tasks(dsn, count, part):
    """The same with tasks of one event loop."""
    portions = [made(f"tasks-{part}-{number}", count // WRITERS) for number in range(WRITERS)]

    async def write(boundary, facts):
        for fact in facts:
            await boundary.append_fact_async(*fact)

    async def run():
        async with PostgresBoundary(dsn) as boundary:
            began = time.perf_counter()
            await asyncio.gather(*(write(boundary, facts) for facts in portions))
            return time.perf_counter() - began

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return sum(map(len, portions)) / runner.run(run())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--singles", type=int, default=1500, help="appends of the one writer, in each round")
    parser.add_argument("--facts", type=int, default=12_800, help="facts of all writers, in each round")
    given = parser.parse_args()
    ours, bare, rates = [], [], {"bare": [], "threads": [], "tasks": []}
    with server() as dsn:
        for part in range(given.rounds):
            some, others = one_writer(dsn, given.singles, part)
            ours, bare = ours + some, bare + others
            rates["bare"].append(bare_rate(dsn, 3.0, part))
            rates["threads"].append(many_threads(dsn, given.facts, part))
            rates["tasks"].append(many_tasks(dsn, given.facts, part))
            print({name: round(found[-1]) for name, found in rates.items()}, file=sys.stderr, flush=True)
    figures = {
        "append_p50_ms": round(statistics.median(ours), 3),
        "insert_p50_ms": round(statistics.median(bare), 3),
        "append_p99_ms": round(quantile(ours, 0.99), 3),
        "insert_p99_ms": round(quantile(bare, 0.99), 3),
        **{f"{name}_per_second": round(statistics.median(found)) for name, found in rates.items()},
    }
    more = figures["append_p50_ms"] - figures["insert_p50_ms"]
    ratios = {name: statistics.median(rates[name]) / statistics.median(rates["bare"]) for name in ("threads", "tasks")}
    most = ratios["tasks"]
    bars = {
        "1 writer: p50 beyond a bare insert, ms": (round(more, 3), BARS["p50_more_ms"], more <= BARS["p50_more_ms"]),
        "1 writer: p99, ms": (figures["append_p99_ms"], BARS["p99_ms"], figures["append_p99_ms"] <= BARS["p99_ms"]),
        # Threads hand the processor to each other for every fact, tasks do not: the bar is for whoever has so many.
        f"{WRITERS} tasks / {CONNECTIONS} bare connections": (round(most, 2), BARS["ratio"], most >= BARS["ratio"]),
    }
    ok = all(good for _, _, good in bars.values())
    told = {name: {"found": found, "bar": bar, "ok": good} for name, (found, bar, good) in bars.items()}
    figures |= {f"{name}_ratio": round(ratio, 2) for name, ratio in ratios.items()}
    print(json.dumps({"figures": figures, "bars": told, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
