"""How fast one worker is on RabbitMQ, beside aio-pika with one ack per message and dramatiq; threads; latency; idling.

    python bench/brokers/rabbitmq.py [count] [rounds]

It starts a server of its own. Sides take turns, so that what slows the machine for a while slows all of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import aio_pika
import uvloop

from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.rabbitmq import PrivateRabbitMQ

#: 200 bytes of JSON.
PAYLOAD = {"order": 4711, "text": "x" * 176}
IDLE = 20.0


class Async(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


class Threaded(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


def say(words):
    print(words, file=sys.stderr, flush=True)


def run(coroutine):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def policy(concurrency, **loop):
    return ConsumerPolicy.load({"loop": {"concurrency": {"value": concurrency}, "batch": {"size": 100}, **loop}})


def filled(url, count):
    name = f"bench-{uuid.uuid4().hex[:8]}"
    queue = RabbitMQQueue(name, url=url)
    for start in range(0, count, 1000):
        queue.dispatch([queue.transaction(PAYLOAD) for _ in range(min(1000, count - start))])
    queue.close()
    return name


def by_asyncio(url, count, concurrency):
    name = filled(url, count)

    async def consume():
        task = Async()
        task.connector = RabbitMQQueue(name, url=url)
        await task.connector.open_async()
        began = time.perf_counter()
        await task.consume_transactions(policy(concurrency, limit=count, prefetch=concurrency))
        took = time.perf_counter() - began
        await task.connector.close_async()
        return took

    return count / run(consume())


def by_threads(url, count, concurrency):
    name = filled(url, count)
    task = Threaded()
    task.connector = RabbitMQQueue(name, url=url)
    task.connector.open()
    began = time.perf_counter()
    task.consume_transactions(policy(concurrency, limit=count, prefetch=concurrency))
    took = time.perf_counter() - began
    task.connector.close()
    return count / took


def by_aio_pika(url, count, concurrency):
    name = filled(url, count)

    async def consume():
        connection = await aio_pika.connect(url)
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=concurrency)
        queue = await channel.get_queue(name)
        done, left = asyncio.get_running_loop().create_future(), count

        async def handle(message):
            nonlocal left
            json.loads(message.body)
            await message.ack()
            left -= 1
            if not left:
                done.set_result(None)

        began = time.perf_counter()
        await queue.consume(handle)
        await done
        took = time.perf_counter() - began
        await connection.close()
        return took

    return count / run(consume())


def several(url, count, workers):
    name = filled(url, count)
    command = [sys.executable, __file__, "--worker", url, name, str(count // workers)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(workers)]
    for process in started:
        process.stdout.readline()  # it is connected and waits
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


def worker(url, name, count):
    async def consume():
        task = Async()
        task.connector = RabbitMQQueue(name, url=url)
        await task.connector.open_async()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await task.consume_transactions(policy(100, limit=count, prefetch=0))
        print("done", flush=True)
        await task.connector.close_async()

    run(consume())


def latency(url, count=200):
    """Milliseconds from before a dispatch to the start of its handler, one at a time; the median."""
    queue = RabbitMQQueue(f"latency-{uuid.uuid4().hex[:8]}", url=url)
    took = []

    class Timed(AsyncConsumerMixin):
        async def process_transaction(self, transaction):
            took.append((time.time() - transaction.payload["at"]) * 1000)

    async def consume():
        task = Timed()
        task.connector = queue
        await queue.open_async()
        running = asyncio.ensure_future(task.consume_transactions(policy(100, streaming=True)))
        await asyncio.sleep(0.5)
        for _ in range(count):
            await queue.dispatch_async([queue.transaction({"at": time.time()})])
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        task.stop()
        await running
        await queue.close_async()

    run(consume())
    return statistics.median(took)


def idle(url, queues=20):
    """The share of one core that a process with so many idle loops takes."""

    async def consume():
        tasks = []
        for _ in range(queues):
            task = Async()
            task.connector = RabbitMQQueue(f"idle-{uuid.uuid4().hex[:8]}", url=url)
            await task.connector.open_async()
            tasks.append((task, asyncio.ensure_future(task.consume_transactions(policy(10, streaming=True)))))
        await asyncio.sleep(5.0)
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        await asyncio.sleep(IDLE)
        after, lasted = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
        for task, running in tasks:
            task.stop()
            await running
            await task.connector.close_async()
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / lasted

    return run(consume())


def main(count, rounds, only=()):
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        server = PrivateRabbitMQ(folder)
        server.start()
        url = f"{server.url[:-2]}/%2F"
        try:
            sides = {
                "aio-pika 100": lambda: by_aio_pika(url, count, 100),
                "asyncio 100": lambda: by_asyncio(url, count, 100),
                "threads 100": lambda: by_threads(url, count, 100),
                "aio-pika 10": lambda: by_aio_pika(url, count, 10),
                "asyncio 10": lambda: by_asyncio(url, count, 10),
                "one process": lambda: several(url, count, 1),
                "eight processes": lambda: several(url, count, 8),
            }
            sides = {name: side for name, side in sides.items() if not only or name in only}
            rates = {name: [] for name in sides}
            for number in range(rounds):
                for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                    rates[name].append(sides[name]())
                    say(f"round {number + 1} of {rounds}: {name}: {rates[name][-1]:,.0f}/s")
            found = {"per_second": {name: round(statistics.median(figures)) for name, figures in rates.items()}}
            if not only:
                found |= {"latency_ms": round(latency(url), 2), "idle_share": round(idle(url), 4)}
            print(json.dumps(found | {"ratios": ratios(rates)}))
        finally:
            server.stop()
            server.kill()


def ratios(rates):
    wanted = {
        ("asyncio 100", "aio-pika 100"): 1.1,
        ("asyncio 10", "aio-pika 10"): 1.1,
        ("threads 100", "asyncio 100"): 0.6,
        ("eight processes", "one process"): 0.8,
    }
    found = {}
    for (one, other), bar in wanted.items():
        if one in rates and other in rates:
            each = [mine / theirs for mine, theirs in zip(rates[one], rates[other], strict=True)]
            found[f"{one} / {other}"] = {"ratio": round(statistics.median(each), 3), "bar": bar}
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        given = sys.argv[1:]
        main(int(given[0]) if given else 10_000, int(given[1]) if len(given) > 1 else 3, given[2:])
