"""Clean-up under load: 10,000,000 inbox marks, journal rows and fact ids, of which a twentieth is too old.

python bench/postgres/cleanup.py                  the full size, about 15 minutes; exit 1 where a target is missed
python bench/postgres/cleanup.py --rows 200000    to see that it runs

It measures the cost of an index by age per insert, the rows that every clean-up statement reads compared with those it
deletes, the duration of a complete clean-up, and the duration of fetches before and during it.
"""

from __future__ import annotations

import argparse
import json
import threading
import time

import psycopg
from ground import PAYLOAD, PostgresQueue, median, quantile, say, server

from ergon_framework.connectors.base import Ack
from ergon_framework.connectors.postgres import cleanup
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.facts.stores.postgres import sql as postgres_statements
from ergon_framework.facts.stores.postgres.store import PostgresBoundary

DAY_SECONDS = 86_400.0
#: One in this many rows is too old.
EXPIRED_ONE_IN = 20
#: Milliseconds, or factor, by which the p99 of a fetch may be higher while clean-up runs.
MAX_ADDED_MS, MAX_FACTOR = 50.0, 3.0

FILL_STATEMENTS = {
    "inbox": """
        insert into ergon.inbox (queue, transaction_id, at)
        select %(queue)s, md5(i::text), now() - interval '30 days' * (1 - i::float8 / %(rows)s)
        from generate_series(%(first)s, %(last)s) i""",
    "journal": """
        insert into ergon.journal (at, transaction_id, task, queue, outcome, attempts, seconds, worker)
        select now() - interval '30 days' * (1 - i::float8 / %(rows)s), md5(i::text), 't', 'q', 'succeeded', 1, 0.1, 'w'
        from generate_series(%(first)s, %(last)s) i""",
    "fact_ids": """
        insert into ergon.fact_ids (from_zone, message_id, digest, log, fact_offset, epoch, kept_at)
        select 'a', md5(i::text), sha256(i::text::bytea), %(log)s, i, %(epoch)s,
            (extract(epoch from now()) * 1000 - 30 * 86400000.0 * (1 - i::float8 / %(rows)s))::bigint
        from generate_series(%(first)s, %(last)s) i""",
}
INDEXES = {
    "inbox": ("inbox_age", "ergon.inbox (queue, at)"),
    "journal": ("journal_age", "ergon.journal (at)"),
    "fact_ids": ("fact_ids_age", "ergon.fact_ids (log, kept_at)"),
}
INSERT_LOG = """
with epoch as (insert into ergon.fact_epochs (epoch) values ('bench') returning id)
insert into ergon.fact_log (from_zone, to_zone, forwarded, epoch, last, dropped)
select 'a', 'b', false, id, %(rows)s, %(rows)s from epoch returning id, epoch
"""


