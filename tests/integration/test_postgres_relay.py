"""The relay from PostgreSQL: to a log in memory and to another database, in order, with a target that fails."""

from __future__ import annotations

import asyncio
import itertools
import threading

import psycopg
import pytest

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.memory_log import MemoryLog
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.errors import ConnectionLost
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.relay import relay, relay_async
from ergon_framework.transaction import Transaction
from tests.integration.boxes import opened, taken
from tests.servers.databases import migrated

KEYS, EACH = 7, 15
POLICY = ConsumerPolicy.load(
    {
        "loop": {"concurrency": {"value": 8}, "streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.05}},
        "steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.002}}},
    }
)
PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture(scope="module")
def dsn(postgres):
    return migrated(postgres)


@pytest.fixture(scope="module")
def other_dsn(postgres):
    return migrated(postgres)


@pytest.fixture(params=["sync", "async"])
def flavour(request):
    return request.param


class Failing:
    """A dispatch that fails now and then: before it was done, and after, when it has arrived all the same."""

    def __init__(self):
        self.turn = itertools.count(1)

    def before(self):
        turn = next(self.turn)
        if turn % 5 == 0:
            raise ConnectionLost("down for a moment")
        if turn % 7 == 0:
            raise ConnectorError("refused this time")
        return turn

    def after(self, turn):
        if turn % 6 == 0:
            raise ConnectionLost("the answer was lost")


class FailingLog(MemoryLog):
    def __init__(self):
        super().__init__("log")
        self.failing = Failing()

    def dispatch(self, transactions):
        turn = self.failing.before()
        confirmations = super().dispatch(transactions)
        self.failing.after(turn)
        return confirmations


class FailingQueue(PostgresQueue):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.failing = Failing()

    def dispatch(self, transactions):
        turn = self.failing.before()
        confirmations = super().dispatch(transactions)
        self.failing.after(turn)
        return confirmations

    async def dispatch_async(self, transactions):
        turn = self.failing.before()
        confirmations = await super().dispatch_async(transactions)
        self.failing.after(turn)
        return confirmations


def filled(dsn, queue):
    """Each key's transactions in order, dispatched in the application's database transactions."""
    with psycopg.connect(dsn) as connection:
        for number in range(EACH):
            group = [
                Transaction(f"{key}-{number}", number, key=f"k{key}", correlation=f"case-{key}", trace=PARENT)
                for key in range(KEYS)
            ]
            queue.dispatch_on(connection, group)
            connection.commit()


def producers(dsn, queue):
    """A thread for each key, which dispatches in database transactions of its own, one after the other."""

    def produce(key):
        with psycopg.connect(dsn) as connection:
            for number in range(EACH):
                queue.dispatch_on(connection, [Transaction(f"{key}-{number}", number, key=f"k{key}")])
                if number % 4 == 3:
                    connection.commit()

    return [threading.Thread(target=produce, args=(key,)) for key in range(KEYS)]


def moved(flavour, tasks, queue, *, producing=()):
    """Run relays until everything was produced and nothing is left in *queue*."""
    for thread in producing:
        thread.start()

    def watch():
        for thread in producing:
            thread.join()
        pause = threading.Event()
        for _ in range(3000):
            depth = queue.depth()
            if depth.ready + depth.delayed + depth.in_flight == 0:
                break
            pause.wait(0.02)
        for task in tasks:
            task.stop()

    watching = threading.Thread(target=watch)
    if flavour == "sync":
        threads = [threading.Thread(target=task.run, args=(POLICY,)) for task in tasks]
        for thread in (*threads, watching):
            thread.start()
        for thread in (*threads, watching):
            thread.join(90)
    else:

        async def run():
            running = [asyncio.create_task(task.run(POLICY)) for task in tasks]
            watching.start()
            await asyncio.wait_for(asyncio.gather(*running), 90)

        asyncio.run(run())
        watching.join(10)
    depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.in_flight, depth.dead) == (0, 0, 0, 0)


def in_order(arrived):
    """By key, each number's first arrival; a repetition comes before anything later."""
    by_key = {}
    for one in arrived:
        seen = by_key.setdefault(one.key, [])
        if not seen or seen[-1] != one.payload:
            seen.append(one.payload)
    return by_key


def made(flavour, source, target):
    return (relay if flavour == "sync" else relay_async)(source, target, depth_every=0.05)


