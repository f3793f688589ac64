"""One poisoned transaction among many, which ends every process that touches it: one dead letter, and no other."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid

import pytest

from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.transaction import Transaction

COUNT = 500
POISONED = 66
PATIENCE = 90.0
MAX_DELIVERIES = 3

WORKER = """
import asyncio, os, sys, time
from ergon_framework import *
from ergon_framework.connectors.rabbitmq import RabbitMQQueue

flavour, url, name, max_deliveries, poisoned_code = sys.argv[1:]
queue = RabbitMQQueue(name, url=url)
policy = ConsumerPolicy.load({
    "loop": {"streaming": True, "concurrency": {"value": 100}, "batch": {"size": 100},
             "empty_queue": {"backoff": 0.05, "cap": 0.05}, "max_deliveries": int(max_deliveries)},
})

def poisoned(order):
    if order["poison"]:
        os._exit(int(poisoned_code))

if flavour == "threads":
    @consumer(queue, policy=policy)
    def handle(order):
        poisoned(order)
        time.sleep(0.02)
    handle.run()
else:
    @consumer(queue, policy=policy)
    async def handle(order):
        poisoned(order)
        await asyncio.sleep(0.02)
    asyncio.run(handle.run())
"""


@pytest.mark.spec("CNN-11", "CNN-04")
@pytest.mark.parametrize("flavour", ["threads", "async"])
def test_one_poison_among_five_hundred_gives_exactly_one_dead_letter(rabbitmq, flavour):
    name = f"poison-{uuid.uuid4().hex[:8]}"
    queue = RabbitMQQueue(name, url=rabbitmq)
    # In the middle of a batch: those before it have started, those behind it are held.
    queue.dispatch([Transaction(f"order-{n}", {"poison": n == 250}) for n in range(COUNT)])
    crashes, until, empty = 0, time.monotonic() + PATIENCE, 0
    command = [sys.executable, "-c", WORKER, flavour, rabbitmq, name, str(MAX_DELIVERIES), str(POISONED)]
    process = subprocess.Popen(command)
    try:
        # What the worker holds cannot be seen from here; it is done when it has buried the one and goes on living.
        while empty < 20:
            assert time.monotonic() < until, f"{queue.depth()} after {crashes} crashes"
            if process.poll() is not None:
                assert process.returncode == POISONED
                crashes += 1
                process = subprocess.Popen(command)
            depth = queue.depth()
            empty = empty + 1 if depth.ready == 0 and depth.dead else 0
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    dead = queue.list_dead(DeadLetterQuery(), limit=COUNT)
    left = queue.fetch_transactions(COUNT, wait=1.0)
    queue.close()
    assert [(letter.id, letter.reason) for letter in dead] == [("order-250", "max_deliveries")]
    assert not left
    assert crashes == MAX_DELIVERIES
