"""One poisoned transaction among many, which ends every process that touches it: one dead letter, and no other."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.transaction import Transaction
from tests.integration.redises import Queues, running, stream

COUNT = 500
POISONED = 66
PATIENCE = 90.0
MAX_DELIVERIES = 3

WORKER = """
import asyncio, os, sys, time
from ergon_framework import *
from ergon_framework.connectors.redis import RedisQueue

flavour, url, name, max_deliveries, poisoned_code = sys.argv[1:]
queue = RedisQueue(name, url=url, lease=2.0)
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
def test_one_poison_among_five_hundred_gives_exactly_one_dead_letter(flavour):
    with running() as server, server.client() as client:
        queue = Queues(server)(f"poison-{flavour}")
        # In the middle of a batch: those before it have started, those behind it are held.
        queue.dispatch([Transaction(f"order-{n}", {"poison": n == 250}) for n in range(COUNT)])
        crashes, until = 0, time.monotonic() + PATIENCE
        command = [sys.executable, "-c", WORKER, flavour, server.url, queue.name, str(MAX_DELIVERIES), str(POISONED)]
        process = subprocess.Popen(command)
        try:
            while client.xlen(stream(queue.name)):
                assert time.monotonic() < until, f"{queue.depth()} after {crashes} crashes"
                if process.poll() is not None:
                    assert process.returncode == POISONED
                    crashes += 1
                    process = subprocess.Popen(command)
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        dead = queue.list_dead(DeadLetterQuery(), limit=COUNT)
        queue.close()
    assert [(letter.id, letter.reason) for letter in dead] == [("order-250", "max_deliveries")]
    assert crashes == MAX_DELIVERIES
