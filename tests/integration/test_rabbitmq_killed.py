"""Check a server killed right after its response: confirmed messages exist, and no message is lost."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress

import pika
import pytest

from ergon_framework import ConnectionLostError, Transaction
from ergon_framework.connectors.base import Ack, DeadLetter, Defer, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.rabbitmq import RabbitMQQueue

pytestmark = pytest.mark.invariant

TIMEOUT_SECONDS = 30.0
MESSAGE_COUNT = 200
LARGE_BODY = b"x" * 1_000_000


def claim(queue, count):
    """Claim *count* deliveries; retry while the server is down or has just started."""
    deliveries, deadline = [], time.monotonic() + TIMEOUT_SECONDS
    while len(deliveries) < count:
        assert time.monotonic() < deadline, f"{len(deliveries)} of {count} came"
        try:
            deliveries += queue.fetch_transactions(count - len(deliveries), wait=0.2)
        except ConnectionLostError:
            time.sleep(0.05)
    return deliveries


def flood(url, is_flooding):
    """Publish large messages to another queue without waiting until the server is gone."""
    with suppress(pika.exceptions.AMQPError, OSError):
        channel = pika.BlockingConnection(pika.URLParameters(f"{url[:-2]}/%2F")).channel()
        channel.queue_declare("flood", durable=True, arguments={"x-queue-type": "quorum"})
        for number in itertools.count():
            channel.basic_publish("", "flood", LARGE_BODY, pika.BasicProperties(delivery_mode=2))
            if number == 20:
                is_flooding.set()


@pytest.mark.spec("CNN-02", "CNN-09")
def test_messages_confirmed_by_a_new_queue_survive_a_kill(new_rabbitmq):
    """The first dead letter and delay of a queue, and then the first dispatch to another queue."""
    server = new_rabbitmq()
    queue = RabbitMQQueue("orders", url=server.url, timeout=5.0)
    queue.dispatch([Transaction({}, id=f"order-{number}") for number in range(2)])
    deferred, dead_lettered = claim(queue, 2)
    assert queue.settle([(dead_lettered, DeadLetter("why"))]) == [SettleResult.SETTLED]
    assert queue.settle([(deferred, Defer(0.3))]) == [SettleResult.SETTLED]
    server.restart(crash=True)
    assert [delivery.transaction.id for delivery in claim(queue, 1)] == [deferred.transaction.id]
    assert [record.id for record in queue.list_dead(DeadLetterQuery())] == [dead_lettered.transaction.id]
    other = RabbitMQQueue("parcels", url=server.url, timeout=5.0)
    other.dispatch([Transaction({}, id="parcel")])
    server.restart(crash=True)
    assert [delivery.transaction.id for delivery in claim(other, 1)] == ["parcel"]
    queue.close()
    other.close()


@pytest.mark.spec("CNN-02")
@pytest.mark.parametrize("is_redelivered", [False, True], ids=["pushed", "fetched one by one"])
def test_a_kill_after_settling_loses_nothing_and_returns_only_what_counts_a_delivery(new_rabbitmq, is_redelivered):
    """Acks have no confirmation: those that the server had not stored are lost, and their messages return."""
    server = new_rabbitmq()
    queue = RabbitMQQueue("orders", url=server.url, timeout=5.0)
    assert not queue.capabilities.confirms_settlements
    queue.dispatch([Transaction({}, id=f"order-{number}") for number in range(MESSAGE_COUNT)])
    deliveries = claim(queue, MESSAGE_COUNT)
    if is_redelivered:
        server.restart(crash=True)
        deliveries = claim(queue, MESSAGE_COUNT)
    deliveries.sort(key=lambda delivery: delivery.receipt.tag)
    is_flooding = threading.Event()
    threading.Thread(target=flood, args=(server.url, is_flooding), daemon=True).start()
    assert is_flooding.wait(TIMEOUT_SECONDS)
    # Every other one, so that each ack is separate; the server's log has much else to write.
    settled = deliveries[1::2]
    assert queue.settle([(delivery, Ack()) for delivery in settled]) == [SettleResult.SETTLED] * len(settled)
    server.restart(crash=True)
    unsettled_ids = {delivery.transaction.id for delivery in deliveries[::2]}
    first_count = deliveries[0].deliveries
    returned = claim(queue, MESSAGE_COUNT // 2)
    while more := queue.fetch_transactions(MESSAGE_COUNT, wait=1.0):
        returned += more
    returned_ids = [delivery.transaction.id for delivery in returned]
    assert len(set(returned_ids)) == len(returned_ids)
    assert unsettled_ids <= set(returned_ids)
    assert {delivery.deliveries for delivery in returned} == {first_count + 1}
    queue.settle([(delivery, Ack()) for delivery in returned])
    assert not queue.fetch_transactions(1, wait=0.5)
    queue.close()
