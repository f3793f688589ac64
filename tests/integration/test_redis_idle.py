"""What waiting costs: twenty empty queues in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.redises import running

PROGRAM = """
import asyncio, sys, time
from ergon_framework import *
from ergon_framework.connectors.redis import RedisQueue

policy = ConsumerPolicy.load({"loop": {"streaming": True}})

async def main():
    tasks = []
    for number in range(20):
        @consumer(RedisQueue(f"idle-{number}", url=sys.argv[1]))
        async def task(order): ...
        tasks.append(task)
    loops = [asyncio.create_task(task.consume_transactions(policy)) for task in tasks]
    await asyncio.sleep(11)  # until they wait as long as their policy lets them
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(10)
    print((time.process_time() - cpu) / (time.perf_counter() - began))
    for task in tasks:
        task.stop()
    await asyncio.gather(*loops)

asyncio.run(main())
"""


@pytest.mark.spec("CNN-10")
def test_twenty_idle_queues_cost_less_than_a_hundredth_of_a_core():
    with running(appendonly="no") as server:
        ran = subprocess.run([sys.executable, "-c", PROGRAM, server.url], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 0.01
