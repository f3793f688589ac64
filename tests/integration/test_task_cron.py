"""Schedules of tasks on a real database: each time is sent once by a fleet, after a failure, an outage or a crash."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ergon_framework import ConfigurationError, ConnectionLostError, MemoryConnector, consumer, cron
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.jobs import Cron, JobClient, cron_store
from ergon_framework.jobs.cron import tick_id
from ergon_framework.runner.exit import RunExit
from tests.integration.running import ErgonProcess

EVERY_SECOND = "* * * * * *"
YEARLY = "0 0 1 1 *"
TIMEOUT_SECONDS = 20.0


@pytest.fixture
def dsn(database):
    return database


def run_sql(dsn, sql, *values):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql, values)
        return cursor.fetchall() if cursor.description else []


def make_overdue(dsn, name, interval):
    """Set the next time of the schedule to *interval* ago, rounded down to the minute, and return it."""
    sql = "update ergon.cron set next_at = date_trunc('minute', now() - %s::interval) where name = %s returning next_at"
    return run_sql(dsn, sql, interval, name)[0][0]


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
    return value


@contextmanager
def run_schedules(*schedules):
    """Run each schedule on a thread for the duration of the block."""
    threads = [threading.Thread(target=schedule.run) for schedule in schedules]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for schedule, thread in zip(schedules, threads, strict=True):
            # A stop before the loop runs has no effect.
            while thread.is_alive():
                schedule.stop()
                thread.join(0.05)


def fetch_all(connector):
    """Return all transactions of the queue, and settle none."""
    transactions = []
    while deliveries := connector.fetch_transactions(100):
        transactions += [delivery.transaction for delivery in deliveries]
    return transactions


@contextmanager
def opened(schedule):
    with schedule.open():
        yield schedule.connector


def fire_due(schedule):
    """Fire what is due, as the loop does; return the number of ticks that this call got."""
    count = 0
    while deliveries := schedule.connector.fetch_transactions(1):
        schedule.process_transaction(deliveries[0].transaction)
        count += 1
    return count


@pytest.fixture(params=["memory", "postgres", "redis"])
def target(request, dsn):
    if request.param == "memory":
        connector = MemoryConnector("orders")
    elif request.param == "postgres":
        connector = PostgresQueue("orders", dsn=dsn)
    else:
        connector = RedisQueue("orders", url=request.getfixturevalue("new_redis")().url)
    connector.open()
    yield connector
    connector.close()


@pytest.mark.spec("EXE-27")
def test_two_schedulers_send_each_time_once(dsn, target):
    made = []

    def create():
        @cron(EVERY_SECOND, target, name="tick", dsn=dsn)
        def tick(at: datetime):
            made.append(at)
            return {"at": at.isoformat()}

        return tick

    with run_schedules(create(), create()):
        wait_until(lambda: len(made) >= 4)
    transactions = fetch_all(target)
    first = made[0]
    expected_ids = [tick_id("tick", first + timedelta(seconds=n)) for n in range(len(made))]
    assert sorted(each.id for each in transactions) == expected_ids
    assert [each.payload["at"] for each in sorted(transactions, key=lambda each: each.id)] == [
        (first + timedelta(seconds=n)).isoformat() for n in range(len(made))
    ]


@pytest.mark.spec("EXE-27")
def test_a_schedule_sends_to_the_queue_of_a_task_with_its_fields(dsn):
    orders = MemoryConnector("orders")

    @consumer(orders)
    def charge(order): ...

    @cron(YEARLY, charge, zone="Europe/Berlin", tenant="acme", type="charge", key="all", grace=600, dsn=dsn)
    async def nightly(at):
        await asyncio.sleep(0)
        return at.isoformat()

    with opened(nightly):
        due_at = make_overdue(dsn, "nightly", "90 seconds")
        assert fire_due(nightly) == 1
    first = fetch_all(orders)[0]
    assert first.id == f"cron:nightly:{due_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    assert (first.tenant, first.type, first.key, first.source) == ("acme", "charge", "all", "orders")
    local = datetime.fromisoformat(first.payload)
    assert local == due_at
    assert local.utcoffset() in {timedelta(hours=1), timedelta(hours=2)}


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize(
    "misfire, grace, count", [("skip", 60, 0), ("once", 60, 1), ("all", 60, 11), ("skip", 900, 11)]
)
def test_times_of_an_outage_follow_the_misfire_policy(dsn, misfire, grace, count):
    orders = MemoryConnector("orders")

    @cron("* * * * *", orders, misfire=misfire, grace=grace, dsn=dsn)
    def minutely():
        return None

    with opened(minutely):
        due_at = make_overdue(dsn, "minutely", "10 minutes")
        fire_due(minutely)
    ids = [each.id for each in fetch_all(orders)]
    expected_ids = [tick_id("minutely", due_at + timedelta(minutes=n)) for n in range(12)]
    # A minute may have begun meanwhile.
    assert ids in (expected_ids[11 - count : 11], expected_ids[12 - count : 12], expected_ids[: count + 1])
    ((next_at,),) = run_sql(dsn, "select next_at from ergon.cron")
    assert next_at > datetime.now(UTC)


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize("place, sent", [("postgres", 1), ("memory", 2)])
def test_a_crash_before_the_commit_sends_again_with_the_same_id_or_not_at_all(dsn, place, sent):
    dispatched = []

    class Noting(MemoryConnector):
        def dispatch(self, transactions):
            dispatched.extend(transactions)
            kill_connection()
            return super().dispatch(transactions)

    orders = Noting("orders") if place == "memory" else PostgresQueue("orders", dsn=dsn)
    calls = []

    def kill_connection():
        """End the session that holds the lock, once: the server rolls its transaction back."""
        if len(calls) == 1:
            sql = (
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
                "where state = 'idle in transaction' and datname = current_database()"
            )
            assert run_sql(dsn, sql) == [(True,)]

    @cron(YEARLY, orders, grace=86_400, dsn=dsn)
    def yearly():
        calls.append(1)
        if place == "postgres":
            kill_connection()
        return "payload"

    with opened(yearly):
        due_at = make_overdue(dsn, "yearly", "1 minute")
        # Its only tick: the next scheduled time is next year.
        [delivery] = yearly.connector.fetch_transactions(1)
        with pytest.raises(ConnectionLostError):
            yearly.process_transaction(delivery.transaction)
        assert fire_due(yearly) == 1
        assert fire_due(yearly) == 0
    found = dispatched if place == "memory" else fetch_all(orders)
    assert [each.id for each in found] == [tick_id("yearly", due_at)] * sent
    assert len(calls) == 2
    if place == "postgres":
        orders.close()


@pytest.mark.spec("EXE-27")
def test_of_two_processes_with_the_same_time_one_sends(dsn):
    orders = MemoryConnector("orders")
    entered, leave = threading.Event(), threading.Event()

    def create():
        @cron(YEARLY, orders, name="yearly", grace=86_400, dsn=dsn)
        def yearly():
            entered.set()
            assert leave.wait(TIMEOUT_SECONDS)

        return yearly

    first, second = create(), create()
    with opened(first), opened(second):
        make_overdue(dsn, "yearly", "1 minute")
        [one] = first.connector.fetch_transactions(1)
        [other] = second.connector.fetch_transactions(1)
        thread = threading.Thread(target=first.process_transaction, args=(one.transaction,))
        thread.start()
        assert entered.wait(TIMEOUT_SECONDS)
        # While the row is locked: neither a new tick, nor that of before.
        assert second.connector.fetch_transactions(1) == []
        second.process_transaction(other.transaction)
        leave.set()
        thread.join()
        second.process_transaction(other.transaction)
        # Another time is due: the one that was fetched before does not stand for it.
        make_overdue(dsn, "yearly", "3 minutes")
        second.process_transaction(other.transaction)
    assert len(fetch_all(orders)) == 1


@pytest.mark.spec("EXE-27")
def test_a_time_whose_function_fails_is_tried_again_and_not_lost(dsn):
    orders = MemoryConnector("orders")
    calls = []

    @cron(YEARLY, orders, grace=86_400, dsn=dsn)
    def yearly():
        calls.append(1)
        if len(calls) < 4:
            raise ValueError("the shelf is empty")
        return "payload"

    with opened(yearly):
        due_at = make_overdue(dsn, "yearly", "1 minute")
    with run_schedules(yearly):
        transactions = wait_until(lambda: fetch_all(orders))
    assert [each.id for each in transactions] == [tick_id("yearly", due_at)]
    assert len(calls) == 4


@pytest.mark.spec("EXE-27")
def test_without_an_address_the_schedule_does_not_start(monkeypatch):
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)

    @cron(YEARLY, MemoryConnector("orders"))
    def yearly():
        return None

    with pytest.raises(ConfigurationError, match=r"'yearly' has no database address.*set ERGON_POSTGRES__DSN or pass"):
        yearly.run()


@pytest.mark.spec("EXE-27")
def test_orchestrators_leave_the_entries_of_queues_alone(dsn):
    @cron(YEARLY, MemoryConnector("orders"), dsn=dsn)
    def yearly():
        return None

    pool = ConnectionPool(dsn)
    with opened(yearly), JobClient(dsn) as client:
        make_overdue(dsn, "yearly", "1 minute")
        assert pool.run(cron_store.seconds_until_due()) is None
        assert pool.run(cron_store.fire_next(set())) is None
        [entry] = client.schedules()
        assert (entry.name, entry.kind, entry.function_name) == ("yearly", "#queue", "orders")
        with pytest.raises(ConfigurationError, match="'yearly' sends to a queue"):
            client.run_schedule("yearly")
        with pytest.raises(ConfigurationError, match="'yearly' exists already and sends to a queue"):
            client.schedule(Cron("yearly", YEARLY, "report"))
        client.pause_schedule("yearly")
        assert yearly.connector.fetch_transactions(1) == []
        client.resume_schedule("yearly")
        assert client.unschedule("yearly")
        client.schedule(Cron("yearly", YEARLY, "report"))
    pool.close()
    with pytest.raises(ConfigurationError, match="schedule 'yearly' is not open"):
        yearly.connector.fetch_transactions(1)
    with pytest.raises(ConfigurationError, match="'yearly' exists already and submits a job"):
        yearly.run()


APP = """
orders = MemoryConnector("orders")

@consumer(orders, policy=policy(empty_queue={"backoff": 0.05, "cap": 0.05}))
def charge(order, transaction: Transaction):
    say(f"{transaction.id} {order}")

@cron("* * * * * *", charge)
def every_second():
    return {"total": 9}
"""


@pytest.mark.spec("EXE-27")
def test_a_process_runs_the_schedules_of_a_module_beside_its_tasks(dsn, tmp_path, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    with ErgonProcess(tmp_path, APP, command=("run", "app")) as process:
        process.wait_for("cron:every_second:")
        assert process.output[-1].endswith("Z {'total': 9}")
        process.send_signal()
        code, seconds = process.wait_for_exit()
    assert code == RunExit.OK
    assert seconds < 5.0
