"""NATS: one worker and the bare client, the cost of threads, eight workers on one queue, and the delay before a start.

Run: python bench/brokers/jetstream.py [--count 20000] [--rounds 3] [--sync]; without --sync the server has defaults,
as in published figures of other libraries.
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
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.worker.policies import ConsumerPolicy
from tests.servers.nats import PrivateNats

#: 200 bytes of JSON.
PAYLOAD = {"order": 4711, "text": "x" * 176}
BODY = json.dumps(PAYLOAD).encode()


class NatsAsyncTask(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


class NatsThreadedTask(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


@contextlib.contextmanager
def server(*, sync=False):
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        instance = PrivateNats(Path(folder), sync=sync)
        instance.start()
        try:
            yield instance
        finally:
            instance.kill()


def build_policy(concurrency, *, limit=None, prefetch=0, streaming=False):
    loop = {"concurrency": {"value": concurrency}, "batch": {"size": 100}, "prefetch": prefetch}
    return ConsumerPolicy.load({"loop": loop | {"limit": limit, "streaming": streaming}})


def run(coroutine):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


# -- bare client ---------------------------------------------------------------------------------------


async def run_by_fetch(url, count):
    """Do as the client's documentation shows: fetch(100), and an ack for each."""
    client = await nats.connect(url)
    js = client.jetstream()
    await js.add_stream(name="bare", subjects=["bare"], retention="workqueue")
    await asyncio.gather(*[js.publish("bare", BODY) for _ in range(count)])
    subscription = await js.pull_subscribe("bare", "worker")
    began, done = time.perf_counter(), 0
    while done < count:
        for message in await subscription.fetch(100):
            json.loads(message.data)
            await message.ack()
            done += 1
    await client.flush()
    seconds = time.perf_counter() - began
    await js.delete_stream("bare")
    await client.close()
    return seconds


async def run_by_inbox(url, count):
    """Use a dedicated inbox, request 100 at a time, and ack each."""
    client = await nats.connect(url)
    js = client.jetstream()
    await js.add_stream(name="bare", subjects=["bare"], retention="workqueue")
    await asyncio.gather(*[js.publish("bare", BODY) for _ in range(count)])
    await js.pull_subscribe("bare", "worker")
    inbox, done, finished = client.new_inbox(), 0, asyncio.Event()

    async def on_message(message):
        nonlocal done
        json.loads(message.data)
        await client.publish(message.reply, b"+ACK")
        done += 1
        if done == count:
            finished.set()
        elif done % 100 == 50:
            await client.publish("$JS.API.CONSUMER.MSG.NEXT.bare.worker", b'{"batch": 100}', reply=inbox)

    await client.subscribe(inbox, cb=on_message)
    began = time.perf_counter()
    await client.publish("$JS.API.CONSUMER.MSG.NEXT.bare.worker", b'{"batch": 100}', reply=inbox)
    await finished.wait()
    await client.flush()
    seconds = time.perf_counter() - began
    await js.delete_stream("bare")
    await client.close()
    return seconds


# -- Ergon ---------------------------------------------------------------------------------------------


def fill_queue(url, name, count):
    async def fill():
        queue = NatsQueue(name, url=url)
        for start in range(0, count, 1000):
            await queue.dispatch_async([queue.transaction(PAYLOAD) for _ in range(min(1000, count - start))])
        await queue.close_async()

    run(fill())


def consume_async(url, name, count, concurrency, prefetch=100):
    """Return the seconds that one asyncio loop takes for *count* transactions."""

    async def consume():
        task = NatsAsyncTask()
        task.connector = NatsQueue(name, url=url)
        await task.connector.open_async()
        began = time.perf_counter()
        report = await task.consume_transactions(build_policy(concurrency, limit=count, prefetch=prefetch))
        seconds = time.perf_counter() - began
        await task.connector.close_async()
        assert report.settled.get("settled") == count, report.settled
        return seconds

    return run(consume())


