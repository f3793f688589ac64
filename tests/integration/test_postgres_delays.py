"""Check delayed dispatch on PostgreSQL: in an outbox, with ordering keys, and with idle workers."""

from __future__ import annotations

import asyncio
import threading
import time

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, Defer, Release
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.transaction import Transaction
from tests.integration.boxes import open_queue
from tests.integration.libraries import ASYNC_LIBRARIES, SYNC_LIBRARIES
from tests.servers.databases import create_migrated_database

pytestmark = pytest.mark.invariant

TIMEOUT_SECONDS = 10.0
DELAY_SECONDS = 0.6


@pytest.fixture(scope="module")
def dsn(postgres):
    return create_migrated_database(postgres)


@pytest.fixture
def queue(dsn):
    with open_queue(dsn) as queue:
        yield queue


def make_mixed():
    """Return transactions of which every second one is delayed."""
    return [
        Transaction.new({"text": "Käse %s :x"}, id=f"tx-{n}", key=f"k{n}", delay=DELAY_SECONDS if n % 2 else None)
        for n in range(6)
    ]


def expect_mixed(queue, sent):
    depth = queue.depth()
    assert (depth.ready, depth.delayed) == (3, 3)
    due = {one.id: one.not_before or 0.0 for one in sent}
    ids = []
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(ids) < len(sent):
        assert time.monotonic() < deadline, ids
        deliveries = queue.fetch_transactions(10, wait=0.1)
        assert all(time.time() >= due[delivery.transaction.id] for delivery in deliveries)
        ids += [delivery.transaction.id for delivery in deliveries]
        queue.settle([(delivery, Ack()) for delivery in deliveries])
    assert (ids[:3], sorted(ids[3:])) == (["tx-0", "tx-2", "tx-4"], ["tx-1", "tx-3", "tx-5"])


@pytest.mark.spec("CNN-09", "CNN-15")
@pytest.mark.parametrize("library", SYNC_LIBRARIES)
def test_an_outbox_holds_a_delayed_transaction_until_it_is_due(library, dsn, queue):
    with SYNC_LIBRARIES[library](dsn) as (connection, _):
        sent = make_mixed()
        queue.dispatch_on(connection, sent)
        depth = queue.depth()
        assert (depth.ready, depth.delayed) == (0, 0)
    expect_mixed(queue, sent)


@pytest.mark.spec("CNN-09", "CNN-15")
@pytest.mark.parametrize("library", ASYNC_LIBRARIES)
def test_an_async_outbox_holds_a_delayed_transaction_until_it_is_due(library, dsn, queue):
    async def dispatch():
        async with ASYNC_LIBRARIES[library](dsn) as (connection, _):
            sent = make_mixed()
            await queue.dispatch_on_async(connection, sent)
            return sent

    expect_mixed(queue, asyncio.run(dispatch()))


@pytest.mark.spec("CNN-15")
def test_a_delayed_dispatch_that_is_rolled_back_never_comes(dsn, queue):
    with psycopg.connect(dsn) as connection:
        queue.dispatch_on(connection, [Transaction.new({}, id="never", delay=DELAY_SECONDS)])
        connection.rollback()
    depth = queue.depth()
    assert (depth.ready, depth.delayed) == (0, 0)


@pytest.mark.spec("CNN-09")
def test_a_delay_begins_at_the_dispatch_and_not_at_the_begin_of_the_callers_database_transaction(dsn, queue):
    with psycopg.connect(dsn) as connection:
        connection.execute("select now()")
        # The time of the database transaction falls behind meanwhile.
        assert queue.fetch_transactions(1, wait=DELAY_SECONDS) == []
        delayed = Transaction.new({}, id="delayed", delay=DELAY_SECONDS)
        queue.dispatch_on(connection, [delayed])
    (delivery,) = queue.fetch_transactions(1, wait=TIMEOUT_SECONDS)
    assert time.time() >= delayed.not_before
    queue.settle([(delivery, Ack())])


