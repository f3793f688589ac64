"""How fast one worker on a Redis stream is, beside redis-py by hand; threads beside asyncio; eight beside one; idling.

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
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.redis import PrivateRedis

#: 200 bytes of JSON.
PAYLOAD = {"order": 4711, "text": "x" * 176}
BODY = json.dumps(PAYLOAD).encode()
QUEUES = 20


class Async(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


class Threaded(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


class Timed(Async):
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


def policy(concurrency, *, limit=None, prefetch=100, streaming=False):
    loop = {"concurrency": {"value": concurrency}, "batch": {"size": 100}, "prefetch": prefetch}
    return ConsumerPolicy.load({"loop": loop | {"limit": limit, "streaming": streaming}})


def run(coroutine):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def filled(url, name, count):
    queue = RedisQueue(name, url=url)
    for start in range(0, count, 1000):
        queue.dispatch([queue.transaction(PAYLOAD) for _ in range(min(1000, count - start))])
    queue.close()


# -- the sides ---------------------------------------------------------------------------------------


async def _by_hand(url, count):
    """XREADGROUP 100 and one XACK for all of them: no fence, no envelope, and nothing is ever taken away."""
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
        await client.xack("bare", "g", *(place for place, _ in entries))
        done += len(entries)
    took = time.perf_counter() - began
    await client.delete("bare")
    await client.aclose()
    return count / took


def by_hand(url, count):
    return run(_by_hand(url, count))


async def _asyncio(url, count):
    task = Async()
    task.connector = RedisQueue("a", url=url)
    await task.connector.open_async()
    began = time.perf_counter()
    report = await task.consume_transactions(policy(100, limit=count))
    took = time.perf_counter() - began
    await task.connector.close_async()
    assert report.settled.get("settled") == count, report.settled
    return count / took


def on_asyncio(url, count):
    filled(url, "a", count)
    return run(_asyncio(url, count))


def on_threads(url, count):
    filled(url, "t", count)
    task = Threaded()
    task.connector = RedisQueue("t", url=url)
    task.connector.open()
    began = time.perf_counter()
    report = task.consume_transactions(policy(100, limit=count))
    took = time.perf_counter() - began
    task.connector.close()
    assert report.settled.get("settled") == count, report.settled
    return count / took


def several(url, count, workers):
    """Per second from the first start to the last end of *workers* processes that share a queue."""
    filled(url, "several", count)
    command = [sys.executable, __file__, "--worker", url, str(count // workers)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(workers)]
    for process in started:
        process.stdout.readline()
    began = time.perf_counter()
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        process.stdout.readline()
    took = time.perf_counter() - began
    for process in started:
        process.communicate()
    return count / took


def worker(url, count):
    logging.disable(logging.CRITICAL)

    async def consume():
        task = Async()
        task.connector = RedisQueue("several", url=url)
        await task.connector.open_async()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await task.consume_transactions(policy(100, limit=count))
        print("done", flush=True)
        await task.connector.close_async()

    run(consume())


def dispatched(url, count, at_once):
    queue = RedisQueue("d", url=url)
    queue.open()
    made = [queue.transaction(PAYLOAD) for _ in range(count)]
    began = time.perf_counter()
    for start in range(0, count, at_once):
        queue.dispatch(made[start : start + at_once])
    took = time.perf_counter() - began
    queue.close()
    with redis.Redis.from_url(url) as client:
        client.delete("ergon:{d}")
    return count / took


async def idling(url, seconds, messages):
    """The share of a core that twenty empty queues cost, and milliseconds from dispatch to start."""
    tasks = []
    for number in range(QUEUES):
        task = Timed()
        task.connector = RedisQueue(f"idle-{number}", url=url)
        tasks.append(task)
    loops = [asyncio.create_task(task.consume_transactions(policy(10, streaming=True))) for task in tasks]
    await asyncio.sleep(15)  # until all of them wait as long as their policy lets them
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    late = []
    sender = RedisQueue("idle-0", url=url)
    for _ in range(messages):
        sent = sender.transaction(PAYLOAD)
        await asyncio.to_thread(sender.dispatch, [sent])
        confirmed = time.perf_counter()
        await tasks[0].started.wait()
        tasks[0].started.clear()
        late.append((tasks[0].began[sent.id] - confirmed) * 1e3)
        await asyncio.sleep(0.11)
    for task in tasks:
        task.stop()
    await asyncio.gather(*loops)
    for queue in (*(task.connector for task in tasks), sender):
        await queue.close_async()
    return share, statistics.median(late)


def say(text):
    print(text, file=sys.stderr, flush=True)


def main(count, rounds, *, quick):
    logging.disable(logging.CRITICAL)
    # As the figures of others were taken: on disk within a second. What appendfsync always costs is told beside.
    with server(appendfsync="everysec") as private, server() as synced:
        url = private.url
        sides = {
            "by hand": lambda: by_hand(url, count),
            "asyncio 100": lambda: on_asyncio(url, count),
            "threads 100": lambda: on_threads(url, count),
            "by hand, appendfsync always": lambda: by_hand(synced.url, count),
            "asyncio 100, appendfsync always": lambda: on_asyncio(synced.url, count),
        }
        if not quick:
            sides |= {
                "one process": lambda: several(url, count, 1),
                "eight processes": lambda: several(url, count, 8),
                "dispatch one by one": lambda: dispatched(url, count // 10, 1),
                "dispatch by 100": lambda: dispatched(url, count, 100),
            }
        rates = {name: [] for name in sides}
        for number in range(rounds):
            for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                rates[name].append(sides[name]())
                say(f"round {number + 1} of {rounds}: {name}: {rates[name][-1]:,.0f}/s")
        share, late = (0.0, 0.0) if quick else run(idling(url, 20.0, 30))

    def ratio(one, other):
        # Neighbours in time: what slows the machine for a while slows both.
        return round(statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True)), 3)

    bars = {
        "asyncio 100 / by hand": (ratio("asyncio 100", "by hand"), 0.3),
        "threads 100 / asyncio 100": (ratio("threads 100", "asyncio 100"), 0.6),
    }
    judged = {name: {"ratio": got, "bar": bar, "ok": got >= bar} for name, (got, bar) in bars.items()}
    if not quick:
        shared = ratio("eight processes", "one process")
        judged["eight processes / one process"] = {"ratio": shared, "bar": 0.8, "ok": shared >= 0.8}
        judged["core of 20 empty queues"] = {"value": round(share, 5), "bar": 0.01, "ok": share < 0.01}
        judged["median ms to start"] = {"value": round(late, 2), "bar": 20, "ok": late <= 20}
    middle = {name: round(statistics.median(figures)) for name, figures in rates.items()}
    print(json.dumps({"per_second": middle, "bars": judged, "ok": all(one["ok"] for one in judged.values())}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--count", type=int, default=20_000)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--quick", action="store_true", help="without several processes, dispatch and idling")
        given = parser.parse_args()
        main(given.count, given.rounds, quick=given.quick)
