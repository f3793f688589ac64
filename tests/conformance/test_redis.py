"""Redis takes the exam, on a server of its own that is stopped, killed and cut off."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager

import pytest

from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.testing.conformance.connector import Candidate, exam
from tests.servers.redis import PrivateRedis


class RedisCandidate(Candidate):
    receives = True
    durable = True

    def __init__(self, server):
        self.server = server

    def client(self, queue, *, lease):
        # Shorter than by default: a line that is cut is noticed by nothing else.
        return RedisQueue(queue, url=f"{self.server.url}?socket_timeout=2&socket_connect_timeout=2", lease=lease)

    def receive(self, queue, body, headers):
        with self.server.client() as client:
            client.xadd(f"ergon:{{{queue}}}", {"body": body, **headers})


@contextmanager
def running():
    folder = tempfile.mkdtemp(prefix="ergon-redis-")
    server = PrivateRedis(folder)
    try:
        server.start()
        yield server
    finally:
        server.mend()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def candidate():
    with running() as server:
        yield RedisCandidate(server)


test_redis = exam("candidate", marks=lambda check: [pytest.mark.spec(*check.ids)])