@pytest.mark.spec("CNN-09", "CNN-12")
def test_a_delayed_transaction_holds_back_no_other_of_its_key_before_it_is_due(queue):
    queue.dispatch([Transaction.new({}, id="reminder", key="customer-1", delay=DELAY_SECONDS)])
    queue.dispatch([Transaction(id="order", key="customer-1")])
    (order,) = queue.fetch_transactions(5)
    assert order.transaction.id == "order"
    # The reminder is due, but its key is in use: it waits for the order to be settled.
    assert queue.fetch_transactions(1, wait=2 * DELAY_SECONDS) == []
    queue.dispatch([Transaction(id="next-order", key="customer-1")])
    queue.settle([(order, Ack())])
    for expected in ("reminder", "next-order"):
        (delivery,) = queue.fetch_transactions(5, wait=TIMEOUT_SECONDS)
        assert (delivery.transaction.id, delivery.transaction.key) == (expected, "customer-1")
        assert delivery.deliveries == 1
        queue.settle([(delivery, Ack())])
    assert queue.fetch_transactions(1) == []
    depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.in_flight) == (0, 0, 0)


@pytest.mark.spec("CNN-04", "CNN-12")
def test_a_due_transaction_with_a_key_is_claimed_with_others_and_returned_like_them(queue):
    queue.dispatch(
        [
            Transaction.new({}, id="keyed", key="customer-1", delay=0.2),
            Transaction.new({}, id="plain", delay=0.2),
        ]
    )
    held = {}
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(held) < 2:
        assert time.monotonic() < deadline, held
        held |= {delivery.transaction.id: delivery for delivery in queue.fetch_transactions(5, wait=0.1)}
    queue.settle([(held["keyed"], Release()), (held["plain"], Defer(0.0))])
    again = {}
    while len(again) < 2:
        assert time.monotonic() < deadline, again
        again |= {delivery.transaction.id: delivery for delivery in queue.fetch_transactions(5, wait=0.1)}
    assert {delivery.deliveries for delivery in again.values()} == {1}
    queue.settle([(delivery, Ack()) for delivery in again.values()])
    assert queue.depth().in_flight == 0


class WakeupListener:
    def __init__(self):
        self.woken = threading.Event()

    def wake(self):
        self.woken.set()

    def on_lost(self, receipts):
        pass


@pytest.mark.spec("CNN-06")
def test_an_idle_worker_is_woken_when_each_delayed_transaction_of_another_process_is_due(dsn, queue):
    listener = WakeupListener()
    unlisten = queue.listen(listener)
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not queue._client.listener.listening:
            assert time.monotonic() < deadline
            queue.fetch_transactions(1, wait=0.05)
        assert queue.fetch_transactions(1) == []
        producer = PostgresQueue(queue.name, dsn=f"{dsn}?application_name=producer")
        sent = [Transaction.new({}, id=f"tx-{n}", delay=0.5 * (n + 1)) for n in range(3)]
        producer.dispatch(sent)
        producer.close()
        for expected in sent:
            delivery = None
            while delivery is None:
                assert listener.woken.wait(TIMEOUT_SECONDS), "the worker was not woken"
                listener.woken.clear()
                delivery = next(iter(queue.fetch_transactions(1)), None)
            now = time.time()
            assert delivery.transaction.id == expected.id
            assert now >= expected.not_before
            queue.settle([(delivery, Ack())])
            # As an idle loop does, which then waits for a wake-up.
            queue.fetch_transactions(1)
    finally:
        unlisten()


@pytest.mark.spec("CNN-09")
def test_the_age_of_a_delayed_transaction_counts_from_its_due_time(queue):
    queue.dispatch([Transaction.new({}, id="tx", created_at=1.0, delay=DELAY_SECONDS)])
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (depth := queue.depth()).ready == 0:
        assert time.monotonic() < deadline
        queue._arrivals.wait(lambda: (), 0.05, next_due=lambda: None)
    assert depth.oldest_age < DELAY_SECONDS / 2


def test_the_priority_of_a_transaction_decides_unless_the_queue_has_a_rule(dsn):
    sent = [Transaction(id="low", priority=-1), Transaction(id="plain"), Transaction(id="high", priority=2)]
    with open_queue(dsn, priority=lambda transaction: -transaction.priority) as ruled:
        ruled.dispatch(sent)
        order = [ruled.fetch_transactions(1)[0].transaction.id for _ in sent]
        assert order == ["low", "plain", "high"]
    with open_queue(dsn) as plain:
        plain.dispatch(sent)
        order = [plain.fetch_transactions(1)[0].transaction for _ in sent]
        assert [(one.id, one.priority) for one in order] == [("high", 2), ("plain", 0), ("low", -1)]
