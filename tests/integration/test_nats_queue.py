"""Check a NATS queue with foreign producers, the relay, ``ergon run``, ``ergon dlq`` and its durability report."""

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
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.foreign_codec import ForeignCodec, from_header, from_json_pointer
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.nats.streams import StreamConfig, stream_names
from ergon_framework.task.relay import relay, relay_async
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from tests.integration import boxes
from tests.integration.nats_queues import claim_deliveries, new_queue_name, open_client, open_queue
from tests.integration.running import ERGON, TIMEOUT_SECONDS, ErgonProcess
from tests.log_events import get_event
from tests.servers.nats import find_distribution_server

# -- foreign messages ----------------------------------------------------------------------------------


@pytest.mark.spec("CNN-16", "CNN-03")
def test_plain_json_of_a_foreign_producer_has_a_stable_id(nats_server):
    codec = ForeignCodec(id=from_json_pointer("/order/id"), tenant=from_header("X-Shop"), type="order")

    async def run():
        subject = f"shop.{new_queue_name()}"
        async with (
            open_queue(nats_server, codec=codec, subjects=[subject]) as queue,
            open_client(nats_server) as (client, _),
        ):
            body = json.dumps({"order": {"id": 7}, "total": 5}).encode()
            await client.jetstream().publish(subject, body, headers={"X-Shop": "acme"})
            await client.jetstream().publish(stream_names(queue.name).subject, b'{"no": "id"}')
            one, other = await claim_deliveries(queue, 2)
            assert (one.transaction.id, one.transaction.tenant, one.transaction.type) == ("7", "acme", "order")
            assert other.error is not None
            await queue.settle_async([(one, Release()), (other, DeadLetter("undecodable"))])
            (redelivered,) = await claim_deliveries(queue, 1)
            assert (redelivered.transaction.id, redelivered.transaction.payload) == (
                "7",
                {"order": {"id": 7}, "total": 5},
            )
            await queue.settle_async([(redelivered, DeadLetter("why"))])
            unreadable, readable = await queue.list_dead_async(DeadLetterQuery())
            assert (unreadable.raw, readable.id, readable.envelope.tenant) == (b'{"no": "id"}', "7", "acme")
            assert await queue.find_queued_async(["7"]) is None

    asyncio.run(run())


# -- durability ----------------------------------------------------------------------------------------


def read_durability(server, caplog, **options):
    async def run():
        async with open_queue(server, **options) as queue:
            return queue.capabilities.durable, queue.durability

    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        durable, message = asyncio.run(run())
    (record,) = [record for record in caplog.records if get_event(record) == "nats durability"]
    assert record.levelno == (logging.INFO if durable else logging.WARNING)
    assert record.summary == message
    return durable, message


def read_version(server):
    async def read():
        async with open_client(server) as (client, _):
            return client.connected_server_version

    version = asyncio.run(read())
    return version.major, version.minor


@pytest.mark.spec("CNN-17")
def test_the_durability_report_says_what_a_power_loss_may_lose(nats_server, new_nats, caplog):
    synced = new_nats(sync=True)
    assert read_durability(synced, caplog, monitor=synced.monitor) == (
        True,
        "after a power loss no confirmed message is lost",
    )
    durable, message = read_durability(nats_server, caplog, monitor=nats_server.monitor)
    assert (durable, "120 s" in message) == (False, True)
    assert read_durability(synced, caplog)[0] is None
    assert read_durability(synced, caplog, monitor="http://127.0.0.1:1")[0] is None


@pytest.mark.spec("CNN-17")
def test_the_durability_report_fits_the_version_of_the_server(new_nats, caplog):
    program = find_distribution_server()
    unsynced = new_nats(program=program)
    durable, message = read_durability(unsynced, caplog, monitor=unsynced.monitor)
    assert durable is False
    if read_version(unsynced) < (2, 10):
        assert "the last 2 min may be lost: this server cannot sync each write" in message
    else:
        assert "the last 120 s may be lost: sync_interval" in message
        synced = new_nats(program=program, sync=True)
        assert read_durability(synced, caplog, monitor=synced.monitor)[0] is True


@pytest.mark.spec("CNN-17")
def test_a_stream_that_confirms_before_it_writes_is_not_durable(new_nats, caplog):
    synced, name = new_nats(sync=True), new_queue_name()

    async def create_stream():
        config = StreamConfig(stream_names(name), 30.0, (), 1, None).work_stream()
        async with open_client(synced) as (_, call_api):
            answer = await call_api(f"STREAM.CREATE.{config['name']}", **config, persist_mode="async")
            assert answer["config"]["persist_mode"] == "async", answer

    asyncio.run(create_stream())
    durable, message = read_durability(synced, caplog, queue=name, monitor=synced.monitor)
    assert (durable, "persist_mode" in message) == (False, True)