def count_read_rows(plan):
    """Return the rows that the scans of tables in *plan* have read, including those that a filter removed."""
    own_rows = 0
    if "Relation Name" in plan and plan["Node Type"] != "ModifyTable":
        own_rows = round((plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"])
    return own_rows + sum(count_read_rows(child) for child in plan.get("Plans", ()))


def fill(connection, rows, values):
    """Fill the tables in batches; return the seconds of each table."""
    seconds = {}
    for table, sql in FILL_STATEMENTS.items():
        began = time.perf_counter()
        for first in range(1, rows + 1, 500_000):
            last = min(rows, first + 499_999)
            connection.execute(sql, {**values, "rows": rows, "first": first, "last": last})
        seconds[table] = round(time.perf_counter() - began, 1)
        connection.execute(f"vacuum (analyze) ergon.{table}")
        say(f"{table}: {rows:,} rows in {seconds[table]} s")
    return seconds


def measure_insert_cost(connection, rows, values):
    """Return microseconds per inserted row with the index by age and without it, in turns."""
    results = {}
    for table, sql in FILL_STATEMENTS.items():
        name, columns = INDEXES[table]
        parameters = {**values, "rows": rows * 2}
        first, durations = rows + 1, {True: [], False: []}
        for _ in range(5):
            for has_index in (True, False):
                connection.execute("begin")
                if not has_index:
                    connection.execute(f"drop index ergon.{name}")
                began = time.perf_counter()
                connection.execute(sql, {**parameters, "first": first, "last": first + 19_999})
                durations[has_index].append((time.perf_counter() - began) / 20_000 * 1e6)
                connection.execute("rollback")
        results[table] = {
            "with": round(median(durations[True]), 2),
            "without": round(median(durations[False]), 2),
            "on": columns,
        }
        say(f"{table}: an insert takes {results[table]['with']} us with {name}, {results[table]['without']} us without")
    return results


def explain(dsn, statements):
    """Return the rows read and deleted by one batch of each statement, in a transaction that is rolled back."""
    results = {}
    with ConnectionPool(dsn).connect() as session:
        for table, (sql, values) in statements.items():
            began = time.perf_counter()
            session.execute("begin")
            row = session.execute(f"explain (analyze, format json) {sql}", values).fetchone()
            session.execute("rollback")
            plan = row[0][0]["Plan"]
            results[table] = {
                "read": count_read_rows(plan),
                "deleted": values.get("most", values.get("part")),
                "ms": round((time.perf_counter() - began) * 1e3, 1),
            }
            say(f"{table}: {json.dumps(results[table])}")
            say("\n".join(format_plan(plan)))
    return results


def format_plan(plan, depth=1):
    name = " ".join(str(plan[key]) for key in ("Node Type", "Relation Name", "Index Name") if key in plan)
    yield f"{'  ' * depth}{name}: {plan['Actual Rows']} rows, {plan.get('Rows Removed by Filter', 0)} removed by filter"
    for child in plan.get("Plans", ()):
        yield from format_plan(child, depth + 1)


def measure_fetches(queue, seconds, is_over):
    """Return the milliseconds of each fetch of a worker, for *seconds* or until *is_over*."""
    durations_ms = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_over():
        queue.dispatch([queue.transaction(PAYLOAD) for _ in range(10)])
        began = time.perf_counter()
        deliveries = queue.fetch_transactions(100)
        durations_ms.append((time.perf_counter() - began) * 1e3)
        queue.settle([(delivery, Ack()) for delivery in deliveries])
    return durations_ms


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    rows = parser.parse_args().rows
    with server() as (_, dsn):
        result = measure(dsn, rows)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def measure(dsn, rows):
    queue = PostgresQueue("bench", dsn=dsn, inbox=True)
    queue.open()
    with psycopg.connect(dsn, autocommit=True) as connection:
        (number,) = connection.execute("select ergon.create_queue('bench')").fetchone()
        log, epoch = connection.execute(INSERT_LOG, {"rows": rows * 2}).fetchone()
        values = {"queue": number, "log": log, "epoch": epoch}
        fill_seconds = fill(connection, rows, values)
        inserts = measure_insert_cost(connection, rows, values)
        connection.execute("checkpoint")
        baseline_ms = measure_fetches(queue, 20.0, lambda: False)
        say(f"fetch before clean-up: p50 {quantile(baseline_ms, 0.5):.1f} ms, p99 {quantile(baseline_ms, 0.99):.1f} ms")
        keep = 30 * DAY_SECONDS * (1 - 1 / EXPIRED_ONE_IN)
        latest = int(time.time() * 1000 - keep * 1000)
        plans = explain(
            dsn,
            {
                "inbox": (cleanup.DELETE_MARKS, {"queue": number, "seconds": keep, "most": cleanup.BATCH_ROWS}),
                "journal": (cleanup.DELETE_JOURNAL, {"seconds": keep, "most": cleanup.BATCH_ROWS}),
                "fact_ids": (
                    postgres_statements.DELETE_IDS,
                    {"log": log, "since": 0, "latest": latest, "part": 1_000},
                ),
            },
        )
        clean_seconds, busy_ms = clean(dsn, queue, number, keep)
        remaining = {
            table: connection.execute(f"select count(*) from ergon.{table}").fetchone()[0] for table in FILL_STATEMENTS
        }
        idle_reads = explain_without_expired(dsn, number, keep, log, latest)
    queue.close()
    fetch = {
        "before_p50_ms": round(quantile(baseline_ms, 0.5), 2),
        "before_p99_ms": round(quantile(baseline_ms, 0.99), 2),
        "during_p50_ms": round(quantile(busy_ms, 0.5), 2),
        "during_p99_ms": round(quantile(busy_ms, 0.99), 2),
        "during_max_ms": round(max(busy_ms), 2),
        "fetches": len(busy_ms),
    }
    max_p99_ms = max(MAX_FACTOR * fetch["before_p99_ms"], fetch["before_p99_ms"] + MAX_ADDED_MS)
    bars = {
        f"rows read for one batch of {table}": {
            "value": plan["read"],
            "bar": 2 * plan["deleted"] + 1_000,
            "ok": plan["read"] <= 2 * plan["deleted"] + 1_000,
        }
        for table, plan in plans.items()
    }
    bars |= {
        f"rows of {table} read when nothing is old": {"value": read, "bar": 1_000, "ok": read <= 1_000}
        for table, read in idle_reads.items()
    }
    bars["p99 of a fetch during clean-up, ms"] = {
        "value": fetch["during_p99_ms"],
        "bar": round(max_p99_ms, 2),
        "ok": fetch["during_p99_ms"] <= max_p99_ms,
    }
    return {
        "rows": rows,
        "fill_s": fill_seconds,
        "insert_us": inserts,
        "plans": plans,
        "clean_up_s": clean_seconds,
        "left": remaining,
        "fetch": fetch,
        "bars": bars,
        "ok": all(bar["ok"] for bar in bars.values()),
    }


def clean(dsn, queue, number, keep):
    """Return the seconds that the clean-up of each table takes, and the fetches meanwhile."""
    seconds = {}

    def work():
        for table, retention in {
            "inbox": cleanup.retain_marks(number, keep),
            "journal": cleanup.retain_journal(keep),
        }.items():
            began = time.perf_counter()
            cleaner = cleanup.Cleanup(dsn)
            end = cleaner.add(retention)
            cleaner.delete_expired(threading.Event())
            end()
            seconds[table] = round(time.perf_counter() - began, 1)
            say(f"{table}: cleaned in {seconds[table]} s")
        began = time.perf_counter()
        with PostgresBoundary(dsn, identity_retention=keep, accept_loss=True) as store:
            store.prune(0)
        seconds["fact_ids"] = round(time.perf_counter() - began, 1)
        say(f"fact_ids: cleaned in {seconds['fact_ids']} s")

    thread = threading.Thread(target=work)
    thread.start()
    busy_ms = measure_fetches(queue, 3600.0, lambda: not thread.is_alive())
    thread.join()
    return seconds, busy_ms


def explain_without_expired(dsn, number, keep, log, latest):
    """Return the rows that each statement reads when no row is too old."""
    older_seconds = keep + 10 * DAY_SECONDS
    statements = {
        "inbox": (cleanup.DELETE_MARKS, {"queue": number, "seconds": older_seconds, "most": cleanup.BATCH_ROWS}),
        "journal": (cleanup.DELETE_JOURNAL, {"seconds": older_seconds, "most": cleanup.BATCH_ROWS}),
        "fact_ids": (
            postgres_statements.DELETE_IDS,
            {"log": log, "since": 0, "latest": latest - int(10 * DAY_SECONDS * 1000), "part": 1_000},
        ),
    }
    reads = {}
    with ConnectionPool(dsn).connect() as session:
        for table, (sql, values) in statements.items():
            row = session.execute(f"explain (analyze, format json) {sql}", values).fetchone()
            reads[table] = count_read_rows(row[0][0]["Plan"])
    return reads


if __name__ == "__main__":
    raise SystemExit(main())
