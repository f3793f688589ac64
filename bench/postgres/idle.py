"""The cost of waiting: 20 empty queues in one worker, and the delay between a commit and the start of its message."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from ground import PAYLOAD, AsyncNoopTask, PostgresQueue, build_policy, quantile, run, say

QUEUE_COUNT = 20
MEASURE_SECONDS = 20.0


class TimedTask(AsyncNoopTask):
    def __init__(self):
        self.began = {}
        self.started = asyncio.Event()

    async def process_transaction(self, transaction):
        self.began[transaction.id] = time.perf_counter()
        self.started.set()


async def measure_idle(dsn, messages):
    queues = [PostgresQueue(f"idle-{number}", dsn=dsn) for number in range(QUEUE_COUNT)]
    tasks = []
    for queue in queues:
        task = TimedTask()
        task.connector = queue
        tasks.append(task)
    loops = [asyncio.create_task(task.consume_transactions(build_policy(10, streaming=True))) for task in tasks]
    await asyncio.sleep(15)  # until all of them wait for the maximum of their policy
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(MEASURE_SECONDS)
    cpu_share = (time.process_time() - cpu) / (time.perf_counter() - began)
    say(f"idle: {cpu_share:.2%} of a core")
    delays_ms = []
    sender = PostgresQueue("idle-0", dsn=dsn)
    for _ in range(messages):
        transaction = sender.transaction(PAYLOAD)
        await asyncio.to_thread(sender.dispatch, [transaction])
        committed = time.perf_counter()
        await tasks[0].started.wait()
        tasks[0].started.clear()
        delays_ms.append((tasks[0].began[transaction.id] - committed) * 1e3)
        await asyncio.sleep(0.11)
    for task in tasks:
        task.stop()
    await asyncio.gather(*loops)
    for queue in (*queues, sender):
        await queue.close_async()
    return cpu_share, delays_ms


async def measure_half_load(dsn, rate):
    """Return milliseconds from dispatch to start at *rate* messages per second."""
    queue, task = PostgresQueue("half", dsn=dsn), TimedTask()
    task.connector = queue
    loop = asyncio.create_task(task.consume_transactions(build_policy(100, streaming=True)))
    await asyncio.sleep(1)
    sender, sent_times, deadline = PostgresQueue("half", dsn=dsn), {}, time.perf_counter() + 10
    while (now := time.perf_counter()) < deadline:
        batch = [sender.transaction(PAYLOAD) for _ in range(max(1, round(rate * 0.01)))]
        await sender.dispatch_async(batch)
        sent_times |= dict.fromkeys((transaction.id for transaction in batch), time.perf_counter())
        await asyncio.sleep(max(0.0, now + 0.01 - time.perf_counter()))
    while len(task.began) < len(sent_times):
        task.started.clear()
        await asyncio.wait_for(task.started.wait(), 60)
    task.stop()
    await loop
    await queue.close_async()
    await sender.close_async()
    return [(task.began[transaction_id] - sent_time) * 1e3 for transaction_id, sent_time in sent_times.items()], len(
        sent_times
    ) / 10


def summarize(values):
    return {"p50_ms": round(quantile(values, 0.5), 2), "p99_ms": round(quantile(values, 0.99), 2)}


def main(dsn, messages, rate):
    cpu_share, delays_ms = run(measure_idle(dsn, messages))
    half_load_delays_ms, reached_rate = run(measure_half_load(dsn, rate))
    load = {"per_second": round(reached_rate), **summarize(half_load_delays_ms)}
    wake = summarize(delays_ms)
    bars = {
        "core of 20 empty queues": {"value": round(cpu_share, 5), "bar": 0.01, "ok": cpu_share < 0.01},
        "median from commit to start, ms": {"value": wake["p50_ms"], "bar": 20, "ok": wake["p50_ms"] <= 20},
    }
    print(json.dumps({"half_load": load, "wake": wake, "bars": bars, "ok": all(bar["ok"] for bar in bars.values())}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
