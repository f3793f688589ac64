"""Kill a consumer of facts at random points, run it again, and print the result as JSON.

python -m tests.integration.side_killing DSN KILLS SEED FLAVOUR

Each run is a fork of this script. It prints ``+ ID`` when a handler starts and ``= ID`` when its effect is made, so
that the script knows what each kill has interrupted. Some facts are bad and become dead letters, some are deferred
once, and some kill the process of their handler.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial

import psycopg

from ergon_framework import AsyncConsumerMixin, AsyncTask, BusinessError, ConsumerMixin, ConsumerPolicy, Task
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.model import ZonePair
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from tests.integration.forked import ForkedRun

PAIR = ZonePair("Plant A", "HQ")
READER = "ledger"
#: One fact in BAD_EACH is bad, and one in LATER_EACH is deferred.
BAD_EVERY, DEFERRED_EVERY = 7, 5
#: Maximum seconds for the remaining facts after the last kill.
DRAIN_TIMEOUT_SECONDS = 60.0
#: Deliveries that are allowed where a kill is not the fact's fault.
UNLIMITED_DELIVERIES = 1000


def make_policy(deliveries):
    return ConsumerPolicy.load(
        {
            "loop": {
                "streaming": True,
                "concurrency": {"value": 4},
                "batch": {"size": 4},
                "empty_queue": {"backoff": 0.02, "cap": 0.1},
                "max_deliveries": deliveries,
            },
            # A temporary failure is not waited for in the process: the fact is deferred in the consumer state store.
            "steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.01, "max_inline_delay": 0.0}}},
        }
    )


class HandlerWork:
    """The work of a handler, and its report."""

    def __init__(self, dsn, pipe):
        self.boundary = PostgresBoundary(dsn, accept_loss=True)
        self.connector_options = {**PAIR._asdict(), "reader": READER}
        self._pipe = pipe

    def handle(self, transaction):
        self._report("+", transaction.id)
        number = transaction.payload["number"]
        if transaction.payload.get("deadly"):
            os.kill(os.getpid(), signal.SIGKILL)
        if number % BAD_EVERY == 0:
            raise BusinessError("this cannot be done", code="bad")
        if number % DEFERRED_EVERY == 0 and transaction.attempts == 0:
            raise ConnectionError("not yet")
        self._report("=", transaction.id)

    def _report(self, *fields):
        # Short enough to be written atomically, also with concurrent writers.
        os.write(self._pipe, (" ".join(fields) + "\n").encode())


class KilledFactConsumer(ConsumerMixin, Task):
    def __init__(self, work):
        super().__init__(connector=FactConnector(work.boundary, **work.connector_options))
        self._work = work

    def process_transaction(self, transaction):
        self._work.handle(transaction)


class AsyncKilledFactConsumer(AsyncConsumerMixin, AsyncTask):
    def __init__(self, work):
        super().__init__(connector=AsyncFactConnector(work.boundary, **work.connector_options))
        self._work = work

    async def process_transaction(self, transaction):
        self._work.handle(transaction)


def consume(dsn, variant, deliveries, pipe):
    work = HandlerWork(dsn, pipe)
    if variant == "threads":
        KilledFactConsumer(work).consume_transactions(make_policy(deliveries))
    else:
        asyncio.run(AsyncKilledFactConsumer(work).consume_transactions(make_policy(deliveries)))


def count_unsettled(dsn):
    """Return how many facts the reader has not settled: after its cursor, and deferred before it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "select l.last - coalesce(r.fact_offset, 0)"
            " + (select count(*) from ergon.fact_consumer_state where due_at is not null)"
            " from ergon.fact_log l left join ergon.fact_readers r on r.log = l.id and r.reader = %s",
            (READER,),
        ).fetchone()
        return row[0]


def list_dead_letters(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = connection.execute("select transaction_id, reason, deliveries from ergon.dead_letter order by id")
        return rows.fetchall()


def classify_kill(lines):
    started = Counter(name for what, name in lines if what == "+")
    finished = Counter(name for what, name in lines if what == "=")
    return "handling" if started - finished else "settling" if finished else "between"


def kill_at_random(dsn, kills, seed, variant):
    rng, effects, hits = random.Random(seed), Counter(), Counter()
    for _ in range(kills):
        run = ForkedRun(partial(consume, dsn, variant, UNLIMITED_DELIVERIES))
        # Progress is counted in printed lines, so that it does not depend on the machine's speed; 0 while a run opens.
        run.wait_for_lines(rng.choice((0, 1, 2, 4, 8, 16, 24)), patience=3.0)
        time.sleep(rng.uniform(0.0, 0.01))
        lines = run.kill()
        hits[classify_kill(lines)] += 1
        effects.update(name for what, name in lines if what == "=")
    result = {"left after the kills": count_unsettled(dsn)}
    run, deadline = (
        ForkedRun(partial(consume, dsn, variant, UNLIMITED_DELIVERIES)),
        time.monotonic() + DRAIN_TIMEOUT_SECONDS,
    )
    while count_unsettled(dsn) and time.monotonic() < deadline:
        run.poll_output(0.2)
    effects.update(name for what, name in run.kill() if what == "=")
    return result | {"effects": effects, "hits": hits, "left": count_unsettled(dsn), "dead": list_dead_letters(dsn)}


def run_deadly_fact(dsn, variant, deliveries):
    effects, deaths, deadline = Counter(), 0, time.monotonic() + DRAIN_TIMEOUT_SECONDS
    while count_unsettled(dsn) and time.monotonic() < deadline:
        run, alive = ForkedRun(partial(consume, dsn, variant, deliveries)), True
        while alive is not None and count_unsettled(dsn) and time.monotonic() < deadline:
            alive = run.poll_output(0.1)
        deaths += alive is None
        effects.update(name for what, name in run.kill() if what == "=")
    return {"effects": effects, "deaths": deaths, "left": count_unsettled(dsn), "dead": list_dead_letters(dsn)}


def main():
    dsn, kills, seed, variant = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    result = kill_at_random(dsn, kills, seed, variant) if kills else run_deadly_fact(dsn, variant, seed)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