def consume_threads(url, name, count, concurrency, prefetch=100):
    task = NatsThreadedTask()
    task.connector = NatsQueue(name, url=url)
    queue = as_sync(task.connector)
    queue.open()
    began = time.perf_counter()
    report = task.consume_transactions(build_policy(concurrency, limit=count, prefetch=prefetch))
    seconds = time.perf_counter() - began
    queue.close()
    assert report.settled.get("settled") == count, report.settled
    return seconds


def measure_dispatch(url, name, count, batch_size):
    async def send():
        queue = NatsQueue(name, url=url)
        await queue.open_async()
        began = time.perf_counter()
        for _ in range(count // batch_size):
            await queue.dispatch_async([queue.transaction(PAYLOAD) for _ in range(batch_size)])
        seconds = time.perf_counter() - began
        await queue.close_async()
        return seconds

    return run(send())


def run_workers(url, count, workers):
    """Return the seconds from the first start to the last end of *workers* processes that share a queue."""
    fill_queue(url, "several", count)
    command = [sys.executable, __file__, "--worker", url, str(count // workers)]
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
    return seconds


def run_worker(url, count):
    async def consume():
        task = NatsAsyncTask()
        task.connector = NatsQueue("several", url=url)
        await task.connector.open_async()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await task.consume_transactions(build_policy(100, limit=count, prefetch=100))
        print("done", flush=True)
        await task.connector.close_async()

    run(consume())


def measure_start_delay(url):
    """Return the median milliseconds from a confirmed dispatch to the handler's start on an idle queue, of 100."""

    async def measure():
        started = asyncio.Queue()

        class RecordingTask(AsyncConsumerMixin):
            async def process_transaction(self, transaction):
                started.put_nowait(time.perf_counter())

        task, producer, delays = RecordingTask(), NatsQueue("soon", url=url), []
        task.connector = NatsQueue("soon", url=url)
        loop = asyncio.ensure_future(task.consume_transactions(build_policy(10, streaming=True)))
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


def measure_idle_share(url, queues=20, seconds=10.0):
    """Return the share of a processor that a process with *queues* idle loops takes."""

    async def measure():
        tasks = [NatsAsyncTask() for _ in range(queues)]
        for number, task in enumerate(tasks):
            task.connector = NatsQueue(f"idle-{number}", url=url)
        loops = [asyncio.ensure_future(task.consume_transactions(build_policy(10, streaming=True))) for task in tasks]
        await asyncio.sleep(8.0)  # until they poll at their longest interval
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


# -- all parts -----------------------------------------------------------------------------------------


def main(url, count, rounds):
    contestants = {
        "fetch(100) by hand": lambda: count / run(run_by_fetch(url, count)),
        "own inbox by hand": lambda: count / run(run_by_inbox(url, count)),
        "asyncio 100": lambda: (fill_queue(url, "a", count), count / consume_async(url, "a", count, 100))[1],
        "threads 100": lambda: (fill_queue(url, "c", count), count / consume_threads(url, "c", count, 100))[1],
        "one process": lambda: count / run_workers(url, count, 1),
        "eight processes": lambda: count / run_workers(url, count, 8),
        "dispatch one by one": lambda: count // 20 / measure_dispatch(url, "d", count // 20, 1),
        "dispatch by 100": lambda: count / measure_dispatch(url, "d", count, 100),
    }
    rates = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants) if number % 2 == 0 else list(contestants)[::-1]:
            rates[name].append(contestants[name]())
            print(f"{name}: {rates[name][-1]:,.0f}/s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "rates": {name: round(rate) for name, rate in medians.items()},
        "of fetch(100)": round(medians["asyncio 100"] / medians["fetch(100) by hand"], 2),
        "threads of asyncio": round(medians["threads 100"] / medians["asyncio 100"], 2),
        "eight of one": round(medians["eight processes"] / medians["one process"], 2),
        "start ms": round(measure_start_delay(url), 2),
        "idle share of 20 queues": round(measure_idle_share(url), 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    if "--worker" in sys.argv:
        run_worker(sys.argv[2], int(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--count", type=int, default=20_000)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--sync", action="store_true")
        options = parser.parse_args()
        with server(sync=options.sync) as private_server:
            main(private_server.url, options.count, options.rounds)
