"""The store in PostgreSQL compared with bare inserts, in one run against one server with fsync.

One writer: the median append and the median insert with commit, in turns. 256 writers: facts per second and single
inserts with commit over 16 connections. The last line is JSON; the exit code is 1 if a target was missed.
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

from ergon_framework.database import migrate
from ergon_framework.facts.model import Envelope, Fact
from ergon_framework.facts.stores.postgres.store import PostgresBoundary

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.postgres import PrivatePostgres

WRITER_COUNT, CONNECTION_COUNT = 256, 16
#: The baseline insert has the minimum of columns and the unique id that a store needs.
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


def create_facts(prefix, count):
    """Create facts in advance: only the store is measured."""
    return [
        (
            Envelope(message_id=f"{prefix}-{n}", from_zone="Plant A", to_zone="HQ", produced_at_unix_ms=n),
            Fact.create(f"order:{n}", "paid", {**OBJECT, "n": n}),
        )
        for n in range(count)
    ]


def build_row(prefix, n):
    text = json.dumps({**OBJECT, "n": n})
    return "Plant A", f"{prefix}-{n}", n, f"order:{n}", "paid", text, os.urandom(32)


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure_ms(call, *args):
    began = time.perf_counter()
    call(*args)
    return (time.perf_counter() - began) * 1000


def measure_one_writer(dsn, count, part):
    """Return the milliseconds of each, in turns, so that disk load affects both."""
    ours, bare = [], []
    with PostgresBoundary(dsn) as boundary, psycopg.connect(dsn, autocommit=True, prepare_threshold=2) as connection:
        facts = create_facts(f"one-{part}", count + 50)
        for n, fact in enumerate(facts):
            ours.append(measure_ms(boundary.append_fact, *fact))
            bare.append(measure_ms(connection.execute, INSERT, build_row(f"one-{part}", n)))
    return ours[50:], bare[50:]


def measure_bare_rate(dsn, seconds, part):
    """Return inserts per second over 16 connections, each with its own commit."""
    done, deadline = [0] * CONNECTION_COUNT, [0.0]
    ready = threading.Barrier(CONNECTION_COUNT + 1)

    def write(number):
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=2) as connection:
            rows = [build_row(f"many-{part}-{number}", n) for n in range(4000)]
            connection.execute(INSERT, build_row(f"warm-{part}-{number}", 0))
            ready.wait()
            for values in rows:
                if time.perf_counter() > deadline[0]:
                    return
                connection.execute(INSERT, values)
                done[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(CONNECTION_COUNT)]
    for thread in threads:
        thread.start()
    deadline[0] = time.perf_counter() + seconds + 60
    ready.wait()
    began = time.perf_counter()
    deadline[0] = began + seconds
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)


def measure_threads(dsn, count, part):
    """Return facts per second of as many threads as there are writers."""
    portions = [create_facts(f"threads-{part}-{number}", count // WRITER_COUNT) for number in range(WRITER_COUNT)]
    ready = threading.Barrier(WRITER_COUNT + 1)

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
        seconds = time.perf_counter() - began
    return sum(map(len, portions)) / seconds


def measure_tasks(dsn, count, part):
    """Return the same with tasks of one event loop."""
    portions = [create_facts(f"tasks-{part}-{number}", count // WRITER_COUNT) for number in range(WRITER_COUNT)]

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
    options = parser.parse_args()
    ours, bare, rates = [], [], {"bare": [], "threads": [], "tasks": []}
    with server() as dsn:
        for part in range(options.rounds):
            round_ours, round_bare = measure_one_writer(dsn, options.singles, part)
            ours, bare = ours + round_ours, bare + round_bare
            rates["bare"].append(measure_bare_rate(dsn, 3.0, part))
            rates["threads"].append(measure_threads(dsn, options.facts, part))
            rates["tasks"].append(measure_tasks(dsn, options.facts, part))
            print({name: round(measured[-1]) for name, measured in rates.items()}, file=sys.stderr, flush=True)
    figures = {
        "append_p50_ms": round(statistics.median(ours), 3),
        "insert_p50_ms": round(statistics.median(bare), 3),
        "append_p99_ms": round(quantile(ours, 0.99), 3),
        "insert_p99_ms": round(quantile(bare, 0.99), 3),
        **{f"{name}_per_second": round(statistics.median(measured)) for name, measured in rates.items()},
    }
    added_ms = figures["append_p50_ms"] - figures["insert_p50_ms"]
    ratios = {name: statistics.median(rates[name]) / statistics.median(rates["bare"]) for name in ("threads", "tasks")}
    task_ratio = ratios["tasks"]
    bars = {
        "1 writer: p50 beyond a bare insert, ms": (
            round(added_ms, 3),
            BARS["p50_more_ms"],
            added_ms <= BARS["p50_more_ms"],
        ),
        "1 writer: p99, ms": (figures["append_p99_ms"], BARS["p99_ms"], figures["append_p99_ms"] <= BARS["p99_ms"]),
        # Threads switch for every fact, tasks do not; the target is for programs with this many threads.
        f"{WRITER_COUNT} tasks / {CONNECTION_COUNT} bare connections": (
            round(task_ratio, 2),
            BARS["ratio"],
            task_ratio >= BARS["ratio"],
        ),
    }
    ok = all(is_met for _, _, is_met in bars.values())
    results = {name: {"found": measured, "bar": bar, "ok": is_met} for name, (measured, bar, is_met) in bars.items()}
    figures |= {f"{name}_ratio": round(ratio, 2) for name, ratio in ratios.items()}
    print(json.dumps({"figures": figures, "bars": results, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
