"""What a worker of a release does with a database, from dispatch to replay: smoke.py DSN; packed with the release."""

from __future__ import annotations

import sys

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Release, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.transaction import Transaction


def exercise(dsn: str) -> None:
    """Everything that a queue promises, once; AssertionError where it does not hold."""
    queue = PostgresQueue("smoke", dsn=dsn, inbox=True, dead_days=1, priority=lambda one: int(one.type == "urgent"))
    queue.open()
    try:
        _deliver(queue)
        _dead_letter_and_replay(queue)
        _recognize_duplicate(queue)
        depth = queue.depth()
        assert (depth.ready, depth.delayed, depth.in_flight, depth.dead) == (0, 0, 0, 0), depth
    finally:
        queue.close()


def _deliver(queue: PostgresQueue) -> None:
    """The urgent one first, one of a key at a time, and back again by a release and a delay."""
    sent = [
        Transaction({"n": 1}, id="plain"),
        Transaction({"n": 2}, id="urgent", type="urgent"),
        Transaction({"n": 3}, id="first", key="k"),
        Transaction({"n": 4}, id="second", key="k"),
    ]
    assert [confirmed.transaction_id for confirmed in queue.dispatch(sent)] == ["plain", "urgent", "first", "second"]
    claimed = {delivery.transaction.id: delivery for delivery in queue.fetch_transactions(1)}
    assert set(claimed) == {"urgent"}
    claimed |= {delivery.transaction.id: delivery for delivery in queue.fetch_transactions(10, wait=5.0)}
    assert set(claimed) == {"urgent", "plain", "first"}
    assert claimed["plain"].transaction.payload == {"n": 1}
    assert None not in queue.extend(list(claimed.values()))
    _settle(
        queue, (claimed["urgent"], Release()), (claimed["plain"], Defer(0.0, attempts=1)), (claimed["first"], Ack())
    )
    redelivered = {delivery.transaction.id: delivery for delivery in queue.fetch_transactions(10, wait=5.0)}
    assert set(redelivered) == {"urgent", "plain", "second"}
    _settle(queue, *((delivery, Ack()) for delivery in redelivered.values()))


def _dead_letter_and_replay(queue: PostgresQueue) -> None:
    queue.dispatch([Transaction({"n": 5}, id="doomed"), Transaction({"n": 6}, id="hopeless")])
    dead = queue.fetch_transactions(10, wait=5.0)
    _settle(queue, *((delivery, DeadLetter("declined")) for delivery in dead))
    letters = {record.id: record for record in queue.list_dead(DeadLetterQuery(reason="declined"))}
    assert set(letters) == {"doomed", "hopeless"}
    assert [done.outcome for done in queue.discard_dead([letters["hopeless"].handle])] == [DeadLetterResult.DISCARDED]
    assert [done.outcome for done in queue.replay_dead([letters["doomed"].handle])] == [DeadLetterResult.REPLAYED]
    (replayed,) = queue.fetch_transactions(10, wait=5.0)
    assert (replayed.transaction.id, replayed.deliveries) == ("doomed", 1)
    _settle(queue, (replayed, Ack()))


def _recognize_duplicate(queue: PostgresQueue) -> None:
    queue.dispatch([Transaction({"n": 7}, id="doomed")])
    (duplicate,) = queue.fetch_transactions(10, wait=5.0)
    assert duplicate.done
    _settle(queue, (duplicate, Ack()))


def _settle(queue: PostgresQueue, *settlings: tuple[object, object]) -> None:
    assert set(queue.settle(settlings)) == {SettleResult.SETTLED}


if __name__ == "__main__":
    exercise(sys.argv[1])
    print("smoke passed")
