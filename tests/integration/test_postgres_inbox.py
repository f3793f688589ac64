"""Inbox: what has succeeded is not run again, and effects in the same database happen once."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider

from ergon_framework.connectors.base import Ack, Release, SettleResult
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.foreign import ForeignCodec, header, pointer
from ergon_framework.connectors.postgres import PostgresQueue, cleanup
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.decorators import consumer
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import registry_of
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.transaction import Transaction
from tests.integration.boxes import opened, taken
from tests.integration.libraries import ASYNC, SYNC
from tests.integration.metering import until
from tests.servers.databases import migrated

pytestmark = pytest.mark.invariant


@pytest.fixture(scope="module")
def dsn(postgres):
    return migrated(postgres)


@pytest.fixture
def queue(dsn):
    with opened(dsn, inbox=True) as queue:
        yield queue


def marks(dsn, queue):
    sql = "select i.transaction_id from ergon.inbox i join ergon.queue q on q.id = i.queue where q.name = %s order by 1"
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute(sql, [queue.name])]


def recorder(queue):
    """A task that writes down the ids that it has run."""
    ran = []

    @consumer(queue, name="Recorder")
    def handle(payload, transaction: Transaction):
        ran.append(transaction.id)

    return handle, ran


# -- what succeeded ---------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-14")
def test_a_transaction_that_has_succeeded_is_acked_without_running_and_counted(dsn, queue):
    handle, ran = recorder(queue)
    provider = MeterProvider()
    handle.telemetry = TelemetryOptions(meter_provider=provider)
    for _ in range(2):
        queue.dispatch([Transaction("order-7")])
        report = handle.run()
    assert ran == ["order-7"]
    assert (report.refused, report.settled) == ({"done": 1}, {"settled": 1})
    registry = registry_of(provider)
    assert registry.read(names.REFUSED) == [({"ergon.task": "Recorder", "ergon.reason": "done"}, 1)]
    depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.in_flight, depth.dead) == (0, 0, 0, 0)
    provider.shutdown()


@pytest.mark.spec("CNN-14")
def test_the_async_flavour_knows_what_has_succeeded_too(dsn, queue):
    ran = []

    @consumer(queue)
    async def handle(payload, transaction: Transaction):
        ran.append(transaction.id)

    async def twice():
        for _ in range(2):
            await queue.dispatch_async([Transaction("order-7"), Transaction("keyed", key="k")])
            await handle.run()

    asyncio.run(twice())
    assert sorted(ran) == ["keyed", "order-7"]


@pytest.mark.spec("CNN-14")
def test_what_failed_or_belongs_to_another_queue_is_not_done(dsn, queue):
    seen = []

    @consumer(queue)
    def handle(payload, transaction: Transaction):
        seen.append(transaction.id)
        raise ConfigurationError("not yet")

    for _ in range(2):
        queue.dispatch([Transaction("failed")])
        handle.run()
    assert seen == ["failed"] * len(seen)
    assert len(seen) >= 2
    queue.dispatch([Transaction("order-7")])
    taken(queue)
    with opened(dsn, inbox=True) as other:
        other.dispatch([Transaction("order-7")])
        assert [delivery.done for delivery in other.fetch_transactions(1)] == [False]


def test_without_an_inbox_the_same_id_runs_twice(dsn):
    with opened(dsn) as queue:
        queue.dispatch([Transaction("order-7")])
        taken(queue)
        queue.dispatch([Transaction("order-7")])
        assert [delivery.done for delivery in queue.fetch_transactions(1)] == [False]


# -- the mark in the handler's own database transaction -----------------------------------------------------


@pytest.mark.spec("CNN-14")
@pytest.mark.parametrize("library", SYNC)
def test_the_mark_is_written_in_the_handlers_own_database_transaction(library, dsn, queue):
    first = []

    @consumer(queue)
    def handle(payload, transaction: Transaction):
        with suppress(LookupError), SYNC[library](dsn) as (connection, _):
            first.append(queue.mark_on(connection))
            if transaction.id == "undone":
                raise LookupError
        first.append(marks(dsn, queue))

    queue.dispatch([Transaction("done")])
    handle.run()
    assert first == [True, ["done"]]
    first.clear()
    queue.dispatch([Transaction("undone")])
    handle.run()
    assert first == [True, ["done"]]


@pytest.mark.spec("CNN-14")
@pytest.mark.parametrize("library", ASYNC)
def test_the_mark_is_written_in_the_handlers_own_async_database_transaction(library, dsn, queue):
    first = []

    @consumer(queue)
    async def handle(payload, transaction: Transaction):
        with suppress(LookupError):
            async with ASYNC[library](dsn) as (connection, _):
                first.append(await queue.mark_on_async(connection))
                first.append(await queue.mark_on_async(connection))
                if transaction.id == "undone":
                    raise LookupError
        first.append(marks(dsn, queue))

    async def both():
        await queue.dispatch_async([Transaction("done")])
        await handle.run()
        await queue.dispatch_async([Transaction("undone")])
        await handle.run()

    asyncio.run(both())
    assert first == [True, False, ["done"]] * 2


def add(connection, name):
    """The handler's effect."""
    connection.execute("insert into effect (name) values (%s)", [name])


