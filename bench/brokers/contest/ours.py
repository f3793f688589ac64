"""Ergon's connectors: one worker that empties a queue, on asyncio or on threads, alone or as one of several.

python bench/brokers/contest/ours.py rate URL COUNT CONCURRENCY async|threads
python bench/brokers/contest/ours.py fill URL COUNT
python bench/brokers/contest/ours.py share URL CONCURRENCY        starts when a line arrives on stdin
python bench/brokers/contest/ours.py left URL                     prints the depth of the queue

Default policies, which have timeouts and retries for each step, with shorter timeouts: RabbitMQ redelivers messages
unacknowledged for half an hour, so a policy that may hold one longer is rejected. 100 messages are fetched and
prefetched at a time, the same as for peers and the bare client.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import uvloop
from stopwatch import PAYLOAD, QUEUE_NAME, Stopwatch

from ergon_framework import AsyncConsumerMixin, ConsumerMixin, ConsumerPolicy
from ergon_framework.connectors import registry
from ergon_framework.connectors.bridge import as_async, as_sync

DISPATCH_BATCH = 500
#: Seconds of each step.
STEP_TIMEOUT_SECONDS = 4.0


class AsyncTask(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        self.tick()


class ThreadedTask(ConsumerMixin):
    def process_transaction(self, transaction):
        self.tick()


def build_policy(concurrency, **loop):
    loop_defaults = {"concurrency": {"value": concurrency}, "batch": {"size": 100}, "prefetch": 100}
    steps = {
        name: {"retry": {"timeout": STEP_TIMEOUT_SECONDS}} for name in ("process", "success", "exception", "settle")
    }
    return ConsumerPolicy.load({"loop": loop_defaults | loop, "steps": steps})


def connect_queue(url, name=QUEUE_NAME):
    return registry.create_connector(name, url, {})


def fill(url, count):
    sender = as_sync(connect_queue(url))
    for start in range(0, count, DISPATCH_BATCH):
        sender.dispatch([sender.transaction(PAYLOAD) for _ in range(min(DISPATCH_BATCH, count - start))])
    sender.close()


def measure_rate(url, count, concurrency, variant):
    fill(url, count)
    task = AsyncTask() if variant == "async" else ThreadedTask()
    task.connector, task.tick = connect_queue(url), Stopwatch(count).tick
    # Streaming: the stopwatch ends the process, so claimed messages at the end are not waited for.
    if variant == "threads":
        as_sync(task.connector).open()
        task.consume_transactions(build_policy(concurrency, streaming=True))
        return

    async def run():
        await as_async(task.connector).open_async()
        await task.consume_transactions(build_policy(concurrency, streaming=True))

    uvloop.run(run())


class RecordingTask(AsyncTask):
    def __init__(self):
        self.times = []

    def tick(self):
        self.times.append(time.time())


async def consume_shared(url, concurrency):
    task = RecordingTask()
    task.connector = connect_queue(url)
    await as_async(task.connector).open_async()
    print("ready", flush=True)
    sys.stdin.readline()
    await task.consume_transactions(build_policy(concurrency, prefetch=0))
    await as_async(task.connector).close_async()
    times = task.times or [0.0]
    print(json.dumps({"count": len(task.times), "began": times[0], "ended": times[-1]}), flush=True)


def print_depth(url):
    connector = as_sync(connect_queue(url))
    connector.open()
    depth = connector.depth()
    connector.close()
    print(json.dumps(dataclasses.asdict(depth)), flush=True)


def main():
    command, url, *arguments = sys.argv[1:]
    if command == "fill":
        fill(url, int(arguments[0]))
    elif command == "left":
        print_depth(url)
    elif command == "share":
        uvloop.run(consume_shared(url, int(arguments[0])))
    else:
        measure_rate(url, int(arguments[0]), int(arguments[1]), arguments[2])


if __name__ == "__main__":
    main()
