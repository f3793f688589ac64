"""RabbitMQ: one worker, aio-pika with one ack per message and dramatiq; threads; latency; idle cost.

    python bench/brokers/rabbitmq.py [count] [rounds]

It starts its own server. Contestants take turns, so that other load on the machine slows all of them.
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
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.worker.policies import ConsumerPolicy

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.rabbitmq import PrivateRabbitMQ

#: 200 bytes of JSON.
PAYLOAD = {"order": 4711, "text": "x" * 176}
IDLE_SECONDS = 20.0


class RabbitMQAsyncTask(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


class RabbitMQThreadedTask(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(coroutine):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def build_policy(concurrency, **loop):
    return ConsumerPolicy.load({"loop": {"concurrency": {"value": concurrency}, "batch": {"size": 100}, **loop}})


def fill_new_queue(url, count):
    name = f"bench-{uuid.uuid4().hex[:8]}"
    queue = RabbitMQQueue(name, url=url)
    for start in range(0, count, 1000):
        queue.dispatch([queue.transaction(PAYLOAD) for _ in range(min(1000, count - start))])
    queue.close()
    return name


def measure_asyncio(url, count, concurrency):
    name = fill_new_queue(url, count)

    async def consume():
        task = RabbitMQAsyncTask()
        task.connector = RabbitMQQueue(name, url=url)
        await task.connector.open_async()
        began = time.perf_counter()
        await task.consume_transactions(build_policy(concurrency, limit=count, prefetch=concurrency))
        seconds = time.perf_counter() - began
        await task.connector.close_async()
        return seconds

    return count / run(consume())


def measure_threads(url, count, concurrency):
    name = fill_new_queue(url, count)
    task = RabbitMQThreadedTask()
    task.connector = RabbitMQQueue(name, url=url)
    task.connector.open()
    began = time.perf_counter()
    task.consume_transactions(build_policy(concurrency, limit=count, prefetch=concurrency))
    seconds = time.perf_counter() - began
    task.connector.close()
    return count / seconds


def measure_aio_pika(url, count, concurrency):
    name = fill_new_queue(url, count)

    async def consume():
        connection = await aio_pika.connect(url)
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=concurrency)
        queue = await channel.get_queue(name)
        done, remaining = asyncio.get_running_loop().create_future(), count

        async def handle(message):
            nonlocal remaining
            json.loads(message.body)
            await message.ack()
            remaining -= 1
            if not remaining:
                done.set_result(None)

        began = time.perf_counter()
        await queue.consume(handle)
        await done
        seconds = time.perf_counter() - began
        await connection.close()
        return seconds

    return count / run(consume())


def measure_workers(url, count, workers):
    name = fill_new_queue(url, count)
    command = [sys.executable, __file__, "--worker", url, name, str(count // workers)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(workers)]
    for process in processes:
        process.stdout.readline()  # it is connected and waits
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


def run_worker(url, name, count):
    async def consume():
        task = RabbitMQAsyncTask()
        task.connector = RabbitMQQueue(name, url=url)
        await task.connector.open_async()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await task.consume_transactions(build_policy(100, limit=count, prefetch=0))
        print("done", flush=True)
        await task.connector.close_async()

    run(consume())


def measure_latency(url, count=200):
    """Return the median milliseconds from before a dispatch to the start of its handler, one at a time."""
    queue = RabbitMQQueue(f"latency-{uuid.uuid4().hex[:8]}", url=url)
    delays_ms = []

    class TimedTask(AsyncConsumerMixin):
        async def process_transaction(self, transaction):
            delays_ms.append((time.time() - transaction.payload["at"]) * 1000)

    async def consume():
        task = TimedTask()
        task.connector = queue
        await queue.open_async()
        consuming = asyncio.ensure_future(task.consume_transactions(build_policy(100, streaming=True)))
        await asyncio.sleep(0.5)
        for _ in range(count):
            await queue.dispatch_async([queue.transaction({"at": time.time()})])
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        task.stop()
        await consuming
        await queue.close_async()

    run(consume())
    return statistics.median(delays_ms)


def measure_idle_share(url, queues=20):
    """Return the share of one core that a process with *queues* idle loops takes."""

    async def consume():
        tasks = []
        for _ in range(queues):
            task = RabbitMQAsyncTask()
            task.connector = RabbitMQQueue(f"idle-{uuid.uuid4().hex[:8]}", url=url)
            await task.connector.open_async()
            tasks.append((task, asyncio.ensure_future(task.consume_transactions(build_policy(10, streaming=True)))))
        await asyncio.sleep(5.0)
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        await asyncio.sleep(IDLE_SECONDS)
        after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
        for task, consuming in tasks:
            task.stop()
            await consuming
            await task.connector.close_async()
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds

    return run(consume())


def main(count, rounds, only=()):
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        server = PrivateRabbitMQ(folder)
        server.start()
        url = f"{server.url[:-2]}/%2F"
        try:
            contestants = {
                "aio-pika 100": lambda: measure_aio_pika(url, count, 100),
                "asyncio 100": lambda: measure_asyncio(url, count, 100),
                "threads 100": lambda: measure_threads(url, count, 100),
                "aio-pika 10": lambda: measure_aio_pika(url, count, 10),
                "asyncio 10": lambda: measure_asyncio(url, count, 10),
                "one process": lambda: measure_workers(url, count, 1),
                "eight processes": lambda: measure_workers(url, count, 8),
            }
            contestants = {name: measure for name, measure in contestants.items() if not only or name in only}
            rates = {name: [] for name in contestants}
            for number in range(rounds):
                for name in list(contestants) if number % 2 == 0 else list(contestants)[::-1]:
                    rates[name].append(contestants[name]())
                    say(f"round {number + 1} of {rounds}: {name}: {rates[name][-1]:,.0f}/s")
            results = {"per_second": {name: round(statistics.median(values)) for name, values in rates.items()}}
            if not only:
                results |= {
                    "latency_ms": round(measure_latency(url), 2),
                    "idle_share": round(measure_idle_share(url), 4),
                }
            print(json.dumps(results | {"ratios": compute_ratios(rates)}))
        finally:
            server.stop()
            server.kill()


def compute_ratios(rates):
    targets = {
        ("asyncio 100", "aio-pika 100"): 1.1,
        ("asyncio 10", "aio-pika 10"): 1.1,
        ("threads 100", "asyncio 100"): 0.6,
        ("eight processes", "one process"): 0.8,
    }
    results = {}
    for (first, second), bar in targets.items():
        if first in rates and second in rates:
            quotients = [mine / theirs for mine, theirs in zip(rates[first], rates[second], strict=True)]
            results[f"{first} / {second}"] = {"ratio": round(statistics.median(quotients), 3), "bar": bar}
    return results


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        arguments = sys.argv[1:]
        main(int(arguments[0]) if arguments else 10_000, int(arguments[1]) if len(arguments) > 1 else 3, arguments[2:])
