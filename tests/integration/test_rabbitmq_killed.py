"""A server that is killed right after it has answered: what was confirmed is there, and what was settled is not."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress

import pika
import pytest

from ergon_framework import ConnectionLost, Transaction
from ergon_framework.connectors.base import Ack, DeadLetter, Later, SettleResult
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.rabbitmq import RabbitMQQueue

pytestmark = pytest.mark.invariant

SOON = 30.0
MANY = 200
LARGE = b"x" * 1_000_000


def claimed(queue, count):
    """So many deliveries; a server that is down, or has just come up, is asked again."""
    found, end = [], time.monotonic() + SOON
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} came"
        try:
            found += queue.fetch_transactions(count - len(found), wait=0.2)
        except ConnectionLost:
            time.sleep(0.05)
    return found


def flood(url, flooded):
    """Publish large messages to another queue, and never wait, until the server is gone."""
    with suppress(pika.exceptions.AMQPError, OSError):
        channel = pika.BlockingConnection(pika.URLParameters(f"{url[:-2]}/%2F")).channel()
        channel.queue_declare("flood", durable=True, arguments={"x-queue-type": "quorum"})
        for number in itertools.count():
            channel.basic_publish("", "flood", LARGE, pika.BasicProperties(delivery_mode=2))
            if number == 20:
                flooded.set()


@pytest.mark.spec("CNN-02", "CNN-09")
def test_what_was_confirmed_by_a_queue_that_was_just_made_outlives_a_kill(new_rabbitmq):
    """The first dead letter and delay of a queue, and then the first dispatch to another."""
    server = new_rabbitmq()
    queue = RabbitMQQueue("orders", url=server.url, timeout=5.0)
    queue.dispatch([Transaction(f"order-{number}", {}) for number in range(2)])
    late, dead = claimed(queue, 2)
    assert queue.settle([(dead, DeadLetter("why"))]) == [SettleResult.SETTLED]
    assert queue.settle([(late, Later(0.3))]) == [SettleResult.SETTLED]
    server.restart(crash=True)
    assert [delivery.transaction.id for delivery in claimed(queue, 1)] == [late.transaction.id]
    assert [record.id for record in queue.list_dead(DeadLetterQuery())] == [dead.transaction.id]
    other = RabbitMQQueue("parcels", url=server.url, timeout=5.0)
    other.dispatch([Transaction("parcel", {})])
    server.restart(crash=True)
    assert [delivery.transaction.id for delivery in claimed(other, 1)] == ["parcel"]
    queue.close()
    other.close()


@pytest.mark.spec("CNN-02")
def test_what_was_answered_as_settled_does_not_come_again_after_a_kill(new_rabbitmq):
    """Every other one of many, so that an ack is sent for each, to a server whose log has much else to write."""
    server = new_rabbitmq()
    queue = RabbitMQQueue("orders", url=server.url, timeout=5.0)
    queue.dispatch([Transaction(f"order-{number}", {}) for number in range(MANY)])
    held = sorted(claimed(queue, MANY), key=lambda delivery: delivery.receipt.tag)
    flooded = threading.Event()
    threading.Thread(target=flood, args=(server.url, flooded), daemon=True).start()
    assert flooded.wait(SOON)
    assert queue.settle([(delivery, Ack()) for delivery in held[1::2]]) == [SettleResult.SETTLED] * (MANY // 2)
    server.restart(crash=True)
    left = {delivery.transaction.id for delivery in held[::2]}
    found = claimed(queue, MANY // 2)
    assert {delivery.transaction.id for delivery in found} == left
    queue.settle([(delivery, Ack()) for delivery in found])
    assert not queue.fetch_transactions(1, wait=0.5)
    queue.close()


@pytest.mark.spec("CNN-02")
def test_what_came_back_and_was_settled_at_once_does_not_come_again_after_a_kill(new_rabbitmq):
    """What came back is fetched one by one; one ack for all of it is many entries of the server's log."""
    server = new_rabbitmq()
    queue = RabbitMQQueue("orders", url=server.url, timeout=5.0)
    queue.dispatch([Transaction(f"order-{number}", {}) for number in range(MANY)])
    claimed(queue, MANY)
    server.restart(crash=True)
    held = claimed(queue, MANY)
    flooded = threading.Event()
    threading.Thread(target=flood, args=(server.url, flooded), daemon=True).start()
    assert flooded.wait(SOON)
    assert queue.settle([(delivery, Ack()) for delivery in held]) == [SettleResult.SETTLED] * MANY
    server.restart(crash=True)
    queue.dispatch([Transaction("marker", {})])
    assert [delivery.transaction.id for delivery in claimed(queue, 1)] == ["marker"]
    assert not queue.fetch_transactions(1, wait=0.5)
    queue.close()
