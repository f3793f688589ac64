"""Check the inbox: succeeded transactions do not run again, and effects in the same database happen once."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider

from ergon_framework.connectors.base import Ack, Release, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.foreign_codec import ForeignCodec, from_header, from_json_pointer
from ergon_framework.connectors.postgres import PostgresQueue, cleanup
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.decorators import consumer
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.transaction import Transaction
from tests.integration.boxes import fetch_and_ack, open_queue
from tests.integration.libraries import ASYNC_LIBRARIES, SYNC_LIBRARIES
from tests.integration.metering import wait_until
from tests.servers.databases import create_migrated_database

pytestmark = pytest.mark.invariant


@pytest.fixture(scope="module")
def dsn(postgres):
    return create_migrated_database(postgres)


@pytest.fixture
def queue(dsn):
    with open_queue(dsn, inbox=True) as queue:
        yield queue


def list_marks(dsn, queue):
    sql = "select i.transaction_id from ergon.inbox i join ergon.queue q on q.id = i.queue where q.name = %s order by 1"
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute(sql, [queue.name])]


def make_recorder(queue):
    """Return a task and the list of the ids that it has run."""
    handled = []

    @consumer(queue, name="Recorder")
    def handle(payload, transaction: Transaction):
        handled.append(transaction.id)

    return handle, handled


# -- succeeded transactions -------------------------------------------------------------------------------


@pytest.mark.spec("CNN-14")
def test_a_transaction_that_has_succeeded_is_acked_without_running_and_counted(dsn, queue):
    handle, handled = make_recorder(queue)
    provider = MeterProvider()
    handle.telemetry = TelemetryOptions(meter_provider=provider)
    for _ in range(2):
        queue.dispatch([Transaction(id="order-7")])
        report = handle.run()
    assert handled == ["order-7"]
    assert (report.rejected, report.settled) == ({"done": 1}, {"settled": 1})
    registry = get_registry(provider)
    assert registry.read(names.REJECTED_DELIVERIES) == [({"ergon.task": "Recorder", "ergon.reason": "done"}, 1)]
    depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.in_flight, depth.dead) == (0, 0, 0, 0)
    provider.shutdown()


@pytest.mark.spec("CNN-14")
def test_the_async_variant_recognizes_succeeded_transactions_too(dsn, queue):
    handled = []

    @consumer(queue)
    async def handle(payload, transaction: Transaction):
        handled.append(transaction.id)

    async def main():
        for _ in range(2):
            await queue.dispatch_async([Transaction(id="order-7"), Transaction(id="keyed", key="k")])
            await handle.run()

    asyncio.run(main())
    assert sorted(handled) == ["keyed", "order-7"]


@pytest.mark.spec("CNN-14")
def test_a_failed_transaction_or_one_of_another_queue_is_not_done(dsn, queue):
    handled = []

    @consumer(queue)
    def handle(payload, transaction: Transaction):
        handled.append(transaction.id)
        raise ConfigurationError("not yet")

    for _ in range(2):
        queue.dispatch([Transaction(id="failed")])
        handle.run()
    assert handled == ["failed"] * len(handled)
    assert len(handled) >= 2
    queue.dispatch([Transaction(id="order-7")])
    fetch_and_ack(queue)
    with open_queue(dsn, inbox=True) as other:
        other.dispatch([Transaction(id="order-7")])
        assert [delivery.done for delivery in other.fetch_transactions(1)] == [False]


def test_without_an_inbox_the_same_id_runs_twice(dsn):
    with open_queue(dsn) as queue:
        queue.dispatch([Transaction(id="order-7")])
        fetch_and_ack(queue)
        queue.dispatch([Transaction(id="order-7")])
        assert [delivery.done for delivery in queue.fetch_transactions(1)] == [False]


# -- the mark in the handler's own database transaction -----------------------------------------------------


@pytest.mark.spec("CNN-14")
@pytest.mark.parametrize("library", SYNC_LIBRARIES)
def test_the_mark_is_written_in_the_handlers_own_database_transaction(library, dsn, queue):
    results = []

    @consumer(queue)
    def handle(payload, transaction: Transaction):
        with suppress(LookupError), SYNC_LIBRARIES[library](dsn) as (connection, _):
            results.append(queue.record_processed_on(connection))
            if transaction.id == "undone":
                raise LookupError
        results.append(list_marks(dsn, queue))

    queue.dispatch([Transaction(id="done")])
    handle.run()
    assert results == [True, ["done"]]
    results.clear()
    queue.dispatch([Transaction(id="undone")])
    handle.run()
    assert results == [True, ["done"]]


@pytest.mark.spec("CNN-14")
@pytest.mark.parametrize("library", ASYNC_LIBRARIES)
def test_the_mark_is_written_in_the_handlers_own_async_database_transaction(library, dsn, queue):
    results = []

    @consumer(queue)
    async def handle(payload, transaction: Transaction):
        with suppress(LookupError):
            async with ASYNC_LIBRARIES[library](dsn) as (connection, _):
                results.append(await queue.record_processed_on_async(connection))
                results.append(await queue.record_processed_on_async(connection))
                if transaction.id == "undone":
                    raise LookupError
        results.append(list_marks(dsn, queue))

    async def main():
        await queue.dispatch_async([Transaction(id="done")])
        await handle.run()
        await queue.dispatch_async([Transaction(id="undone")])
        await handle.run()

    asyncio.run(main())
    assert results == [True, False, ["done"]] * 2


def add_effect(connection, name):
    """Write the handler's effect."""
    connection.execute("insert into effect (name) values (%s)", [name])


