"""Check tasks on a Redis stream as a team runs them: ergon run, ergon dlq, and a relay from PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time

import pytest

from ergon_framework.connectors.base import DeadLetter
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.task.relay import relay, relay_async
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from tests.integration.redises import QueueFactory, run_server, wait_until
from tests.integration.running import ERGON, ErgonProcess
from tests.servers.databases import create_migrated_database

APP_TEMPLATE = """
from ergon_framework.connectors.redis import RedisQueue

orders = RedisQueue("{name}", url="{url}")

@consumer(orders, policy=policy(streaming=True, empty_queue={{"backoff": 5.0}}))
{word}def task(order):
    say(f"handled {{order['number']}}")
"""
TRANSACTION_COUNT = 60
POLICY = ConsumerPolicy.load(
    {
        "loop": {"concurrency": {"value": 8}, "streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.05}},
        "steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.002}}},
    }
)


@pytest.fixture(scope="module")
def server():
    with run_server() as server:
        yield server


@pytest.fixture
def queues(server):
    queues = QueueFactory(server)
    yield queues
    queues.close()


def make_transactions(count):
    return [Transaction({"number": number}, id=f"tx-{number}") for number in range(count)]


@pytest.mark.spec("CNN-01", "RUN-01")
@pytest.mark.parametrize("word", ["", "async "])
def test_ergon_run_handles_arriving_messages_and_exits_at_a_signal(tmp_path, server, queues, word):
    queue = queues(f"run-{word.strip()}")
    queue.dispatch(make_transactions(1))
    with ErgonProcess(tmp_path, APP_TEMPLATE.format(name=queue.name, url=server.url, word=word)) as process:
        process.wait_for("handled 0")
        queue.dispatch([Transaction({"number": "late"}, id="late")])
        started_at = time.monotonic()
        process.wait_for("handled late")
        # It was notified: polling alone would have taken five seconds.
        assert time.monotonic() - started_at < 4.0
        process.send_signal()
        assert process.wait_for_exit()[0] == 0
    depth = queue.depth()
    assert (depth.ready, depth.in_flight) == (0, 0)


@pytest.mark.spec("CNN-08")
def test_ergon_dlq_lists_replays_and_discards(tmp_path, server, queues):
    queue = queues("dlq")
    queue.dispatch(make_transactions(3))
    queue.settle([(delivery, DeadLetter("sold_out")) for delivery in queue.fetch_transactions(3)])
    (tmp_path / "app.py").write_text(
        "from ergon_framework import consumer\nfrom ergon_framework.connectors.redis import RedisQueue\n\n"
        'orders = RedisQueue("dlq")\n\n@consumer(orders)\ndef task(order):\n    pass\n',
        encoding="utf-8",
    )

    def run_dlq(*arguments):
        command = [*ERGON, "dlq", arguments[0], "app:task", *arguments[1:]]
        env = {**os.environ, "ERGON_REDIS__URL": server.url}
        result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    records = [json.loads(line) for line in run_dlq("list", "--json").splitlines()]
    assert [record["envelope"]["id"] for record in records] == ["tx-0", "tx-1", "tx-2"]
    run_dlq("replay", "--id", "tx-1")
    run_dlq("discard", "--id", "tx-2", "--yes")
    assert [record.id for record in queue.list_dead(DeadLetterQuery())] == ["tx-0"]
    assert [delivery.transaction.id for delivery in queue.fetch_transactions(5)] == ["tx-1"]


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("variant", ["sync", "async"])
def test_a_relay_moves_everything_from_postgresql(postgres, queues, variant):
    source = PostgresQueue(f"outbox-{variant}", dsn=create_migrated_database(postgres))
    target = queues(f"relayed-{variant}")
    source.dispatch(make_transactions(TRANSACTION_COUNT))
    task = (relay if variant == "sync" else relay_async)(source, target)
    if variant == "sync":
        thread = threading.Thread(target=lambda: task.consume_transactions(POLICY))
    else:
        thread = threading.Thread(target=lambda: asyncio.run(task.consume_transactions(POLICY)))
    thread.start()
    try:
        wait_until(lambda: target.depth().ready == TRANSACTION_COUNT, "all arrive", within=30.0)
        wait_until(lambda: source.depth().in_flight == 0, "all are acked", within=30.0)
    finally:
        task.stop()
        thread.join()
    deliveries = target.fetch_transactions(TRANSACTION_COUNT)
    assert sorted(item.transaction.id for item in deliveries) == sorted(
        item.id for item in make_transactions(TRANSACTION_COUNT)
    )
    source.close()
