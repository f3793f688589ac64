"""Check headers of other programs that the client cannot decode, or would change, on a real server."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
import uuid

import aio_pika
import pika
import pytest

from ergon_framework.connectors.base import DeadLetter, Defer, Release, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.connectors.foreign_codec import ForeignCodec, from_json_pointer
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.task.decorators import consumer
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy

ALL_DEAD_LETTERS = DeadLetterQuery()
#: Written by producers in Java, .NET and JavaScript that treat an AMQP timestamp as milliseconds.
MILLISECOND_TIMESTAMP = struct.pack(">cQ", b"T", 1_763_000_000_000)
UNDECODABLE_HEADERS = {
    "milliseconds": MILLISECOND_TIMESTAMP,
    "largest timestamp": struct.pack(">cQ", b"T", 2**64 - 1),
    "in a table": b"F" + struct.pack(">I", 13) + b"\x03sent"[:4] + MILLISECOND_TIMESTAMP,
    "in a list": b"A" + struct.pack(">I", 9) + MILLISECOND_TIMESTAMP,
}


class RawProperties(pika.BasicProperties):
    """Properties with headers as bytes that the client would not write."""

    def __init__(self, fields):
        super().__init__(delivery_mode=2)
        self.fields = fields

    def encode(self):
        table = b"".join(struct.pack("B", len(name)) + name.encode() + value for name, value in self.fields.items())
        flags = self.FLAG_HEADERS | self.FLAG_DELIVERY_MODE
        return [struct.pack(">H", flags), struct.pack(">I", len(table)), table, b"\x02"]


@pytest.fixture
def name():
    return f"headers-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def queue(rabbitmq, name):
    queue = RabbitMQQueue(name, url=rabbitmq)
    queue.open()
    yield queue
    queue.close()


@pytest.fixture
def publish(rabbitmq):
    """Return a function that publishes as another program does."""
    connection = pika.BlockingConnection(pika.URLParameters(f"{rabbitmq[:-2]}/%2F"))
    channel = connection.channel()

    def send(queue, fields, body=b'{"foreign": 1}'):
        channel.confirm_delivery()
        channel.basic_publish("", queue, body, RawProperties(fields), mandatory=True)

    yield send
    connection.close()


def make_orders(prefix):
    return [Transaction(number, id=f"{prefix}-{number}") for number in range(10)]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run_threads(queue, policy, handled, is_over):
    @consumer(queue, policy=policy)
    def handle(payload, transaction: Transaction):
        handled.append(transaction.id)

    thread = threading.Thread(target=handle.run, daemon=True)
    thread.start()
    wait_until(is_over)
    handle.stop()
    thread.join(30)


def run_asyncio(queue, policy, handled, is_over):
    @consumer(queue, policy=policy)
    async def handle(payload, transaction: Transaction):
        handled.append(transaction.id)

    async def main():
        loop = asyncio.create_task(handle.run())
        await asyncio.to_thread(wait_until, is_over)
        handle.stop()
        await loop

    asyncio.run(main())


@pytest.mark.spec("DX-21", "CNN-16")
@pytest.mark.parametrize("header", UNDECODABLE_HEADERS)
@pytest.mark.parametrize("run", [run_threads, run_asyncio], ids=["threads", "asyncio"])
def test_a_message_with_an_undecodable_header_is_dead_lettered_and_affects_no_other(queue, publish, run, header):
    queue.dispatch(make_orders("before"))
    publish(queue.name, {"kind": b"S" + struct.pack(">I", 5) + b"order", "sent": UNDECODABLE_HEADERS[header]})
    queue.dispatch(make_orders("after"))
    handled = []
    policy = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.02}}})
    run(queue, policy, handled, lambda: len(handled) >= 20 and queue.depth().dead == 1)
    assert sorted(handled) == sorted(order.id for order in make_orders("before") + make_orders("after"))
    (letter,) = queue.list_dead(ALL_DEAD_LETTERS)
    assert (letter.reason, letter.raw, letter.deliveries) == ("undecodable", b'{"foreign": 1}', 1)
    assert letter.headers["kind"] == "order"
    assert "headers of the message cannot be decoded" in letter.failure.error_message


@pytest.mark.spec("DX-21", "CNN-12")
def test_dead_letters_can_be_listed_replayed_and_discarded_next_to_an_undecodable_one(queue, publish):
    queue.dispatch(make_orders("a"))
    deliveries = []
    while len(deliveries) < 10:
        deliveries += queue.fetch_transactions(10, wait=1.0)
    queue.settle([(delivery, DeadLetter("broken")) for delivery in deliveries])
    for _ in range(2):
        publish(f"{queue.name}.dead", {"sent": MILLISECOND_TIMESTAMP}, body=uuid.uuid4().bytes)
    letters = queue.list_dead(ALL_DEAD_LETTERS)
    assert [letter.reason for letter in letters].count("broken") == 10
    own = next(letter for letter in letters if letter.reason == "broken")
    foreign, other = (letter for letter in letters if letter.reason != "broken")
    assert foreign.headers == {"sent": "1763000000000"}
    handles = [own.handle, foreign.handle]
    assert [result.outcome for result in queue.replay_dead(handles)] == [
        DeadLetterResult.REPLAYED,
        DeadLetterResult.REPLAYED,
    ]
    assert [result.outcome for result in queue.discard_dead([other.handle])] == [DeadLetterResult.DISCARDED]
    assert {letter.reason for letter in queue.list_dead(ALL_DEAD_LETTERS)} == {"broken"}
    assert queue.depth().dead == 9


@pytest.mark.spec("DX-21")
@pytest.mark.parametrize("outcome", [Release(), Defer(0.0)], ids=["release", "later"])
def test_headers_of_every_type_are_unchanged_after_redelivery(rabbitmq, name, publish, outcome):
    fields = {
        "text": b"S" + struct.pack(">I", 3) + b"abc",
        "bytes": b"x" + struct.pack(">I", 2) + b"\xff\x00",
        "true": b"t\x01",
        "small": struct.pack(">cb", b"b", -5),
        "short": struct.pack(">ch", b"s", -300),
        "int": struct.pack(">ci", b"I", -70_000),
        "long": struct.pack(">cq", b"l", 2**40),
        "float": struct.pack(">cf", b"f", 1.5),
        "double": struct.pack(">cd", b"d", 0.1),
        "decimal": struct.pack(">cBi", b"D", 2, 314),
        "time": struct.pack(">cQ", b"T", 1_763_000_000),
        "late": MILLISECOND_TIMESTAMP,
        "nothing": b"V",
        "table": b"F" + struct.pack(">I", 11) + b"\x01d" + struct.pack(">cd", b"d", 2.5),
        "list": b"A" + struct.pack(">I", 9) + struct.pack(">cd", b"d", -2.5),
    }
    queue = RabbitMQQueue(name, url=rabbitmq, codec=ForeignCodec(id=from_json_pointer("/order")))
    queue.open()
    publish(name, fields, body=b'{"order": 1}')
    before = asyncio.run(read_raw_headers(rabbitmq, name))
    (delivery,) = queue.fetch_transactions(1, wait=10.0)
    assert queue.settle([(delivery, outcome)]) == [SettleResult.SETTLED]
    queue.close()
    after = asyncio.run(read_raw_headers(rabbitmq, name))
    assert {name: after.get(name) for name in fields} == before


async def read_raw_headers(url, name):
    """Return the encoded fields of the message in the queue, as another client receives them; the message stays."""
    received = []
    connection = await aio_pika.connect(f"{url[:-2]}/%2F")
    try:
        channel = await connection.channel()
        message = await (await channel.get_queue(name, ensure=False)).get(timeout=10, fail=True)
        received.append(dict(message.headers))
        await message.nack(requeue=True)
    finally:
        await connection.close()
    return {key: repr(value) for key, value in received[0].items() if not key.startswith(("x-", "ergon-"))}
