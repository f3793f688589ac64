"""Check the PostgreSQL relay to a log in memory and to another database: in order, with a target that fails."""

from __future__ import annotations

import asyncio
import itertools
import threading

import psycopg
import pytest

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.errors import ConnectionLostError
from ergon_framework.task.relay import relay, relay_async
from ergon_framework.testing.memory_log import MemoryLog
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from tests.integration.boxes import fetch_and_ack, open_queue
from tests.servers.databases import create_migrated_database

KEY_COUNT, PER_KEY = 7, 15
POLICY = ConsumerPolicy.load(
    {
        "loop": {"concurrency": {"value": 8}, "streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.05}},
        "steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.002}}},
    }
)
PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture(scope="module")
def dsn(postgres):
    return create_migrated_database(postgres)


@pytest.fixture(scope="module")
def other_dsn(postgres):
    return create_migrated_database(postgres)


@pytest.fixture(params=["sync", "async"])
def variant(request):
    return request.param


class FailureSchedule:
    """A schedule of dispatch failures, before the dispatch was done or after the target has received it."""

    def __init__(self):
        self.turns = itertools.count(1)

    def raise_before_dispatch(self):
        turn = next(self.turns)
        if turn % 5 == 0:
            raise ConnectionLostError("down for a moment")
        if turn % 7 == 0:
            raise ConnectorError("refused this time")
        return turn

    def raise_after_dispatch(self, turn):
        if turn % 6 == 0:
            raise ConnectionLostError("the answer was lost")


class FailingLog(MemoryLog):
    def __init__(self):
        super().__init__("log")
        self.failures = FailureSchedule()

    def dispatch(self, transactions):
        turn = self.failures.raise_before_dispatch()
        confirmations = super().dispatch(transactions)
        self.failures.raise_after_dispatch(turn)
        return confirmations


class FailingQueue(PostgresQueue):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.failures = FailureSchedule()

    def dispatch(self, transactions):
        turn = self.failures.raise_before_dispatch()
        confirmations = super().dispatch(transactions)
        self.failures.raise_after_dispatch(turn)
        return confirmations

    async def dispatch_async(self, transactions):
        turn = self.failures.raise_before_dispatch()
        confirmations = await super().dispatch_async(transactions)
        self.failures.raise_after_dispatch(turn)
        return confirmations


def dispatch_all(dsn, queue):
    """Dispatch each key's transactions in order, in the application's database transactions."""
    with psycopg.connect(dsn) as connection:
        for number in range(PER_KEY):
            group = [
                Transaction(number, id=f"{key}-{number}", key=f"k{key}", correlation=f"case-{key}", trace=PARENT)
                for key in range(KEY_COUNT)
            ]
            queue.dispatch_on(connection, group)
            connection.commit()


def make_producers(dsn, queue):
    """Return one thread per key that dispatches its transactions in separate database transactions."""

    def produce(key):
        with psycopg.connect(dsn) as connection:
            for number in range(PER_KEY):
                queue.dispatch_on(connection, [Transaction(number, id=f"{key}-{number}", key=f"k{key}")])
                if number % 4 == 3:
                    connection.commit()

    return [threading.Thread(target=produce, args=(key,)) for key in range(KEY_COUNT)]


def run_relays(variant, tasks, queue, *, producing=()):
    """Run relays until everything is produced and nothing is left in *queue*."""
    for thread in producing:
        thread.start()

    def stop_when_empty():
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

    watcher = threading.Thread(target=stop_when_empty)
    if variant == "sync":
        threads = [threading.Thread(target=task.run, args=(POLICY,)) for task in tasks]
        for thread in (*threads, watcher):
            thread.start()
        for thread in (*threads, watcher):
            thread.join(90)
    else:

        async def run():
            running = [asyncio.create_task(task.run(POLICY)) for task in tasks]
            watcher.start()
            await asyncio.wait_for(asyncio.gather(*running), 90)

        asyncio.run(run())
        watcher.join(10)
    depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.in_flight, depth.dead) == (0, 0, 0, 0)


def group_by_key(transactions):
    """Return the first arrival of each number by key; a repetition comes before anything later."""
    by_key = {}
    for transaction in transactions:
        numbers = by_key.setdefault(transaction.key, [])
        if not numbers or numbers[-1] != transaction.payload:
            numbers.append(transaction.payload)
    return by_key


def make_relay(variant, source, target):
    return (relay if variant == "sync" else relay_async)(source, target, depth_every=0.05)