def count_effects(dsn, name):
    with psycopg.connect(dsn) as connection:
        return connection.execute("select count(*) from effect where name = %s", [name]).fetchone()[0]


@pytest.mark.spec("CNN-14")
def test_a_handler_that_is_rolled_back_leaves_no_mark_and_runs_again(dsn, queue):
    attempts = []

    @consumer(queue)
    def handle(payload, transaction: Transaction):
        attempts.append(transaction.id)
        with psycopg.connect(dsn) as connection:
            assert queue.record_processed_on(connection)
            add_effect(connection, queue.name)
            if len(attempts) == 1:
                raise OSError("before the commit")

    queue.dispatch([Transaction(id="order-7")])
    handle.run()
    assert attempts == ["order-7"] * 2
    assert count_effects(dsn, queue.name) == 1


@pytest.mark.spec("CNN-14")
def test_a_handler_that_fails_after_its_commit_has_its_effect_once(dsn, queue):
    results = []

    @consumer(queue)
    def handle(payload, transaction: Transaction):
        with psycopg.connect(dsn) as connection:
            results.append(queue.record_processed_on(connection))
            if results[-1]:
                add_effect(connection, queue.name)
        if len(results) == 1:
            raise OSError("after the commit")

    queue.dispatch([Transaction(id="order-7")])
    report = handle.run()
    assert results == [True, False]
    assert report.settled == {"settled": 1}
    assert count_effects(dsn, queue.name) == 1


@pytest.mark.spec("CNN-14")
def test_two_workers_that_run_the_same_transaction_concurrently_have_one_effect(dsn, queue):
    """The first worker's claim has expired while its handler still runs; the second has claimed the transaction."""
    with open_queue(dsn, queue.name, inbox=True, lease=29.0) as other:
        queue.dispatch([Transaction(id="order-7")])
        [mine] = queue.fetch_transactions(1)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "update ergon.worker set alive_until = now() - interval '1 s' where id = %s", [mine.receipt.worker]
            )
        [theirs] = other.fetch_transactions(1, wait=20)
        assert theirs.transaction.id == "order-7"
        results = {}

        def run_second():
            with psycopg.connect(dsn) as connection:
                results["second"] = other.record_processed_on(connection, theirs.transaction)
                if results["second"]:
                    add_effect(connection, queue.name)

        with psycopg.connect(dsn) as connection:
            results["first"] = queue.record_processed_on(connection, mine.transaction)
            add_effect(connection, queue.name)
            worker = threading.Thread(target=run_second)
            worker.start()
            wait_for_lock(dsn)
        worker.join(20)
        assert results == {"first": True, "second": False}
        assert count_effects(dsn, queue.name) == 1
        assert other.settle([(theirs, Ack())]) == [SettleResult.SETTLED]
        assert queue.settle([(mine, Ack())]) == [SettleResult.LOST]
    assert list_marks(dsn, queue) == ["order-7"]


def wait_for_lock(dsn):
    sql = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    pause = threading.Event()
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(2000):
            if connection.execute(sql).fetchone():
                return
            pause.wait(0.01)
    raise AssertionError("no session waited for the first mark")


@pytest.mark.spec("CNN-14")
def test_a_mark_outside_an_open_database_transaction_is_rejected(dsn, queue):
    with psycopg.connect(dsn, autocommit=True) as connection, pytest.raises(ConfigurationError, match="is open"):
        queue.record_processed_on(connection, Transaction(id="order-7"))
    assert list_marks(dsn, queue) == []


def test_a_mark_needs_an_inbox_and_a_transaction(dsn, queue):
    with psycopg.connect(dsn) as connection:
        with pytest.raises(ConfigurationError, match="has no inbox: create it with inbox=True"):
            PostgresQueue(queue.name, dsn=dsn).record_processed_on(connection, Transaction(id="order-7"))
        with pytest.raises(ConfigurationError, match="no transaction is being handled here"):
            queue.record_processed_on(connection)


