"""Check which counts, delays and acks survive when a NATS server is killed."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework.connectors.base import Ack, Defer, SettleResult
from ergon_framework.errors import Category, ConnectionLostError
from ergon_framework.failure import Attempt
from ergon_framework.transaction import Transaction
from tests.integration.nats_queues import claim_deliveries, open_queue
from tests.servers.nats import find_bundled_server, find_distribution_server

pytestmark = pytest.mark.invariant

HISTORY = (Attempt(attempt=0, category=Category.SYSTEM, error="it broke", at=1_700_000_000.5, delay=3.0),)

#: Many more than are acked while a server that was told to stop shuts down.
ORDER_COUNT, STOP_INDEX = 500, 20


@pytest.fixture(params=[find_bundled_server, find_distribution_server], ids=["new", "old"])
def server(request, new_nats):
    return new_nats(program=request.param())


@pytest.mark.spec("CNN-02", "CNN-07")
def test_acked_messages_are_not_redelivered_after_the_server_is_killed(server):
    """Servers before 2.10 keep acks in memory for minutes; for them the connector erases acked messages."""

    async def run():
        async with open_queue(server, lease=2.0) as queue:
            await queue.dispatch_async([Transaction(number, id=f"order-{number}") for number in range(60)])
            deliveries = await claim_deliveries(queue, 60)
            acked = [delivery for delivery in deliveries if delivery.transaction.payload % 3]
            results = await queue.settle_async([(delivery, Ack()) for delivery in acked])
            assert set(results) == {SettleResult.SETTLED}
            server.kill()
            server.start()
            # The first may be delivered for the second time before the last is delivered for the first time.
            unacked, redelivered = set(range(0, 60, 3)), set()
            while not redelivered >= unacked:
                redelivered |= {each.transaction.payload for each in await claim_deliveries(queue, 1, within=15.0)}
            redelivered |= {each.transaction.payload for each in await queue.fetch_transactions_async(10, wait=0.3)}
            assert redelivered == unacked

    asyncio.run(run())


@pytest.mark.spec("CNN-02", "CNN-07")
def test_an_ack_that_a_stopping_server_does_not_store_is_not_reported_as_settled(server):
    """The server closes its stores some milliseconds before its connections and answers acks in between."""

    async def run():
        async with open_queue(server, lease=2.0, timeout=1.0) as queue:
            await queue.dispatch_async([Transaction(number, id=f"order-{number}") for number in range(ORDER_COUNT)])
            deliveries = await claim_deliveries(queue, ORDER_COUNT)
            stop_thread = threading.Thread(target=server.stop)
            settled_ids = set()
            for number, delivery in enumerate(deliveries):
                if number == STOP_INDEX:
                    stop_thread.start()
                try:
                    (result,) = await queue.settle_async([(delivery, Ack())])
                except ConnectionLostError:
                    break
                if result is SettleResult.SETTLED:
                    settled_ids.add(delivery.transaction.id)
            stop_thread.join()
            assert 0 < len(settled_ids) < ORDER_COUNT, "the stop came too early or too late to say anything"
            server.start()
            redelivered_ids = {
                each.transaction.id
                for each in await claim_deliveries(queue, ORDER_COUNT - 1 - len(settled_ids), within=15.0)
            }
            redelivered_ids |= {
                each.transaction.id for each in await queue.fetch_transactions_async(ORDER_COUNT, wait=0.3)
            }
            assert not redelivered_ids & settled_ids

    asyncio.run(run())


@pytest.mark.spec("CNN-09", "CNN-04")
def test_a_delay_survives_a_killed_server_with_attempts_and_history(server):
    """A delay that the server had not yet stored ends when the lease would have ended."""
    delay, lease = 3.0, 4.0

    async def run():
        async with open_queue(server, lease=lease) as queue:
            await queue.dispatch_async([Transaction({}, id="order")])
            (delivery,) = await claim_deliveries(queue, 1)
            began = time.monotonic()
            assert await queue.settle_async([(delivery, Defer(delay, 2, HISTORY))]) == [SettleResult.SETTLED]
            server.kill()
            server.start()
            (redelivered,) = await claim_deliveries(queue, 1, within=15.0)
            took = time.monotonic() - began
            # One second is allowed for the clocks of two machines.
            assert delay - 1.1 <= took, f"deferred for {delay} s, it was redelivered after {took:.2f} s"
            assert (redelivered.transaction.attempts, redelivered.transaction.history) == (2, HISTORY)
            assert redelivered.deliveries == 1
            assert await queue.settle_async([(redelivered, Ack())]) == [SettleResult.SETTLED]

    asyncio.run(run())
