"""The bare client: what a careful hand writes without any framework; nothing is retried, timed out or counted.

python bench/brokers/contest/bare.py BROKER URL COUNT CONCURRENCY

RabbitMQ: aio-pika, one ack for each message. NATS: nats-py, fetch(100), one ack for each message. Redis: redis-py,
XREADGROUP of 100, one XACK for all of them. Each reads the JSON, and holds no more than it may handle at once and as
many again.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop
from stopwatch import NAME, PAYLOAD, Stopwatch

BODY = json.dumps(PAYLOAD).encode()
AT_ONCE = 100


async def rabbitmq(url, watch, count, concurrency):
    import aio_pika

    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=2 * concurrency)
    queue = await channel.declare_queue(NAME, durable=True, arguments={"x-queue-type": "quorum"})
    message = aio_pika.Message(BODY, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    for start in range(0, count, AT_ONCE):
        sent = (channel.default_exchange.publish(message, NAME) for _ in range(min(AT_ONCE, count - start)))
        await asyncio.gather(*sent)

    async def handle(message):
        json.loads(message.body)
        await message.ack()
        watch.tick()

    await queue.consume(handle)
    await asyncio.Event().wait()


async def nats(url, watch, count, concurrency):
    import nats as library
    from nats.js.api import ConsumerConfig

    client = await library.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name=NAME, subjects=[NAME])
    for start in range(0, count, AT_ONCE):
        await asyncio.gather(*(stream.publish(NAME, BODY) for _ in range(min(AT_ONCE, count - start))))
    pull = await stream.pull_subscribe(NAME, durable=NAME, config=ConsumerConfig(max_ack_pending=-1))
    while True:
        for message in await pull.fetch(AT_ONCE, timeout=5):
            json.loads(message.data)
            await message.ack()
            watch.tick()


async def redis(url, watch, count, concurrency):
    from redis.asyncio import Redis

    client = Redis.from_url(url)
    await client.xgroup_create(NAME, NAME, id="0", mkstream=True)
    for start in range(0, count, AT_ONCE):
        async with client.pipeline(transaction=False) as pipe:
            for _ in range(min(AT_ONCE, count - start)):
                pipe.xadd(NAME, {"body": BODY})
            await pipe.execute()
    while True:
        for _, messages in await client.xreadgroup(NAME, NAME, {NAME: ">"}, count=AT_ONCE, block=5000):
            for _, fields in messages:
                json.loads(fields[b"body"])
            await client.xack(NAME, NAME, *(number for number, _ in messages))
            for _ in messages:
                watch.tick()


def main():
    broker, url, count, concurrency = sys.argv[1:]
    run = {"rabbitmq": rabbitmq, "nats": nats, "redis": redis}[broker]
    uvloop.run(run(url, Stopwatch(int(count)), int(count), int(concurrency)))


if __name__ == "__main__":
    main()
