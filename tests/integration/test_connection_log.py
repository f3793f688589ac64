"""An outage of a broker is two lines in the log of a streaming worker: its begin and its end."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from contextlib import contextmanager

import pytest

from ergon_framework import ConsumerPolicy, Transaction, consumer
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.schema.migrate import upgrade

#: Longer than a server takes to start on a busy machine.
PATIENCE = 120.0
#: Several attempts of the default fetch policy.
OUTAGE = 3.0
STREAMING = ConsumerPolicy.load({"loop": {"streaming": True}})
NAME = f"orders-{uuid.uuid4().hex[:8]}"


def postgres(request):
    server = request.getfixturevalue("new_postgres")()
    upgrade(server.dsn())
    dsn = server.dsn().replace("postgres@", "postgres:open-sesame@")
    return server, lambda: PostgresQueue(NAME, dsn=dsn)


def rabbitmq(request):
    server = request.getfixturevalue("new_rabbitmq")()
    return server, lambda: RabbitMQQueue(NAME, url=server.url)


def nats(request):
    server = request.getfixturevalue("new_nats")()
    url = server.url.replace("://", "://someone:open-sesame@")
    return server, lambda: NatsQueue(NAME, url=url)


def redis(request):
    server = request.getfixturevalue("new_redis")()
    return server, lambda: RedisQueue(NAME, url=server.url)


class Heard(logging.Handler):
    """Keeps the records about connections, and tells who waits for one."""

    def __init__(self):
        super().__init__()
        self.records = []
        self.said = {"connection lost": threading.Event(), "connection restored": threading.Event()}

    def emit(self, record):
        event = getattr(record, "event", None)
        if event in self.said:
            self.records.append(record)
            self.said[event].set()

    def wait(self, event):
        assert self.said[event].wait(PATIENCE), f"{event!r} was not logged"


@pytest.fixture
def heard():
    handler = Heard()
    log = logging.getLogger("ergon_framework")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


@contextmanager
def worker(flavour, queue):
    """A streaming worker; yields what it has done, which grows while it runs."""
    done, ended = [], threading.Event()
    news = threading.Condition()

    def note(transaction):
        with news:
            done.append(transaction.id)
            news.notify_all()

    def wait_for(name):
        with news:
            assert news.wait_for(lambda: name in done, PATIENCE), f"{name} was not processed: {done}"

    if flavour == "threads":

        @consumer(queue, policy=STREAMING)
        def handle(order, transaction: Transaction):
            note(transaction)

        task, run = handle, handle.run
    else:

        @consumer(queue, policy=STREAMING)
        async def handle_async(order, transaction: Transaction):
            note(transaction)

        task, run = handle_async, lambda: asyncio.run(handle_async.run())

    def target():
        try:
            run()
        finally:
            ended.set()

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    try:
        yield wait_for
    finally:
        task.stop()
        assert ended.wait(PATIENCE)


def send(queue, name):
    """Dispatch one transaction as another program would, by a connector of its own."""

    async def send_async():
        try:
            await queue.dispatch_async([Transaction(name, {})])
        finally:
            await queue.close_async()

    asyncio.run(send_async())


@pytest.mark.spec("DX-12")
@pytest.mark.parametrize("flavour", ["threads", "async"])
@pytest.mark.parametrize("start", [postgres, rabbitmq, nats, redis])
def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_ends(request, heard, start, flavour):
    server, make = start(request)
    with worker(flavour, make()) as wait_for:
        send(make(), "before")
        wait_for("before")
        assert heard.records == []
        server.stop()
        heard.wait("connection lost")
        threading.Event().wait(OUTAGE)
        assert [record.event for record in heard.records] == ["connection lost"]
        server.start()
        heard.wait("connection restored")
        send(make(), "after")
        wait_for("after")
    lost, restored = heard.records
    assert (lost.levelno, restored.levelno) == (logging.WARNING, logging.INFO)
    for record in heard.records:
        assert record.queue == NAME
        assert f"://127.0.0.1:{server.port}" in record.address
        assert f"address={record.address}" in record.getMessage()
        assert "open-sesame" not in str(vars(record)) + record.getMessage()
    assert OUTAGE <= restored.seconds < PATIENCE
    assert lost.error