@pytest.mark.spec("CNN-15")
def test_a_log_gets_everything_in_the_order_of_its_key_though_it_fails_now_and_then(flavour, dsn, monkeypatch):
    monkeypatch.setattr("ergon_framework.task.relay.AGAIN", 0.05)
    log = FailingLog()
    with opened(dsn) as source, opened(dsn, source.name) as looked_at:
        filled(dsn, source)
        second = PostgresQueue(source.name, dsn=dsn, lease=29.0)
        moved(flavour, [made(flavour, source, log), made(flavour, second, log)], looked_at)
    arrived = [record for record, _ in log.records.partitions[0]]
    assert in_order(arrived) == {f"k{key}": list(range(EACH)) for key in range(KEYS)}
    assert {(one.source, dict(one.trace)["traceparent"], one.correlation) for one in arrived} == {
        (source.name, PARENT["traceparent"], f"case-{key}") for key in range(KEYS)
    }
    assert {one.attempts for one in arrived} == {0}


@pytest.mark.spec("CNN-15")
def test_another_database_gets_everything_in_the_order_of_its_key(flavour, dsn, other_dsn, monkeypatch):
    monkeypatch.setattr("ergon_framework.task.relay.AGAIN", 0.05)
    with opened(dsn) as source, opened(dsn, source.name) as looked_at, opened(other_dsn) as reading:
        filled(dsn, source)
        target = FailingQueue(reading.name, dsn=other_dsn)
        moved(flavour, [made(flavour, source, target)], looked_at)
        arrived = list(itertools.chain.from_iterable(iter(lambda: taken(reading), [])))
    assert in_order(arrived) == {f"k{key}": list(range(EACH)) for key in range(KEYS)}
    assert {(one.source, dict(one.trace)["traceparent"], one.correlation) for one in arrived} == {
        (source.name, PARENT["traceparent"], f"case-{key}") for key in range(KEYS)
    }


@pytest.mark.spec("CNN-15")
def test_the_order_of_each_key_is_kept_while_many_dispatch_and_several_relays_run(flavour, dsn, monkeypatch):
    monkeypatch.setattr("ergon_framework.task.relay.AGAIN", 0.05)
    log = FailingLog()
    with opened(dsn) as source, opened(dsn, source.name) as looked_at:
        others = [PostgresQueue(source.name, dsn=dsn, lease=lease) for lease in (28.0, 29.0)]
        tasks = [made(flavour, queue, log) for queue in (source, *others)]
        moved(flavour, tasks, looked_at, producing=producers(dsn, looked_at))
    arrived = [record for record, _ in log.records.partitions[0]]
    assert in_order(arrived) == {f"k{key}": list(range(EACH)) for key in range(KEYS)}


@pytest.mark.spec("CNN-15")
def test_a_relay_that_dies_between_dispatch_and_ack_sends_again_under_the_same_id(dsn, other_dsn):
    with opened(dsn) as source, opened(other_dsn, inbox=True) as target:
        source.dispatch([Transaction("order-7")])
        [delivery] = source.fetch_transactions(1)
        target.dispatch([delivery.transaction])  # and the process is gone
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("update ergon.worker set alive_until = now() - interval '1 s'")
        second = PostgresQueue(source.name, dsn=dsn, lease=29.0)
        policy = ConsumerPolicy.load({"loop": {"limit": 1, "streaming": True}})
        relay(second, target).run(policy)
        first, again = target.fetch_transactions(1), target.fetch_transactions(1)
        assert [one.transaction.id for one in (*first, *again)] == ["order-7", "order-7"]


def test_a_wait_for_the_target_keeps_the_key_behind_it(dsn):
    """What waits for its next try is not overtaken by what has the same key."""
    log = MemoryLog("log")
    down = threading.Event()

    class Down(MemoryLog):
        def dispatch(self, transactions):
            down.set()
            raise ConnectionLost("down")

    once = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 1}}}})
    with opened(dsn) as source:
        source.dispatch([Transaction("first", key="k"), Transaction("second", key="k"), Transaction("free")])
        relay(source, Down("down")).run(once)
        assert down.is_set()
        source.dispatch([Transaction("third", key="k")])
        report = relay(source, log).run(once)
        assert report.started == 0
        assert source.depth().delayed >= 2
