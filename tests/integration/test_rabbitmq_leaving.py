"""Check that a RabbitMQ client that closes cleanly counts no delivery for messages it requested but did not receive."""

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
from ergon_framework.connectors.rabbitmq.message import DELIVERED_HEADER, new_message
from ergon_framework.transaction import Transaction

MESSAGE_COUNT = 12
ROUNDS = 15
TIMEOUT_SECONDS = 30.0


@pytest.fixture
def queue(rabbitmq):
    """Yield a queue whose messages were delivered once already, so that they are fetched one by one."""
    queue = RabbitMQQueue(f"leaving-{uuid.uuid4().hex[:8]}", url=rabbitmq)
    queue.open()
    messages = [
        new_message(queue.name, *JsonCodec().encode(Transaction({}, id=f"order-{n}")), ready_since=0.0)
        for n in range(MESSAGE_COUNT)
    ]
    for message in messages:
        message.properties.headers[DELIVERED_HEADER] = "1"
    queue._run(lambda station: station.publish(messages))
    yield queue
    queue.close()


class WakeListener:
    """A listener that calls *wake* when a message has arrived."""

    def __init__(self, wake):
        self.wake = wake

    def on_lost(self, receipts):
        """Ignore the claims that a closing client loses."""


def expected_deliveries(received=()):
    """Return each message with its expected delivery count: the first, this one, and those in *taken*."""
    extra = Counter(received)
    return sorted((f"order-{number}", 2 + extra[f"order-{number}"]) for number in range(MESSAGE_COUNT))


def drain(queue):
    """Settle every message of *queue* and return their ids with their delivery counts."""
    deliveries, deadline = [], time.monotonic() + 30
    while len(deliveries) < MESSAGE_COUNT and time.monotonic() < deadline:
        deliveries += queue.fetch_transactions(MESSAGE_COUNT, wait=0.2)
    queue.settle([(delivery, Ack()) for delivery in deliveries])
    return sorted((delivery.transaction.id, delivery.deliveries) for delivery in deliveries)


@pytest.mark.spec("CNN-04", "CON-36")
def test_a_client_cancelled_during_a_fetch_and_closed_counts_no_delivery(queue, rabbitmq):
    """Cancel as soon as the first message has arrived, while the others are being requested one by one."""

    async def cancel_and_close():
        client, arrived, loop = RabbitMQQueue(queue.name, url=rabbitmq), asyncio.Event(), asyncio.get_running_loop()
        client.listen(WakeListener(lambda: loop.call_soon_threadsafe(arrived.set)))
        await client.open_async()
        fetching = asyncio.ensure_future(client.fetch_transactions_async(MESSAGE_COUNT))
        await asyncio.wait_for(arrived.wait(), TIMEOUT_SECONDS)
        fetching.cancel()
        with suppress(asyncio.CancelledError):
            await client.settle_async([(delivery, Release()) for delivery in await fetching])
        await client.close_async()

    for _ in range(ROUNDS):
        asyncio.run(cancel_and_close())
    assert drain(queue) == expected_deliveries()


@pytest.mark.spec("CNN-04", "CON-36")
def test_a_client_closed_while_its_thread_fetches_counts_only_received_deliveries(queue, rabbitmq):
    """A delivery that the thread still received counts once; no other message counts a delivery."""
    received = Counter()

    def close_during_fetch():
        client, arrived, deliveries = RabbitMQQueue(queue.name, url=rabbitmq), threading.Event(), []

        def fetch():
            with suppress(ErgonError):
                deliveries.extend(client.fetch_transactions(MESSAGE_COUNT))

        client.listen(WakeListener(arrived.set))
        client.open()
        thread = threading.Thread(target=fetch)
        thread.start()
        assert arrived.wait(TIMEOUT_SECONDS)
        client.close()
        thread.join()
        received.update(delivery.transaction.id for delivery in deliveries)

    for _ in range(ROUNDS):
        close_during_fetch()
    assert drain(queue) == expected_deliveries(received)
