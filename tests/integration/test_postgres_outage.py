"""Check outages of PostgreSQL: longer than the settlement retries, shorter than the lease, or without a response."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework import ConsumerPolicy, Transaction, consumer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.database.migrate import upgrade
from ergon_framework.errors import ConnectionLostError

TRANSACTION_COUNT = 20
TIMEOUT_SECONDS = 20.0
#: Longer than the test: every claim that ends was settled.
LEASE_SECONDS = 120.0
POLICY = ConsumerPolicy.load(
    {
        "loop": {
            "streaming": True,
            "concurrency": {"value": TRANSACTION_COUNT},
            "batch": {"size": TRANSACTION_COUNT},
            "empty_queue": {"backoff": 0.1, "cap": 0.1},
        },
        "steps": {
            "settle": {"retry": {"max_attempts": 2, "backoff": 0.05}},
            "fetch": {"retry": {"backoff": 0.1, "cap": 0.1}},
        },
    }
)


def make_task(variant, queue, entered, release):
    if variant == "threads":

        @consumer(queue, policy=POLICY)
        def handle(order, transaction: Transaction):
            entered.append(transaction.id)
            release.wait(TIMEOUT_SECONDS)

        return handle, handle.run

    @consumer(queue, policy=POLICY)
    async def handle_async(order, transaction: Transaction):
        entered.append(transaction.id)
        await asyncio.to_thread(release.wait, TIMEOUT_SECONDS)

    return handle_async, lambda: asyncio.run(handle_async.run())


def wait_until(condition, describe):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.02)


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize("variant", ["threads", "async"])
def test_settlements_that_failed_during_an_outage_are_sent_after_it(new_postgres, variant):
    server = new_postgres()
    upgrade(server.dsn())
    queue = PostgresQueue("orders", dsn=server.dsn(), lease=LEASE_SECONDS)
    queue.dispatch([Transaction({}, id=f"order-{n}") for n in range(TRANSACTION_COUNT)])
    entered, release = [], threading.Event()
    task, run = make_task(variant, queue, entered, release)
    reports = []
    thread = threading.Thread(target=lambda: reports.append(run()), daemon=True)
    thread.start()
    wait_until(lambda: len(entered) == TRANSACTION_COUNT, lambda: entered)
    server.kill()
    release.set()
    # Two attempts are over long before this, each refused immediately.
    time.sleep(1.0)
    server.start()
    observer = PostgresQueue("orders", dsn=server.dsn())
    wait_until(lambda: observer.depth().in_flight == 0, observer.depth)
    task.stop()
    thread.join(TIMEOUT_SECONDS)
    depth = observer.depth()
    observer.close()
    assert (depth.ready, depth.delayed, depth.dead) == (0, 0, 0)
    assert sorted(entered) == sorted(f"order-{n}" for n in range(TRANSACTION_COUNT)), "each ran once"
    assert reports[0].settled == {"failed": TRANSACTION_COUNT}, "those who asked had given up"


@pytest.mark.spec("CNN-07")
def test_a_connection_that_the_server_closed_while_idle_fails_no_call(new_postgres):
    server = new_postgres()
    dsn = server.create_database("idle")
    upgrade(dsn)
    queue = PostgresQueue("orders", dsn=dsn)
    queue.dispatch([Transaction({}, id="before")])
    server.restart()
    queue.dispatch([Transaction({}, id="after")])
    assert queue.depth().ready == 2
    queue.close()


@pytest.mark.spec("CNN-07")
def test_a_connection_without_response_is_closed_by_default(new_postgres):
    server = new_postgres()
    upgrade(server.dsn())
    queue = PostgresQueue("orders", dsn=server.dsn(), lease=LEASE_SECONDS)
    queue.open()
    server.partition_network()
    started_at = time.monotonic()
    try:
        with pytest.raises(ConnectionLostError):
            queue.fetch_transactions(1)
    finally:
        server.heal_network()
        queue.close()
    # Twelve seconds are the default of the address, and the kernel notices when it sends again.
    assert 5.0 < time.monotonic() - started_at < 30.0