@pytest.mark.spec("CNN-15")
def test_a_log_gets_everything_in_key_order_despite_failures(variant, dsn, monkeypatch):
    monkeypatch.setattr("ergon_framework.task.relay.RETRY_DELAY_SECONDS", 0.05)
    log = FailingLog()
    with open_queue(dsn) as source, open_queue(dsn, source.name) as observer:
        dispatch_all(dsn, source)
        second = PostgresQueue(source.name, dsn=dsn, lease=29.0)
        run_relays(variant, [make_relay(variant, source, log), make_relay(variant, second, log)], observer)
    transactions = [record for record, _ in log.records.partitions[0]]
    assert group_by_key(transactions) == {f"k{key}": list(range(PER_KEY)) for key in range(KEY_COUNT)}
    assert {(one.source, dict(one.trace)["traceparent"], one.correlation) for one in transactions} == {
        (source.name, PARENT["traceparent"], f"case-{key}") for key in range(KEY_COUNT)
    }
    assert {one.attempts for one in transactions} == {0}


@pytest.mark.spec("CNN-15")
def test_another_database_gets_everything_in_key_order(variant, dsn, other_dsn, monkeypatch):
    monkeypatch.setattr("ergon_framework.task.relay.RETRY_DELAY_SECONDS", 0.05)
    with open_queue(dsn) as source, open_queue(dsn, source.name) as observer, open_queue(other_dsn) as target_queue:
        dispatch_all(dsn, source)
        target = FailingQueue(target_queue.name, dsn=other_dsn)
        run_relays(variant, [make_relay(variant, source, target)], observer)
        transactions = list(itertools.chain.from_iterable(iter(lambda: fetch_and_ack(target_queue), [])))
    assert group_by_key(transactions) == {f"k{key}": list(range(PER_KEY)) for key in range(KEY_COUNT)}
    assert {(one.source, dict(one.trace)["traceparent"], one.correlation) for one in transactions} == {
        (source.name, PARENT["traceparent"], f"case-{key}") for key in range(KEY_COUNT)
    }


@pytest.mark.spec("CNN-15")
def test_key_order_is_kept_while_many_dispatch_and_several_relays_run(variant, dsn, monkeypatch):
    monkeypatch.setattr("ergon_framework.task.relay.RETRY_DELAY_SECONDS", 0.05)
    log = FailingLog()
    with open_queue(dsn) as source, open_queue(dsn, source.name) as observer:
        others = [PostgresQueue(source.name, dsn=dsn, lease=lease) for lease in (28.0, 29.0)]
        tasks = [make_relay(variant, queue, log) for queue in (source, *others)]
        run_relays(variant, tasks, observer, producing=make_producers(dsn, observer))
    transactions = [record for record, _ in log.records.partitions[0]]
    assert group_by_key(transactions) == {f"k{key}": list(range(PER_KEY)) for key in range(KEY_COUNT)}


@pytest.mark.spec("CNN-15")
def test_a_relay_that_dies_between_dispatch_and_ack_sends_again_under_the_same_id(dsn, other_dsn):
    with open_queue(dsn) as source, open_queue(other_dsn, inbox=True) as target:
        source.dispatch([Transaction(id="order-7")])
        [delivery] = source.fetch_transactions(1)
        target.dispatch([delivery.transaction])  # and then the process is gone
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("update ergon.worker set alive_until = now() - interval '1 s'")
        second = PostgresQueue(source.name, dsn=dsn, lease=29.0)
        policy = ConsumerPolicy.load({"loop": {"limit": 1, "streaming": True}})
        relay(second, target).run(policy)
        first, again = target.fetch_transactions(1), target.fetch_transactions(1)
        assert [one.transaction.id for one in (*first, *again)] == ["order-7", "order-7"]


def test_a_transaction_that_waits_for_the_target_blocks_later_ones_of_its_key(dsn):
    """A transaction that waits for its next attempt is not overtaken by others of the same key."""
    log = MemoryLog("log")
    is_called = threading.Event()

    class UnavailableLog(MemoryLog):
        def dispatch(self, transactions):
            is_called.set()
            raise ConnectionLostError("down")

    policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 1}}}})
    with open_queue(dsn) as source:
        source.dispatch([Transaction(id="first", key="k"), Transaction(id="second", key="k"), Transaction(id="free")])
        relay(source, UnavailableLog("down")).run(policy)
        assert is_called.is_set()
        source.dispatch([Transaction(id="third", key="k")])
        report = relay(source, log).run(policy)
        assert report.started == 0
        assert source.depth().delayed >= 2