# -- sync and async variants ---------------------------------------------------------------------------


def test_the_same_queue_serves_one_event_loop_after_the_other(nats_server):
    queue = NatsQueue(new_queue_name(), url=nats_server.url)

    async def send(number):
        await queue.dispatch_async([Transaction(number, id=f"order-{number}")])

    async def take():
        deliveries = await claim_deliveries(queue, 2)
        await queue.settle_async([(delivery, Ack()) for delivery in deliveries])
        await queue.close_async()
        return sorted(delivery.transaction.payload for delivery in deliveries)

    async def send_and_close():
        await send(1)
        await queue.close_async()

    asyncio.run(send_and_close())
    asyncio.run(send_and_close())
    assert asyncio.run(take()) == [1, 1]


def test_queues_of_one_loop_share_a_connection(nats_server):
    async def run():
        async with open_queue(nats_server) as one, open_queue(nats_server) as other:
            assert (await one._get_session()).connection is (await other._get_session()).connection

    asyncio.run(run())


# -- from PostgreSQL -----------------------------------------------------------------------------------

ORDER_COUNT = 60
POLICY = ConsumerPolicy.load(
    {"loop": {"concurrency": {"value": 8}, "streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.05}}}
)


@pytest.mark.parametrize("variant", ["sync", "async"])
@pytest.mark.spec("CNN-15")
def test_the_relay_brings_an_outbox_to_nats(database, nats_server, variant):
    with boxes.open_queue(database) as source, boxes.open_queue(database, source.name) as observer_queue:
        with psycopg.connect(database) as connection:
            source.dispatch_on(connection, [Transaction(number, id=f"order-{number}") for number in range(ORDER_COUNT)])
            connection.commit()
        target = NatsQueue(source.name, url=nats_server.url)
        task = (relay if variant == "sync" else relay_async)(source, target)

        def stop_when_empty():
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while (depth := observer_queue.depth()).ready + depth.in_flight and time.monotonic() < deadline:
                time.sleep(0.02)
            task.stop()

        watcher = threading.Thread(target=stop_when_empty)
        watcher.start()
        task.run(POLICY) if variant == "sync" else asyncio.run(task.run(POLICY))
        watcher.join()
    reader = as_sync(NatsQueue(source.name, url=nats_server.url))
    deliveries = reader.fetch_transactions(2 * ORDER_COUNT, wait=2.0)
    reader.settle([(delivery, Ack()) for delivery in deliveries])
    reader.close()
    assert sorted(delivery.transaction.payload for delivery in deliveries) == list(range(ORDER_COUNT))


# -- the commands --------------------------------------------------------------------------------------

APP = """
import os
from ergon_framework import *
from ergon_framework.connectors.nats import NatsQueue

orders = NatsQueue(os.environ["ORDERS"])
policy = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 0.05, "cap": 0.05}}})

@consumer(orders, policy=policy)
%s charge(order, transaction):
    say(f"charged {transaction.id}")
    if order["card"] == "declined":
        raise BusinessError("declined", code="declined")

task = charge
"""


@pytest.mark.parametrize("definition", ["def", "async def"])
@pytest.mark.spec("RUN-01", "CNN-08")
def test_a_task_runs_and_its_dead_letters_are_replayed(nats_server, tmp_path, monkeypatch, definition):
    monkeypatch.setenv("ERGON_NATS__URL", nats_server.url)
    monkeypatch.setenv("ORDERS", new_queue_name())
    queue = as_sync(NatsQueue(os.environ["ORDERS"]))
    queue.dispatch([Transaction({"card": "good"}, id="order-1"), Transaction({"card": "declined"}, id="order-2")])
    with ErgonProcess(tmp_path, APP % definition) as running:
        running.wait_for("charged order-2")
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (queue.depth().dead and not queue.depth().in_flight):
            assert time.monotonic() < deadline, queue.depth()
            time.sleep(0.02)
        assert (run_dlq(tmp_path, "list", "--json")[0]["envelope"]["id"]) == "order-2"
        replayed = run_dlq(tmp_path, "replay", "--all", "--json")
        assert replayed, "nothing was replayed"
        running.wait_for("charged order-2")
        running.send_signal()
        assert running.wait_for_exit()[0] == 0
    queue.close()


def run_dlq(folder, command, *arguments):
    result = subprocess.run(
        [*ERGON, "dlq", command, "app:task", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]
