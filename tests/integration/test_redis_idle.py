"""Check the processor time of waiting on twenty empty queues in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.redises import run_server

IDLE_PROGRAM = """
import asyncio, sys, time
from ergon_framework import *
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.worker.policies import EmptyQueuePolicy

# From the first look on they wait as long as their policy lets them by and by.
longest = EmptyQueuePolicy().cap
policy = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": longest, "cap": longest}}})

class Looked(RedisQueue):
    def __init__(self, number):
        super().__init__(f"idle-{number}", url=sys.argv[1])
        self.once = asyncio.Event()

    async def fetch_transactions_async(self, batch_size, **extra):
        found = await super().fetch_transactions_async(batch_size, **extra)
        self.once.set()
        return found

async def main():
    queues, tasks = [Looked(number) for number in range(20)], []
    for queue in queues:
        @consumer(queue)
        async def task(order): ...
        tasks.append(task)
    loops = [asyncio.create_task(task.consume_transactions(policy)) for task in tasks]
    for queue in queues:
        await queue.once.wait()
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(2 * longest)
    print((time.process_time() - cpu) / (time.perf_counter() - began))
    for task in tasks:
        task.stop()
    await asyncio.gather(*loops)

asyncio.run(main())
"""


@pytest.mark.spec("CNN-10")
def test_twenty_idle_queues_use_less_than_a_hundredth_of_a_core():
    with run_server(appendonly="no") as server:
        result = subprocess.run(
            [sys.executable, "-c", IDLE_PROGRAM, server.url], capture_output=True, text=True, check=True
        )
    assert float(result.stdout) < 0.01
