"""RabbitMQ passes the conformance suite, on a separate server that is stopped, killed and cut off."""

from __future__ import annotations

import itertools
import shutil
import tempfile

import pika
import pytest

from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.testing.conformance.connector.suite import ConnectorUnderTest, pytest_suite
from tests.servers.rabbitmq import PrivateRabbitMQ

#: The suite's loops survive any outage with so many attempts that the server's half hour would not suffice for them,
#: and prefetched deliveries wait for others.
CONSUMER_TIMEOUT_SECONDS = 100_000_000.0


#: A server that was killed repeats a move out of a delay queue that failed while it started, by default after three
#: minutes; the guide names this setting, in milliseconds.
SERVER_SETTINGS = {"dead_letter_worker_publisher_confirm_timeout": 2_000}


class RabbitMQUnderTest(ConnectorUnderTest):
    receives = True
    durable = True

    def __init__(self, server):
        self.server = server
        self._numbers = itertools.count()

    def client(self, queue, *, lease):
        # A check that fails in an outage must leave the server running for others.
        self.server.start()
        # A separate name gives each client separate connections, as another process would have.
        url = f"{self.server.url}?heartbeat=4&client_properties={{'connection_name':'client-{next(self._numbers)}'}}"
        return RabbitMQQueue(queue, url=url, timeout=3.0, consumer_timeout=CONSUMER_TIMEOUT_SECONDS)

    def receive(self, queue, body, headers):
        connection = pika.BlockingConnection(pika.URLParameters(f"{self.server.url[:-2]}/%2F"))
        try:
            connection.channel().basic_publish("", queue, body, pika.BasicProperties(headers=dict(headers)))
        finally:
            connection.close()


@pytest.fixture(scope="module")
def system():
    folder = tempfile.mkdtemp(prefix="ergon-rabbitmq-")
    server = PrivateRabbitMQ(folder, settings=SERVER_SETTINGS)
    try:
        server.start()
        yield RabbitMQUnderTest(server)
    finally:
        server.heal_network()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_rabbitmq = pytest_suite("system", marks=get_spec_marks)
