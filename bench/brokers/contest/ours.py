"""Our connectors: one worker that empties a queue, on asyncio or on threads, alone or as one of several.

python bench/brokers/contest/ours.py rate URL COUNT CONCURRENCY async|threads
python bench/brokers/contest/ours.py fill URL COUNT
python bench/brokers/contest/ours.py share URL CONCURRENCY        begins when a line comes on stdin
python bench/brokers/contest/ours.py left URL                     what is still in the queue

Default policies, which have timeouts and retries for each step, the timeouts shorter: RabbitMQ takes back what is held
for half an hour, so a policy that may hold it longer is refused. 100 are fetched and prefetched at a time, as peers and
the bare client are let.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import uvloop
from stopwatch import NAME, PAYLOAD, Stopwatch

from ergon_framework import AsyncConsumerMixin, ConsumerMixin, ConsumerPolicy
from ergon_framework.connectors import schemes
from ergon_framework.connectors.bridge import as_async, as_sync

AT_ONCE = 500
#: Seconds of each step.
TIMEOUT = 4.0


class Async(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        self.tick()


class Threaded(ConsumerMixin):
    def process_transaction(self, transaction):
        self.tick()


def policy(concurrency, **loop):
    told = {"concurrency": {"value": concurrency}, "batch": {"size": 100}, "prefetch": 100}
    steps = {name: {"retry": {"timeout": TIMEOUT}} for name in ("process", "success", "exception", "settle")}
    return ConsumerPolicy.load({"loop": told | loop, "steps": steps})


def queue(url, name=NAME):
    return schemes.connect(name, url, {})


def fill(url, count):
    sender = as_sync(queue(url))
    for start in range(0, count, AT_ONCE):
        sender.dispatch([sender.transaction(PAYLOAD) for _ in range(min(AT_ONCE, count - start))])
    sender.close()


def rate(url, count, concurrency, flavour):
    fill(url, count)
    task = Async() if flavour == "async" else Threaded()
    task.connector, task.tick = queue(url), Stopwatch(count).tick
    # Streaming: what is in hand of a broker at the end must not be waited for, and the stopwatch ends it.
    if flavour == "threads":
        as_sync(task.connector).open()
        task.consume_transactions(policy(concurrency, streaming=True))
        return

    async def run():
        await as_async(task.connector).open_async()
        await task.consume_transactions(policy(concurrency, streaming=True))

    uvloop.run(run())


class Shared(Async):
    def __init__(self):
        self.times = []

    def tick(self):
        self.times.append(time.time())


async def share(url, concurrency):
    task = Shared()
    task.connector = queue(url)
    await as_async(task.connector).open_async()
    print("ready", flush=True)
    sys.stdin.readline()
    await task.consume_transactions(policy(concurrency, prefetch=0))
    await as_async(task.connector).close_async()
    times = task.times or [0.0]
    print(json.dumps({"count": len(task.times), "began": times[0], "ended": times[-1]}), flush=True)


def left(url):
    connector = as_sync(queue(url))
    connector.open()
    found = connector.depth()
    connector.close()
    print(json.dumps(dataclasses.asdict(found)), flush=True)


def main():
    what, url, *words = sys.argv[1:]
    if what == "fill":
        fill(url, int(words[0]))
    elif what == "left":
        left(url)
    elif what == "share":
        uvloop.run(share(url, int(words[0])))
    else:
        rate(url, int(words[0]), int(words[1]), words[2])


if __name__ == "__main__":
    main()
