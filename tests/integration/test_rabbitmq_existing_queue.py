"""Check a queue that another program declared: with declare=False it is consumed as it is, of whatever type."""

from __future__ import annotations

import time
import uuid

import pika
import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Release, SettleResult
from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction

pytestmark = pytest.mark.invariant

TIMEOUT_SECONDS = 15.0
ARGUMENTS = {"classic": {}, "quorum": {"x-queue-type": "quorum", "x-delivery-limit": 7}}


@pytest.fixture
def raw_channel(rabbitmq):
    connection = pika.BlockingConnection(pika.URLParameters(f"{rabbitmq[:-2]}/%2F"))
    yield connection.channel()
    connection.close()


@pytest.fixture(params=ARGUMENTS)
def name(request, raw_channel):
    """Yield the name of a queue that another program has declared."""
    name = f"existing-{uuid.uuid4().hex[:10]}"
    raw_channel.queue_declare(name, durable=True, arguments=ARGUMENTS[request.param])
    yield name
    raw_channel.queue_delete(name)


@pytest.fixture
def connect(rabbitmq, name):
    """Return a function that opens one more client, on connections of its own."""
    clients = []

    def connect(**options):
        url = f"{rabbitmq}?client_properties={{'connection_name':'{len(clients)}'}}"
        clients.append(RabbitMQQueue(name, url=url, declare=False, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def claim(queue, count=1):
    deliveries, deadline = [], time.monotonic() + TIMEOUT_SECONDS
    while len(deliveries) < count:
        deliveries += queue.fetch_transactions(count - len(deliveries), wait=0.2)
        assert time.monotonic() < deadline, f"{len(deliveries)} of {count} came"
    return deliveries


def make_orders(count):
    return [Transaction({"n": n}, id=f"order-{n}") for n in range(count)]


@pytest.mark.spec("CNN-02", "CNN-08", "CNN-09")
def test_an_existing_queue_is_consumed_as_it_is(connect):
    queue = connect()
    queue.dispatch(make_orders(4))
    acked, deferred, dead, released = claim(queue, 4)
    settlements = [(acked, Ack()), (deferred, Defer(0.1, attempts=1)), (dead, DeadLetter("why")), (released, Release())]
    assert queue.settle(settlements) == [SettleResult.SETTLED] * 4
    again = {delivery.transaction.id: delivery for delivery in claim(queue, 2)}
    assert set(again) == {deferred.transaction.id, released.transaction.id}
    assert {delivery.deliveries for delivery in again.values()} == {1}
    queue.settle([(delivery, Ack()) for delivery in again.values()])
    (record,) = queue.list_dead(DeadLetterQuery())
    assert [result.outcome for result in queue.replay_dead([record.handle])] == [DeadLetterResult.REPLAYED]
    assert [delivery.transaction.id for delivery in claim(queue)] == [dead.transaction.id]


@pytest.mark.spec("CNN-04")
def test_every_crash_counts_one_delivery(connect):
    """A classic queue reports only that a message was delivered before; the count is kept in its headers."""
    queue = connect()
    queue.dispatch(make_orders(3))
    for deliveries in (1, 2, 3, 4):
        client = connect()
        claimed = []
        while len(claimed) < 3:
            claimed += claim(client)
        assert [delivery.deliveries for delivery in claimed] == [deliveries] * 3
        client.close()


@pytest.mark.spec("CNN-03")
def test_a_body_over_the_limit_is_a_dead_letter_and_not_lost(connect, name, raw_channel):
    """The server itself would discard a rejected message of a queue without a dead-letter exchange."""
    queue = connect(codec=JsonCodec(max_bytes=1000))
    raw_channel.basic_publish("", name, b'"' + b"x" * 5000 + b'"')
    (delivery,) = claim(queue)
    assert delivery.error is not None
    assert queue.settle([(delivery, DeadLetter("undecodable"))]) == [SettleResult.SETTLED]
    assert [record.reason for record in queue.list_dead(DeadLetterQuery())] == ["undecodable"]


@pytest.mark.spec("CNN-17")
def test_capabilities_do_not_promise_what_another_program_decided(connect):
    queue = connect()
    queue.open()
    assert queue.capabilities.durable is None
    assert "was not declared by this client" in queue.durability
    assert not [each for each in queue.diagnose(time.time) if each.severity.value == "error"]


@pytest.mark.spec("CNN-01")
def test_a_missing_queue_is_an_error_and_is_not_created(rabbitmq):
    queue = RabbitMQQueue("no-such-queue", url=rabbitmq, declare=False)
    for call in (queue.open, lambda: queue.fetch_transactions(1), lambda: queue.dispatch(make_orders(1))):
        with pytest.raises(
            ConfigurationError, match="'no-such-queue' does not exist, and declare=False does not create"
        ):
            call()
    queue.close()
