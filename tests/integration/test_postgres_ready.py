"""Check fresh messages: one row until redelivery moves it, and one order and one identity over both tables."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, ConnectorError, DeadLetter, Defer, Release, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres import sql as statements
from ergon_framework.transaction import Transaction
from tests.integration.boxes import fetch_and_ack, open_queue
from tests.servers.databases import create_migrated_database

TIMEOUT_SECONDS = 10.0


@pytest.fixture(scope="module")
def dsn(postgres):
    return create_migrated_database(postgres)


@pytest.fixture
def queue(dsn):
    with open_queue(dsn) as queue:
        yield queue


def execute(dsn, sql, *parameters):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


def ids_by_table(dsn, queue):
    """Return the number of every message of *queue*, by table."""
    return {
        table: [
            row[0]
            for row in execute(dsn, f"select id from ergon.{table} where queue = %s order by id", queue_number(queue))
        ]
        for table in ("ready", "content")
    }


def queue_number(queue):
    return queue._number


def list_claims(dsn, queue):
    return execute(dsn, "select worker, token from ergon.claim where queue = %s", queue_number(queue))


def make_claim(queue, worker):
    bounds = {"largest": 1 << 20, "budget": 1 << 25, "last_delivery": 10, "suspects": True}
    claim = {
        "queue": queue_number(queue),
        "count": 10,
        "worker": worker,
        "token": 1,
        "rank": 0,
        "floor": 0,
        "inbox": False,
    }
    return {**claim, **bounds}


def ack_all(queue):
    deliveries = queue.fetch_transactions(10)
    queue.settle([(delivery, Ack()) for delivery in deliveries])
    return deliveries


def to_ids(deliveries):
    return [delivery.transaction.id for delivery in deliveries]


# -- one row, moved once ------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
def test_a_message_that_succeeds_is_never_rewritten(dsn, queue):
    queue.dispatch([Transaction(id="a"), Transaction(id="b")])
    before = execute(dsn, "select id, ctid from ergon.ready where queue = %s order by id", queue_number(queue))
    deliveries = queue.fetch_transactions(2)
    assert execute(dsn, "select id, ctid from ergon.ready where queue = %s order by id", queue_number(queue)) == before
    assert queue.settle([(delivery, Ack()) for delivery in deliveries]) == [SettleResult.SETTLED] * 2
    assert ids_by_table(dsn, queue) == {"ready": [], "content": []}
    assert list_claims(dsn, queue) == []


@pytest.mark.spec("CNN-07")
def test_a_redelivered_message_moves_once_and_keeps_its_number(dsn, queue):
    queue.dispatch([Transaction(id="a"), Transaction(id="b")])
    first, second = queue.fetch_transactions(2)
    queue.dispatch([Transaction(id="c")])
    queue.settle([(first, Release()), (second, DeadLetter("declined"))])
    [letter] = queue.list_dead(DeadLetterQuery())
    queue.replay_dead([letter.handle])
    ids = ids_by_table(dsn, queue)
    assert ids["content"] == [first.receipt.id]
    assert first.receipt.id < second.receipt.id < ids["ready"][0] < ids["ready"][1]
    again = queue.fetch_transactions(10)
    assert to_ids(again) == ["a", "c", "b"]
    assert [delivery.receipt.rank for delivery in again] == [None, 0, 0]
    assert queue.settle([(delivery, Defer(0.0)) for delivery in again]) == [SettleResult.SETTLED] * 3
    assert to_ids(ack_all(queue)) == ["a", "c", "b"]
    assert ids_by_table(dsn, queue) == {"ready": [], "content": []}


@pytest.mark.spec("CNN-07")
def test_a_message_claimed_by_a_dead_worker_moves_and_is_counted(dsn, queue):
    queue.dispatch([Transaction(id="fresh")])
    with open_queue(dsn, queue.name, lease=0.5) as dying:
        [delivery] = dying.fetch_transactions(10)
        assert delivery.deliveries == 1
        [redelivered] = queue.fetch_transactions(10, wait=TIMEOUT_SECONDS)
        assert (redelivered.transaction.id, redelivered.deliveries) == ("fresh", 2)
        assert ids_by_table(dsn, queue) == {"ready": [], "content": [redelivered.receipt.id]}
        assert dying.settle([(delivery, Ack())]) == [SettleResult.LOST]
    assert queue.settle([(redelivered, Ack())]) == [SettleResult.SETTLED]


@pytest.mark.spec("CNN-07")
def test_a_claim_whose_session_ends_before_the_commit_has_claimed_nothing(dsn, queue):
    queue.dispatch([Transaction(id="a")])
    ((worker,),) = execute(dsn, statements.INSERT_WORKER.replace("%(lease)s", "30").replace("%(name)s", "'dying'"))
    dying = psycopg.connect(dsn)
    assert len(dying.execute(statements.CLAIM, make_claim(queue, worker)).fetchall()) == 1
    # The lock holds it until the session is closed; afterwards any worker can claim it.
    assert queue.fetch_transactions(10) == []
    dying.close()
    [delivery] = queue.fetch_transactions(10, wait=TIMEOUT_SECONDS)
    assert (delivery.transaction.id, delivery.deliveries) == ("a", 1)


@pytest.mark.spec("CNN-07")
def test_a_claim_outside_read_committed_isolation_is_rejected(dsn, queue):
    queue.dispatch([Transaction(id="a")])
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(psycopg.errors.InvalidTransactionState, match="read committed"):
            connection.execute(statements.CLAIM, make_claim(queue, 1))
    database = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    execute(dsn, f"alter database {database} set default_transaction_isolation = 'repeatable read'")
    try:
        with open_queue(dsn, queue.name) as other:
            assert to_ids(other.fetch_transactions(1)) == ["a"]
    finally:
        execute(dsn, f"alter database {database} reset default_transaction_isolation")


@pytest.mark.spec("CNN-07")
def test_concurrent_partial_settlements_leave_no_claim_rows(dsn, queue):
    queue.dispatch([Transaction(id=str(n)) for n in range(4)])
    deliveries = queue.fetch_transactions(4)
    with ThreadPoolExecutor(4) as threads:
        # No worker gets its answer before all have asked, so each assumes that other claims are left.
        barrier = threading.Barrier(4)
        original = queue._claims.mark_settled

        def settle_late(receipts, emptied):
            barrier.wait(TIMEOUT_SECONDS)
            original(receipts, emptied)

        queue._claims.mark_settled = settle_late
        list(threads.map(lambda delivery: queue.settle([(delivery, Ack())]), deliveries))
        queue._claims.mark_settled = original
    assert len(list_claims(dsn, queue)) == 1
    queue.dispatch([Transaction(id="last")])
    queue.settle([(delivery, Ack()) for delivery in queue.fetch_transactions(1)])
    assert list_claims(dsn, queue) == []


@pytest.mark.spec("CNN-07")
def test_a_large_message_is_complete_after_every_move(queue):
    text = os.urandom(250_000).hex()
    queue.dispatch([Transaction({"text": text}, id="large")])
    for outcome in (Release(), Defer(0.0), DeadLetter("declined")):
        [delivery] = queue.fetch_transactions(10)
        assert delivery.transaction.payload == {"text": text}
        queue.settle([(delivery, outcome)])
    [letter] = queue.list_dead(DeadLetterQuery())
    queue.replay_dead([letter.handle])
    [delivery] = fetch_and_ack(queue)
    assert delivery.payload == {"text": text}


def test_ready_and_claimed_messages_are_both_in_the_queue(queue):
    queue.dispatch([Transaction(id="held"), Transaction(id="ready")])
    queue.fetch_transactions(1)
    assert queue.find_queued(["held", "ready", "neither"]) == {"held", "ready"}
    depth = queue.depth()
    assert (depth.ready, depth.in_flight) == (1, 1)
    assert 0 <= depth.oldest_age < TIMEOUT_SECONDS


def test_the_age_is_that_of_the_dispatch_and_not_of_the_first_claim(dsn, queue):
    queue.dispatch([Transaction(id="old")])
    execute(
        dsn,
        "update ergon.ready set created_at = now() - interval '1 hour' where queue = %s returning id",
        queue_number(queue),
    )
    assert queue.depth().oldest_age > 3000
    queue.settle([(delivery, Release()) for delivery in queue.fetch_transactions(1)])
    assert queue.depth().oldest_age > 3000


# -- keys over both tables ------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
def test_an_older_unclaimed_message_precedes_a_younger_redelivered_one_of_its_key(dsn, queue):
    with psycopg.connect(dsn) as connection:
        queue.dispatch_on(connection, [Transaction(id="elder", key="k")])
        queue.dispatch([Transaction(id="younger", key="k")])
        [younger] = queue.fetch_transactions(10)
    queue.settle([(younger, Release())])
    for name in ("elder", "younger"):
        [delivery] = queue.fetch_transactions(10, wait=TIMEOUT_SECONDS)
        assert delivery.transaction.id == name
        queue.settle([(delivery, Ack())])


@pytest.mark.spec("CNN-07")
def test_a_message_blocked_by_its_key_stays_blocked_while_an_older_one_is_unclaimed(dsn, queue):
    with psycopg.connect(dsn) as connection:
        queue.dispatch_on(connection, [Transaction(id="first", key="k")])
        queue.dispatch([Transaction(id="second", key="k"), Transaction(id="third", key="k")])
        [second] = queue.fetch_transactions(10)
    assert second.transaction.id == "second"
    queue.settle([(second, Ack())])
    depth = queue.depth()
    assert (depth.ready, depth.delayed) == (1, 1)
    for name in ("first", "third"):
        [delivery] = queue.fetch_transactions(10, wait=TIMEOUT_SECONDS)
        assert delivery.transaction.id == name
        queue.settle([(delivery, Ack())])


def test_a_message_of_another_producer_waits_for_its_key_like_any_other(dsn, queue):
    execute(dsn, "select ergon.send(%s, '{}', '{\"ergon-id\": \"theirs\"}', 'k')", queue.name)
    queue.dispatch([Transaction(id="ours", key="k")])
    for name in ("theirs", "ours"):
        [delivery] = queue.fetch_transactions(10, wait=TIMEOUT_SECONDS)
        assert (delivery.transaction.id, delivery.receipt.key) == (name, "k")
        queue.settle([(delivery, Ack())])


# -- by number and by name ------------------------------------------------------------------------------


def expected_number(name):
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) & 0x7FFF_FFFF


def test_a_queue_has_the_same_number_in_every_database(postgres, dsn):
    other = create_migrated_database(postgres)
    with open_queue(other, "before"), open_queue(other, "größer") as there, open_queue(dsn, "größer") as here:
        assert queue_number(here) == queue_number(there) == expected_number("größer")
        # The queue opened here gets a message for the other database: the name in the message decides.
        with psycopg.connect(other) as connection:
            here.dispatch_on(connection, [Transaction(id="a")])
        assert [transaction.id for transaction in fetch_and_ack(there)] == ["a"]
        assert fetch_and_ack(here) == []


def test_the_second_of_two_names_with_one_number_is_rejected(dsn):
    names_by_number: dict[int, str] = {}
    name = next(
        name
        for n in range(1_000_000)
        if names_by_number.setdefault(expected_number(name := f"queue-{n}"), name) != name
    )
    with open_queue(dsn, names_by_number[expected_number(name)]) as first:
        first.dispatch([Transaction(id="a")])
        second = PostgresQueue(name, dsn=dsn)
        with pytest.raises(ConnectorError, match="give it another name"):
            second.open()
        with psycopg.connect(dsn) as connection, pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("select ergon.send(%s, '{}')", [name])
        assert len(fetch_and_ack(first)) == 1


@pytest.mark.parametrize("threshold", [0, None], ids=["by insert", "by function"])
def test_only_queues_with_a_waiting_worker_are_notified(dsn, queue, threshold):
    with psycopg.connect(dsn, autocommit=True) as listener, psycopg.connect(dsn, prepare_threshold=threshold) as caller:
        listener.execute("listen ergon")
        queue.dispatch_on(caller, [Transaction(id="unheard")])
        caller.commit()
        assert not list(listener.notifies(timeout=0.2))
        listener.execute(statements.REGISTER_LISTENER, {"queue": queue_number(queue), "listener": 1, "seconds": 60})
        queue.dispatch_on(caller, [Transaction(id="heard")])
        caller.commit()
        notices = list(listener.notifies(timeout=TIMEOUT_SECONDS, stop_after=1))
        listener.execute(statements.UNREGISTER_LISTENER, {"queue": queue_number(queue), "listener": 1})
    assert [notice.payload for notice in notices] == [str(queue_number(queue))]
    assert [transaction.id for transaction in fetch_and_ack(queue)] == ["unheard", "heard"]
