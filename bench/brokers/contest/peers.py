"""One peer: its own client fills its queue, then one worker process handles all of it.

python bench/brokers/contest/peers.py PEER BROKER URL COUNT CONCURRENCY

Run with the environment that `make broker-peers` builds. Acks after processing, no results kept, a handler that does
nothing, JSON of 200 bytes. A peer on asyncio has uvloop. Prefetch: with RabbitMQ twice the concurrency, with other
brokers the default of the peer, or 100 at a time where it can be configured.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

import uvloop
from stopwatch import PAYLOAD, QUEUE_NAME, Stopwatch

#: Messages sent concurrently where the client supports it.
BATCH_SIZE = 100


async def send_all(count, send):
    for start in range(0, count, BATCH_SIZE):
        await asyncio.gather(*(send() for _ in range(min(BATCH_SIZE, count - start))))


# -- dramatiq: threads -----------------------------------------------------------------------------


def run_dramatiq(broker, url, watch, count, concurrency):
    import dramatiq as library
    from dramatiq.brokers.rabbitmq import RabbitmqBroker
    from dramatiq.brokers.redis import RedisBroker

    connection = RabbitmqBroker(url=url) if broker == "rabbitmq" else RedisBroker(url=url)
    library.set_broker(connection)

    @library.actor(queue_name=QUEUE_NAME)
    def handle(payload):
        watch.tick()

    for _ in range(count):
        handle.send(PAYLOAD)
    worker = library.Worker(connection, worker_threads=concurrency, queues={QUEUE_NAME})
    worker.start()
    threading.Event().wait()


# -- FastStream: asyncio ---------------------------------------------------------------------------


def run_faststream(broker, url, watch, count, concurrency):
    uvloop.run(_run_faststream(broker, url, watch, count, concurrency))


async def _run_faststream(broker, url, watch, count, concurrency):
    client, subscriber, send = {"rabbitmq": _build_rabbitmq, "nats": _build_nats, "redis": _build_redis}[broker](
        url, concurrency
    )

    @subscriber
    async def handle(payload: dict):
        watch.tick()

    await client.connect()
    if broker == "redis":
        from redis.asyncio import Redis

        await Redis.from_url(url).xgroup_create(QUEUE_NAME, QUEUE_NAME, id="0", mkstream=True)
    if broker == "rabbitmq":
        # Declared before it is filled; the consumer declares it with the same options.
        await client.declare_queue(_build_queue())
    if broker == "nats":
        await client.config.broker_config.connection_state.stream.add_stream(name=QUEUE_NAME, subjects=[QUEUE_NAME])
    await send_all(count, send)
    await client.start()
    await asyncio.Event().wait()


def _build_queue():
    from faststream.rabbit import QueueType, RabbitQueue

    return RabbitQueue(QUEUE_NAME, queue_type=QueueType.QUORUM, durable=True)


def _build_rabbitmq(url, concurrency):
    from faststream.rabbit import Channel, RabbitBroker

    client = RabbitBroker(url, default_channel=Channel(prefetch_count=2 * concurrency), logger=None)
    return client, client.subscriber(_build_queue()), lambda: client.publish(PAYLOAD, QUEUE_NAME, persist=True)


def _build_nats(url, concurrency):
    from faststream.nats import JStream, NatsBroker, PullSub

    client = NatsBroker(url, logger=None)
    pull = PullSub(batch_size=BATCH_SIZE, timeout=1.0)
    options = {
        "stream": JStream(QUEUE_NAME, declare=False),
        "durable": QUEUE_NAME,
        "pull_sub": pull,
        "max_workers": concurrency,
    }
    return (
        client,
        client.subscriber(QUEUE_NAME, **options),
        lambda: client.publish(PAYLOAD, QUEUE_NAME, stream=QUEUE_NAME),
    )


def _build_redis(url, concurrency):
    from faststream.redis import RedisBroker, StreamSub

    client = RedisBroker(url, logger=None)
    stream = StreamSub(QUEUE_NAME, group=QUEUE_NAME, consumer=QUEUE_NAME, max_records=BATCH_SIZE)
    return (
        client,
        client.subscriber(stream=stream, max_workers=concurrency),
        lambda: client.publish(PAYLOAD, stream=QUEUE_NAME),
    )


# -- taskiq: asyncio -------------------------------------------------------------------------------


def run_taskiq(broker, url, watch, count, concurrency):
    uvloop.run(_run_taskiq(broker, url, watch, count, concurrency))


async def _run_taskiq(broker, url, watch, count, concurrency):
    from taskiq.acks import AcknowledgeType
    from taskiq.receiver import Receiver

    client = _build_taskiq_broker(broker, url, concurrency)

    @client.task
    async def handle(payload):
        watch.tick()

    client.is_worker_process = True
    await client.startup()
    await send_all(count, lambda: handle.kiq(PAYLOAD))
    options = {"max_async_tasks": concurrency, "max_prefetch": concurrency, "validate_params": False}
    receiver = Receiver(client, run_startup=False, ack_type=AcknowledgeType.WHEN_EXECUTED, **options)
    await receiver.listen(asyncio.Event())


def _build_taskiq_broker(broker, url, concurrency):
    if broker == "rabbitmq":
        from taskiq_aio_pika import AioPikaBroker

        return AioPikaBroker(url, qos=2 * concurrency)
    if broker == "nats":
        from taskiq_nats import PullBasedJetStreamBroker

        return PullBasedJetStreamBroker(
            [url],
            subject=QUEUE_NAME,
            stream_name=QUEUE_NAME,
            durable=QUEUE_NAME,
            pull_consume_batch=BATCH_SIZE,
            pull_consume_timeout=1,
        )
    from taskiq_redis import RedisStreamBroker

    return RedisStreamBroker(
        url, queue_name=QUEUE_NAME, consumer_group_name=QUEUE_NAME, consumer_id="0", xread_count=BATCH_SIZE
    )


# -- Celery: threads -------------------------------------------------------------------------------


def run_celery(broker, url, watch, count, concurrency):
    from celery import Celery

    app = Celery(QUEUE_NAME, broker=url)
    app.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=2,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        task_default_queue=QUEUE_NAME,
    )

    @app.task(name="handle")
    def handle(payload):
        watch.tick()

    with app.producer_pool.acquire() as producer:
        for _ in range(count):
            handle.apply_async((PAYLOAD,), producer=producer)
    arguments = ["worker", "--pool=threads", f"--concurrency={concurrency}", "--loglevel=ERROR", "--without-mingle"]
    app.worker_main([*arguments, "--without-gossip", "--without-heartbeat"])


# -- repid: asyncio --------------------------------------------------------------------------------


def run_repid(broker, url, watch, count, concurrency):
    uvloop.run(_run_repid(url, watch, count, concurrency))


async def _run_repid(url, watch, count, concurrency):
    from repid import RedisServer, Repid, Router

    app, router = Repid(), Router()
    server = RedisServer(url, batch_size=BATCH_SIZE)
    app.servers.register_server("default", server, is_default=True)

    @router.actor(channel=QUEUE_NAME)
    async def handle(order: int, text: str):
        watch.tick()

    app.include_router(router)
    async with server.connection():
        headers = {"topic": "handle"}
        await send_all(count, lambda: app.send_message_json(channel=QUEUE_NAME, payload=PAYLOAD, headers=headers))
        await app.run_worker(tasks_limit=concurrency, register_signals=[])


# Not arq, which requires an older redis-py than the others. repid speaks AMQP 1.0, which RabbitMQ 3 does not.
PEERS = {
    "rabbitmq": ("dramatiq", "faststream", "taskiq", "celery"),
    "nats": ("faststream", "taskiq"),
    "redis": ("dramatiq", "faststream", "taskiq", "celery", "repid"),
}


def main():
    peer, broker, url, count, concurrency = sys.argv[1:]
    logging.disable(logging.ERROR)
    run = {
        "dramatiq": run_dramatiq,
        "faststream": run_faststream,
        "taskiq": run_taskiq,
        "celery": run_celery,
        "repid": run_repid,
    }
    run[peer](broker, url, Stopwatch(int(count)), int(count), int(concurrency))


if __name__ == "__main__":
    main()
