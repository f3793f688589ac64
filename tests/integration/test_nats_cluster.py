"""Three servers of which the leader dies: nothing is lost, and a dispatch waits until another leads."""

from __future__ import annotations

import asyncio
import time

import pytest

from ergon_framework.connectors.base import Ack, SettleResult
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.nats.naming import names
from ergon_framework.errors import ConnectionLost
from ergon_framework.transaction import Transaction
from tests.integration.nats_queues import bare, name
from tests.servers.nats import PrivateNats
from tests.servers.postgres import free_port

pytestmark = pytest.mark.invariant

PATIENCE = 40.0


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


async def opened(queue):
    """Once the three have found each other."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return await queue.open_async()
        except ConnectionLost:
            assert time.monotonic() < end, "the cluster does not come up"
            await asyncio.sleep(0.2)


async def leader(server, queue):
    async with bare(server) as (_, api):
        return (await api(f"STREAM.INFO.{names(queue).work}"))["cluster"]["leader"]


@pytest.mark.spec("CNN-07", "CNN-02")
def test_the_death_of_a_leader_loses_nothing_and_is_waited_out(cluster):
    async def run():
        queue = NatsQueue(name(), url=",".join(server.url for server in cluster), replicas=3, patience=PATIENCE)
        await opened(queue)
        await queue.dispatch_async([Transaction(f"before-{number}", number) for number in range(50)])
        first = await queue.fetch_transactions_async(10, wait=5.0)
        dead = int((await leader(cluster[0], queue.name)).removeprefix("node-"))
        cluster[dead].kill()
        # One call: it goes on for as long as its patience lasts.
        await queue.dispatch_async([Transaction(f"after-{number}", number) for number in range(50)])
        seen = {delivery.transaction.id for delivery in first}
        end = time.monotonic() + PATIENCE
        settled, held = set(), list(first)
        while len(settled) < 100:
            assert time.monotonic() < end, f"{len(settled)} of 100 were settled"
            try:
                held += await queue.fetch_transactions_async(100, wait=1.0)
                results = await queue.settle_async([(delivery, Ack()) for delivery in held])
            except ConnectionLost:
                await asyncio.sleep(0.2)
                continue
            for delivery, result in zip(held, results, strict=True):
                if result is SettleResult.SETTLED:
                    settled.add(delivery.transaction.id)
            held = []
        assert seen <= settled
        await queue.close_async()

    asyncio.run(run())
