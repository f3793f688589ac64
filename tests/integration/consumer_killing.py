"""Kill a consumer whose handler appends a fact at random points, run it again, and print the result as JSON.

python -m tests.integration.consumer_killing DSN FOLDER KILLS SEED FLAVOUR

A separate script with one thread: each run is a fork of it, so that a hundred runs take seconds, not minutes. A run
prints ``+ ID`` when a handler starts and ``= ID OFFSET DUPLICATE`` when its fact is confirmed, so that the script knows
what each kill has interrupted.
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
from ergon_framework.facts.append import AsyncFacts, Blob, Facts, Upload
from ergon_framework.facts.model import ZonePair
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from tests.integration.forked import ForkedRun

PAIR = ZonePair("Plant A", "HQ")
QUEUE = "orders"
#: One order in this many comes with an artifact.
ARTIFACT_EVERY = 5
#: Short, so that claims of a killed consumer expire soon.
LEASE_SECONDS = 1.0
#: Maximum seconds for the remaining messages after the last kill.
DRAIN_TIMEOUT_SECONDS = 120.0
POLICY = {
    "loop": {
        "streaming": True,
        "concurrency": {"value": 4},
        "batch": {"size": 4},
        "empty_queue": {"backoff": 0.02, "cap": 0.1},
        # A kill is not the transaction's fault.
        "max_deliveries": 1000,
    },
}


def make_artifact(number):
    return random.Random(number).randbytes(20_000)


class AppendWork:
    """The work of a handler, and its report."""

    def __init__(self, dsn, folder, pipe):
        self.queue = PostgresQueue(QUEUE, dsn=dsn, lease=LEASE_SECONDS)
        self.boundary = make_boundary(dsn, folder)
        self._pipe = pipe

    def report(self, *fields):
        # Short enough to be written atomically, also with concurrent writers.
        os.write(self._pipe, (" ".join(map(str, fields)) + "\n").encode())

    def build_fact(self, transaction):
        number = transaction.payload["number"]
        options = {"subject": f"order:{number}", "predicate": "paid", "object": {"number": number}}
        if number % ARTIFACT_EVERY == 0:
            options |= {
                "object": None,
                "artifact": Upload("papers", f"{number}.pdf", Blob.from_bytes(make_artifact(number))),
            }
        return options


class AppendingConsumer(ConsumerMixin, Task):
    def __init__(self, work):
        super().__init__(connector=work.queue)
        self._work = work
        self._facts = Facts(work.boundary, zone=PAIR.from_zone)

    def process_transaction(self, transaction):
        self._work.report("+", transaction.id)
        confirmation = self._facts.append(PAIR.to_zone, **self._work.build_fact(transaction))
        self._work.report("=", transaction.id, confirmation.offset, confirmation.duplicate)


class AsyncAppendingConsumer(AsyncConsumerMixin, AsyncTask):
    def __init__(self, work):
        super().__init__(connector=work.queue)
        self._work = work
        self._facts = AsyncFacts(work.boundary, zone=PAIR.from_zone)

    async def process_transaction(self, transaction):
        self._work.report("+", transaction.id)
        confirmation = await self._facts.append(PAIR.to_zone, **self._work.build_fact(transaction))
        self._work.report("=", transaction.id, confirmation.offset, confirmation.duplicate)


def make_boundary(dsn, folder):
    return PostgresBoundary(dsn, contents=FileContentStore(folder), accept_loss=True)


def consume(dsn, folder, variant, pipe):
    work, policy = AppendWork(dsn, folder, pipe), ConsumerPolicy.load(POLICY)
    if variant == "threads":
        AppendingConsumer(work).consume_transactions(policy)
    else:
        asyncio.run(AsyncAppendingConsumer(work).consume_transactions(policy))


class RunReports:
    """The reports of all runs, and what each kill has interrupted."""

    def __init__(self):
        self.offsets = {}
        self.duplicates = 0
        self.changed = []
        self.interrupted = {"append": 0, "settling": 0, "between": 0}

    def add_run(self, lines, *, killed):
        started, finished = set(), set()
        for what, name, *more in lines:
            if what == "+":
                started.add(name)
                finished.discard(name)
                continue
            finished.add(name)
            offset = int(more[0])
            self.duplicates += more[1] == "True"
            if self.offsets.setdefault(name, offset) != offset:
                self.changed.append(name)
        if killed:
            # Only the queue knows which confirmed transactions were settled as well.
            self.interrupted["append" if started - finished else "settling" if finished else "between"] += 1


def count_waiting(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        query = "select (select count(*) from ergon.ready) + (select count(*) from ergon.content)"
        return connection.execute(query).fetchone()[0]


def main():
    dsn, folder, kills, seed, variant = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    rng, reports = random.Random(seed), RunReports()
    for _ in range(kills):
        run = ForkedRun(partial(consume, dsn, folder, variant))
        # Progress is counted in printed lines, so that it does not depend on the machine's speed; 0 while a run opens.
        run.wait_for_lines(rng.choice((0, 1, 2, 4, 8, 16, 32, 48)), patience=5 * LEASE_SECONDS)
        time.sleep(rng.uniform(0.0, 0.01))
        reports.add_run(run.kill(), killed=True)
    left = count_waiting(dsn)
    run, deadline = ForkedRun(partial(consume, dsn, folder, variant)), time.monotonic() + DRAIN_TIMEOUT_SECONDS
    while count_waiting(dsn) and time.monotonic() < deadline:
        run.poll_output(0.2)
    reports.add_run(run.kill(), killed=False)
    print(json.dumps(summarize(dsn, folder, reports) | {"left after the kills": left, "left": count_waiting(dsn)}))


def summarize(dsn, folder, reports):
    boundary = make_boundary(dsn, folder)
    stored = []
    while page := boundary.fetch_facts("look", PAIR, 1000, after=stored[-1].cursor if stored else None):
        stored += page
    result = {
        "stored": len(stored),
        "subjects": len({each.fact.subject for each in stored}),
        "dense": [each.offset for each in stored] == list(range(1, len(stored) + 1)),
        "kept": {each.envelope.causation_id: each.offset for each in stored}.items() >= reports.offsets.items(),
        "papers": sum(each.fact.artifact is not None for each in stored),
        "whole": all(is_complete(boundary, each) for each in stored if each.fact.artifact is not None),
        "duplicates": reports.duplicates,
        "changed": reports.changed,
        "hit": reports.interrupted,
    }
    boundary.close()
    return result


def is_complete(boundary, stored_fact):
    reference = stored_fact.fact.artifact
    number = int(stored_fact.fact.subject.removeprefix("order:"))
    return b"".join(boundary.get_object(reference.bucket, reference.key)) == make_artifact(number)


if __name__ == "__main__":
    main()
