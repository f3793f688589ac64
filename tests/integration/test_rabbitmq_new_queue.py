"""Check that a consumer handles every message of a queue that was just created, exactly once, and then ends.

The number of runs is ERGON_RUNS; 1 by default.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter

import pytest

from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy

RUN_COUNT = int(os.environ.get("ERGON_RUNS", "1"))
MESSAGE_COUNT = 5_000
POLICY = ConsumerPolicy.load({"loop": {"concurrency": {"value": 20}}})


def run_threads(queue):
    handled = []

    class RecordingTask(ConsumerMixin):
        connector = queue

        def process_transaction(self, transaction):
            handled.append(transaction.id)

    return handled, RecordingTask().consume_transactions(POLICY)


def run_asyncio(queue):
    handled = []

    class RecordingTask(AsyncConsumerMixin):
        connector = queue

        async def process_transaction(self, transaction):
            handled.append(transaction.id)

    return handled, asyncio.run(RecordingTask().consume_transactions(POLICY))


@pytest.mark.spec("CNN-01", "CNN-11")
@pytest.mark.parametrize("run_number", range(RUN_COUNT))
@pytest.mark.parametrize("run_task", [run_threads, run_asyncio])
def test_every_message_of_a_new_queue_is_handled_once(rabbitmq, run_task, run_number):
    queue = RabbitMQQueue(f"new-{uuid.uuid4().hex[:8]}", url=rabbitmq)
    queue.dispatch([Transaction({"n": n}, id=f"order-{n}") for n in range(MESSAGE_COUNT)])
    handled, report = run_task(queue)
    depth = queue.depth()
    dead = queue.list_dead(DeadLetterQuery())
    queue.close()
    assert not dead
    assert report.stop_reason.value == "empty"
    assert (depth.ready, depth.in_flight, depth.dead) == (0, 0, 0)
    assert [name for name, count in Counter(handled).items() if count > 1] == []
    assert len(handled) == MESSAGE_COUNT