def effects_of(dsn, name):
    with psycopg.connect(dsn) as connection:
        return connection.execute("select count(*) from effect where name = %s", [name]).fetchone()[0]


@pytest.mark.spec("CNN-14")
def test_a_handler_that_is_rolled_back_leaves_no_mark_and_runs_again(dsn, queue):
    attempts = []

    @consumer(queue)
    def handle(payload, transaction: Transaction):
        attempts.append(transaction.id)
        with psycopg.connect(dsn) as connection:
            assert queue.mark_on(connection)
            add(connection, queue.name)
            if len(attempts) == 1:
                raise OSError("before the commit")

    queue.dispatch([Transaction("order-7")])
    handle.run()
    assert attempts == ["order-7"] * 2
    assert effects_of(dsn, queue.name) == 1


@pytest.mark.spec("CNN-14")
def test_a_handler_that_fails_behind_its_commit_has_its_effect_once(dsn, queue):
    answers = []

    @consumer(queue)
    def handle(payload, transaction: Transaction):
        with psycopg.connect(dsn) as connection:
            answers.append(queue.mark_on(connection))
            if answers[-1]:
                add(connection, queue.name)
        if len(answers) == 1:
            raise OSError("after the commit")

    queue.dispatch([Transaction("order-7")])
    report = handle.run()
    assert answers == [True, False]
    assert report.settled == {"settled": 1}
    assert effects_of(dsn, queue.name) == 1


@pytest.mark.spec("CNN-14")
def test_two_workers_with_the_same_transaction_at_once_have_one_effect(dsn, queue):
    """The claim of the first has run out while its handler still works; the second has got the transaction."""
    with opened(dsn, queue.name, inbox=True, lease=29.0) as other:
        queue.dispatch([Transaction("order-7")])
        [mine] = queue.fetch_transactions(1)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "update ergon.worker set alive_until = now() - interval '1 s' where id = %s", [mine.receipt.worker]
            )
        [theirs] = other.fetch_transactions(1, wait=20)
        assert theirs.transaction.id == "order-7"
        answers = {}

        def second():
            with psycopg.connect(dsn) as connection:
                answers["second"] = other.mark_on(connection, theirs.transaction)
                if answers["second"]:
                    add(connection, queue.name)

        with psycopg.connect(dsn) as connection:
            answers["first"] = queue.mark_on(connection, mine.transaction)
            add(connection, queue.name)
            worker = threading.Thread(target=second)
            worker.start()
            waits_for_a_lock(dsn)
        worker.join(20)
        assert answers == {"first": True, "second": False}
        assert effects_of(dsn, queue.name) == 1
        assert other.settle([(theirs, Ack())]) == [SettleResult.SETTLED]
        assert queue.settle([(mine, Ack())]) == [SettleResult.LOST]
    assert marks(dsn, queue) == ["order-7"]


def waits_for_a_lock(dsn):
    sql = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    until = threading.Event()
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(2000):
            if connection.execute(sql).fetchone():
                return
            until.wait(0.01)
    raise AssertionError("nobody waited for the first mark")


@pytest.mark.spec("CNN-14")
def test_a_mark_outside_an_open_database_transaction_is_refused(dsn, queue):
    with psycopg.connect(dsn, autocommit=True) as connection, pytest.raises(ConfigurationError, match="is open"):
        queue.mark_on(connection, Transaction("order-7"))
    assert marks(dsn, queue) == []


def test_a_mark_needs_an_inbox_and_a_transaction(dsn, queue):
    with psycopg.connect(dsn) as connection:
        with pytest.raises(ConfigurationError, match="has no inbox; make it with inbox=True"):
            PostgresQueue(queue.name, dsn=dsn).mark_on(connection, Transaction("order-7"))
        with pytest.raises(ConfigurationError, match="no transaction is being handled here"):
            queue.mark_on(connection)


