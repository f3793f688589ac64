"""NATS: how fast one worker is beside the bare client, what threads cost, how eight share a queue, how soon one starts.

Run: python bench/brokers/jetstream.py [--count 20000] [--rounds 3] [--sync]; without --sync the server's defaults hold,
as they do in the figures of others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nats
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy
from tests.servers.nats import PrivateNats

#: 200 bytes of JSON.
PAYLOAD = {"order": 4711, "text": "x" * 176}
BODY = json.dumps(PAYLOAD).encode()


class Async(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


class Threaded(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


@contextlib.contextmanager
def server(*, sync=False):
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        running = PrivateNats(Path(folder), sync=sync)
        running.start()
        try:
            yield running
        finally:
            running.kill()


def policy(concurrency, *, limit=None, prefetch=0, streaming=False):
    loop = {"concurrency": {"value": concurrency}, "batch": {"size": 100}, "prefetch": prefetch}
    return ConsumerPolicy.load({"loop": loop | {"limit": limit, "streaming": streaming}})


def run(coroutine):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


# -- by hand -------------------------------------------------------------------------------------------


async def by_fetch(url, count):
    """What the client's documentation shows: fetch(100), and an ack for each."""
    line = await nats.connect(url)
    js = line.jetstream()
    await js.add_stream(name="bare", subjects=["bare"], retention="workqueue")
    await asyncio.gather(*[js.publish("bare", BODY) for _ in range(count)])
    pulled = await js.pull_subscribe("bare", "worker")
    began, done = time.perf_counter(), 0
    while done < count:
        for message in await pulled.fetch(100):
            json.loads(message.data)
            await message.ack()
            done += 1
    await line.flush()
    took = time.perf_counter() - began
    await js.delete_stream("bare")
    await line.close()
    return took


async def by_inbox(url, count):
    """An inbox of one's own, 100 asked for at a time, and an ack for each."""
    line = await nats.connect(url)
    js = line.jetstream()
    await js.add_stream(name="bare", subjects=["bare"], retention="workqueue")
    await asyncio.gather(*[js.publish("bare", BODY) for _ in range(count)])
    await js.pull_subscribe("bare", "worker")
    inbox, done, over = line.new_inbox(), 0, asyncio.Event()

    async def heard(message):
        nonlocal done
        json.loads(message.data)
        await line.publish(message.reply, b"+ACK")
        done += 1
        if done == count:
            over.set()
        elif done % 100 == 50:
            await line.publish("$JS.API.CONSUMER.MSG.NEXT.bare.worker", b'{"batch": 100}', reply=inbox)

    await line.subscribe(inbox, cb=heard)
    began = time.perf_counter()
    await line.publish("$JS.API.CONSUMER.MSG.NEXT.bare.worker", b'{"batch": 100}', reply=inbox)
    await over.wait()
    await line.flush()
    took = time.perf_counter() - began
    await js.delete_stream("bare")
    await line.close()
    return took


# -- ours ----------------------------------------------------------------------------------------------


def filled(url, name, count):
    async def fill():
        queue = NatsQueue(name, url=url)
        for start in range(0, count, 1000):
            await queue.dispatch_async([queue.transaction(PAYLOAD) for _ in range(min(1000, count - start))])
        await queue.close_async()

    run(fill())


def consumed_async(url, name, count, concurrency, prefetch=100):
    """Seconds that one asyncio loop takes for *count* transactions."""

    async def consume():
        task = Async()
        task.connector = NatsQueue(name, url=url)
        await task.connector.open_async()
        began = time.perf_counter()
        report = await task.consume_transactions(policy(concurrency, limit=count, prefetch=prefetch))
        took = time.perf_counter() - began
        await task.connector.close_async()
        assert report.settled.get("settled") == count, report.settled
        return took

    return run(consume())


def consumed_threads(url, name, count, concurrency, prefetch=100):
    task = Threaded()
    task.connector = NatsQueue(name, url=url)
    queue = as_sync(task.connector)
    queue.open()
    began = time.perf_counter()
    report = task.consume_transactions(policy(concurrency, limit=count, prefetch=prefetch))
    took = time.perf_counter() - began
    queue.close()
    assert report.settled.get("settled") == count, report.settled
    return took


