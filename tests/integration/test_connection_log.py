"""The outage of a broker is two events in the log of a streaming worker: its begin and its end."""

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
from ergon_framework.database.migrate import upgrade

#: Longer than a server takes to start on a busy machine.
TIMEOUT_SECONDS = 120.0
#: Several attempts of the default fetch policy.
OUTAGE_SECONDS = 3.0
STREAMING = ConsumerPolicy.load({"loop": {"streaming": True}})
NAME = f"orders-{uuid.uuid4().hex[:8]}"


def start_postgres(request):
    server = request.getfixturevalue("new_postgres")()
    upgrade(server.dsn())
    dsn = server.dsn().replace("postgres@", "postgres:open-sesame@")
    return server, lambda: PostgresQueue(NAME, dsn=dsn)


def start_rabbitmq(request):
    server = request.getfixturevalue("new_rabbitmq")()
    return server, lambda: RabbitMQQueue(NAME, url=server.url)


def start_nats(request):
    server = request.getfixturevalue("new_nats")()
    url = server.url.replace("://", "://someone:open-sesame@")
    return server, lambda: NatsQueue(NAME, url=url)


def start_redis(request):
    server = request.getfixturevalue("new_redis")()
    return server, lambda: RedisQueue(NAME, url=server.url)


class ConnectionLogHandler(logging.Handler):
    """A handler that stores the records about connections and wakes the caller that waits for one."""

    def __init__(self):
        super().__init__()
        self.records = []
        self.events = {"connection lost": threading.Event(), "connection restored": threading.Event()}

    def emit(self, record):
        event = getattr(record, "event", None)
        if event in self.events:
            self.records.append(record)
            self.events[event].set()

    def clear(self):
        """Forget what was logged before."""
        self.records.clear()
        for event in self.events.values():
            event.clear()

    def wait(self, event):
        assert self.events[event].wait(TIMEOUT_SECONDS), f"{event!r} was not logged"


@pytest.fixture
def connection_log():
    handler = ConnectionLogHandler()
    log = logging.getLogger("ergon_framework")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


@contextmanager
def run_worker(variant, queue):
    """Run a streaming worker and yield the list of handled transactions, which grows while it runs."""
    handled, stopped = [], threading.Event()
    handled_changed = threading.Condition()

    def record_handled(transaction):
        with handled_changed:
            handled.append(transaction.id)
            handled_changed.notify_all()

    def wait_for(name):
        with handled_changed:
            assert handled_changed.wait_for(lambda: name in handled, TIMEOUT_SECONDS), (
                f"{name} was not processed: {handled}"
            )

    if variant == "threads":

        @consumer(queue, policy=STREAMING)
        def handle(order, transaction: Transaction):
            record_handled(transaction)

        task, run = handle, handle.run
    else:

        @consumer(queue, policy=STREAMING)
        async def handle_async(order, transaction: Transaction):
            record_handled(transaction)

        task, run = handle_async, lambda: asyncio.run(handle_async.run())

    def target():
        try:
            run()
        finally:
            stopped.set()

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    try:
        yield wait_for
    finally:
        task.stop()
        assert stopped.wait(TIMEOUT_SECONDS)


def send(queue, name):
    """Dispatch one transaction as another program would, with its own connector."""

    async def send_async():
        try:
            await queue.dispatch_async([Transaction({}, id=name)])
        finally:
            await queue.close_async()

    asyncio.run(send_async())


@pytest.mark.spec("DX-12")
@pytest.mark.parametrize("variant", ["threads", "async"])
@pytest.mark.parametrize("start", [start_postgres, start_rabbitmq, start_nats, start_redis])
def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_ends(request, connection_log, start, variant):
    server, make = start(request)
    with run_worker(variant, make()) as wait_for:
        send(make(), "before")
        wait_for("before")
        assert connection_log.records == []
        server.stop()
        connection_log.wait("connection lost")
        threading.Event().wait(OUTAGE_SECONDS)
        assert [record.event for record in connection_log.records] == ["connection lost"]
        server.start()
        connection_log.wait("connection restored")
        send(make(), "after")
        wait_for("after")
    lost, restored = connection_log.records
    assert (lost.levelno, restored.levelno) == (logging.WARNING, logging.INFO)
    for record in connection_log.records:
        assert record.queue == NAME
        assert f"://127.0.0.1:{server.port}" in record.address
        assert f"address={record.address}" in record.getMessage()
        assert "open-sesame" not in str(vars(record)) + record.getMessage()
    assert OUTAGE_SECONDS <= restored.seconds < TIMEOUT_SECONDS
    assert lost.error
