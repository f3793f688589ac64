"""What a message costs the processor on NATS and Redis: to fetch it, to settle it, and with the bare client both.

python bench/brokers/cost.py [--broker nats] [--groups 80]

Processor time of this process, taken group by group of 100 and in turns with the bare client, so that a busy machine
disturbs it less than a rate; it says nothing about waiting. The least and the median of all groups, in µs a message.
What the engine adds to it is what bench/run.py measures. It ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import nats
import redis.asyncio
import uvloop
from nats.js.api import ConsumerConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.connectors.base import Ack
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.redis import RedisQueue
from tests.servers.nats import PrivateNats
from tests.servers.redis import PrivateRedis

#: 200 bytes of JSON.
PAYLOAD = {"order": 4711, "text": "x" * 176}
BODY = json.dumps(PAYLOAD).encode()
GROUP = 100


async def bare_nats(url):
    """Fill by one call, empty by the other: fetch(100) and an ack for each."""
    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name="bare", subjects=["bare"])
    pull = await stream.pull_subscribe("bare", durable="bare", config=ConsumerConfig(max_ack_pending=-1))

    async def fill():
        await asyncio.gather(*(stream.publish("bare", BODY) for _ in range(GROUP)))

    async def empty():
        messages = await pull.fetch(GROUP, timeout=5)
        for message in messages:
            json.loads(message.data)
            await message.ack()
        await client.flush()
        return len(messages)

    return fill, empty, client.close


async def bare_redis(url):
    """XREADGROUP of 100, and one XACK for all of them."""
    client = redis.asyncio.Redis.from_url(url)
    await client.xgroup_create("bare", "bare", id="0", mkstream=True)

    async def fill():
        async with client.pipeline(transaction=False) as pipe:
            for _ in range(GROUP):
                pipe.xadd("bare", {"body": BODY})
            await pipe.execute()

    async def empty():
        ((_, messages),) = await client.xreadgroup("bare", "bare", {"bare": ">"}, count=GROUP)
        for _, fields in messages:
            json.loads(fields[b"body"])
        await client.xack("bare", "bare", *(number for number, _ in messages))
        return len(messages)

    return fill, empty, client.aclose


async def measured(queue, bare, groups):
    """Microseconds a message, of each group: to fetch, to settle, and the bare client's."""
    fill, empty, leave = bare
    found = {"fetch": [], "settle": [], "bare": []}
    await queue.open_async()
    for _ in range(groups):
        await queue.dispatch_async([queue.transaction(PAYLOAD) for _ in range(GROUP)])
        await fill()
        began = time.thread_time()
        fetched = await queue.fetch_transactions_async(GROUP, wait=5.0)
        then = time.thread_time()
        await queue.settle_async([(delivery, Ack()) for delivery in fetched])
        ended = time.thread_time()
        taken = await empty()
        found["fetch"].append((then - began) / len(fetched) * 1e6)
        found["settle"].append((ended - then) / len(fetched) * 1e6)
        found["bare"].append((time.thread_time() - ended) / taken * 1e6)
    await leave()
    await queue.close_async()
    return {
        name: {"least": round(min(each), 1), "median": round(statistics.median(each), 1)}
        for name, each in found.items()
    }


async def costs(broker, url, groups):
    if broker == "nats":
        return await measured(NatsQueue("cost", url=url), await bare_nats(url), groups)
    return await measured(RedisQueue("cost", url=url), await bare_redis(url), groups)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", action="append", choices=("nats", "redis"), help="which; both by default")
    parser.add_argument("--groups", type=int, default=80)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    told = {}
    for broker in options.broker or ("nats", "redis"):
        with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
            made = PrivateNats if broker == "nats" else lambda path: PrivateRedis(path, settings={"appendfsync": "no"})
            server = made(Path(folder) / "server")
            server.start()
            try:
                told[broker] = uvloop.run(costs(broker, server.url, options.groups))
            finally:
                server.kill()
    print(json.dumps({"microseconds": told, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
