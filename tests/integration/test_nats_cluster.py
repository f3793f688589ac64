"""Check a cluster of three servers whose leader fails: no message is lost and a dispatch waits for the next leader."""

from __future__ import annotations

import asyncio
import time

import pytest

from ergon_framework.connectors.base import Ack, SettleResult
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.nats.streams import stream_names
from ergon_framework.errors import ConnectionLostError
from ergon_framework.transaction import Transaction
from tests.integration.nats_queues import new_queue_name, open_client
from tests.servers.nats import PrivateNats
from tests.servers.postgres import free_port

pytestmark = pytest.mark.invariant

TIMEOUT_SECONDS = 40.0


@pytest.fixture
def cluster(new_folder):
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = []
    for number, port in enumerate(ports):
        settings = (
            f"server_name: node-{number}\ncluster {{ name: ergon, listen: 127.0.0.1:{port}, routes: [{routes}] }}\n"
        )
        servers.append(PrivateNats(new_folder("nats"), settings=settings))
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()


async def open_when_ready(queue):
    """Open *queue* once the three servers have formed a cluster."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            return await queue.open_async()
        except ConnectionLostError:
            assert time.monotonic() < deadline, "the cluster does not come up"
            await asyncio.sleep(0.2)


async def get_leader(server, queue):
    async with open_client(server) as (_, api):
        return (await api(f"STREAM.INFO.{stream_names(queue).work}"))["cluster"]["leader"]


@pytest.mark.spec("CNN-07", "CNN-02")
def test_no_message_is_lost_when_the_leader_is_killed_and_a_dispatch_waits_for_the_next(cluster):
    async def run():
        queue = NatsQueue(
            new_queue_name(), url=",".join(server.url for server in cluster), replicas=3, patience=TIMEOUT_SECONDS
        )
        await open_when_ready(queue)
        await queue.dispatch_async([Transaction(number, id=f"before-{number}") for number in range(50)])
        first = await queue.fetch_transactions_async(10, wait=5.0)
        leader_number = int((await get_leader(cluster[0], queue.name)).removeprefix("node-"))
        cluster[leader_number].kill()
        # One call: it is retried until its timeout.
        await queue.dispatch_async([Transaction(number, id=f"after-{number}") for number in range(50)])
        first_ids = {delivery.transaction.id for delivery in first}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        settled_ids, unsettled = set(), list(first)
        while len(settled_ids) < 100:
            assert time.monotonic() < deadline, f"{len(settled_ids)} of 100 were settled"
            try:
                unsettled += await queue.fetch_transactions_async(100, wait=1.0)
                results = await queue.settle_async([(delivery, Ack()) for delivery in unsettled])
            except ConnectionLostError:
                await asyncio.sleep(0.2)
                continue
            for delivery, result in zip(unsettled, results, strict=True):
                if result is SettleResult.SETTLED:
                    settled_ids.add(delivery.transaction.id)
            unsettled = []
        assert first_ids <= settled_ids
        await queue.close_async()

    asyncio.run(run())
