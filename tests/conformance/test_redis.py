"""Redis passes the conformance suite, on a separate server that is stopped, killed and cut off."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager

import pytest

from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.testing.conformance.connector.suite import ConnectorUnderTest, pytest_suite
from tests.servers.redis import PrivateRedis


class RedisUnderTest(ConnectorUnderTest):
    receives = True
    durable = True

    def __init__(self, server):
        self.server = server

    def client(self, queue, *, lease):
        # Shorter than by default: nothing else detects a dead connection.
        return RedisQueue(queue, url=f"{self.server.url}?socket_timeout=2&socket_connect_timeout=2", lease=lease)

    def receive(self, queue, body, headers):
        with self.server.client() as client:
            client.xadd(f"ergon:{{{queue}}}", {"body": body, **headers})


@contextmanager
def run_server():
    folder = tempfile.mkdtemp(prefix="ergon-redis-")
    server = PrivateRedis(folder)
    try:
        server.start()
        yield server
    finally:
        server.heal_network()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def system():
    with run_server() as server:
        yield RedisUnderTest(server)


test_redis = pytest_suite("system", marks=lambda check: [pytest.mark.spec(*check.ids)])