def dispatched(url, name, count, at_once):
    async def send():
        queue = NatsQueue(name, url=url)
        await queue.open_async()
        began = time.perf_counter()
        for _ in range(count // at_once):
            await queue.dispatch_async([queue.transaction(PAYLOAD) for _ in range(at_once)])
        took = time.perf_counter() - began
        await queue.close_async()
        return took

    return run(send())


def several(url, count, workers):
    """Seconds from the first start to the last end of *workers* processes that share a queue."""
    filled(url, "several", count)
    command = [sys.executable, __file__, "--worker", url, str(count // workers)]
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
    return took


def worker(url, count):
    async def consume():
        task = Async()
        task.connector = NatsQueue("several", url=url)
        await task.connector.open_async()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await task.consume_transactions(policy(100, limit=count, prefetch=100))
        print("done", flush=True)
        await task.connector.close_async()

    run(consume())


def start_delay(url):
    """Milliseconds from a confirmed dispatch to the handler's start on an idle queue, the median of 100."""

    async def measure():
        started = asyncio.Queue()

        class Noting(AsyncConsumerMixin):
            async def process_transaction(self, transaction):
                started.put_nowait(time.perf_counter())

        task, producer, delays = Noting(), NatsQueue("soon", url=url), []
        task.connector = NatsQueue("soon", url=url)
        loop = asyncio.ensure_future(task.consume_transactions(policy(10, streaming=True)))
        await producer.open_async()
        await asyncio.sleep(0.5)
        for _ in range(100):
            began = time.perf_counter()
            await producer.dispatch_async([producer.transaction(PAYLOAD)])
            delays.append(1000 * (await started.get() - began))
            await asyncio.sleep(0.02)
        task.stop()
        await loop
        await producer.close_async()
        await task.connector.close_async()
        return statistics.median(delays)

    return run(measure())


def idle_share(url, queues=20, seconds=10.0):
    """The share of a processor that a process with *queues* idle loops takes."""

    async def measure():
        tasks = [Async() for _ in range(queues)]
        for number, task in enumerate(tasks):
            task.connector = NatsQueue(f"idle-{number}", url=url)
        loops = [asyncio.ensure_future(task.consume_transactions(policy(10, streaming=True))) for task in tasks]
        await asyncio.sleep(8.0)  # until they look no more often than they will
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        after = resource.getrusage(resource.RUSAGE_SELF)
        share = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / (time.perf_counter() - began)
        for task in tasks:
            task.stop()
        await asyncio.gather(*loops)
        for task in tasks:
            await task.connector.close_async()
        return share

    return run(measure())


# -- all of it -----------------------------------------------------------------------------------------


def main(url, count, rounds):
    sides = {
        "fetch(100) by hand": lambda: count / run(by_fetch(url, count)),
        "own inbox by hand": lambda: count / run(by_inbox(url, count)),
        "asyncio 100": lambda: (filled(url, "a", count), count / consumed_async(url, "a", count, 100))[1],
        "threads 100": lambda: (filled(url, "c", count), count / consumed_threads(url, "c", count, 100))[1],
        "one process": lambda: count / several(url, count, 1),
        "eight processes": lambda: count / several(url, count, 8),
        "dispatch one by one": lambda: count // 20 / dispatched(url, "d", count // 20, 1),
        "dispatch by 100": lambda: count / dispatched(url, "d", count, 100),
    }
    rates = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            rates[name].append(sides[name]())
            print(f"{name}: {rates[name][-1]:,.0f}/s", file=sys.stderr, flush=True)
    middle = {name: statistics.median(figures) for name, figures in rates.items()}
    told = {
        "rates": {name: round(rate) for name, rate in middle.items()},
        "of fetch(100)": round(middle["asyncio 100"] / middle["fetch(100) by hand"], 2),
        "threads of asyncio": round(middle["threads 100"] / middle["asyncio 100"], 2),
        "eight of one": round(middle["eight processes"] / middle["one process"], 2),
        "start ms": round(start_delay(url), 2),
        "idle share of 20 queues": round(idle_share(url), 4),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    if "--worker" in sys.argv:
        worker(sys.argv[2], int(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--count", type=int, default=20_000)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--sync", action="store_true")
        given = parser.parse_args()
        with server(sync=given.sync) as private:
            main(private.url, given.count, given.rounds)
