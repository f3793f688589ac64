"""What a claim costs when much is waiting, and when one old snapshot keeps every dead row alive."""

from __future__ import annotations

import json
import sys
import time

import psycopg
from ground import PAYLOAD, PostgresQueue, quantile, say

from ergon_framework.connectors.base import Ack

CLAIMS = 300
#: Filled by the database itself: a million dispatches would only measure the dispatching.
FILL = """
insert into ergon.ready (queue, rank, transaction_id, headers, body)
select %(queue)s, 0, 'fill-' || n, jsonb_build_object('ergon-id', 'fill-' || n, 'ergon-source', 'backlog'), %(body)s
from generate_series(1, %(count)s) as n
"""


def filled(dsn, queue, count):
    body = json.dumps(PAYLOAD, separators=(",", ":")).encode()
    with psycopg.connect(dsn, autocommit=True) as connection:
        for start in range(0, count, 100_000):
            given = {"queue": queue._number, "count": min(100_000, count - start), "body": body}
            connection.execute(FILL, given)
        connection.execute("vacuum analyze ergon.content, ergon.ready")


def claims(queue, times):
    """Milliseconds of so many claims of 100, each settled."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        found = queue.fetch_transactions(100)
        took.append((time.perf_counter() - began) * 1e3)
        assert len(found) == 100, len(found)
        queue.settle([(delivery, Ack()) for delivery in found])
    return took


def emptied(dsn, queue):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("truncate ergon.ready, ergon.content, ergon.returned, ergon.held")
        connection.execute("vacuum ergon.content, ergon.ready")


def by_backlog(dsn):
    """Claims with more and more behind them: each size twice, up and down, so that none has the better moment."""
    queue = PostgresQueue("backlog", dsn=dsn)
    queue.open()
    sizes = (1_000, 100_000, 1_000_000)
    took = {size: [] for size in sizes}
    for size in (*sizes, *sizes[::-1]):
        emptied(dsn, queue)
        queue._claiming._floors = {0: 0}
        filled(dsn, queue, size + CLAIMS * 100)
        claims(queue, 20)
        took[size] += claims(queue, CLAIMS - 20)
        middle, worst = quantile(took[size], 0.5), quantile(took[size], 0.99)
        say(f"backlog: {size:,} waiting: median {middle:.2f} ms, p99 {worst:.2f} ms")
    emptied(dsn, queue)
    queue.close()
    return {
        size: {"p50_ms": round(quantile(one, 0.5), 3), "p99_ms": round(quantile(one, 0.99), 3)}
        for size, one in took.items()
    }


def under_snapshot(dsn, messages, minutes):
    """Claims before and after *messages* have passed while one snapshot stays open for *minutes*."""
    queue = PostgresQueue("snapshot", dsn=dsn)
    queue.open()
    filled(dsn, queue, messages + 200_000)
    claims(queue, 20)
    before = claims(queue, CLAIMS)
    with psycopg.connect(dsn) as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select 1 from ergon.queue").fetchall()
        opened = time.monotonic()
        passed, after = 0, []
        while passed < messages or time.monotonic() < opened + minutes * 60:
            if passed >= messages:
                # All have passed: what is left of the minutes is spent at a slow pace.
                after += claims(queue, 1)
                time.sleep(1.0)
                passed += 100
                if passed >= messages + 80_000:
                    break
                continue
            one = claims(queue, 100)
            passed += 10_000
            if passed > messages - CLAIMS * 100:
                after += one
            if passed % 100_000 == 0:
                say(f"snapshot: {passed:,} passed, claim {quantile(one, 0.5):.2f} ms")
        held = time.monotonic() - opened
        holder.rollback()
    emptied(dsn, queue)
    queue.close()
    return {
        "before_p50_ms": round(quantile(before, 0.5), 3),
        "after_p50_ms": round(quantile(after, 0.5), 3),
        "before_p99_ms": round(quantile(before, 0.99), 3),
        "after_p99_ms": round(quantile(after, 0.99), 3),
        "passed": passed,
        "held_minutes": round(held / 60, 2),
    }


def main(dsn, messages, minutes):
    sizes = by_backlog(dsn)
    smallest = sizes[1_000]
    p50 = max(one["p50_ms"] for one in sizes.values()) / smallest["p50_ms"]
    p99 = max(one["p99_ms"] for one in sizes.values()) / smallest["p99_ms"]
    snapshot = under_snapshot(dsn, messages, minutes)
    slower = snapshot["after_p50_ms"] / snapshot["before_p50_ms"]
    bars = {
        "p50, most / least": {"ratio": round(p50, 2), "bar": 1.5, "ok": p50 <= 1.5},
        "p99, most / least": {"ratio": round(p99, 2), "bar": 3, "ok": p99 <= 3},
        "under a snapshot / before": {"ratio": round(slower, 2), "bar": 5, "ok": slower <= 5},
    }
    ok = all(bar["ok"] for bar in bars.values())
    print(json.dumps({"backlog": sizes, "snapshot": snapshot, "ratios": bars, "ok": ok}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
