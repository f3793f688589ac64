"""A consumer of facts is killed at random points and run again, and the verdict is said as JSON.

python -m tests.integration.side_killing DSN KILLS SEED FLAVOUR

Each run is a fork of this script. It says ``+ ID`` when a handler begins and ``= ID`` when its effect is made, so that
it is known what each kill has hit. Some facts are bad and become dead letters, some are put off once, some are so bad
that their handler takes the process with it.
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
from ergon_framework.facts.model import Pair
from ergon_framework.facts.stores.postgres import PostgresBoundary
from tests.integration.forked import Forked

PAIR = Pair("Plant A", "HQ")
READER = "ledger"
#: One in so many is bad, and one in so many is put off.
BAD_EACH, LATER_EACH = 7, 5
#: Seconds that all of what is left may take in the end.
PATIENCE = 60.0
#: Deliveries that are allowed where being killed is not the fact's fault.
MANY = 1000


def policy(deliveries):
    return ConsumerPolicy.load(
        {
            "loop": {
                "streaming": True,
                "concurrency": {"value": 4},
                "batch": {"size": 4},
                "empty_queue": {"backoff": 0.02, "cap": 0.1},
                "max_deliveries": deliveries,
            },
            # What fails for a while is not waited for: it is put off, into the side.
            "steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.01, "hold": 0.0}}},
        }
    )


class Work:
    """What a handler does, and what it says of it."""

    def __init__(self, dsn, pipe):
        self.boundary = PostgresBoundary(dsn, accept_loss=True)
        self.given = {**PAIR._asdict(), "reader": READER}
        self._pipe = pipe

    def handle(self, transaction):
        self._say("+", transaction.id)
        number = transaction.payload["number"]
        if transaction.payload.get("deadly"):
            os.kill(os.getpid(), signal.SIGKILL)
        if number % BAD_EACH == 0:
            raise BusinessError("nobody can do this", code="bad")
        if number % LATER_EACH == 0 and transaction.attempts == 0:
            raise ConnectionError("not yet")
        self._say("=", transaction.id)

    def _say(self, *words):
        # Short enough to be written as one, whoever else writes.
        os.write(self._pipe, (" ".join(words) + "\n").encode())


class Consumer(ConsumerMixin, Task):
    def __init__(self, work):
        super().__init__(connector=FactConnector(work.boundary, **work.given))
        self._work = work

    def process_transaction(self, transaction):
        self._work.handle(transaction)


class AsyncConsumer(AsyncConsumerMixin, AsyncTask):
    def __init__(self, work):
        super().__init__(connector=AsyncFactConnector(work.boundary, **work.given))
        self._work = work

    async def process_transaction(self, transaction):
        self._work.handle(transaction)


def consume(dsn, flavour, deliveries, pipe):
    work = Work(dsn, pipe)
    if flavour == "threads":
        Consumer(work).consume_transactions(policy(deliveries))
    else:
        asyncio.run(AsyncConsumer(work).consume_transactions(policy(deliveries)))


def left(dsn):
    """Facts that the reader has not settled: before its cursor, and beside it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "select l.last - coalesce(r.fact_offset, 0)"
            " + (select count(*) from ergon.fact_aside where due_at is not null)"
            " from ergon.fact_log l left join ergon.fact_readers r on r.log = l.id and r.reader = %s",
            (READER,),
        ).fetchone()
        return row[0]


def dead(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = connection.execute("select transaction_id, reason, deliveries from ergon.dead_letter order by id")
        return rows.fetchall()


def hit(lines):
    began = Counter(name for what, name in lines if what == "+")
    made = Counter(name for what, name in lines if what == "=")
    return "handling" if began - made else "settling" if made else "between"


def killed_at_random(dsn, kills, seed, flavour):
    dice, effects, hits = random.Random(seed), Counter(), Counter()
    for _ in range(kills):
        run = Forked(partial(consume, dsn, flavour, MANY))
        # How far it has come is counted in what it says, on a slow machine as on a fast one; 0 while it still opens.
        run.await_lines(dice.choice((0, 1, 2, 4, 8, 16, 24)), patience=3.0)
        time.sleep(dice.uniform(0.0, 0.01))
        lines = run.kill()
        hits[hit(lines)] += 1
        effects.update(name for what, name in lines if what == "=")
    told = {"left after the kills": left(dsn)}
    run, until = Forked(partial(consume, dsn, flavour, MANY)), time.monotonic() + PATIENCE
    while left(dsn) and time.monotonic() < until:
        run.listen(0.2)
    effects.update(name for what, name in run.kill() if what == "=")
    return told | {"effects": effects, "hits": hits, "left": left(dsn), "dead": dead(dsn)}


def killed_by_a_fact(dsn, flavour, deliveries):
    effects, deaths, until = Counter(), 0, time.monotonic() + PATIENCE
    while left(dsn) and time.monotonic() < until:
        run, alive = Forked(partial(consume, dsn, flavour, deliveries)), True
        while alive is not None and left(dsn) and time.monotonic() < until:
            alive = run.listen(0.1)
        deaths += alive is None
        effects.update(name for what, name in run.kill() if what == "=")
    return {"effects": effects, "deaths": deaths, "left": left(dsn), "dead": dead(dsn)}


def main():
    dsn, kills, seed, flavour = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    told = killed_at_random(dsn, kills, seed, flavour) if kills else killed_by_a_fact(dsn, flavour, seed)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
