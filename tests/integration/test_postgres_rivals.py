"""Claimers at once: whatever they, those who settle and those who bury do, a message is in one pair of hands."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, Later, Release, SettleResult
from ergon_framework.connectors.postgres import PostgresQueue, statements
from ergon_framework.transaction import Transaction
from tests.integration.boxes import opened
from tests.servers.databases import migrated

pytestmark = pytest.mark.invariant

PATIENCE = 60.0
#: So many ids in other claims that a claimer reads for a while between its snapshot and its first lock.
SLOW = 300_000
#: What is fought for.
MESSAGES = 2_000
KEYS = 7


@pytest.fixture(scope="module")
def dsn(postgres):
    return migrated(postgres)


def registered(connection):
    return connection.execute(statements.REGISTER, {"lease": 600, "name": "rival"}).fetchone()[0]


def claimed(connection, queue, worker, **other):
    given = {"queue": queue._number, "count": 10, "worker": worker, "token": 1, "rank": 0, "floor": 0, "inbox": False}
    given |= {"largest": 1 << 20, "budget": 1 << 25, "last_delivery": 10, "suspects": True}
    return [row[0] for row in connection.execute(statements.CLAIM, {**given, **other}).fetchall()]


# -- one moment --------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_claim_that_ends_while_another_looks_is_seen(dsn, end):
    with (
        opened(dsn) as queue,
        psycopg.connect(dsn) as first,
        psycopg.connect(dsn, autocommit=True) as second,
        psycopg.connect(dsn, autocommit=True) as eye,
        ThreadPoolExecutor(1) as thread,
    ):
        workers = registered(eye), registered(eye)
        ids = "array(select generate_series(10000001, 10000000 + %s))"
        eye.execute(
            "insert into ergon.held (worker, token, queue, low, high, ids, ranks)"
            f" values (%s, 99, %s, 10000001, 20000000, {ids}, '{{}}')",
            (workers[0], queue._number, SLOW),
        )
        # Once before there is anything: what it will execute is planned then.
        assert claimed(second, queue, workers[1], count=4) == []
        queue.dispatch([Transaction(str(n)) for n in range(5)])
        taken = claimed(first, queue, workers[0], count=3)
        others = thread.submit(claimed, second, queue, workers[1], count=4)
        looking = "select 1 from pg_locks where pid = %s and relation = 'ergon.held'::regclass"
        while not eye.execute(looking, (second.info.backend_pid,)).fetchone():
            assert not others.done()
        getattr(first, end)()
        found = others.result(PATIENCE)
        eye.execute("delete from ergon.held where queue = %s", (queue._number,))
    assert len(taken) == 3
    if end == "commit":
        assert len(found) == 2
        assert not set(found) & set(taken)
    else:
        assert len(found) >= 2


# -- a long fight ------------------------------------------------------------------------------------


class Hands:
    """Who has what, as the rivals themselves believe."""

    def __init__(self, count):
        self.lock = threading.Lock()
        self.wanted = count
        self.held: dict[str, str] = {}
        #: Of each key the one that is in hand, and those that are done, in that order.
        self.turns: dict[str, str] = {}
        self.ended: dict[str, list[int]] = defaultdict(list)
        self.done: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.until = time.monotonic() + PATIENCE

    @property
    def over(self):
        return len(self.done) >= self.wanted or bool(self.wrong) or time.monotonic() > self.until

    def take(self, who, deliveries):
        with self.lock:
            for delivery in deliveries:
                name = delivery.transaction.id
                if name in self.held:
                    self.wrong.append(f"{name} came to {who} while {self.held[name]} had it")
                if name in self.done:
                    self.wrong.append(f"{name} came to {who} after it was done")
                key = delivery.receipt.key
                if key is not None and self.turns.setdefault(key, name) != name:
                    self.wrong.append(f"{name} came to {who} while {self.turns[key]} of its key was in hand")
                self.held[name] = who
                self.seen[name] += 1

    def drop(self, deliveries, ways):
        """Before it is said to the server: after that they may be in other hands."""
        with self.lock:
            for delivery, how in zip(deliveries, ways, strict=True):
                del self.held[delivery.transaction.id]
                key = delivery.receipt.key
                if key is not None:
                    del self.turns[key]
                    if isinstance(how, Ack):
                        self.ended[key].append(int(delivery.transaction.id))

    def settle(self, who, settlings, results):
        with self.lock:
            for (delivery, how), result in zip(settlings, results, strict=True):
                if result is not SettleResult.SETTLED:
                    self.wrong.append(f"{delivery.transaction.id} was {result} to {who}, who held it")
                if isinstance(how, Ack):
                    self.done[delivery.transaction.id] += 1


def fight(number, dsn, name, hands):
    """Fetch a few, and ack, release, delay or keep them; now and then die with all that is in hand."""
    chance, who = random.Random(number), f"rival {number}"
    # A lease of its own makes it an instance of its own within this process.
    queue = PostgresQueue(name, dsn=dsn, lease=600.0 + number)
    queue.open()
    kept = []
    with psycopg.connect(dsn, autocommit=True) as grave:
        while not hands.over:
            if chance.random() < 0.1:
                # Whoever buries does so every few seconds; here it is now.
                queue._home._reaped = float("-inf")
            found = list(queue.fetch_transactions(chance.randint(1, 5)))
            hands.take(who, found)
            kept += found
            if chance.random() < 0.03 and kept:
                hands.drop(kept, [None] * len(kept))
                kept = []
                grave.execute(
                    "update ergon.worker set alive_until = now() - interval '1 s' where id = %s",
                    (queue._home.tenure.worker,),
                )
                queue._home._reaped = float("-inf")
                continue
            chance.shuffle(kept)
            keep = 0 if not found else chance.randint(0, min(4, len(kept)))
            ends, kept = kept[keep:], kept[:keep]
            ways = [chance.choice([Ack(), Ack(), Ack(), Release(), Later(0.0), Later(0.01)]) for _ in ends]
            hands.drop(ends, ways)
            settlings = list(zip(ends, ways, strict=True))
            hands.settle(who, settlings, queue.settle(settlings))
    queue.close()


@pytest.mark.spec("CNN-07", "CNN-12")
def test_every_message_is_in_one_pair_of_hands_and_done_once(dsn):
    hands = Hands(MESSAGES)
    with opened(dsn, priority=lambda transaction: len(transaction.id) % 2) as queue, ThreadPoolExecutor(6) as threads:
        for start in range(0, MESSAGES, 100):
            queue.dispatch(
                [Transaction(str(n), key=f"k{n % KEYS}" if n % 10 == 0 else None) for n in range(start, start + 100)]
            )
        for rival in [threads.submit(fight, number, dsn, queue.name, hands) for number in range(6)]:
            rival.result()
        depth = queue.depth()
    assert hands.wrong == []
    assert sorted(hands.done) == sorted(map(str, range(MESSAGES)))
    assert set(hands.done.values()) == {1}
    assert max(hands.seen.values()) > 1
    assert len(hands.ended) == KEYS
    assert all(order == sorted(order) for order in hands.ended.values())
    assert (depth.ready, depth.delayed, depth.in_flight) == (0, 0, 0)
