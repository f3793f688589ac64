"""Check RabbitMQ with the relay from PostgreSQL, ``ergon run`` and ``ergon dlq``."""

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
from ergon_framework.task.relay import relay, relay_async
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from tests.integration.running import ERGON, TIMEOUT_SECONDS, ErgonProcess

pytestmark = pytest.mark.invariant

TRANSACTION_COUNT = 60
POLICY = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.05}}})

APP_MODULE = """
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
    queue = RabbitMQQueue(name)
    queue.open()
    yield queue
    queue.close()


def drain(queue, count):
    transactions, deadline = {}, time.monotonic() + TIMEOUT_SECONDS
    while len(transactions) < count:
        assert time.monotonic() < deadline, f"{len(transactions)} of {count} came"
        batch = queue.fetch_transactions(50, wait=0.2)
        queue.settle([(delivery, Ack()) for delivery in batch])
        transactions |= {delivery.transaction.id: delivery.transaction for delivery in batch}
    return transactions


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("variant", ["sync", "async"])
def test_a_relay_moves_everything_from_postgres(database, queue, variant):
    source = PostgresQueue("outbox", dsn=database)
    source.dispatch(
        [Transaction({"n": n}, id=f"order-{n}", correlation=f"basket-{n}") for n in range(TRANSACTION_COUNT)]
    )
    make_relay = relay if variant == "sync" else relay_async
    task = make_relay(source, queue, policy=POLICY)
    run = task.run if variant == "sync" else lambda: asyncio.run(task.run())
    thread = threading.Thread(target=run)
    thread.start()
    try:
        transactions = drain(queue, TRANSACTION_COUNT)
    finally:
        task.stop()
        thread.join(TIMEOUT_SECONDS)
    source.close()
    assert {tx.correlation for tx in transactions.values()} == {f"basket-{n}" for n in range(TRANSACTION_COUNT)}


@pytest.mark.spec("RUN-01")
def test_ergon_run_consumes_and_stops(queue, tmp_path):
    queue.dispatch([Transaction({"n": n}, id=f"order-{n}") for n in range(3)])
    with ErgonProcess(tmp_path, APP_MODULE) as worker:
        for _ in range(3):
            worker.wait_for("charged")
        worker.send_signal(signal.SIGTERM)
        code, _ = worker.wait_for_exit()
    assert code == 0, worker.output
    assert sorted(line for line in worker.output if "charged" in line) == [f"charged {n}" for n in range(3)]
    assert not queue.fetch_transactions(5, wait=0.5)


def run_ergon(folder, *arguments):
    result = subprocess.run([*ERGON, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.spec("CNN-08")
def test_ergon_dlq_lists_replays_and_discards(queue, tmp_path):
    (tmp_path / "app.py").write_text(APP_MODULE.partition("def charge")[0], encoding="utf-8")
    queue.dispatch([Transaction({"n": n}, id=f"order-{n}") for n in range(3)])
    deliveries = []
    while len(deliveries) < 3:
        deliveries += queue.fetch_transactions(3, wait=0.2)
    queue.settle([(delivery, DeadLetter("declined")) for delivery in deliveries])
    records = [json.loads(line) for line in run_ergon(tmp_path, "dlq", "list", "app:orders", "--json").splitlines()]
    assert sorted(record["envelope"]["id"] for record in records) == ["order-0", "order-1", "order-2"]
    run_ergon(tmp_path, "dlq", "discard", "app:orders", "--id", "order-1", "--yes")
    run_ergon(tmp_path, "dlq", "replay", "app:orders", "--all")
    assert sorted(drain(queue, 2)) == ["order-0", "order-2"]
    assert run_ergon(tmp_path, "dlq", "list", "app:orders", "--json") == ""
