"""Check that one of many idle workers gets a redelivered message, however many wait for it."""

from __future__ import annotations

import threading
import time
import uuid

import pika
import pytest

from ergon_framework.connectors.base import Ack
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.connectors.rabbitmq.message import DELIVERED_HEADER

#: The server may push the message to any of them while all the others poll and get nothing.
WORKER_COUNT = 6
TIMEOUT_SECONDS = 10.0


class IdleWorker(threading.Thread):
    """A worker that polls from time to time, as one with an empty queue does."""

    def __init__(self, queue, stop_event):
        super().__init__(daemon=True)
        self.queue, self.stop_event = queue, stop_event
        self.received = []
        self.empty = threading.Event()
        self.woken = threading.Event()
        queue.listen(self)

    def wake(self):
        self.woken.set()

    def on_lost(self, receipts): ...

    def run(self):
        while not self.stop_event.is_set():
            self.woken.clear()
            deliveries = self.queue.fetch_transactions(10)
            if deliveries:
                self.queue.settle([(delivery, Ack()) for delivery in deliveries])
                self.received += [(delivery.transaction.id, delivery.deliveries) for delivery in deliveries]
            else:
                self.empty.set()
            self.woken.wait(0.3)


def make_client(url, name, number):
    """Return a client on its own connection, as a separate process has."""
    return RabbitMQQueue(name, url=f"{url}?client_properties={{'connection_name':'{number}'}}")


@pytest.fixture
def name():
    return f"idle-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def idle_workers(rabbitmq, name):
    stop_event = threading.Event()
    workers = [IdleWorker(make_client(rabbitmq, name, f"idler-{number}"), stop_event) for number in range(WORKER_COUNT)]
    for worker in workers:
        worker.start()
    for worker in workers:
        assert worker.empty.wait(TIMEOUT_SECONDS)
    yield workers
    stop_event.set()
    for worker in workers:
        worker.join(TIMEOUT_SECONDS)
        worker.queue.close()


@pytest.fixture
def channel(rabbitmq):
    connection = pika.BlockingConnection(pika.URLParameters(f"{rabbitmq[:-2]}/%2F"))
    yield connection.channel()
    connection.close()


def list_received(idle_workers):
    return sorted(each for worker in idle_workers for each in worker.received)


@pytest.mark.spec("CNN-01", "CNN-11")
def test_a_redelivered_message_is_not_passed_around_among_idle_workers(name, idle_workers, channel):
    """The worker that gets the push keeps the message: a release would only push it to the next worker."""
    count = 5
    for number in range(count):
        # A message deferred in its second delivery and due now looks like this; all workers are idle.
        headers = {"ergon-id": f"order-{number}", DELIVERED_HEADER: "1"}
        channel.basic_publish("", name, b"{}", pika.BasicProperties(headers=headers))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(list_received(idle_workers)) <= number:
            assert time.monotonic() < deadline, f"order-{number} was not delivered"
            time.sleep(0.01)
        for worker in idle_workers:
            worker.empty.clear()
        for worker in idle_workers:
            assert worker.empty.wait(TIMEOUT_SECONDS)
    assert list_received(idle_workers) == [(f"order-{number}", 2) for number in range(count)]
