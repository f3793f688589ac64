"""What a NATS server that is killed brings back, and what it forgets: counts, delays and acks."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework.connectors.base import Ack, Later, SettleResult
from ergon_framework.errors import Category, ConnectionLost
from ergon_framework.failure import Attempt
from ergon_framework.transaction import Transaction
from tests.integration.nats_queues import claimed, opened
from tests.servers.nats import find_new, find_old

pytestmark = pytest.mark.invariant

HISTORY = (Attempt(attempt=0, category=Category.SYSTEM, error="it broke", at=1_700_000_000.5, delay=3.0),)

#: Many more than are acked while a server that was told to stop does so.
ORDERS, STOPPED_AT = 500, 20


@pytest.fixture(params=[find_new, find_old], ids=["new", "old"])
def server(request, new_nats):
    return new_nats(program=request.param())


@pytest.mark.spec("CNN-02", "CNN-07")
def test_what_was_acked_stays_away_from_a_killed_server(server):
    """Servers before 2.10 keep acks in memory for minutes; there the connector erases."""

    async def run():
        async with opened(server, lease=2.0) as queue:
            await queue.dispatch_async([Transaction(f"order-{number}", number) for number in range(60)])
            held = await claimed(queue, 60)
            acked = [delivery for delivery in held if delivery.transaction.payload % 3]
            results = await queue.settle_async([(delivery, Ack()) for delivery in acked])
            assert set(results) == {SettleResult.SETTLED}
            server.kill()
            server.start()
            # The first of them may be back for the second time before the last is for the first.
            unacked, again = set(range(0, 60, 3)), set()
            while not again >= unacked:
                again |= {each.transaction.payload for each in await claimed(queue, 1, within=15.0)}
            again |= {each.transaction.payload for each in await queue.fetch_transactions_async(10, wait=0.3)}
            assert again == unacked

    asyncio.run(run())


@pytest.mark.spec("CNN-02", "CNN-07")
def test_an_ack_that_a_stopping_server_no_longer_keeps_is_not_called_settled(server):
    """Its stores are closed some milliseconds before its lines are, and acks are answered in between."""

    async def run():
        async with opened(server, lease=2.0, timeout=1.0) as queue:
            await queue.dispatch_async([Transaction(f"order-{number}", number) for number in range(ORDERS)])
            held = await claimed(queue, ORDERS)
            stopping = threading.Thread(target=server.stop)
            settled = set()
            for number, delivery in enumerate(held):
                if number == STOPPED_AT:
                    stopping.start()
                try:
                    (result,) = await queue.settle_async([(delivery, Ack())])
                except ConnectionLost:
                    break
                if result is SettleResult.SETTLED:
                    settled.add(delivery.transaction.id)
            stopping.join()
            assert 0 < len(settled) < ORDERS, "the stop came too early or too late to say anything"
            server.start()
            again = {each.transaction.id for each in await claimed(queue, ORDERS - 1 - len(settled), within=15.0)}
            again |= {each.transaction.id for each in await queue.fetch_transactions_async(ORDERS, wait=0.3)}
            assert not again & settled

    asyncio.run(run())


@pytest.mark.spec("CNN-09", "CNN-04")
def test_a_delay_outlives_a_killed_server_with_attempts_and_history(server):
    """Where the server had not yet written down that it was put off, it comes when the lease would have ended."""
    delay, lease = 3.0, 4.0

    async def run():
        async with opened(server, lease=lease) as queue:
            await queue.dispatch_async([Transaction("order", {})])
            (delivery,) = await claimed(queue, 1)
            began = time.monotonic()
            assert await queue.settle_async([(delivery, Later(delay, 2, HISTORY))]) == [SettleResult.SETTLED]
            server.kill()
            server.start()
            (again,) = await claimed(queue, 1, within=15.0)
            took = time.monotonic() - began
            # A second is left to the clocks of two machines.
            assert delay - 1.1 <= took, f"put off for {delay} s, it came after {took:.2f} s"
            assert (again.transaction.attempts, again.transaction.history) == (2, HISTORY)
            assert again.deliveries == 1
            assert await queue.settle_async([(again, Ack())]) == [SettleResult.SETTLED]

    asyncio.run(run())
