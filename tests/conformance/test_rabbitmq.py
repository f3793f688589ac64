"""RabbitMQ takes the exam, on a server of its own that is stopped, killed and cut off."""

from __future__ import annotations

import itertools
import shutil
import tempfile

import pika
import pytest

from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.testing.conformance.connector import Candidate, exam
from tests.servers.rabbitmq import PrivateRabbitMQ

#: The exam's loops outlive any outage, with so many attempts that the server's half hour would not do for all of them;
#: and what is fetched ahead waits for others.
LONG = 100_000_000.0


class RabbitMQCandidate(Candidate):
    receives = True
    durable = True

    def __init__(self, server):
        self.server = server
        self._numbers = itertools.count()

    def client(self, queue, *, lease):
        # One check that fails in an outage leaves others a server.
        self.server.start()
        # A name of its own gives each client connections of its own, as another process would have.
        url = f"{self.server.url}?heartbeat=4&client_properties={{'connection_name':'client-{next(self._numbers)}'}}"
        return RabbitMQQueue(queue, url=url, timeout=3.0, consumer_timeout=LONG)

    def receive(self, queue, body, headers):
        connection = pika.BlockingConnection(pika.URLParameters(f"{self.server.url[:-2]}/%2F"))
        try:
            connection.channel().basic_publish("", queue, body, pika.BasicProperties(headers=dict(headers)))
        finally:
            connection.close()


@pytest.fixture(scope="module")
def candidate():
    folder = tempfile.mkdtemp(prefix="ergon-exam-")
    server = PrivateRabbitMQ(folder)
    try:
        server.start()
        yield RabbitMQCandidate(server)
    finally:
        server.mend()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def spec(check):
    return [pytest.mark.spec(*check.ids)]


test_rabbitmq = exam("candidate", marks=spec)
