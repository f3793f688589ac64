"""A client of RabbitMQ that leaves in good order: what it was asking for, and nobody took, has cost no delivery."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import Counter
from contextlib import suppress

import pytest

from ergon_framework import ErgonError
from ergon_framework.connectors.base import Ack, Release
from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.connectors.rabbitmq.message import DELIVERED, fresh
from ergon_framework.transaction import Transaction

COUNT = 12
GOES = 15
SOON = 30.0


@pytest.fixture
def queue(rabbitmq):
    """It has messages that were delivered once already, so that they are got one by one."""
    made = RabbitMQQueue(f"leaving-{uuid.uuid4().hex[:8]}", url=rabbitmq)
    made.open()
    written = [fresh(made.name, *JsonCodec().encode(Transaction(f"order-{n}", {})), since=0.0) for n in range(COUNT)]
    for each in written:
        each.properties.headers[DELIVERED] = "1"
    made._run(lambda station: station.publish(written))
    yield made
    made.close()


class Rung:
    """Whoever wants to know that something has come."""

    def __init__(self, wake):
        self.wake = wake

    def lost(self, receipts):
        """Those that leave lose what they hold."""


def counted(taken=()):
    """Each with the delivery that it had, this one, and those that somebody has *taken*."""
    more = Counter(taken)
    return sorted((f"order-{number}", 2 + more[f"order-{number}"]) for number in range(COUNT))


def all_of(queue):
    """Everything that is there, with its count of deliveries."""
    found, end = [], time.monotonic() + 30
    while len(found) < COUNT and time.monotonic() < end:
        found += queue.fetch_transactions(COUNT, wait=0.2)
    queue.settle([(delivery, Ack()) for delivery in found])
    return sorted((delivery.transaction.id, delivery.deliveries) for delivery in found)


@pytest.mark.spec("CNN-04", "CON-36")
def test_one_that_is_cancelled_while_it_fetches_and_closed(queue, rabbitmq):
    """As soon as the first has come: the others are being asked for, one after the other."""

    async def leave():
        leaving, came, loop = RabbitMQQueue(queue.name, url=rabbitmq), asyncio.Event(), asyncio.get_running_loop()
        leaving.listen(Rung(lambda: loop.call_soon_threadsafe(came.set)))
        await leaving.open_async()
        fetching = asyncio.ensure_future(leaving.fetch_transactions_async(COUNT))
        await asyncio.wait_for(came.wait(), SOON)
        fetching.cancel()
        with suppress(asyncio.CancelledError):
            await leaving.settle_async([(delivery, Release()) for delivery in await fetching])
        await leaving.close_async()

    for _ in range(GOES):
        asyncio.run(leave())
    assert all_of(queue) == counted()


@pytest.mark.spec("CNN-04", "CON-36")
def test_one_that_is_closed_while_a_thread_of_it_fetches(queue, rabbitmq):
    """What that thread was handed all the same has cost one delivery, and nothing else has."""
    taken = Counter()

    def leave():
        leaving, came, brought = RabbitMQQueue(queue.name, url=rabbitmq), threading.Event(), []

        def fetch():
            with suppress(ErgonError):
                brought.extend(leaving.fetch_transactions(COUNT))

        leaving.listen(Rung(came.set))
        leaving.open()
        thread = threading.Thread(target=fetch)
        thread.start()
        assert came.wait(SOON)
        leaving.close()
        thread.join()
        taken.update(delivery.transaction.id for delivery in brought)

    for _ in range(GOES):
        leave()
    assert all_of(queue) == counted(taken)
