"""A queue in NATS among the others: foreign producers, the relay, ``ergon run`` and ``ergon dlq``, what it is worth."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import threading
import time

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Release
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.foreign import ForeignCodec, header, pointer
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.nats.naming import names
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.relay import relay, relay_async
from ergon_framework.transaction import Transaction
from tests.integration import boxes
from tests.integration.nats_queues import bare, claimed, name, opened
from tests.integration.running import ERGON, PATIENCE, Running
from tests.log_events import event_of
from tests.servers.nats import find_old

# -- foreign messages ----------------------------------------------------------------------------------


@pytest.mark.spec("CNN-16", "CNN-03")
def test_plain_json_of_somebody_else_has_a_stable_id(nats_server):
    codec = ForeignCodec(id=pointer("/order/id"), tenant=header("X-Shop"), type="order")

    async def run():
        subject = f"shop.{name()}"
        async with opened(nats_server, codec=codec, subjects=[subject]) as queue, bare(nats_server) as (line, _):
            theirs = json.dumps({"order": {"id": 7}, "total": 5}).encode()
            await line.jetstream().publish(subject, theirs, headers={"X-Shop": "acme"})
            await line.jetstream().publish(names(queue.name).subject, b'{"no": "id"}')
            one, other = await claimed(queue, 2)
            assert (one.transaction.id, one.transaction.tenant, one.transaction.type) == ("7", "acme", "order")
            assert other.error is not None
            await queue.settle_async([(one, Release()), (other, DeadLetter("undecodable"))])
            (again,) = await claimed(queue, 1)
            assert (again.transaction.id, again.transaction.payload) == ("7", {"order": {"id": 7}, "total": 5})
            await queue.settle_async([(again, DeadLetter("why"))])
            unreadable, readable = await queue.list_dead_async(DeadLetterQuery())
            assert (unreadable.raw, readable.id, readable.envelope.tenant) == (b'{"no": "id"}', "7", "acme")
            assert await queue.queued_async(["7"]) is None

    asyncio.run(run())


# -- what it is worth ----------------------------------------------------------------------------------


def judged(server, caplog, **options):
    async def run():
        async with opened(server, **options) as queue:
            return queue.capabilities.durable, queue.durability

    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        durable, words = asyncio.run(run())
    (record,) = [record for record in caplog.records if event_of(record) == "nats durability"]
    assert record.levelno == (logging.INFO if durable else logging.WARNING)
    assert record.words == words
    return durable, words


@pytest.mark.spec("CNN-17")
def test_it_says_what_a_power_loss_could_cost(nats_server, new_nats, caplog):
    synced = new_nats(sync=True)
    assert judged(synced, caplog, monitor=synced.monitor) == (True, "a power loss costs nothing that was confirmed")
    durable, words = judged(nats_server, caplog, monitor=nats_server.monitor)
    assert (durable, "120 s" in words) == (False, True)
    assert judged(synced, caplog)[0] is None
    assert judged(synced, caplog, monitor="http://127.0.0.1:1")[0] is None
    durable, words = judged(new_nats(program=find_old()), caplog)
    assert (durable, "cannot sync" in words) == (False, True)


# -- both flavours -------------------------------------------------------------------------------------


def test_the_same_queue_serves_one_event_loop_after_the_other(nats_server):
    queue = NatsQueue(name(), url=nats_server.url)

    async def send(number):
        await queue.dispatch_async([Transaction(f"order-{number}", number)])

    async def take():
        found = await claimed(queue, 2)
        await queue.settle_async([(delivery, Ack()) for delivery in found])
        await queue.close_async()
        return sorted(delivery.transaction.payload for delivery in found)

    async def sent():
        await send(1)
        await queue.close_async()

    asyncio.run(sent())
    asyncio.run(sent())
    assert asyncio.run(take()) == [1, 1]


def test_queues_of_one_loop_share_a_line(nats_server):
    async def run():
        async with opened(nats_server) as one, opened(nats_server) as other:
            assert (await one._opened()).line is (await other._opened()).line

    asyncio.run(run())


# -- from PostgreSQL -----------------------------------------------------------------------------------

COUNT = 60
POLICY = ConsumerPolicy.load(
    {"loop": {"concurrency": {"value": 8}, "streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.05}}}
)


@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.spec("CNN-15")
def test_the_relay_brings_an_outbox_to_nats(database, nats_server, flavour):
    with boxes.opened(database) as source, boxes.opened(database, source.name) as looked_at:
        with psycopg.connect(database) as connection:
            source.dispatch_on(connection, [Transaction(f"order-{number}", number) for number in range(COUNT)])
            connection.commit()
        target = NatsQueue(source.name, url=nats_server.url)
        task = (relay if flavour == "sync" else relay_async)(source, target)

        def watch():
            end = time.monotonic() + PATIENCE
            while (depth := looked_at.depth()).ready + depth.in_flight and time.monotonic() < end:
                time.sleep(0.02)
            task.stop()

        watching = threading.Thread(target=watch)
        watching.start()
        task.run(POLICY) if flavour == "sync" else asyncio.run(task.run(POLICY))
        watching.join()
    reading = as_sync(NatsQueue(source.name, url=nats_server.url))
    found = reading.fetch_transactions(2 * COUNT, wait=2.0)
    reading.settle([(delivery, Ack()) for delivery in found])
    reading.close()
    assert sorted(delivery.transaction.payload for delivery in found) == list(range(COUNT))


# -- the commands --------------------------------------------------------------------------------------

APP = """
import os
from ergon_framework import *
from ergon_framework.connectors.nats import NatsQueue

orders = NatsQueue(os.environ["ORDERS"])
policy = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 0.05, "cap": 0.05}}})

@consumer(orders, policy=policy)
%s charge(order, transaction):
    print("charged", transaction.id, flush=True)
    if order["card"] == "declined":
        raise BusinessError("declined", code="declined")

task = charge
"""


@pytest.mark.parametrize("flavour", ["def", "async def"])
@pytest.mark.spec("RUN-01", "CNN-08")
def test_a_task_runs_and_its_dead_letters_are_replayed(nats_server, tmp_path, monkeypatch, flavour):
    monkeypatch.setenv("ERGON_NATS__URL", nats_server.url)
    monkeypatch.setenv("ORDERS", name())
    queue = as_sync(NatsQueue(os.environ["ORDERS"]))
    queue.dispatch([Transaction("order-1", {"card": "good"}), Transaction("order-2", {"card": "declined"})])
    with Running(tmp_path, APP % flavour) as running:
        running.wait_for("charged order-2")
        end = time.monotonic() + PATIENCE
        while not (queue.depth().dead and not queue.depth().in_flight):
            assert time.monotonic() < end, queue.depth()
            time.sleep(0.02)
        assert (dlq(tmp_path, "list", "--json")[0]["envelope"]["id"]) == "order-2"
        moved = dlq(tmp_path, "replay", "--all", "--json")
        assert moved, "nothing was replayed"
        running.wait_for("charged order-2")
        running.send()
        assert running.ended()[0] == 0
    queue.close()


def dlq(folder, command, *words):
    ran = subprocess.run(
        [*ERGON, "dlq", command, "app:task", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]
