"""One worker on a Redis stream and redis-py by hand; threads and asyncio; eight workers and one; idle cost.

Usage: python bench/brokers/redis_streams.py [--count 20000] [--rounds 3] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import redis.asyncio
import uvloop

from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.worker.policies import ConsumerPolicy

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.redis import PrivateRedis

#: 200 bytes of JSON.
PAYLOAD = {"order": 4711, "text": "x" * 176}
BODY = json.dumps(PAYLOAD).encode()
QUEUE_COUNT = 20


class RedisAsyncTask(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


class RedisThreadedTask(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


class RedisTimedTask(RedisAsyncTask):
    def __init__(self):
        self.began = {}
        self.started = asyncio.Event()

    async def process_transaction(self, transaction):
        self.began[transaction.id] = time.perf_counter()
        self.started.set()


@contextlib.contextmanager
def server(**settings):
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        private = PrivateRedis(folder, settings=settings)
        private.start()
        try:
            yield private
        finally:
            private.kill()


def build_policy(concurrency, *, limit=None, prefetch=100, streaming=False):
    loop = {"concurrency": {"value": concurrency}, "batch": {"size": 100}, "prefetch": prefetch}
    return ConsumerPolicy.load({"loop": loop | {"limit": limit, "streaming": streaming}})


def run(coroutine):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def fill_queue(url, name, count):
    queue = RedisQueue(name, url=url)
    for start in range(0, count, 1000):
        queue.dispatch([queue.transaction(PAYLOAD) for _ in range(min(1000, count - start))])
    queue.close()


# -- the contestants ---------------------------------------------------------------------------------


async def _measure_bare(url, count):
    """XREADGROUP 100 and one XACK for all of them: no fence, no envelope, and no takeover of claims."""
    client = redis.asyncio.Redis.from_url(url)
    await client.delete("bare")
    await client.xgroup_create("bare", "g", id="0", mkstream=True)
    for start in range(0, count, 1000):
        pipe = client.pipeline(transaction=False)
        for _ in range(min(1000, count - start)):
            pipe.xadd("bare", {"body": BODY})
        await pipe.execute()
    began, done = time.perf_counter(), 0
    while done < count:
        ((_, entries),) = await client.xreadgroup("g", "me", {"bare": ">"}, count=100)
        for _, fields in entries:
            json.loads(fields[b"body"])
        await client.xack("bare", "g", *(entry_id for entry_id, _ in entries))
        done += len(entries)
    seconds = time.perf_counter() - began
    await client.delete("bare")
    await client.aclose()
    return count / seconds


def measure_bare(url, count):
    return run(_measure_bare(url, count))


async def _measure_asyncio(url, count):
    task = RedisAsyncTask()
    task.connector = RedisQueue("a", url=url)
    await task.connector.open_async()
    began = time.perf_counter()
    report = await task.consume_transactions(build_policy(100, limit=count))
    seconds = time.perf_counter() - began
    await task.connector.close_async()
    assert report.settled.get("settled") == count, report.settled
    return count / seconds


def measure_asyncio(url, count):
    fill_queue(url, "a", count)
    return run(_measure_asyncio(url, count))


def measure_threads(url, count):
    fill_queue(url, "t", count)
    task = RedisThreadedTask()
    task.connector = RedisQueue("t", url=url)
    task.connector.open()
    began = time.perf_counter()
    report = task.consume_transactions(build_policy(100, limit=count))
    seconds = time.perf_counter() - began
    task.connector.close()
    assert report.settled.get("settled") == count, report.settled
    return count / seconds


def measure_workers(url, count, workers):
    """Return messages per second from the first start to the last end of *workers* processes that share a queue."""
    fill_queue(url, "several", count)
    command = [sys.executable, __file__, "--worker", url, str(count // workers)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(workers)]
    for process in processes:
        process.stdout.readline()
    began = time.perf_counter()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.stdout.readline()
    seconds = time.perf_counter() - began
    for process in processes:
        process.communicate()
    return count / seconds


def run_worker(url, count):
    logging.disable(logging.CRITICAL)

    async def consume():
        task = RedisAsyncTask()
        task.connector = RedisQueue("several", url=url)
        await task.connector.open_async()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await task.consume_transactions(build_policy(100, limit=count))
        print("done", flush=True)
        await task.connector.close_async()

    run(consume())


def measure_dispatch(url, count, batch_size):
    queue = RedisQueue("d", url=url)
    queue.open()
    transactions = [queue.transaction(PAYLOAD) for _ in range(count)]
    began = time.perf_counter()
    for start in range(0, count, batch_size):
        queue.dispatch(transactions[start : start + batch_size])
    elapsed_seconds = time.perf_counter() - began
    queue.close()
    with redis.Redis.from_url(url) as client:
        client.delete("ergon:{d}")
    return count / elapsed_seconds


async def measure_idle(url, seconds, messages):
    """Return the share of a core that 20 empty queues cost, and milliseconds from dispatch to start."""
    tasks = []
    for number in range(QUEUE_COUNT):
        task = RedisTimedTask()
        task.connector = RedisQueue(f"idle-{number}", url=url)
        tasks.append(task)
    loops = [asyncio.create_task(task.consume_transactions(build_policy(10, streaming=True))) for task in tasks]
    await asyncio.sleep(15)  # until all of them wait for the maximum of their policy
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    cpu_share = (time.process_time() - cpu) / (time.perf_counter() - began)
    delays_ms = []
    sender = RedisQueue("idle-0", url=url)
    for _ in range(messages):
        transaction = sender.transaction(PAYLOAD)
        await asyncio.to_thread(sender.dispatch, [transaction])
        confirmed = time.perf_counter()
        await tasks[0].started.wait()
        tasks[0].started.clear()
        delays_ms.append((tasks[0].began[transaction.id] - confirmed) * 1e3)
        await asyncio.sleep(0.11)
    for task in tasks:
        task.stop()
    await asyncio.gather(*loops)
    for queue in (*(task.connector for task in tasks), sender):
        await queue.close_async()
    return cpu_share, statistics.median(delays_ms)


def say(text):
    print(text, file=sys.stderr, flush=True)


def main(count, rounds, *, quick):
    logging.disable(logging.CRITICAL)
    # As in published figures of other libraries: on disk within a second. appendfsync always is measured too.
    with server(appendfsync="everysec") as fast_server, server() as synced_server:
        url = fast_server.url
        contestants = {
            "by hand": lambda: measure_bare(url, count),
            "asyncio 100": lambda: measure_asyncio(url, count),
            "threads 100": lambda: measure_threads(url, count),
            "by hand, appendfsync always": lambda: measure_bare(synced_server.url, count),
            "asyncio 100, appendfsync always": lambda: measure_asyncio(synced_server.url, count),
        }
        if not quick:
            contestants |= {
                "one process": lambda: measure_workers(url, count, 1),
                "eight processes": lambda: measure_workers(url, count, 8),
                "dispatch one by one": lambda: measure_dispatch(url, count // 10, 1),
                "dispatch by 100": lambda: measure_dispatch(url, count, 100),
            }
        rates = {name: [] for name in contestants}
        for number in range(rounds):
            for name in list(contestants) if number % 2 == 0 else list(contestants)[::-1]:
                rates[name].append(contestants[name]())
                say(f"round {number + 1} of {rounds}: {name}: {rates[name][-1]:,.0f}/s")
        cpu_share, median_delay_ms = (0.0, 0.0) if quick else run(measure_idle(url, 20.0, 30))

    def compute_ratio(first, second):
        # Adjacent rounds are compared: other load on the machine slows both.
        return round(statistics.median(a / b for a, b in zip(rates[first], rates[second], strict=True)), 3)

    bars = {
        "asyncio 100 / by hand": (compute_ratio("asyncio 100", "by hand"), 0.3),
        "threads 100 / asyncio 100": (compute_ratio("threads 100", "asyncio 100"), 0.6),
    }
    results = {name: {"ratio": value, "bar": bar, "ok": value >= bar} for name, (value, bar) in bars.items()}
    if not quick:
        worker_ratio = compute_ratio("eight processes", "one process")
        results["eight processes / one process"] = {"ratio": worker_ratio, "bar": 0.8, "ok": worker_ratio >= 0.8}
        results["core of 20 empty queues"] = {"value": round(cpu_share, 5), "bar": 0.01, "ok": cpu_share < 0.01}
        results["median ms to start"] = {"value": round(median_delay_ms, 2), "bar": 20, "ok": median_delay_ms <= 20}
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    print(
        json.dumps(
            {"per_second": medians, "bars": results, "ok": all(result["ok"] for result in results.values())}, indent=1
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(sys.argv[2], int(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--count", type=int, default=20_000)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--quick", action="store_true", help="without several processes, dispatch and idling")
        options = parser.parse_args()
        main(options.count, options.rounds, quick=options.quick)
