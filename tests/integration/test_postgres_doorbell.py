"""Check that the notification listener sleeps for seconds and still wakes immediately when it is needed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psycopg
import pytest

from ergon_framework.connectors.postgres.notify import NotificationListener
from ergon_framework.database.pool import ConnectionPool

#: The sleep without a notification is five seconds; this is far less, and more than a busy machine needs.
MAX_WAKE_SECONDS = 3.0


@pytest.fixture
def connection_pool(database):
    with psycopg.connect(database, autocommit=True) as connection:
        for number, name in enumerate(("first", "second"), 1):
            connection.execute("insert into ergon.queue (id, name) values (%s, %s)", (number, name))
    pool = ConnectionPool(database)
    yield pool
    pool.close()


def subscribe_and_wait(doorbell):
    """Wait until *doorbell* listens and is registered as waiting; its first poll notifies without a message."""
    notified = threading.Event()
    unsubscribe = doorbell.subscribe(1, notified.set)
    assert notified.wait(20)
    # A waiting thread shows no visible state: by then it waits.
    time.sleep(0.3)
    notified.clear()
    return notified, unsubscribe


def list_waiting_queues(database):
    with psycopg.connect(database) as connection:
        return {queue for (queue,) in connection.execute("select queue from ergon.listener")}


def test_a_reminder_notifies_when_it_is_due_and_not_before(connection_pool):
    doorbell = NotificationListener(connection_pool)
    notified, unsubscribe = subscribe_and_wait(doorbell)
    started_at = time.monotonic()
    doorbell.wake_after(1, 0.5)
    doorbell.wake_after(1, 60.0)
    assert notified.wait(20)
    assert 0.5 <= time.monotonic() - started_at < MAX_WAKE_SECONDS
    unsubscribe()


def test_a_second_queue_is_registered_immediately(connection_pool, database):
    doorbell = NotificationListener(connection_pool)
    _, unsubscribe = subscribe_and_wait(doorbell)
    started_at, notified = time.monotonic(), threading.Event()
    unsubscribe_second = doorbell.subscribe(2, notified.set)
    assert notified.wait(20)
    assert time.monotonic() - started_at < MAX_WAKE_SECONDS
    assert list_waiting_queues(database) == {1, 2}
    unsubscribe()
    unsubscribe_second()


def test_a_notification_wakes_the_waiter_immediately(connection_pool, database):
    doorbell = NotificationListener(connection_pool)
    notified, unsubscribe = subscribe_and_wait(doorbell)
    started_at = time.monotonic()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("select pg_notify('ergon', '1')")
    assert notified.wait(20)
    assert time.monotonic() - started_at < MAX_WAKE_SECONDS
    unsubscribe()


def test_the_listener_ends_with_its_last_subscriber_and_starts_again(connection_pool):
    doorbell = NotificationListener(connection_pool)
    _, unsubscribe = subscribe_and_wait(doorbell)
    thread, started_at = doorbell._thread, time.monotonic()
    unsubscribe()
    thread.join(20)
    assert time.monotonic() - started_at < MAX_WAKE_SECONDS
    assert doorbell._waiter is None
    notified, unsubscribe = subscribe_and_wait(doorbell)
    doorbell.wake_after(1, 0.0)
    assert notified.wait(20)
    unsubscribe()


def test_a_waiting_listener_needs_almost_no_cpu(connection_pool):
    doorbell = NotificationListener(connection_pool)
    _, unsubscribe = subscribe_and_wait(doorbell)
    task = doorbell._thread.native_id

    def count_switches():
        status = Path(f"/proc/self/task/{task}/status").read_text()
        return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)

    before = count_switches()
    time.sleep(2.0)
    # Polling five times a second took ten switches, each with a call through the driver.
    assert count_switches() - before <= 4
    unsubscribe()
