"""What waiting costs: twenty empty queues in one worker, and how soon a message starts after its commit."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from ground import PAYLOAD, Async, PostgresQueue, policy, quantile, run, say

QUEUES = 20
SECONDS = 20.0


class Timed(Async):
    def __init__(self):
        self.began = {}
        self.started = asyncio.Event()

    async def process_transaction(self, transaction):
        self.began[transaction.id] = time.perf_counter()
        self.started.set()


async def waiting(dsn, messages):
    queues = [PostgresQueue(f"idle-{number}", dsn=dsn) for number in range(QUEUES)]
    tasks = []
    for queue in queues:
        task = Timed()
        task.connector = queue
        tasks.append(task)
    loops = [asyncio.create_task(task.consume_transactions(policy(10, streaming=True))) for task in tasks]
    await asyncio.sleep(15)  # until all of them wait as long as their policy lets them
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(SECONDS)
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    say(f"idle: {share:.2%} of a core")
    late = []
    sender = PostgresQueue("idle-0", dsn=dsn)
    for _ in range(messages):
        sent = sender.transaction(PAYLOAD)
        await asyncio.to_thread(sender.dispatch, [sent])
        committed = time.perf_counter()
        await tasks[0].started.wait()
        tasks[0].started.clear()
        late.append((tasks[0].began[sent.id] - committed) * 1e3)
        await asyncio.sleep(0.11)
    for task in tasks:
        task.stop()
    await asyncio.gather(*loops)
    for queue in (*queues, sender):
        await queue.close_async()
    return share, late


async def at_half_load(dsn, rate):
    """Milliseconds from dispatch to start when *rate* messages come a second."""
    queue, task = PostgresQueue("half", dsn=dsn), Timed()
    task.connector = queue
    loop = asyncio.create_task(task.consume_transactions(policy(100, streaming=True)))
    await asyncio.sleep(1)
    sender, sent, until = PostgresQueue("half", dsn=dsn), {}, time.perf_counter() + 10
    while (now := time.perf_counter()) < until:
        batch = [sender.transaction(PAYLOAD) for _ in range(max(1, round(rate * 0.01)))]
        await sender.dispatch_async(batch)
        sent |= dict.fromkeys((one.id for one in batch), time.perf_counter())
        await asyncio.sleep(max(0.0, now + 0.01 - time.perf_counter()))
    while len(task.began) < len(sent):
        task.started.clear()
        await asyncio.wait_for(task.started.wait(), 60)
    task.stop()
    await loop
    await queue.close_async()
    await sender.close_async()
    return [(task.began[name] - when) * 1e3 for name, when in sent.items()], len(sent) / 10


def quantiles(figures):
    return {"p50_ms": round(quantile(figures, 0.5), 2), "p99_ms": round(quantile(figures, 0.99), 2)}


def main(dsn, messages, rate):
    share, late = run(waiting(dsn, messages))
    half, reached = run(at_half_load(dsn, rate))
    load = {"per_second": round(reached), **quantiles(half)}
    wake = quantiles(late)
    bars = {
        "core of 20 empty queues": {"value": round(share, 5), "bar": 0.01, "ok": share < 0.01},
        "median from commit to start, ms": {"value": wake["p50_ms"], "bar": 20, "ok": wake["p50_ms"] <= 20},
    }
    print(json.dumps({"half_load": load, "wake": wake, "bars": bars, "ok": all(bar["ok"] for bar in bars.values())}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
