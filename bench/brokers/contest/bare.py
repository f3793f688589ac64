"""The bare client: careful code without any framework; nothing is retried, timed out or counted.

python bench/brokers/contest/bare.py BROKER URL COUNT CONCURRENCY

RabbitMQ: aio-pika, one ack for each message. NATS: nats-py, fetch(100), one ack for each message. Redis: redis-py,
XREADGROUP of 100, one XACK for all of them. Each reads the JSON, and holds at most twice the messages that it may
handle concurrently.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop
from stopwatch import PAYLOAD, QUEUE_NAME, Stopwatch

BODY = json.dumps(PAYLOAD).encode()
BATCH_SIZE = 100


async def run_rabbitmq(url, watch, count, concurrency):
    import aio_pika

    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=2 * concurrency)
    queue = await channel.declare_queue(QUEUE_NAME, durable=True, arguments={"x-queue-type": "quorum"})
    message = aio_pika.Message(BODY, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    for start in range(0, count, BATCH_SIZE):
        publishes = (
            channel.default_exchange.publish(message, QUEUE_NAME) for _ in range(min(BATCH_SIZE, count - start))
        )
        await asyncio.gather(*publishes)

    async def handle(message):
        json.loads(message.body)
        await message.ack()
        watch.tick()

    await queue.consume(handle)
    await asyncio.Event().wait()


async def run_nats(url, watch, count, concurrency):
    import nats as library
    from nats.js.api import ConsumerConfig

    client = await library.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name=QUEUE_NAME, subjects=[QUEUE_NAME])
    for start in range(0, count, BATCH_SIZE):
        await asyncio.gather(*(stream.publish(QUEUE_NAME, BODY) for _ in range(min(BATCH_SIZE, count - start))))
    pull = await stream.pull_subscribe(QUEUE_NAME, durable=QUEUE_NAME, config=ConsumerConfig(max_ack_pending=-1))
    while True:
        for message in await pull.fetch(BATCH_SIZE, timeout=5):
            json.loads(message.data)
            await message.ack()
            watch.tick()


async def run_redis(url, watch, count, concurrency):
    from redis.asyncio import Redis

    client = Redis.from_url(url)
    await client.xgroup_create(QUEUE_NAME, QUEUE_NAME, id="0", mkstream=True)
    for start in range(0, count, BATCH_SIZE):
        async with client.pipeline(transaction=False) as pipe:
            for _ in range(min(BATCH_SIZE, count - start)):
                pipe.xadd(QUEUE_NAME, {"body": BODY})
            await pipe.execute()
    while True:
        for _, messages in await client.xreadgroup(
            QUEUE_NAME, QUEUE_NAME, {QUEUE_NAME: ">"}, count=BATCH_SIZE, block=5000
        ):
            for _, fields in messages:
                json.loads(fields[b"body"])
            await client.xack(QUEUE_NAME, QUEUE_NAME, *(message_id for message_id, _ in messages))
            for _ in messages:
                watch.tick()


def main():
    broker, url, count, concurrency = sys.argv[1:]
    run = {"rabbitmq": run_rabbitmq, "nats": run_nats, "redis": run_redis}[broker]
    uvloop.run(run(url, Stopwatch(int(count)), int(count), int(concurrency)))


if __name__ == "__main__":
    main()
