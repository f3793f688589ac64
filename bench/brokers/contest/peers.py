"""One peer: its queue is filled by its own client, then one worker process handles all of it.

python bench/brokers/contest/peers.py PEER BROKER URL COUNT CONCURRENCY

Run with the environment that `make broker-peers` builds. Acks after processing, no results kept, a handler that does
nothing, JSON of 200 bytes. A peer on asyncio has uvloop. What each may hold beside what runs: RabbitMQ twice the
concurrency, others as many as they ask for by themselves, or 100 at a time where they let one say it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

import uvloop
from stopwatch import NAME, PAYLOAD, Stopwatch

#: How many are sent at once where the client lets one.
AT_ONCE = 100


async def gathered(count, send):
    for start in range(0, count, AT_ONCE):
        await asyncio.gather(*(send() for _ in range(min(AT_ONCE, count - start))))


# -- dramatiq: threads -----------------------------------------------------------------------------


def dramatiq(broker, url, watch, count, concurrency):
    import dramatiq as library
    from dramatiq.brokers.rabbitmq import RabbitmqBroker
    from dramatiq.brokers.redis import RedisBroker

    made = RabbitmqBroker(url=url) if broker == "rabbitmq" else RedisBroker(url=url)
    library.set_broker(made)

    @library.actor(queue_name=NAME)
    def handle(payload):
        watch.tick()

    for _ in range(count):
        handle.send(PAYLOAD)
    worker = library.Worker(made, worker_threads=concurrency, queues={NAME})
    worker.start()
    threading.Event().wait()


# -- FastStream: asyncio ---------------------------------------------------------------------------


def faststream(broker, url, watch, count, concurrency):
    uvloop.run(_faststream(broker, url, watch, count, concurrency))


async def _faststream(broker, url, watch, count, concurrency):
    made, subscriber, send = {"rabbitmq": _rabbit, "nats": _nats, "redis": _redis}[broker](url, concurrency)

    @subscriber
    async def handle(payload: dict):
        watch.tick()

    await made.connect()
    if broker == "redis":
        from redis.asyncio import Redis

        await Redis.from_url(url).xgroup_create(NAME, NAME, id="0", mkstream=True)
    if broker == "rabbitmq":
        # Declared before it is filled; whoever consumes declares it the same.
        await made.declare_queue(_queue())
    if broker == "nats":
        await made.config.broker_config.connection_state.stream.add_stream(name=NAME, subjects=[NAME])
    await gathered(count, send)
    await made.start()
    await asyncio.Event().wait()


def _queue():
    from faststream.rabbit import QueueType, RabbitQueue

    return RabbitQueue(NAME, queue_type=QueueType.QUORUM, durable=True)


def _rabbit(url, concurrency):
    from faststream.rabbit import Channel, RabbitBroker

    made = RabbitBroker(url, default_channel=Channel(prefetch_count=2 * concurrency), logger=None)
    return made, made.subscriber(_queue()), lambda: made.publish(PAYLOAD, NAME, persist=True)


def _nats(url, concurrency):
    from faststream.nats import JStream, NatsBroker, PullSub

    made = NatsBroker(url, logger=None)
    pull = PullSub(batch_size=AT_ONCE, timeout=1.0)
    told = {"stream": JStream(NAME, declare=False), "durable": NAME, "pull_sub": pull, "max_workers": concurrency}
    return made, made.subscriber(NAME, **told), lambda: made.publish(PAYLOAD, NAME, stream=NAME)


def _redis(url, concurrency):
    from faststream.redis import RedisBroker, StreamSub

    made = RedisBroker(url, logger=None)
    stream = StreamSub(NAME, group=NAME, consumer=NAME, max_records=AT_ONCE)
    return made, made.subscriber(stream=stream, max_workers=concurrency), lambda: made.publish(PAYLOAD, stream=NAME)


# -- taskiq: asyncio -------------------------------------------------------------------------------


def taskiq(broker, url, watch, count, concurrency):
    uvloop.run(_taskiq(broker, url, watch, count, concurrency))


async def _taskiq(broker, url, watch, count, concurrency):
    from taskiq.acks import AcknowledgeType
    from taskiq.receiver import Receiver

    made = _taskiq_broker(broker, url, concurrency)

    @made.task
    async def handle(payload):
        watch.tick()

    made.is_worker_process = True
    await made.startup()
    await gathered(count, lambda: handle.kiq(PAYLOAD))
    told = {"max_async_tasks": concurrency, "max_prefetch": concurrency, "validate_params": False}
    receiver = Receiver(made, run_startup=False, ack_type=AcknowledgeType.WHEN_EXECUTED, **told)
    await receiver.listen(asyncio.Event())


def _taskiq_broker(broker, url, concurrency):
    if broker == "rabbitmq":
        from taskiq_aio_pika import AioPikaBroker

        return AioPikaBroker(url, qos=2 * concurrency)
    if broker == "nats":
        from taskiq_nats import PullBasedJetStreamBroker

        return PullBasedJetStreamBroker(
            [url], subject=NAME, stream_name=NAME, durable=NAME, pull_consume_batch=AT_ONCE, pull_consume_timeout=1
        )
    from taskiq_redis import RedisStreamBroker

    return RedisStreamBroker(url, queue_name=NAME, consumer_group_name=NAME, consumer_id="0", xread_count=AT_ONCE)


# -- Celery: threads -------------------------------------------------------------------------------


def celery(broker, url, watch, count, concurrency):
    from celery import Celery

    app = Celery(NAME, broker=url)
    app.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=2,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        task_default_queue=NAME,
    )

    @app.task(name="handle")
    def handle(payload):
        watch.tick()

    with app.producer_pool.acquire() as producer:
        for _ in range(count):
            handle.apply_async((PAYLOAD,), producer=producer)
    words = ["worker", "--pool=threads", f"--concurrency={concurrency}", "--loglevel=ERROR", "--without-mingle"]
    app.worker_main([*words, "--without-gossip", "--without-heartbeat"])


# -- repid: asyncio --------------------------------------------------------------------------------


def repid(broker, url, watch, count, concurrency):
    uvloop.run(_repid(url, watch, count, concurrency))


async def _repid(url, watch, count, concurrency):
    from repid import RedisServer, Repid, Router

    app, router = Repid(), Router()
    server = RedisServer(url, batch_size=AT_ONCE)
    app.servers.register_server("default", server, is_default=True)

    @router.actor(channel=NAME)
    async def handle(order: int, text: str):
        watch.tick()

    app.include_router(router)
    async with server.connection():
        headers = {"topic": "handle"}
        await gathered(count, lambda: app.send_message_json(channel=NAME, payload=PAYLOAD, headers=headers))
        await app.run_worker(tasks_limit=concurrency, register_signals=[])


# Not arq, which holds redis-py below the release that others need. repid speaks AMQP 1.0, which RabbitMQ 3 does not.
PEERS = {
    "rabbitmq": ("dramatiq", "faststream", "taskiq", "celery"),
    "nats": ("faststream", "taskiq"),
    "redis": ("dramatiq", "faststream", "taskiq", "celery", "repid"),
}


def main():
    peer, broker, url, count, concurrency = sys.argv[1:]
    logging.disable(logging.ERROR)
    run = {"dramatiq": dramatiq, "faststream": faststream, "taskiq": taskiq, "celery": celery, "repid": repid}
    run[peer](broker, url, Stopwatch(int(count)), int(count), int(concurrency))


if __name__ == "__main__":
    main()
