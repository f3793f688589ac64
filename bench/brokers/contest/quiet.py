"""What waiting costs: twenty empty queues in one worker, how soon a message starts, and how soon at half load.

python bench/brokers/contest/quiet.py URL PER_SECOND
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time

import uvloop
from ours import Async, policy, queue
from stopwatch import NAME, PAYLOAD

from ergon_framework.connectors.bridge import as_async

QUEUES = 20
#: Seconds until all wait as long as their policy lets them, and then for how long they are watched.
SETTLE = 8.0
SECONDS = 10.0
MESSAGES = 100


class Timed(Async):
    def __init__(self):
        self.began = {}
        self.started = asyncio.Event()

    async def process_transaction(self, transaction):
        self.began[transaction.id] = time.perf_counter()
        self.started.set()


def worker(url, name):
    task = Timed()
    task.connector = queue(url, name)
    return task


async def waiting(url):
    tasks = [worker(url, f"{NAME}-idle-{number}") for number in range(QUEUES)]
    loops = [asyncio.create_task(task.consume_transactions(policy(10, streaming=True))) for task in tasks]
    await asyncio.sleep(SETTLE)
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(SECONDS)
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    sender, late = as_async(queue(url, f"{NAME}-idle-0")), []
    for _ in range(MESSAGES):
        sent = sender.transaction(PAYLOAD)
        before = time.perf_counter()
        await sender.dispatch_async([sent])
        await asyncio.wait_for(tasks[0].started.wait(), 30)
        tasks[0].started.clear()
        late.append((tasks[0].began[sent.id] - before) * 1e3)
        await asyncio.sleep(0.05)
    for task in tasks:
        task.stop()
    await asyncio.gather(*loops)
    for connector in [sender, *(as_async(task.connector) for task in tasks)]:
        await connector.close_async()
    return share, late


async def at_half_load(url, rate):
    task = worker(url, f"{NAME}-half")
    loop = asyncio.create_task(task.consume_transactions(policy(100, streaming=True)))
    await asyncio.sleep(1)
    sender, sent, until = as_async(queue(url, f"{NAME}-half")), {}, time.perf_counter() + SECONDS
    while (now := time.perf_counter()) < until:
        batch = [sender.transaction(PAYLOAD) for _ in range(max(1, round(rate * 0.01)))]
        sent |= dict.fromkeys((one.id for one in batch), time.perf_counter())
        await sender.dispatch_async(batch)
        await asyncio.sleep(max(0.0, now + 0.01 - time.perf_counter()))
    while len(task.began) < len(sent):
        task.started.clear()
        await asyncio.wait_for(task.started.wait(), 60)
    task.stop()
    await loop
    await sender.close_async()
    await as_async(task.connector).close_async()
    return [(task.began[name] - when) * 1e3 for name, when in sent.items()], len(sent) / SECONDS


def quantile(figures, share):
    ordered = sorted(figures)
    return round(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)], 2)


async def main():
    url, rate = sys.argv[1], float(sys.argv[2])
    share, late = await waiting(url)
    half, reached = await at_half_load(url, rate)
    told = {"idle": share, "start_p50_ms": quantile(late, 0.5), "start_p99_ms": quantile(late, 0.99)}
    told |= {"half_per_second": round(reached), "half_p50_ms": quantile(half, 0.5), "half_p99_ms": quantile(half, 0.99)}
    print(json.dumps(told))


if __name__ == "__main__":
    uvloop.run(main())
