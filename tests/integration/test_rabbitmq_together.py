"""RabbitMQ with the rest: a relay from PostgreSQL, ``ergon run`` and ``ergon dlq``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
import uuid

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.relay import relay, relay_async
from ergon_framework.transaction import Transaction
from tests.integration.running import ERGON, PATIENCE, Running

pytestmark = pytest.mark.invariant

COUNT = 60
POLICY = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.05}}})

APP = """
import os
from ergon_framework.connectors.rabbitmq import RabbitMQQueue

orders = RabbitMQQueue(os.environ["QUEUE"])

def charge(order):
    # In one piece: several threads say it at once.
    os.write(1, f"charged {order['n']}\\n".encode())

task = consumer(orders, policy=policy(concurrency=4))(charge)
"""


@pytest.fixture
def name(rabbitmq, monkeypatch):
    monkeypatch.setenv("ERGON_RABBITMQ__URL", rabbitmq)
    monkeypatch.setenv("QUEUE", f"together-{uuid.uuid4().hex[:8]}")
    return os.environ["QUEUE"]


@pytest.fixture
def queue(name):
    made = RabbitMQQueue(name)
    made.open()
    yield made
    made.close()


def drained(queue, count):
    found, end = {}, time.monotonic() + PATIENCE
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} came"
        batch = queue.fetch_transactions(50, wait=0.2)
        queue.settle([(delivery, Ack()) for delivery in batch])
        found |= {delivery.transaction.id: delivery.transaction for delivery in batch}
    return found


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_relay_brings_everything_from_postgres(database, queue, flavour):
    source = PostgresQueue("outbox", dsn=database)
    source.dispatch([Transaction(f"order-{n}", {"n": n}, correlation=f"basket-{n}") for n in range(COUNT)])
    make = relay if flavour == "sync" else relay_async
    task = make(source, queue, policy=POLICY)
    running = task.run if flavour == "sync" else lambda: asyncio.run(task.run())
    thread = threading.Thread(target=running)
    thread.start()
    try:
        found = drained(queue, COUNT)
    finally:
        task.stop()
        thread.join(PATIENCE)
    source.close()
    assert {tx.correlation for tx in found.values()} == {f"basket-{n}" for n in range(COUNT)}


@pytest.mark.spec("RUN-01")
def test_ergon_run_consumes_and_stops(queue, tmp_path):
    queue.dispatch([Transaction(f"order-{n}", {"n": n}) for n in range(3)])
    with Running(tmp_path, APP) as worker:
        for _ in range(3):
            worker.wait_for("charged")
        worker.send(signal.SIGTERM)
        code, _ = worker.ended()
    assert code == 0, worker.said
    assert sorted(line for line in worker.said if "charged" in line) == [f"charged {n}" for n in range(3)]
    assert not queue.fetch_transactions(5, wait=0.5)


def ergon(folder, *words):
    done = subprocess.run([*ERGON, *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.spec("CNN-08")
def test_ergon_dlq_lists_replays_and_discards(queue, tmp_path):
    (tmp_path / "app.py").write_text(APP.partition("def charge")[0], encoding="utf-8")
    queue.dispatch([Transaction(f"order-{n}", {"n": n}) for n in range(3)])
    held = []
    while len(held) < 3:
        held += queue.fetch_transactions(3, wait=0.2)
    queue.settle([(delivery, DeadLetter("declined")) for delivery in held])
    listed = [json.loads(line) for line in ergon(tmp_path, "dlq", "list", "app:orders", "--json").splitlines()]
    assert sorted(record["envelope"]["id"] for record in listed) == ["order-0", "order-1", "order-2"]
    ergon(tmp_path, "dlq", "discard", "app:orders", "--id", "order-1", "--yes")
    ergon(tmp_path, "dlq", "replay", "app:orders", "--all")
    assert sorted(drained(queue, 2)) == ["order-0", "order-2"]
    assert ergon(tmp_path, "dlq", "list", "app:orders", "--json") == ""
