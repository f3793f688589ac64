"""Workers with nothing to do, and one message that came back: somebody is handed it, however many wait for it."""

from __future__ import annotations

import threading
import time
import uuid

import pika
import pytest

from ergon_framework.connectors.base import Ack
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.connectors.rabbitmq.message import DELIVERED

#: Each is somebody whom the server may push it to while all the others look for it and find nothing.
WORKERS = 6
SOON = 10.0


class Idler(threading.Thread):
    """A worker that asks now and then, as one does whose queue is empty."""

    def __init__(self, queue, over):
        super().__init__(daemon=True)
        self.queue, self.over = queue, over
        self.found = []
        self.empty = threading.Event()
        self.rung = threading.Event()
        queue.listen(self)

    def wake(self):
        self.rung.set()

    def lost(self, receipts): ...

    def run(self):
        while not self.over.is_set():
            self.rung.clear()
            found = self.queue.fetch_transactions(10)
            if found:
                self.queue.settle([(delivery, Ack()) for delivery in found])
                self.found += [(delivery.transaction.id, delivery.deliveries) for delivery in found]
            else:
                self.empty.set()
            self.rung.wait(0.3)


def client(url, name, number):
    """On a connection of its own, as a process has."""
    return RabbitMQQueue(name, url=f"{url}?client_properties={{'connection_name':'{number}'}}")


@pytest.fixture
def name():
    return f"idle-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def idlers(rabbitmq, name):
    over = threading.Event()
    made = [Idler(client(rabbitmq, name, f"idler-{number}"), over) for number in range(WORKERS)]
    for idler in made:
        idler.start()
    for idler in made:
        assert idler.empty.wait(SOON)
    yield made
    over.set()
    for idler in made:
        idler.join(SOON)
        idler.queue.close()


@pytest.fixture
def raw(rabbitmq):
    connection = pika.BlockingConnection(pika.URLParameters(f"{rabbitmq[:-2]}/%2F"))
    yield connection.channel()
    connection.close()


def found(idlers):
    return sorted(each for idler in idlers for each in idler.found)


@pytest.mark.spec("CNN-01", "CNN-11")
def test_what_came_back_is_not_passed_around_among_idle_workers(name, idlers, raw):
    """Whoever is pushed it keeps it: given back, it would only be pushed to the next."""
    count = 5
    for number in range(count):
        # As one looks that was put off in its second delivery and is due now, while nobody has anything else to do.
        headers = {"ergon-id": f"order-{number}", DELIVERED: "1"}
        raw.basic_publish("", name, b"{}", pika.BasicProperties(headers=headers))
        end = time.monotonic() + SOON
        while len(found(idlers)) <= number:
            assert time.monotonic() < end, f"order-{number} was handed to nobody"
            time.sleep(0.01)
        for idler in idlers:
            idler.empty.clear()
        for idler in idlers:
            assert idler.empty.wait(SOON)
    assert found(idlers) == [(f"order-{number}", 2) for number in range(count)]
