"""NATS JetStream passes the conformance suite, in two versions of the server, which is stopped, killed and cut off."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import contextmanager

import nats
import pytest

from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.nats.streams import stream_names
from ergon_framework.testing.conformance.connector.suite import ConnectorUnderTest, pytest_suite
from tests.servers.nats import PrivateNats, find_bundled_server, find_distribution_server


class NatsUnderTest(ConnectorUnderTest):
    receives = True

    def __init__(self, server, *, durable):
        self.server = server
        self.durable = durable

    def client(self, queue, *, lease):
        return NatsQueue(
            queue, url=self.server.url, lease=lease, timeout=1.0, patience=1.5, monitor=self.server.monitor
        )

    def receive(self, queue, body, headers):
        async def publish():
            connection = await nats.connect(self.server.url)
            await connection.jetstream().publish(stream_names(queue).subject, body, headers=dict(headers))
            await connection.close()

        asyncio.run(publish())


@contextmanager
def run_server(program, *, sync=False):
    folder = tempfile.mkdtemp(prefix="ergon-nats-")
    server = PrivateNats(folder, program=program, sync=sync)
    try:
        server.start()
        yield server
    finally:
        server.heal_network()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def new_system():
    with run_server(find_bundled_server(), sync=True) as server:
        yield NatsUnderTest(server, durable=True)


@pytest.fixture(scope="module")
def old_system():
    with run_server(find_distribution_server()) as server:
        yield NatsUnderTest(server, durable=False)


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_nats = pytest_suite("new_system", marks=get_spec_marks)
test_nats_of_debian = pytest_suite("old_system", marks=get_spec_marks)
