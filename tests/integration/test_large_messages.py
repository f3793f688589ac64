"""Messages that are too large, and messages that end the process before they are decoded."""

from __future__ import annotations

import subprocess
import time
import uuid

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, SettleResult
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.codec import MAX_BYTES, JsonCodec
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.transaction import Transaction
from tests.integration.brokers import ADDRESSES, BROKERS, is_empty
from tests.integration.running import ERGON

LARGE_BODY_CHARS = 5 * MAX_BYTES
TIMEOUT_SECONDS = 120.0
#: Seconds that a killed worker keeps its claims; RabbitMQ notices immediately that the worker has exited.
LEASE_SECONDS = 2.0
MAX_DELIVERIES = 3
POISON_EXIT_CODE = 66

QUEUE_FACTORIES = {
    "postgres": lambda address, name, **options: PostgresQueue(name, dsn=address, **options),
    "rabbitmq": lambda address, name, **options: RabbitMQQueue(name, url=address, **options),
    "nats": lambda address, name, **options: NatsQueue(name, url=address, **options),
    "redis": lambda address, name, **options: RedisQueue(name, url=address, **options),
}
#: NATS is absent: its server rejects messages over its max_payload, which is the limit of the codec.
SIZE_REPORTING_BROKERS = [broker for broker in BROKERS if broker != "nats"]


@pytest.fixture
def address(request, broker):
    """The server of the broker; some fixtures start one for each call."""
    return ADDRESSES[broker](request)


@pytest.fixture
def make_queue(address):
    """A factory for connectors of one broker, all with the same queue name."""
    name, opened_queues = f"orders_{uuid.uuid4().hex[:8]}", []

    def open_queue(broker, **options):
        queue = as_sync(QUEUE_FACTORIES[broker](address, name, **options))
        queue.open()
        opened_queues.append(queue)
        return queue

    yield open_queue
    for queue in opened_queues:
        queue.close()


def fetch_all(queue, count):
    """Fetch until *count* deliveries have arrived; return them by fetch."""
    fetches, deadline = [], time.monotonic() + TIMEOUT_SECONDS
    while sum(map(len, fetches)) < count:
        assert time.monotonic() < deadline, f"{[len(fetch) for fetch in fetches]} of {count}"
        fetches.append(queue.fetch_transactions(count, wait=1.0))
    return [fetch for fetch in fetches if fetch]


@pytest.mark.spec("SEC-14")
@pytest.mark.parametrize("broker", SIZE_REPORTING_BROKERS)
def test_a_body_over_the_limit_is_dead_lettered_without_being_loaded(broker, make_queue):
    wide_queue = make_queue(broker, codec=JsonCodec(max_bytes=2 * LARGE_BODY_CHARS))
    wide_queue.dispatch(
        [
            Transaction(id="before"),
            Transaction("x" * LARGE_BODY_CHARS, id="large", type="order"),
            Transaction(id="after"),
        ]
    )
    wide_queue.close()
    queue = make_queue(broker)
    deliveries = {each.transaction.id: each for fetch in fetch_all(queue, 3) for each in fetch}
    large = deliveries.pop("large")
    assert large.transaction.payload is None
    assert str(LARGE_BODY_CHARS + 2) in str(large.error)
    assert str(MAX_BYTES) in str(large.error)
    assert queue.settle([(large, DeadLetter("undecodable"))]) == [SettleResult.SETTLED]
    assert queue.settle([(each, Ack()) for each in deliveries.values()]) == [SettleResult.SETTLED] * 2
    assert is_empty(queue.depth())
    # Listed by its size, and returned completely for a codec that admits it.
    [record] = queue.list_dead(DeadLetterQuery())
    assert (record.id, record.reason, record.size) == ("large", "undecodable", LARGE_BODY_CHARS + 2)
    assert (record.raw, record.payload) == (None, None)
    queue.close()
    wide_queue = make_queue(broker, codec=JsonCodec(max_bytes=2 * LARGE_BODY_CHARS))
    [record] = wide_queue.list_dead(DeadLetterQuery())
    assert record.size is None
    wide_queue.replay_dead([record.handle])
    [[replayed]] = fetch_all(wide_queue, 1)
    assert (replayed.transaction.id, len(replayed.transaction.payload), replayed.error) == (
        "large",
        LARGE_BODY_CHARS,
        None,
    )
    assert replayed.transaction.type == "order"
    wide_queue.settle([(replayed, Ack())])