# -- retention ------------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-14")
def test_marks_are_deleted_when_their_retention_has_passed(dsn, monkeypatch):
    monkeypatch.setattr(cleanup, "INTERVAL_SECONDS", 0.05)
    with open_queue(dsn, inbox=True, inbox_days=2) as queue:
        queue.dispatch([Transaction(id="old"), Transaction(id="young")])
        fetch_and_ack(queue)
        with psycopg.connect(dsn) as connection:
            for name, days in (("old", 2.1), ("young", 1.9)):
                connection.execute(
                    "update ergon.inbox set at = now() - %s * interval '1 day' where transaction_id = %s", [days, name]
                )
        wait_until(lambda: list_marks(dsn, queue) == ["young"])
        queue.dispatch([Transaction(id="old"), Transaction(id="young")])
        results = {delivery.transaction.id: delivery.done for delivery in queue.fetch_transactions(10)}
        assert results == {"old": False, "young": True}


# -- foreign messages ---------------------------------------------------------------------------------------


def send_foreign(dsn, queue, body, headers="{}"):
    with psycopg.connect(dsn) as connection:
        connection.execute("select ergon.send(%s, %s, %s::jsonb)", [queue.name, body, headers])


@pytest.mark.spec("CNN-14", "CNN-16")
def test_foreign_messages_are_identified_by_the_id_that_their_rule_extracts(dsn):
    with open_queue(dsn, inbox=True, codec=ForeignCodec(id=from_json_pointer("/order"))) as queue:
        handle, handled = make_recorder(queue)
        for order in (b'{"order": 1}', b'{"order": 2}', b'{"order": 1, "again": true}'):
            send_foreign(dsn, queue, order)
            handle.run()
        assert handled == ["1", "2"]
        assert list_marks(dsn, queue) == ["1", "2"]


@pytest.mark.spec("CNN-14", "CNN-16")
def test_a_redelivered_foreign_message_is_identified_by_its_id_too(dsn):
    with open_queue(dsn, inbox=True, codec=ForeignCodec(id=from_json_pointer("/order"))) as queue:
        for order in (b'{"order": 1}', b'{"order": 2}'):
            send_foreign(dsn, queue, order)
        queue.settle([(delivery, Release()) for delivery in queue.fetch_transactions(10)])
        send_foreign(dsn, queue, b'{"order": 3}')
        again = queue.fetch_transactions(10)
        assert [delivery.receipt.rank for delivery in again] == [None, None, 0]
        queue.settle([(delivery, Ack()) for delivery in again])
        assert list_marks(dsn, queue) == ["1", "2", "3"]
        send_foreign(dsn, queue, b'{"order": 1}')
        [duplicate] = queue.fetch_transactions(10)
        assert duplicate.done


@pytest.mark.spec("CNN-16")
def test_a_foreign_message_without_an_id_becomes_a_dead_letter_with_its_bytes(dsn):
    with open_queue(dsn, inbox=True, codec=ForeignCodec(id=from_header("x-order"))) as queue:
        handle, handled = make_recorder(queue)
        send_foreign(dsn, queue, b"\x00\xff no json")
        send_foreign(dsn, queue, b"{}", '{"x-order": null, "x-number": 7, "x-list": [1]}')
        send_foreign(dsn, queue, b"{}", '{"x-order": 12}')
        send_foreign(dsn, queue, b"{}", "[]")
        send_foreign(dsn, queue, b"{}", "null")
        report = handle.run()
        assert handled == ["12"]
        assert report.rejected == {"undecodable": 4}
        letters = queue.list_dead(DeadLetterQuery())
        assert sorted(letter.raw for letter in letters) == [b"\x00\xff no json", b"{}", b"{}", b"{}"]
        replayed = queue.replay_dead([letter.handle for letter in letters])
        assert {result.outcome.value for result in replayed} == {"replayed"}
        handle.run()
        assert len(queue.list_dead(DeadLetterQuery())) == 4


@pytest.mark.spec("CNN-14", "CNN-16")
def test_a_message_without_an_id_leaves_no_mark_that_matches_others_without_one(dsn):
    with open_queue(dsn, inbox=True, codec=ForeignCodec(id=from_header("x-order"))) as queue:
        send_foreign(dsn, queue, b"{}")
        [first] = queue.fetch_transactions(1)
        assert queue.settle([(first, Ack())]) == [SettleResult.SETTLED]
        assert list_marks(dsn, queue) == []
        send_foreign(dsn, queue, b"{}")
        [second] = queue.fetch_transactions(1)
        assert (second.done, second.error is None) == (False, False)
