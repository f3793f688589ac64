"""The cost of a claim with a large backlog, and while one old snapshot keeps every dead row."""

from __future__ import annotations

import json
import sys
import time

import psycopg
from ground import PAYLOAD, PostgresQueue, quantile, say

from ergon_framework.connectors.base import Ack

CLAIM_COUNT = 300
#: Filled by the database itself: a million dispatches would only measure the dispatching.
FILL = """
insert into ergon.ready (queue, rank, transaction_id, headers, body)
select %(queue)s, 0, 'fill-' || n, jsonb_build_object('ergon-id', 'fill-' || n, 'ergon-source', 'backlog'), %(body)s
from generate_series(1, %(count)s) as n
"""


def fill_queue(dsn, queue, count):
    body = json.dumps(PAYLOAD, separators=(",", ":")).encode()
    with psycopg.connect(dsn, autocommit=True) as connection:
        for start in range(0, count, 100_000):
            parameters = {"queue": queue._number, "count": min(100_000, count - start), "body": body}
            connection.execute(FILL, parameters)
        connection.execute("vacuum analyze ergon.content, ergon.ready")


def measure_claims(queue, count):
    """Return the milliseconds of *times* claims of 100, each settled."""
    durations_ms = []
    for _ in range(count):
        began = time.perf_counter()
        deliveries = queue.fetch_transactions(100)
        durations_ms.append((time.perf_counter() - began) * 1e3)
        assert len(deliveries) == 100, len(deliveries)
        queue.settle([(delivery, Ack()) for delivery in deliveries])
    return durations_ms


def empty_queue(dsn, queue):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("truncate ergon.ready, ergon.content, ergon.redelivery, ergon.claim")
        connection.execute("vacuum ergon.content, ergon.ready")


def measure_by_backlog(dsn):
    """Measure claims with growing backlogs: each size twice, up and down, so that none has an advantage."""
    queue = PostgresQueue("backlog", dsn=dsn)
    queue.open()
    sizes = (1_000, 100_000, 1_000_000)
    durations_ms = {size: [] for size in sizes}
    for size in (*sizes, *sizes[::-1]):
        empty_queue(dsn, queue)
        queue._claims._floors = {0: 0}
        fill_queue(dsn, queue, size + CLAIM_COUNT * 100)
        measure_claims(queue, 20)
        durations_ms[size] += measure_claims(queue, CLAIM_COUNT - 20)
        median_ms, p99_ms = quantile(durations_ms[size], 0.5), quantile(durations_ms[size], 0.99)
        say(f"backlog: {size:,} waiting: median {median_ms:.2f} ms, p99 {p99_ms:.2f} ms")
    empty_queue(dsn, queue)
    queue.close()
    return {
        size: {"p50_ms": round(quantile(values, 0.5), 3), "p99_ms": round(quantile(values, 0.99), 3)}
        for size, values in durations_ms.items()
    }


def measure_under_snapshot(dsn, messages, minutes):
    """Measure claims before and after *messages* have passed while one snapshot stays open for *minutes*."""
    queue = PostgresQueue("snapshot", dsn=dsn)
    queue.open()
    fill_queue(dsn, queue, messages + 200_000)
    measure_claims(queue, 20)
    before = measure_claims(queue, CLAIM_COUNT)
    with psycopg.connect(dsn) as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select 1 from ergon.queue").fetchall()
        opened_at = time.monotonic()
        passed, after = 0, []
        while passed < messages or time.monotonic() < opened_at + minutes * 60:
            if passed >= messages:
                # All have passed: the rest of the minutes runs at a slow rate.
                after += measure_claims(queue, 1)
                time.sleep(1.0)
                passed += 100
                if passed >= messages + 80_000:
                    break
                continue
            durations_ms = measure_claims(queue, 100)
            passed += 10_000
            if passed > messages - CLAIM_COUNT * 100:
                after += durations_ms
            if passed % 100_000 == 0:
                say(f"snapshot: {passed:,} passed, claim {quantile(durations_ms, 0.5):.2f} ms")
        held_seconds = time.monotonic() - opened_at
        holder.rollback()
    empty_queue(dsn, queue)
    queue.close()
    return {
        "before_p50_ms": round(quantile(before, 0.5), 3),
        "after_p50_ms": round(quantile(after, 0.5), 3),
        "before_p99_ms": round(quantile(before, 0.99), 3),
        "after_p99_ms": round(quantile(after, 0.99), 3),
        "passed": passed,
        "held_minutes": round(held_seconds / 60, 2),
    }


def main(dsn, messages, minutes):
    sizes = measure_by_backlog(dsn)
    smallest = sizes[1_000]
    p50 = max(figures["p50_ms"] for figures in sizes.values()) / smallest["p50_ms"]
    p99 = max(figures["p99_ms"] for figures in sizes.values()) / smallest["p99_ms"]
    snapshot = measure_under_snapshot(dsn, messages, minutes)
    slowdown = snapshot["after_p50_ms"] / snapshot["before_p50_ms"]
    bars = {
        "p50, most / least": {"ratio": round(p50, 2), "bar": 1.5, "ok": p50 <= 1.5},
        "p99, most / least": {"ratio": round(p99, 2), "bar": 3, "ok": p99 <= 3},
        "under a snapshot / before": {"ratio": round(slowdown, 2), "bar": 5, "ok": slowdown <= 5},
    }
    ok = all(bar["ok"] for bar in bars.values())
    print(json.dumps({"backlog": sizes, "snapshot": snapshot, "ratios": bars, "ok": ok}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
