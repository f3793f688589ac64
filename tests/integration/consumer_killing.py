"""A consumer whose handler appends a fact is killed at random points and run again, and the verdict is said as JSON.

python -m tests.integration.consumer_killing DSN FOLDER KILLS SEED FLAVOUR

A script of its own with one thread: each run is a fork of it, so that a hundred cost seconds and not minutes. A run
says ``+ ID`` when a handler begins and ``= ID OFFSET DUPLICATE`` when its fact is confirmed, so that it is known what
each kill has hit.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path

import psycopg

from ergon_framework import AsyncConsumerMixin, AsyncTask, ConsumerMixin, ConsumerPolicy, Task
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.facts.blob import Blob
from ergon_framework.facts.facts import AsyncFacts, Facts
from ergon_framework.facts.model import Pair
from ergon_framework.facts.publish import Upload
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.postgres import PostgresBoundary
from tests.integration.forked import Forked

PAIR = Pair("Plant A", "HQ")
QUEUE = "orders"
#: One in so many orders comes with a paper.
PAPER_EACH = 5
#: Short, so that what a killed one had claimed is soon somebody else's.
LEASE = 1.0
#: Seconds that all of what is left may take in the end.
PATIENCE = 120.0
POLICY = {
    "loop": {
        "streaming": True,
        "concurrency": {"value": 4},
        "batch": {"size": 4},
        "empty_queue": {"backoff": 0.02, "cap": 0.1},
        # Being killed is not the transaction's fault.
        "max_deliveries": 1000,
    },
}


def paper(number):
    return random.Random(number).randbytes(20_000)


class Work:
    """What a handler does, and what it says of it."""

    def __init__(self, dsn, folder, pipe):
        self.queue = PostgresQueue(QUEUE, dsn=dsn, lease=LEASE)
        self.boundary = boundary_of(dsn, folder)
        self._pipe = pipe

    def say(self, *words):
        # Short enough to be written as one, whoever else writes.
        os.write(self._pipe, (" ".join(map(str, words)) + "\n").encode())

    def fact(self, transaction):
        number = transaction.payload["number"]
        given = {"subject": f"order:{number}", "predicate": "paid", "object": {"number": number}}
        if number % PAPER_EACH == 0:
            given |= {"object": None, "artifact": Upload("papers", f"{number}.pdf", Blob.of(paper(number)))}
        return given


class Consumer(ConsumerMixin, Task):
    def __init__(self, work):
        super().__init__(connector=work.queue)
        self._work = work
        self._facts = Facts(work.boundary, zone=PAIR.from_zone)

    def process_transaction(self, transaction):
        self._work.say("+", transaction.id)
        told = self._facts.append(PAIR.to_zone, **self._work.fact(transaction))
        self._work.say("=", transaction.id, told.offset, told.duplicate)


class AsyncConsumer(AsyncConsumerMixin, AsyncTask):
    def __init__(self, work):
        super().__init__(connector=work.queue)
        self._work = work
        self._facts = AsyncFacts(work.boundary, zone=PAIR.from_zone)

    async def process_transaction(self, transaction):
        self._work.say("+", transaction.id)
        told = await self._facts.append(PAIR.to_zone, **self._work.fact(transaction))
        self._work.say("=", transaction.id, told.offset, told.duplicate)


def boundary_of(dsn, folder):
    return PostgresBoundary(dsn, contents=FileContents(folder), accept_loss=True)


def consume(dsn, folder, flavour, pipe):
    work, policy = Work(dsn, folder, pipe), ConsumerPolicy.load(POLICY)
    if flavour == "threads":
        Consumer(work).consume_transactions(policy)
    else:
        asyncio.run(AsyncConsumer(work).consume_transactions(policy))


class Verdict:
    """What all runs have said, and what each kill has hit."""

    def __init__(self):
        self.offsets = {}
        self.duplicates = 0
        self.changed = []
        self.hit = {"append": 0, "settling": 0, "between": 0}

    def take(self, lines, *, killed):
        began, told = set(), set()
        for what, name, *more in lines:
            if what == "+":
                began.add(name)
                told.discard(name)
                continue
            told.add(name)
            offset = int(more[0])
            self.duplicates += more[1] == "True"
            if self.offsets.setdefault(name, offset) != offset:
                self.changed.append(name)
        if killed:
            # Which of those that were confirmed were settled as well only the queue knows.
            self.hit["append" if began - told else "settling" if told else "between"] += 1


def waiting(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        held = "select (select count(*) from ergon.ready) + (select count(*) from ergon.content)"
        return connection.execute(held).fetchone()[0]


def main():
    dsn, folder, kills, seed, flavour = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    dice, verdict = random.Random(seed), Verdict()
    for _ in range(kills):
        run = Forked(partial(consume, dsn, folder, flavour))
        # How far it has come is counted in what it says, on a slow machine as on a fast one; 0 while it still opens.
        run.await_lines(dice.choice((0, 1, 2, 4, 8, 16, 32, 48)), patience=5 * LEASE)
        time.sleep(dice.uniform(0.0, 0.01))
        verdict.take(run.kill(), killed=True)
    left = waiting(dsn)
    run, until = Forked(partial(consume, dsn, folder, flavour)), time.monotonic() + PATIENCE
    while waiting(dsn) and time.monotonic() < until:
        run.listen(0.2)
    verdict.take(run.kill(), killed=False)
    print(json.dumps(told(dsn, folder, verdict) | {"left after the kills": left, "left": waiting(dsn)}))


def told(dsn, folder, verdict):
    boundary = boundary_of(dsn, folder)
    stored = []
    while some := boundary.fetch_facts("look", PAIR, 1000, after=stored[-1].cursor if stored else None):
        stored += some
    found = {
        "stored": len(stored),
        "subjects": len({each.fact.subject for each in stored}),
        "dense": [each.offset for each in stored] == list(range(1, len(stored) + 1)),
        "kept": {each.envelope.causation_id: each.offset for each in stored}.items() >= verdict.offsets.items(),
        "papers": sum(each.fact.artifact is not None for each in stored),
        "whole": all(whole(boundary, each) for each in stored if each.fact.artifact is not None),
        "duplicates": verdict.duplicates,
        "changed": verdict.changed,
        "hit": verdict.hit,
    }
    boundary.close()
    return found


def whole(boundary, each):
    named = each.fact.artifact
    number = int(each.fact.subject.removeprefix("order:"))
    return b"".join(boundary.get_object(named.bucket, named.key)) == paper(number)


if __name__ == "__main__":
    main()
