"""Messages that are too large, and messages that end the process before it has decoded them."""

from __future__ import annotations

import subprocess
import time
import uuid

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, SettleResult
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.codec import MAX_BYTES, JsonCodec
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.transaction import Transaction
from tests.integration.brokers import ADDRESSES, BROKERS, is_empty
from tests.integration.running import ERGON

LARGE = 5 * MAX_BYTES
PATIENCE = 120.0
#: As long as a dead worker keeps its claims; RabbitMQ sees at once that the worker is gone.
LEASE = 2.0
MAX_DELIVERIES = 3
POISONED = 66

MAKE = {
    "postgres": lambda address, name, **options: PostgresQueue(name, dsn=address, **options),
    "rabbitmq": lambda address, name, **options: RabbitMQQueue(name, url=address, **options),
    "nats": lambda address, name, **options: NatsQueue(name, url=address, **options),
    "redis": lambda address, name, **options: RedisQueue(name, url=address, **options),
}
#: The server of NATS refuses what is larger than its max_payload, which is the limit of the codec.
TELLING = [broker for broker in BROKERS if broker != "nats"]


@pytest.fixture
def address(request, broker):
    """The server of the broker; some fixtures start one for each call."""
    return ADDRESSES[broker](request)


@pytest.fixture
def queues(address):
    """Make queues of one broker, all of one name."""
    name, made = f"orders_{uuid.uuid4().hex[:8]}", []

    def make(broker, **options):
        queue = as_sync(MAKE[broker](address, name, **options))
        queue.open()
        made.append(queue)
        return queue

    yield make
    for queue in made:
        queue.close()


def fetch_all(queue, count):
    """Fetch until *count* deliveries are there; return them by fetch."""
    fetches, until = [], time.monotonic() + PATIENCE
    while sum(map(len, fetches)) < count:
        assert time.monotonic() < until, f"{[len(found) for found in fetches]} of {count}"
        fetches.append(queue.fetch_transactions(count, wait=1.0))
    return [found for found in fetches if found]


@pytest.mark.spec("SEC-14")
@pytest.mark.parametrize("broker", TELLING)
def test_a_body_over_the_limit_is_dead_lettered_without_being_loaded(broker, queues):
    wide = queues(broker, codec=JsonCodec(max_bytes=2 * LARGE))
    wide.dispatch([Transaction("before"), Transaction("large", "x" * LARGE, type="order"), Transaction("after")])
    wide.close()
    queue = queues(broker)
    found = {each.transaction.id: each for fetch in fetch_all(queue, 3) for each in fetch}
    large = found.pop("large")
    assert large.transaction.payload is None
    assert str(LARGE + 2) in str(large.error)
    assert str(MAX_BYTES) in str(large.error)
    assert queue.settle([(large, DeadLetter("undecodable"))]) == [SettleResult.SETTLED]
    assert queue.settle([(each, Ack()) for each in found.values()]) == [SettleResult.SETTLED] * 2
    assert is_empty(queue.depth())
    # Listed by its size, and whole for a codec that admits it.
    [record] = queue.list_dead(DeadLetterQuery())
    assert (record.id, record.reason, record.size) == ("large", "undecodable", LARGE + 2)
    assert (record.raw, record.payload) == (None, None)
    queue.close()
    wide = queues(broker, codec=JsonCodec(max_bytes=2 * LARGE))
    [record] = wide.list_dead(DeadLetterQuery())
    assert record.size is None
    wide.replay_dead([record.place])
    [[again]] = fetch_all(wide, 1)
    assert (again.transaction.id, len(again.transaction.payload), again.error) == ("large", LARGE, None)
    assert again.transaction.type == "order"
    wide.settle([(again, Ack())])


@pytest.mark.spec("SEC-14")
@pytest.mark.parametrize("broker", BROKERS)
def test_one_fetch_loads_at_most_its_bytes(broker, queues):
    queue = queues(broker, max_fetch_bytes=1_000_000)
    sizes = {f"order-{number}": 400_000 if number % 2 else 300_000 for number in range(11)}
    queue.dispatch([Transaction(name, "x" * size) for name, size in sizes.items()])
    fetches = fetch_all(queue, len(sizes))
    found = [each.transaction.id for fetch in fetches for each in fetch]
    assert sorted(found) == sorted(sizes)
    assert max(sum(len(each.transaction.payload) for each in fetch) for fetch in fetches) <= 1_000_000
    assert all(each.deliveries == 1 for fetch in fetches for each in fetch)
    assert set(queue.settle([(each, Ack()) for fetch in fetches for each in fetch])) == {SettleResult.SETTLED}
    assert is_empty(queue.depth())


