"""Fresh messages: one row until they come back, which moves it; one order, and one message, over both tables."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, ConnectorError, DeadLetter, Later, Release, SettleResult
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue, statements
from ergon_framework.transaction import Transaction
from tests.integration.boxes import opened, taken
from tests.servers.databases import migrated

PATIENCE = 10.0


@pytest.fixture(scope="module")
def dsn(postgres):
    return migrated(postgres)


@pytest.fixture
def queue(dsn):
    with opened(dsn) as found:
        yield found


def rows(dsn, sql, *given):
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute(sql, given)
        return found.fetchall() if found.description else []


def places(dsn, queue):
    """The number of every message of *queue*, by the table that it is in."""
    return {
        table: [
            row[0] for row in rows(dsn, f"select id from ergon.{table} where queue = %s order by id", number(queue))
        ]
        for table in ("ready", "content")
    }


def number(queue):
    return queue._number


def claims(dsn, queue):
    return rows(dsn, "select worker, token from ergon.held where queue = %s", number(queue))


def claim_of(queue, worker):
    bounds = {"largest": 1 << 20, "budget": 1 << 25, "last_delivery": 10, "suspects": True}
    claim = {"queue": number(queue), "count": 10, "worker": worker, "token": 1, "rank": 0, "floor": 0, "inbox": False}
    return {**claim, **bounds}


def taken_in_order(queue):
    found = queue.fetch_transactions(10)
    queue.settle([(delivery, Ack()) for delivery in found])
    return found


def ids(deliveries):
    return [delivery.transaction.id for delivery in deliveries]


# -- one row, moved once ------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
def test_a_message_that_succeeds_is_never_written_anew(dsn, queue):
    queue.dispatch([Transaction("a"), Transaction("b")])
    before = rows(dsn, "select id, ctid from ergon.ready where queue = %s order by id", number(queue))
    held = queue.fetch_transactions(2)
    assert rows(dsn, "select id, ctid from ergon.ready where queue = %s order by id", number(queue)) == before
    assert queue.settle([(delivery, Ack()) for delivery in held]) == [SettleResult.SETTLED] * 2
    assert places(dsn, queue) == {"ready": [], "content": []}
    assert claims(dsn, queue) == []


@pytest.mark.spec("CNN-07")
def test_what_comes_back_moves_once_and_keeps_its_number(dsn, queue):
    queue.dispatch([Transaction("a"), Transaction("b")])
    first, second = queue.fetch_transactions(2)
    queue.dispatch([Transaction("c")])
    queue.settle([(first, Release()), (second, DeadLetter("declined"))])
    [letter] = queue.list_dead(DeadLetterQuery())
    queue.replay_dead([letter.place])
    found = places(dsn, queue)
    assert found["content"] == [first.receipt.id]
    assert first.receipt.id < second.receipt.id < found["ready"][0] < found["ready"][1]
    again = queue.fetch_transactions(10)
    assert ids(again) == ["a", "c", "b"]
    assert [delivery.receipt.rank for delivery in again] == [None, 0, 0]
    assert queue.settle([(delivery, Later(0.0)) for delivery in again]) == [SettleResult.SETTLED] * 3
    assert ids(taken_in_order(queue)) == ["a", "c", "b"]
    assert places(dsn, queue) == {"ready": [], "content": []}


@pytest.mark.spec("CNN-07")
def test_what_a_dead_worker_held_moves_and_is_counted(dsn, queue):
    queue.dispatch([Transaction("fresh")])
    with opened(dsn, queue.name, lease=0.5) as dying:
        [delivery] = dying.fetch_transactions(10)
        assert delivery.deliveries == 1
        [found] = queue.fetch_transactions(10, wait=PATIENCE)
        assert (found.transaction.id, found.deliveries) == ("fresh", 2)
        assert places(dsn, queue) == {"ready": [], "content": [found.receipt.id]}
        assert dying.settle([(delivery, Ack())]) == [SettleResult.LOST]
    assert queue.settle([(found, Ack())]) == [SettleResult.SETTLED]


@pytest.mark.spec("CNN-07")
def test_a_claim_that_dies_before_its_commit_has_taken_nothing(dsn, queue):
    queue.dispatch([Transaction("a")])
    ((worker,),) = rows(dsn, statements.REGISTER.replace("%(lease)s", "30").replace("%(name)s", "'dying'"))
    dying = psycopg.connect(dsn)
    assert len(dying.execute(statements.CLAIM, claim_of(queue, worker)).fetchall()) == 1
    # Held by its lock until it is gone, and there for everybody afterwards.
    assert queue.fetch_transactions(10) == []
    dying.close()
    [found] = queue.fetch_transactions(10, wait=PATIENCE)
    assert (found.transaction.id, found.deliveries) == ("a", 1)


@pytest.mark.spec("CNN-07")
def test_a_claim_that_could_not_look_twice_is_refused(dsn, queue):
    queue.dispatch([Transaction("a")])
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(psycopg.errors.InvalidTransactionState, match="read committed"):
            connection.execute(statements.CLAIM, claim_of(queue, 1))
    database = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    rows(dsn, f"alter database {database} set default_transaction_isolation = 'repeatable read'")
    try:
        with opened(dsn, queue.name) as other:
            assert ids(other.fetch_transactions(1)) == ["a"]
    finally:
        rows(dsn, f"alter database {database} reset default_transaction_isolation")


@pytest.mark.spec("CNN-07")
def test_claims_settled_in_bits_at_once_leave_no_rows_behind(dsn, queue):
    queue.dispatch([Transaction(str(n)) for n in range(4)])
    held = queue.fetch_transactions(4)
    with ThreadPoolExecutor(4) as threads:
        # Nobody is answered before all have asked, so that each believes that others are left.
        together = threading.Barrier(4)
        answered = queue._claiming.settled

        def late(receipts, emptied):
            together.wait(PATIENCE)
            answered(receipts, emptied)

        queue._claiming.settled = late
        list(threads.map(lambda delivery: queue.settle([(delivery, Ack())]), held))
        queue._claiming.settled = answered
    assert len(claims(dsn, queue)) == 1
    queue.dispatch([Transaction("last")])
    queue.settle([(delivery, Ack()) for delivery in queue.fetch_transactions(1)])
    assert claims(dsn, queue) == []


@pytest.mark.spec("CNN-07")
def test_what_is_large_arrives_whole_after_every_move(queue):
    text = os.urandom(250_000).hex()
    queue.dispatch([Transaction("large", {"text": text})])
    for how in (Release(), Later(0.0), DeadLetter("declined")):
        [found] = queue.fetch_transactions(10)
        assert found.transaction.payload == {"text": text}
        queue.settle([(found, how)])
    [letter] = queue.list_dead(DeadLetterQuery())
    queue.replay_dead([letter.place])
    [found] = taken(queue)
    assert found.payload == {"text": text}


def test_what_waits_and_what_is_in_hand_are_both_in_the_queue(queue):
    queue.dispatch([Transaction("held"), Transaction("ready")])
    queue.fetch_transactions(1)
    assert queue.queued(["held", "ready", "neither"]) == {"held", "ready"}
    depth = queue.depth()
    assert (depth.ready, depth.in_flight) == (1, 1)
    assert 0 <= depth.oldest_age < PATIENCE


def test_the_age_is_that_of_the_dispatch_and_not_of_the_first_claim(dsn, queue):
    queue.dispatch([Transaction("old")])
    rows(
        dsn,
        "update ergon.ready set created_at = now() - interval '1 hour' where queue = %s returning id",
        number(queue),
    )
    assert queue.depth().oldest_age > 3000
    queue.settle([(delivery, Release()) for delivery in queue.fetch_transactions(1)])
    assert queue.depth().oldest_age > 3000


# -- keys over both tables ------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
def test_an_elder_that_nobody_has_claimed_yet_goes_before_a_younger_one_that_came_back(dsn, queue):
    with psycopg.connect(dsn) as slow:
        queue.dispatch_on(slow, [Transaction("elder", key="k")])
        queue.dispatch([Transaction("younger", key="k")])
        [younger] = queue.fetch_transactions(10)
    queue.settle([(younger, Release())])
    for name in ("elder", "younger"):
        [found] = queue.fetch_transactions(10, wait=PATIENCE)
        assert found.transaction.id == name
        queue.settle([(found, Ack())])


@pytest.mark.spec("CNN-07")
def test_what_waits_behind_its_key_goes_on_waiting_while_an_elder_is_unclaimed(dsn, queue):
    with psycopg.connect(dsn) as slow:
        queue.dispatch_on(slow, [Transaction("first", key="k")])
        queue.dispatch([Transaction("second", key="k"), Transaction("third", key="k")])
        [second] = queue.fetch_transactions(10)
    assert second.transaction.id == "second"
    queue.settle([(second, Ack())])
    depth = queue.depth()
    assert (depth.ready, depth.delayed) == (1, 1)
    for name in ("first", "third"):
        [found] = queue.fetch_transactions(10, wait=PATIENCE)
        assert found.transaction.id == name
        queue.settle([(found, Ack())])


def test_a_message_of_another_producer_waits_behind_its_key_like_any_other(dsn, queue):
    rows(dsn, "select ergon.send(%s, '{}', '{\"ergon-id\": \"theirs\"}', 'k')", queue.name)
    queue.dispatch([Transaction("ours", key="k")])
    for name in ("theirs", "ours"):
        [found] = queue.fetch_transactions(10, wait=PATIENCE)
        assert (found.transaction.id, found.receipt.key) == (name, "k")
        queue.settle([(found, Ack())])


# -- by number and by name ------------------------------------------------------------------------------


def numbered(name):
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) & 0x7FFF_FFFF


def test_a_queue_has_the_same_number_in_every_database(postgres, dsn):
    other = migrated(postgres)
    with opened(other, "before"), opened(other, "größer") as there, opened(dsn, "größer") as here:
        assert number(here) == number(there) == numbered("größer")
        # The one that was opened here is told of the other database: it goes where its name says.
        with psycopg.connect(other) as connection:
            here.dispatch_on(connection, [Transaction("a")])
        assert [transaction.id for transaction in taken(there)] == ["a"]
        assert taken(here) == []


def test_of_two_names_with_one_number_the_second_is_refused(dsn):
    seen: dict[int, str] = {}
    name = next(name for n in range(1_000_000) if seen.setdefault(numbered(name := f"queue-{n}"), name) != name)
    with opened(dsn, seen[numbered(name)]) as first:
        first.dispatch([Transaction("a")])
        second = PostgresQueue(name, dsn=dsn)
        with pytest.raises(ConnectorError, match="give it another name"):
            second.open()
        with psycopg.connect(dsn) as connection, pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("select ergon.send(%s, '{}')", [name])
        assert len(taken(first)) == 1


@pytest.mark.parametrize("threshold", [0, None], ids=["by insert", "by function"])
def test_whoever_sleeps_is_rung_and_nobody_else(dsn, queue, threshold):
    with psycopg.connect(dsn, autocommit=True) as ear, psycopg.connect(dsn, prepare_threshold=threshold) as caller:
        ear.execute("listen ergon")
        queue.dispatch_on(caller, [Transaction("unheard")])
        caller.commit()
        assert not list(ear.notifies(timeout=0.2))
        ear.execute(statements.SLEEP, {"queue": number(queue), "sleeper": 1, "seconds": 60})
        queue.dispatch_on(caller, [Transaction("heard")])
        caller.commit()
        rung = list(ear.notifies(timeout=PATIENCE, stop_after=1))
        ear.execute(statements.AWAKE, {"queue": number(queue), "sleeper": 1})
    assert [notice.payload for notice in rung] == [str(number(queue))]
    assert [transaction.id for transaction in taken(queue)] == ["unheard", "heard"]
