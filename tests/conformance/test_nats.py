"""NATS JetStream takes the exam, in two versions of the server, which is stopped, killed and cut off."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import contextmanager

import nats
import pytest

from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.nats.naming import names
from ergon_framework.testing.conformance.connector import Candidate, exam
from tests.servers.nats import PrivateNats, find_new, find_old


class NatsCandidate(Candidate):
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
            line = await nats.connect(self.server.url)
            await line.jetstream().publish(names(queue).subject, body, headers=dict(headers))
            await line.close()

        asyncio.run(publish())


@contextmanager
def running(program, *, sync=False):
    folder = tempfile.mkdtemp(prefix="ergon-nats-")
    server = PrivateNats(folder, program=program, sync=sync)
    try:
        server.start()
        yield server
    finally:
        server.mend()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def new():
    with running(find_new(), sync=True) as server:
        yield NatsCandidate(server, durable=True)


@pytest.fixture(scope="module")
def old():
    with running(find_old()) as server:
        yield NatsCandidate(server, durable=False)


def spec(check):
    return [pytest.mark.spec(*check.ids)]


test_nats = exam("new", marks=spec)
test_nats_of_debian = exam("old", marks=spec)