@pytest.mark.spec("SEC-14")
@pytest.mark.parametrize("broker", BROKERS)
def test_a_message_over_the_bytes_of_a_fetch_is_fetched_by_itself(broker, queues):
    queue = queues(broker, max_fetch_bytes=100_000)
    queue.dispatch([Transaction("a"), Transaction("large", "x" * 500_000), Transaction("b")])
    fetches = fetch_all(queue, 3)
    assert [each.transaction.id for fetch in fetches if len(fetch) == 1 for each in fetch].count("large") == 1
    queue.settle([(each, Ack()) for fetch in fetches for each in fetch])
    assert is_empty(queue.depth())


# -- a process that ends while it decodes --------------------------------------------------------------

WORKER = """
import os, time
from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.{module} import {queue}

class PoisonedCodec(JsonCodec):
    def decode(self, body, headers, **more):
        if headers.get("ergon-id") == "poison":
            os._exit({poisoned})
        return super().decode(body, headers, **more)

policy = ConsumerPolicy.load({{
    "loop": {{"streaming": True, "concurrency": {{"value": 20}}, "batch": {{"size": 20}},
              "empty_queue": {{"backoff": 0.05, "cap": 0.05}}, "max_deliveries": {max_deliveries}}},
}})

@consumer({queue}({name!r}, codec=PoisonedCodec(), {options}), policy=policy)
def handle(order):
    time.sleep(0.2)
"""
WRITTEN = {
    "postgres": ("postgres", "PostgresQueue", "dsn={address!r}, lease={lease}"),
    "rabbitmq": ("rabbitmq", "RabbitMQQueue", "url={address!r}"),
    "nats": ("nats", "NatsQueue", "url={address!r}, lease={lease}"),
    "redis": ("redis", "RedisQueue", "url={address!r}, lease={lease}"),
}


@pytest.fixture
def worker_of(tmp_path, monkeypatch):
    """Start workers of a program; the last one is ended with the test."""
    started = []
    monkeypatch.chdir(tmp_path)

    def write(program):
        (tmp_path / "app.py").write_text(program, encoding="utf-8")
        return start

    def start():
        started.append(subprocess.Popen([*ERGON, "run", "app:handle"], stdout=subprocess.DEVNULL))
        return started[-1]

    yield write
    for process in started[-1:]:
        process.terminate()
        process.wait(PATIENCE)


@pytest.mark.invariant
@pytest.mark.spec("SEC-13")
@pytest.mark.parametrize(
    "broker, keyed",
    [*((broker, False) for broker in BROKERS), ("postgres", True)],
    ids=[*BROKERS, "postgres-keyed"],
)
def test_a_message_that_ends_the_process_in_decode_is_dead_lettered_at_its_limit(
    broker, keyed, queues, worker_of, address
):
    lease = {} if broker == "rabbitmq" else {"lease": LEASE}
    queue = queues(broker, **lease)
    module, kind, options = WRITTEN[broker]
    options = options.format(address=address, lease=LEASE)
    values = {"module": module, "queue": kind, "name": queue.name, "options": options}
    start = worker_of(WORKER.format(**values, max_deliveries=MAX_DELIVERIES, poisoned=POISONED))
    ids = [*(f"before-{number}" for number in range(5)), "poison", *(f"after-{number}" for number in range(5))]
    queue.dispatch([Transaction(name, {}, key=f"key-{name}" if keyed else None) for name in ids])
    worker, crashes, until = start(), 0, time.monotonic() + PATIENCE
    while not (is_empty(depth := queue.depth()) and depth.dead):
        assert time.monotonic() < until, f"{depth} after {crashes} crashes"
        time.sleep(0.02)
        if worker.poll() is not None:
            assert worker.returncode == POISONED
            worker, crashes = start(), crashes + 1
    assert [(each.id, each.reason, each.deliveries) for each in queue.list_dead(DeadLetterQuery())] == [
        ("poison", "max_deliveries", MAX_DELIVERIES + 1)
    ]
    # A lease that ends under a worker that stands still is a delivery too.
    assert 1 <= crashes <= MAX_DELIVERIES
