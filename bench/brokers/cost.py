"""The processor time of a message on NATS and Redis: to fetch it, to settle it, and both with the bare client.

python bench/brokers/cost.py [--broker nats] [--groups 80]

Processor time of this process, measured in groups of 100 and in turns with the bare client, so that other load on the
machine disturbs it less than a rate; it does not include waiting. The minimum and the median of all groups, in µs per
message. bench/run.py measures the overhead of the engine. It ends with one line of JSON.
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
GROUP_SIZE = 100


async def open_bare_nats(url):
    """Fill by one call, empty by the other: fetch(100) and an ack for each."""
    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name="bare", subjects=["bare"])
    pull = await stream.pull_subscribe("bare", durable="bare", config=ConsumerConfig(max_ack_pending=-1))

    async def fill():
        await asyncio.gather(*(stream.publish("bare", BODY) for _ in range(GROUP_SIZE)))

    async def empty():
        messages = await pull.fetch(GROUP_SIZE, timeout=5)
        for message in messages:
            json.loads(message.data)
            await message.ack()
        await client.flush()
        return len(messages)

    return fill, empty, client.close


async def open_bare_redis(url):
    """XREADGROUP of 100, and one XACK for all of them."""
    client = redis.asyncio.Redis.from_url(url)
    await client.xgroup_create("bare", "bare", id="0", mkstream=True)

    async def fill():
        async with client.pipeline(transaction=False) as pipe:
            for _ in range(GROUP_SIZE):
                pipe.xadd("bare", {"body": BODY})
            await pipe.execute()

    async def empty():
        ((_, messages),) = await client.xreadgroup("bare", "bare", {"bare": ">"}, count=GROUP_SIZE)
        for _, fields in messages:
            json.loads(fields[b"body"])
        await client.xack("bare", "bare", *(message_id for message_id, _ in messages))
        return len(messages)

    return fill, empty, client.aclose


async def measure(queue, bare_client, groups):
    """Return microseconds per message, of each group: to fetch, to settle, and the bare client's."""
    fill, empty, close_client = bare_client
    durations = {"fetch": [], "settle": [], "bare": []}
    await queue.open_async()
    for _ in range(groups):
        await queue.dispatch_async([queue.transaction(PAYLOAD) for _ in range(GROUP_SIZE)])
        await fill()
        began = time.thread_time()
        deliveries = await queue.fetch_transactions_async(GROUP_SIZE, wait=5.0)
        fetch_end = time.thread_time()
        await queue.settle_async([(delivery, Ack()) for delivery in deliveries])
        settle_end = time.thread_time()
        count = await empty()
        durations["fetch"].append((fetch_end - began) / len(deliveries) * 1e6)
        durations["settle"].append((settle_end - fetch_end) / len(deliveries) * 1e6)
        durations["bare"].append((time.thread_time() - settle_end) / count * 1e6)
    await close_client()
    await queue.close_async()
    return {
        name: {"least": round(min(values), 1), "median": round(statistics.median(values), 1)}
        for name, values in durations.items()
    }


async def measure_broker(broker, url, groups):
    if broker == "nats":
        return await measure(NatsQueue("cost", url=url), await open_bare_nats(url), groups)
    return await measure(RedisQueue("cost", url=url), await open_bare_redis(url), groups)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", action="append", choices=("nats", "redis"), help="which; both by default")
    parser.add_argument("--groups", type=int, default=80)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    results = {}
    for broker in options.broker or ("nats", "redis"):
        with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
            create_server = (
                PrivateNats if broker == "nats" else lambda path: PrivateRedis(path, settings={"appendfsync": "no"})
            )
            server = create_server(Path(folder) / "server")
            server.start()
            try:
                results[broker] = uvloop.run(measure_broker(broker, server.url, options.groups))
            finally:
                server.kill()
    print(json.dumps({"microseconds": results, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