@pytest.mark.spec("SEC-14")
@pytest.mark.parametrize("broker", BROKERS)
def test_one_fetch_loads_at_most_its_bytes(broker, make_queue):
    queue = make_queue(broker, max_fetch_bytes=1_000_000)
    sizes = {f"order-{number}": 400_000 if number % 2 else 300_000 for number in range(11)}
    queue.dispatch([Transaction("x" * size, id=name) for name, size in sizes.items()])
    fetches = fetch_all(queue, len(sizes))
    ids = [each.transaction.id for fetch in fetches for each in fetch]
    assert sorted(ids) == sorted(sizes)
    assert max(sum(len(each.transaction.payload) for each in fetch) for fetch in fetches) <= 1_000_000
    assert all(each.deliveries == 1 for fetch in fetches for each in fetch)
    assert set(queue.settle([(each, Ack()) for fetch in fetches for each in fetch])) == {SettleResult.SETTLED}
    assert is_empty(queue.depth())


@pytest.mark.spec("SEC-14")
@pytest.mark.parametrize("broker", BROKERS)
def test_a_message_over_the_bytes_of_a_fetch_is_fetched_alone(broker, make_queue):
    queue = make_queue(broker, max_fetch_bytes=100_000)
    queue.dispatch([Transaction(id="a"), Transaction("x" * 500_000, id="large"), Transaction(id="b")])
    fetches = fetch_all(queue, 3)
    assert [each.transaction.id for fetch in fetches if len(fetch) == 1 for each in fetch].count("large") == 1
    queue.settle([(each, Ack()) for fetch in fetches for each in fetch])
    assert is_empty(queue.depth())


# -- a process that ends while it decodes --------------------------------------------------------------

WORKER_TEMPLATE = """
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
QUEUE_SOURCES = {
    "postgres": ("postgres", "PostgresQueue", "dsn={address!r}, lease={lease}"),
    "rabbitmq": ("rabbitmq", "RabbitMQQueue", "url={address!r}"),
    "nats": ("nats", "NatsQueue", "url={address!r}, lease={lease}"),
    "redis": ("redis", "RedisQueue", "url={address!r}, lease={lease}"),
}


@pytest.fixture
def write_program(tmp_path, monkeypatch):
    """A factory for workers of a program; the last worker is stopped with the test."""
    processes = []
    monkeypatch.chdir(tmp_path)

    def write(program):
        (tmp_path / "app.py").write_text(program, encoding="utf-8")
        return start_worker

    def start_worker():
        processes.append(subprocess.Popen([*ERGON, "run", "app:handle"], stdout=subprocess.DEVNULL))
        return processes[-1]

    yield write
    for process in processes[-1:]:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)


@pytest.mark.invariant
@pytest.mark.spec("SEC-13")
@pytest.mark.parametrize(
    "broker, keyed",
    [*((broker, False) for broker in BROKERS), ("postgres", True)],
    ids=[*BROKERS, "postgres-keyed"],
)
def test_a_message_that_ends_the_process_in_decode_is_dead_lettered_at_its_limit(
    broker, keyed, make_queue, write_program, address
):
    lease_options = {} if broker == "rabbitmq" else {"lease": LEASE_SECONDS}
    queue = make_queue(broker, **lease_options)
    module, class_name, options = QUEUE_SOURCES[broker]
    options = options.format(address=address, lease=LEASE_SECONDS)
    values = {"module": module, "queue": class_name, "name": queue.name, "options": options}
    start_worker = write_program(
        WORKER_TEMPLATE.format(**values, max_deliveries=MAX_DELIVERIES, poisoned=POISON_EXIT_CODE)
    )
    ids = [*(f"before-{number}" for number in range(5)), "poison", *(f"after-{number}" for number in range(5))]
    queue.dispatch([Transaction({}, id=name, key=f"key-{name}" if keyed else None) for name in ids])
    worker, crashes, deadline = start_worker(), 0, time.monotonic() + TIMEOUT_SECONDS
    while not (is_empty(depth := queue.depth()) and depth.dead):
        assert time.monotonic() < deadline, f"{depth} after {crashes} crashes"
        time.sleep(0.02)
        if worker.poll() is not None:
            assert worker.returncode == POISON_EXIT_CODE
            worker, crashes = start_worker(), crashes + 1
    assert [(each.id, each.reason, each.deliveries) for each in queue.list_dead(DeadLetterQuery())] == [
        ("poison", "max_deliveries", MAX_DELIVERIES + 1)
    ]
    # A lease that expires under a stalled worker is a delivery too.
    assert 1 <= crashes <= MAX_DELIVERIES
