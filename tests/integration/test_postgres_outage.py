"""Outages of PostgreSQL: longer than anybody tries to settle, shorter than the lease, or without a word."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework import ConsumerPolicy, Transaction, consumer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.errors import ConnectionLost
from ergon_framework.schema.migrate import upgrade

COUNT = 20
PATIENCE = 20.0
#: Longer than the test: whatever ends, ends because somebody settled it.
LEASE = 120.0
POLICY = ConsumerPolicy.load(
    {
        "loop": {
            "streaming": True,
            "concurrency": {"value": COUNT},
            "batch": {"size": COUNT},
            "empty_queue": {"backoff": 0.1, "cap": 0.1},
        },
        "steps": {
            "settle": {"retry": {"max_attempts": 2, "backoff": 0.05}},
            "fetch": {"retry": {"backoff": 0.1, "cap": 0.1}},
        },
    }
)


def task_of(flavour, queue, entered, leave):
    if flavour == "threads":

        @consumer(queue, policy=POLICY)
        def handle(order, transaction: Transaction):
            entered.append(transaction.id)
            leave.wait(PATIENCE)

        return handle, handle.run

    @consumer(queue, policy=POLICY)
    async def handle_async(order, transaction: Transaction):
        entered.append(transaction.id)
        await asyncio.to_thread(leave.wait, PATIENCE)

    return handle_async, lambda: asyncio.run(handle_async.run())


def until(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.02)


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize("flavour", ["threads", "async"])
def test_what_could_not_be_settled_during_an_outage_is_settled_after_it(new_postgres, flavour):
    server = new_postgres()
    upgrade(server.dsn())
    queue = PostgresQueue("orders", dsn=server.dsn(), lease=LEASE)
    queue.dispatch([Transaction(f"order-{n}", {}) for n in range(COUNT)])
    entered, leave = [], threading.Event()
    task, run = task_of(flavour, queue, entered, leave)
    reports = []
    thread = threading.Thread(target=lambda: reports.append(run()), daemon=True)
    thread.start()
    until(lambda: len(entered) == COUNT, lambda: entered)
    server.kill()
    leave.set()
    # Two attempts are over long before this, each refused at once.
    time.sleep(1.0)
    server.start()
    look = PostgresQueue("orders", dsn=server.dsn())
    until(lambda: look.depth().in_flight == 0, look.depth)
    task.stop()
    thread.join(PATIENCE)
    depth = look.depth()
    look.close()
    assert (depth.ready, depth.delayed, depth.dead) == (0, 0, 0)
    assert sorted(entered) == sorted(f"order-{n}" for n in range(COUNT)), "each ran once"
    assert reports[0].settled == {"failed": COUNT}, "those who asked had given up"


@pytest.mark.spec("CNN-07")
def test_a_line_that_the_server_ended_while_it_was_idle_costs_nobody_a_call(new_postgres):
    server = new_postgres()
    dsn = server.create_database("idle")
    upgrade(dsn)
    queue = PostgresQueue("orders", dsn=dsn)
    queue.dispatch([Transaction("before", {})])
    server.restart()
    queue.dispatch([Transaction("after", {})])
    assert queue.depth().ready == 2
    queue.close()


@pytest.mark.spec("CNN-07")
def test_a_line_that_falls_silent_is_given_up_by_default(new_postgres):
    server = new_postgres()
    upgrade(server.dsn())
    queue = PostgresQueue("orders", dsn=server.dsn(), lease=LEASE)
    queue.open()
    server.cut()
    began = time.monotonic()
    try:
        with pytest.raises(ConnectionLost):
            queue.fetch_transactions(1)
    finally:
        server.mend()
        queue.close()
    # Twelve seconds are the address's default, and the kernel looks when it sends again.
    assert 5.0 < time.monotonic() - began < 30.0
