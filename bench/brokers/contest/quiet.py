"""The cost of waiting: 20 empty queues in one worker, and the start delay of a message, idle and at half load.

python bench/brokers/contest/quiet.py URL PER_SECOND
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time

import uvloop
from ours import AsyncTask, build_policy, connect_queue
from stopwatch import PAYLOAD, QUEUE_NAME

from ergon_framework.connectors.bridge import as_async

QUEUE_COUNT = 20
#: Seconds until all loops wait for the maximum of their policy, and seconds of the measurement.
SETTLE_SECONDS = 8.0
MEASURE_SECONDS = 10.0
MESSAGE_COUNT = 100


class TimedTask(AsyncTask):
    def __init__(self):
        self.began = {}
        self.started = asyncio.Event()

    async def process_transaction(self, transaction):
        self.began[transaction.id] = time.perf_counter()
        self.started.set()


def create_task(url, name):
    task = TimedTask()
    task.connector = connect_queue(url, name)
    return task


async def measure_idle(url):
    tasks = [create_task(url, f"{QUEUE_NAME}-idle-{number}") for number in range(QUEUE_COUNT)]
    loops = [asyncio.create_task(task.consume_transactions(build_policy(10, streaming=True))) for task in tasks]
    await asyncio.sleep(SETTLE_SECONDS)
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(MEASURE_SECONDS)
    cpu_share = (time.process_time() - cpu) / (time.perf_counter() - began)
    sender, delays_ms = as_async(connect_queue(url, f"{QUEUE_NAME}-idle-0")), []
    for _ in range(MESSAGE_COUNT):
        transaction = sender.transaction(PAYLOAD)
        before = time.perf_counter()
        await sender.dispatch_async([transaction])
        await asyncio.wait_for(tasks[0].started.wait(), 30)
        tasks[0].started.clear()
        delays_ms.append((tasks[0].began[transaction.id] - before) * 1e3)
        await asyncio.sleep(0.05)
    for task in tasks:
        task.stop()
    await asyncio.gather(*loops)
    for connector in [sender, *(as_async(task.connector) for task in tasks)]:
        await connector.close_async()
    return cpu_share, delays_ms


async def measure_half_load(url, rate):
    task = create_task(url, f"{QUEUE_NAME}-half")
    loop = asyncio.create_task(task.consume_transactions(build_policy(100, streaming=True)))
    await asyncio.sleep(1)
    sender, sent_times, deadline = (
        as_async(connect_queue(url, f"{QUEUE_NAME}-half")),
        {},
        time.perf_counter() + MEASURE_SECONDS,
    )
    while (now := time.perf_counter()) < deadline:
        batch = [sender.transaction(PAYLOAD) for _ in range(max(1, round(rate * 0.01)))]
        sent_times |= dict.fromkeys((transaction.id for transaction in batch), time.perf_counter())
        await sender.dispatch_async(batch)
        await asyncio.sleep(max(0.0, now + 0.01 - time.perf_counter()))
    while len(task.began) < len(sent_times):
        task.started.clear()
        await asyncio.wait_for(task.started.wait(), 60)
    task.stop()
    await loop
    await sender.close_async()
    await as_async(task.connector).close_async()
    return [(task.began[transaction_id] - sent_time) * 1e3 for transaction_id, sent_time in sent_times.items()], len(
        sent_times
    ) / MEASURE_SECONDS


def quantile(values, share):
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)], 2)


async def main():
    url, rate = sys.argv[1], float(sys.argv[2])
    cpu_share, delays_ms = await measure_idle(url)
    half_load_delays_ms, reached_rate = await measure_half_load(url, rate)
    result = {"idle": cpu_share, "start_p50_ms": quantile(delays_ms, 0.5), "start_p99_ms": quantile(delays_ms, 0.99)}
    result |= {
        "half_per_second": round(reached_rate),
        "half_p50_ms": quantile(half_load_delays_ms, 0.5),
        "half_p99_ms": quantile(half_load_delays_ms, 0.99),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    uvloop.run(main())