# -- retention ------------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-14")
def test_marks_are_forgotten_when_their_days_are_over(dsn, monkeypatch):
    monkeypatch.setattr(cleanup, "INTERVAL_SECONDS", 0.05)
    with opened(dsn, inbox=True, inbox_days=2) as queue:
        queue.dispatch([Transaction("old"), Transaction("young")])
        taken(queue)
        with psycopg.connect(dsn) as connection:
            for name, days in (("old", 2.1), ("young", 1.9)):
                connection.execute(
                    "update ergon.inbox set at = now() - %s * interval '1 day' where transaction_id = %s", [days, name]
                )
        until(lambda: marks(dsn, queue) == ["young"])
        queue.dispatch([Transaction("old"), Transaction("young")])
        done = {delivery.transaction.id: delivery.done for delivery in queue.fetch_transactions(10)}
        assert done == {"old": False, "young": True}


# -- foreign messages ---------------------------------------------------------------------------------------


def send(dsn, queue, body, headers="{}"):
    with psycopg.connect(dsn) as connection:
        connection.execute("select ergon.send(%s, %s, %s::jsonb)", [queue.name, body, headers])


@pytest.mark.spec("CNN-14", "CNN-16")
def test_foreign_messages_are_known_by_the_id_that_their_rule_finds(dsn):
    with opened(dsn, inbox=True, codec=ForeignCodec(id=pointer("/order"))) as queue:
        handle, ran = recorder(queue)
        for order in (b'{"order": 1}', b'{"order": 2}', b'{"order": 1, "again": true}'):
            send(dsn, queue, order)
            handle.run()
        assert ran == ["1", "2"]
        assert marks(dsn, queue) == ["1", "2"]


@pytest.mark.spec("CNN-14", "CNN-16")
def test_a_foreign_message_that_came_back_is_known_by_its_id_too(dsn):
    with opened(dsn, inbox=True, codec=ForeignCodec(id=pointer("/order"))) as queue:
        for order in (b'{"order": 1}', b'{"order": 2}'):
            send(dsn, queue, order)
        queue.settle([(delivery, Release()) for delivery in queue.fetch_transactions(10)])
        send(dsn, queue, b'{"order": 3}')
        again = queue.fetch_transactions(10)
        assert [delivery.receipt.rank for delivery in again] == [None, None, 0]
        queue.settle([(delivery, Ack()) for delivery in again])
        assert marks(dsn, queue) == ["1", "2", "3"]
        send(dsn, queue, b'{"order": 1}')
        [found] = queue.fetch_transactions(10)
        assert found.done


@pytest.mark.spec("CNN-16")
def test_a_foreign_message_without_an_id_becomes_a_dead_letter_with_its_bytes(dsn):
    with opened(dsn, inbox=True, codec=ForeignCodec(id=header("x-order"))) as queue:
        handle, ran = recorder(queue)
        send(dsn, queue, b"\x00\xff no json")
        send(dsn, queue, b"{}", '{"x-order": null, "x-number": 7, "x-list": [1]}')
        send(dsn, queue, b"{}", '{"x-order": 12}')
        send(dsn, queue, b"{}", "[]")
        send(dsn, queue, b"{}", "null")
        report = handle.run()
        assert ran == ["12"]
        assert report.refused == {"undecodable": 4}
        letters = queue.list_dead(DeadLetterQuery())
        assert sorted(letter.raw for letter in letters) == [b"\x00\xff no json", b"{}", b"{}", b"{}"]
        replayed = queue.replay_dead([letter.place for letter in letters])
        assert {result.became.value for result in replayed} == {"replayed"}
        handle.run()
        assert len(queue.list_dead(DeadLetterQuery())) == 4


@pytest.mark.spec("CNN-14", "CNN-16")
def test_what_has_no_id_leaves_no_mark_that_others_without_one_could_be_taken_for(dsn):
    with opened(dsn, inbox=True, codec=ForeignCodec(id=header("x-order"))) as queue:
        send(dsn, queue, b"{}")
        [first] = queue.fetch_transactions(1)
        assert queue.settle([(first, Ack())]) == [SettleResult.SETTLED]
        assert marks(dsn, queue) == []
        send(dsn, queue, b"{}")
        [second] = queue.fetch_transactions(1)
        assert (second.done, second.error is None) == (False, False)
