"""Headers of other programs that the client cannot decode, or would change, on a real server."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
import uuid

import aio_pika
import pika
import pytest

from ergon_framework.connectors.base import DeadLetter, Later, Release, SettleResult
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery
from ergon_framework.connectors.foreign import ForeignCodec, pointer
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.task.decorators import consumer
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.transaction import Transaction

EVERYTHING = DeadLetterQuery()
#: What producers in Java, .NET and JavaScript write that take an AMQP timestamp for milliseconds.
MILLISECONDS = struct.pack(">cQ", b"T", 1_763_000_000_000)
UNDECODABLE = {
    "milliseconds": MILLISECONDS,
    "largest timestamp": struct.pack(">cQ", b"T", 2**64 - 1),
    "in a table": b"F" + struct.pack(">I", 13) + b"\x03sent"[:4] + MILLISECONDS,
    "in a list": b"A" + struct.pack(">I", 9) + MILLISECONDS,
}


class RawProperties(pika.BasicProperties):
    """Headers as bytes, which the client would not write."""

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
    made = RabbitMQQueue(name, url=rabbitmq)
    made.open()
    yield made
    made.close()


@pytest.fixture
def publish(rabbitmq):
    """Publish as another program does."""
    connection = pika.BlockingConnection(pika.URLParameters(f"{rabbitmq[:-2]}/%2F"))
    channel = connection.channel()

    def send(queue, fields, body=b'{"foreign": 1}'):
        channel.confirm_delivery()
        channel.basic_publish("", queue, body, RawProperties(fields), mandatory=True)

    yield send
    connection.close()


def orders(prefix):
    return [Transaction(f"{prefix}-{number}", number) for number in range(10)]


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def run_threads(queue, policy, handled, is_over):
    @consumer(queue, policy=policy)
    def handle(payload, transaction: Transaction):
        handled.append(transaction.id)

    thread = threading.Thread(target=handle.run, daemon=True)
    thread.start()
    wait_for(is_over)
    handle.stop()
    thread.join(30)


def run_asyncio(queue, policy, handled, is_over):
    @consumer(queue, policy=policy)
    async def handle(payload, transaction: Transaction):
        handled.append(transaction.id)

    async def both():
        loop = asyncio.create_task(handle.run())
        await asyncio.to_thread(wait_for, is_over)
        handle.stop()
        await loop

    asyncio.run(both())


@pytest.mark.spec("DX-21", "CNN-16")
@pytest.mark.parametrize("header", UNDECODABLE)
@pytest.mark.parametrize("run", [run_threads, run_asyncio], ids=["threads", "asyncio"])
def test_a_message_whose_header_the_client_cannot_decode_is_a_dead_letter_and_costs_no_other(
    queue, publish, run, header
):
    queue.dispatch(orders("before"))
    publish(queue.name, {"kind": b"S" + struct.pack(">I", 5) + b"order", "sent": UNDECODABLE[header]})
    queue.dispatch(orders("after"))
    handled = []
    policy = ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.02}}})
    run(queue, policy, handled, lambda: len(handled) >= 20 and queue.depth().dead == 1)
    assert sorted(handled) == sorted(order.id for order in orders("before") + orders("after"))
    (letter,) = queue.list_dead(EVERYTHING)
    assert (letter.reason, letter.raw, letter.deliveries) == ("undecodable", b'{"foreign": 1}', 1)
    assert letter.headers["kind"] == "order"
    assert "headers of the message cannot be decoded" in letter.failure.error_message


@pytest.mark.spec("DX-21", "CNN-12")
def test_dead_letters_can_be_listed_replayed_and_discarded_beside_one_that_the_client_cannot_decode(queue, publish):
    queue.dispatch(orders("a"))
    found = []
    while len(found) < 10:
        found += queue.fetch_transactions(10, wait=1.0)
    queue.settle([(delivery, DeadLetter("broken")) for delivery in found])
    for _ in range(2):
        publish(f"{queue.name}.dead", {"sent": MILLISECONDS}, body=uuid.uuid4().bytes)
    letters = queue.list_dead(EVERYTHING)
    assert [letter.reason for letter in letters].count("broken") == 10
    ours = next(letter for letter in letters if letter.reason == "broken")
    foreign, other = (letter for letter in letters if letter.reason != "broken")
    assert foreign.headers == {"sent": "1763000000000"}
    places = [ours.place, foreign.place]
    assert [result.became for result in queue.replay_dead(places)] == [Became.REPLAYED, Became.REPLAYED]
    assert [result.became for result in queue.discard_dead([other.place])] == [Became.DISCARDED]
    assert {letter.reason for letter in queue.list_dead(EVERYTHING)} == {"broken"}
    assert queue.depth().dead == 9


@pytest.mark.spec("DX-21")
@pytest.mark.parametrize("how", [Release(), Later(0.0)], ids=["release", "later"])
def test_headers_of_every_type_come_back_unchanged(rabbitmq, name, publish, how):
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
        "late": MILLISECONDS,
        "nothing": b"V",
        "table": b"F" + struct.pack(">I", 11) + b"\x01d" + struct.pack(">cd", b"d", 2.5),
        "list": b"A" + struct.pack(">I", 9) + struct.pack(">cd", b"d", -2.5),
    }
    queue = RabbitMQQueue(name, url=rabbitmq, codec=ForeignCodec(id=pointer("/order")))
    queue.open()
    publish(name, fields, body=b'{"order": 1}')
    before = asyncio.run(raw_headers(rabbitmq, name))
    (delivery,) = queue.fetch_transactions(1, wait=10.0)
    assert queue.settle([(delivery, how)]) == [SettleResult.SETTLED]
    queue.close()
    after = asyncio.run(raw_headers(rabbitmq, name))
    assert {name: after.get(name) for name in fields} == before


async def raw_headers(url, name):
    """The encoded fields of the message in the queue, as another client receives them; it stays there."""
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
