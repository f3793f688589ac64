"""Check concurrent claims, settlements and reaping: a message has one owner at a time."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, Defer, Release, SettleResult
from ergon_framework.connectors.postgres import PostgresQueue, sql
from ergon_framework.transaction import Transaction
from tests.integration.boxes import open_queue
from tests.servers.databases import create_migrated_database

pytestmark = pytest.mark.invariant

TIMEOUT_SECONDS = 60.0
#: Number of ids in other claims; it makes a claim read for a while between its snapshot and its first lock.
CLAIMED_ID_COUNT = 300_000
#: Number of messages that the workers compete for.
MESSAGE_COUNT = 2_000
KEY_COUNT = 7


@pytest.fixture(scope="module")
def dsn(postgres):
    return create_migrated_database(postgres)


def register_worker(connection):
    return connection.execute(sql.INSERT_WORKER, {"lease": 600, "name": "rival"}).fetchone()[0]


def claim(connection, queue, worker, **overrides):
    parameters = {
        "queue": queue._number,
        "count": 10,
        "worker": worker,
        "token": 1,
        "rank": 0,
        "floor": 0,
        "inbox": False,
    }
    parameters |= {"largest": 1 << 20, "budget": 1 << 25, "last_delivery": 10, "suspects": True}
    return [row[0] for row in connection.execute(sql.CLAIM, {**parameters, **overrides}).fetchall()]


# -- one moment --------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_claim_sees_another_that_ends_during_its_poll(dsn, end):
    with (
        open_queue(dsn) as queue,
        psycopg.connect(dsn) as first,
        psycopg.connect(dsn, autocommit=True) as second,
        psycopg.connect(dsn, autocommit=True) as observer,
        ThreadPoolExecutor(1) as thread,
    ):
        workers = register_worker(observer), register_worker(observer)
        ids = "array(select generate_series(10000001, 10000000 + %s))"
        observer.execute(
            "insert into ergon.claim (worker, token, queue, low, high, ids, ranks)"
            f" values (%s, 99, %s, 10000001, 20000000, {ids}, '{{}}')",
            (workers[0], queue._number, CLAIMED_ID_COUNT),
        )
        # Once before there is anything, so that the executed plan is the one made then.
        assert claim(second, queue, workers[1], count=4) == []
        queue.dispatch([Transaction(id=str(n)) for n in range(5)])
        first_ids = claim(first, queue, workers[0], count=3)
        future = thread.submit(claim, second, queue, workers[1], count=4)
        lock_query = "select 1 from pg_locks where pid = %s and relation = 'ergon.claim'::regclass"
        while not observer.execute(lock_query, (second.info.backend_pid,)).fetchone():
            assert not future.done()
        getattr(first, end)()
        second_ids = future.result(TIMEOUT_SECONDS)
        observer.execute("delete from ergon.claim where queue = %s", (queue._number,))
    assert len(first_ids) == 3
    if end == "commit":
        assert len(second_ids) == 2
        assert not set(second_ids) & set(first_ids)
    else:
        assert len(second_ids) >= 2


# -- long contention ---------------------------------------------------------------------------------


class OwnershipLog:
    """The owner of each message as recorded by the competing workers."""

    def __init__(self, count):
        self.lock = threading.Lock()
        self.expected_count = count
        self.owners: dict[str, str] = {}
        #: The claimed transaction of each key, and those that are done, in that order.
        self.claimed_by_key: dict[str, str] = {}
        self.acked_by_key: dict[str, list[int]] = defaultdict(list)
        self.done: Counter[str] = Counter()
        self.fetch_counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.deadline = time.monotonic() + TIMEOUT_SECONDS

    @property
    def is_over(self):
        return len(self.done) >= self.expected_count or bool(self.errors) or time.monotonic() > self.deadline

    def record_claims(self, worker, deliveries):
        with self.lock:
            for delivery in deliveries:
                name = delivery.transaction.id
                if name in self.owners:
                    self.errors.append(f"{name} came to {worker} while {self.owners[name]} had it")
                if name in self.done:
                    self.errors.append(f"{name} came to {worker} after it was done")
                key = delivery.receipt.key
                if key is not None and self.claimed_by_key.setdefault(key, name) != name:
                    self.errors.append(
                        f"{name} came to {worker} while {self.claimed_by_key[key]} of its key was in hand"
                    )
                self.owners[name] = worker
                self.fetch_counts[name] += 1

    def record_ends(self, deliveries, outcomes):
        """Record the end of claims before the server gets it: after that other workers may claim them."""
        with self.lock:
            for delivery, outcome in zip(deliveries, outcomes, strict=True):
                del self.owners[delivery.transaction.id]
                key = delivery.receipt.key
                if key is not None:
                    del self.claimed_by_key[key]
                    if isinstance(outcome, Ack):
                        self.acked_by_key[key].append(int(delivery.transaction.id))

    def record_results(self, worker, settlings, results):
        with self.lock:
            for (delivery, outcome), result in zip(settlings, results, strict=True):
                if result is not SettleResult.SETTLED:
                    self.errors.append(f"{delivery.transaction.id} was {result} to {worker}, who held it")
                if isinstance(outcome, Ack):
                    self.done[delivery.transaction.id] += 1


def run_worker(number, dsn, name, ownership):
    """Fetch a few, then ack, release, delay or keep them; now and then die with all claims."""
    rng, worker = random.Random(number), f"rival {number}"
    # Its own lease makes it a separate instance within this process.
    queue = PostgresQueue(name, dsn=dsn, lease=600.0 + number)
    queue.open()
    held = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not ownership.is_over:
            if rng.random() < 0.1:
                # Workers reap every few seconds; here it is due now.
                queue._client._last_reap = float("-inf")
            deliveries = list(queue.fetch_transactions(rng.randint(1, 5)))
            ownership.record_claims(worker, deliveries)
            held += deliveries
            if rng.random() < 0.03 and held:
                ownership.record_ends(held, [None] * len(held))
                held = []
                connection.execute(
                    "update ergon.worker set alive_until = now() - interval '1 s' where id = %s",
                    (queue._client.worker_lease.worker,),
                )
                queue._client._last_reap = float("-inf")
                continue
            rng.shuffle(held)
            keep_count = 0 if not deliveries else rng.randint(0, min(4, len(held)))
            ending, held = held[keep_count:], held[:keep_count]
            outcomes = [rng.choice([Ack(), Ack(), Ack(), Release(), Defer(0.0), Defer(0.01)]) for _ in ending]
            ownership.record_ends(ending, outcomes)
            settlings = list(zip(ending, outcomes, strict=True))
            ownership.record_results(worker, settlings, queue.settle(settlings))
    queue.close()


@pytest.mark.spec("CNN-07", "CNN-12")
def test_every_message_has_one_owner_at_a_time_and_is_done_once(dsn):
    ownership = OwnershipLog(MESSAGE_COUNT)
    with (
        open_queue(dsn, priority=lambda transaction: len(transaction.id) % 2) as queue,
        ThreadPoolExecutor(6) as threads,
    ):
        for start in range(0, MESSAGE_COUNT, 100):
            queue.dispatch(
                [
                    Transaction(id=str(n), key=f"k{n % KEY_COUNT}" if n % 10 == 0 else None)
                    for n in range(start, start + 100)
                ]
            )
        for future in [threads.submit(run_worker, number, dsn, queue.name, ownership) for number in range(6)]:
            future.result()
        depth = queue.depth()
    assert ownership.errors == []
    assert sorted(ownership.done) == sorted(map(str, range(MESSAGE_COUNT)))
    assert set(ownership.done.values()) == {1}
    assert max(ownership.fetch_counts.values()) > 1
    assert len(ownership.acked_by_key) == KEY_COUNT
    assert all(order == sorted(order) for order in ownership.acked_by_key.values())
    assert (depth.ready, depth.delayed, depth.in_flight) == (0, 0, 0)
