"""Tasks on a Redis stream as a team runs them: ergon run, ergon dlq, and a relay from PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time

import pytest

from ergon_framework.connectors.base import DeadLetter
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.relay import relay, relay_async
from ergon_framework.transaction import Transaction
from tests.integration.redises import Queues, running, until
from tests.integration.running import ERGON, Running
from tests.servers.databases import migrated

APP = """
from ergon_framework.connectors.redis import RedisQueue

orders = RedisQueue("{name}", url="{url}")

@consumer(orders, policy=policy(streaming=True, empty_queue={{"backoff": 5.0}}))
{word}def task(order):
    say(f"handled {{order['number']}}")
"""
COUNT = 60
POLICY = ConsumerPolicy.load(
    {
        "loop": {"concurrency": {"value": 8}, "streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.05}},
        "steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0.002}}},
    }
)


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.fixture
def queues(server):
    made = Queues(server)
    yield made
    made.close()


def some(count):
    return [Transaction(f"tx-{number}", {"number": number}) for number in range(count)]


@pytest.mark.spec("CNN-01", "RUN-01")
@pytest.mark.parametrize("word", ["", "async "])
def test_ergon_run_handles_what_comes_and_leaves_at_a_signal(tmp_path, server, queues, word):
    queue = queues(f"run-{word.strip()}")
    queue.dispatch(some(1))
    with Running(tmp_path, APP.format(name=queue.name, url=server.url, word=word)) as process:
        process.wait_for("handled 0")
        queue.dispatch([Transaction("late", {"number": "late"})])
        began = time.monotonic()
        process.wait_for("handled late")
        # Woken: by itself it would have looked after five seconds.
        assert time.monotonic() - began < 4.0
        process.send()
        assert process.ended()[0] == 0
    depth = queue.depth()
    assert (depth.ready, depth.in_flight) == (0, 0)


@pytest.mark.spec("CNN-08")
def test_ergon_dlq_lists_replays_and_discards(tmp_path, server, queues):
    queue = queues("dlq")
    queue.dispatch(some(3))
    queue.settle([(each, DeadLetter("sold_out")) for each in queue.fetch_transactions(3)])
    (tmp_path / "app.py").write_text(
        "from ergon_framework import consumer\nfrom ergon_framework.connectors.redis import RedisQueue\n\n"
        'orders = RedisQueue("dlq")\n\n@consumer(orders)\ndef task(order):\n    pass\n',
        encoding="utf-8",
    )

    def dlq(*words):
        command = [*ERGON, "dlq", words[0], "app:task", *words[1:]]
        env = {**os.environ, "ERGON_REDIS__URL": server.url}
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    listed = [json.loads(line) for line in dlq("list", "--json").splitlines()]
    assert [record["envelope"]["id"] for record in listed] == ["tx-0", "tx-1", "tx-2"]
    dlq("replay", "--id", "tx-1")
    dlq("discard", "--id", "tx-2", "--yes")
    assert [record.id for record in queue.list_dead(DeadLetterQuery())] == ["tx-0"]
    assert [each.transaction.id for each in queue.fetch_transactions(5)] == ["tx-1"]


@pytest.mark.spec("CNN-15")
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_relay_brings_everything_from_postgresql(postgres, queues, flavour):
    source = PostgresQueue(f"outbox-{flavour}", dsn=migrated(postgres))
    target = queues(f"relayed-{flavour}")
    source.dispatch(some(COUNT))
    made = (relay if flavour == "sync" else relay_async)(source, target)
    if flavour == "sync":
        thread = threading.Thread(target=lambda: made.consume_transactions(POLICY))
    else:
        thread = threading.Thread(target=lambda: asyncio.run(made.consume_transactions(POLICY)))
    thread.start()
    try:
        until(lambda: target.depth().ready == COUNT, "all arrive", within=30.0)
        until(lambda: source.depth().in_flight == 0, "all are acked", within=30.0)
    finally:
        made.stop()
        thread.join()
    found = target.fetch_transactions(COUNT)
    assert sorted(each.transaction.id for each in found) == sorted(each.id for each in some(COUNT))
    source.close()
