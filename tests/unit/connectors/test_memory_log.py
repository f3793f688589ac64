"""The log in memory: watermarks, generations, the side store, revocation and restart."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Delivery, Later, Release, Settlement, SettleResult
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery
from ergon_framework.connectors.memory_log import MemoryLog, Records
from ergon_framework.connectors.side_store import MemorySideStore
from ergon_framework.errors import ConnectionLost
from ergon_framework.transaction import Transaction
from tests.unit.connectors.worlds import Clock, Ear, ids, orders

SETTLED, LOST, FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def log(clock):
    return MemoryLog("facts", clock=clock, wall=lambda: 1.5e9)


def restarted(log):
    """Another consumer of the same group, after the first one crashed."""
    other = MemoryLog("facts", records=log.records, side=log.side, clock=log._clock)
    other.open()
    return other


def settle_all(log, deliveries, settlement):
    return log.settle([(delivery, settlement) for delivery in deliveries])


def test_dispatching_nothing_wakes_nobody(log):
    ear = Ear()
    log.listen(ear)
    assert log.dispatch([]) == []
    log.revoke(0)
    assert (ear.wakes, ear.gone) == (1, [])


# -- order and partitions -----------------------------------------------------------------------------


def test_records_come_in_order_with_partition_offset_generation_and_turn(log):
    log.dispatch(orders("a", "b", "c"))
    batch = log.fetch_transactions(2)
    assert ids(batch) == ["a", "b"]
    assert [tuple(delivery.receipt) for delivery in batch] == [(0, 0, 1, 1), (0, 1, 1, 2)]
    assert ids(log.fetch_transactions(2)) == ["c"]
    assert log.fetch_transactions(2) == []


def test_one_key_is_one_partition_in_order(clock):
    log = MemoryLog(partitions=4, clock=clock)
    sent = [Transaction(f"{number}", key=f"key-{number % 5}") for number in range(50)]
    places = {}
    for transaction, confirmation in zip(sent, log.dispatch(sent), strict=True):
        places.setdefault(transaction.key, set()).add(confirmation.detail["partition"])
    assert all(len(partitions) == 1 for partitions in places.values())
    seen = [delivery.transaction for delivery in log.fetch_transactions(100)]
    for key in places:
        assert [each.id for each in seen if each.key == key] == [each.id for each in sent if each.key == key]


def test_the_partition_of_a_key_is_the_same_in_every_process():
    code = (
        "from ergon_framework.connectors.memory_log import Records\n"
        "from ergon_framework.transaction import Transaction\n"
        "log = Records(16)\n"
        "print([log.append(Transaction('x', key=f'key-{n}'), 0.0).partition for n in range(20)])"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


def test_partitions_take_turns(clock):
    log = MemoryLog(partitions=2, clock=clock)
    for partition in (0, 1):
        log.records.partitions[partition].extend((order, clock.now) for order in orders(*"abcdef"))
    assert {log.fetch_transactions(1)[0].receipt.partition for _ in range(2)} == {0, 1}


def test_a_log_has_partitions():
    with pytest.raises(ValueError, match="partition"):
        Records(0)


# -- watermark ------------------------------------------------------------------------------------------


def test_the_watermark_is_the_first_offset_that_is_not_settled(log):
    log.dispatch(orders("a", "b", "c", "d"))
    one, two, three, four = log.fetch_transactions(4)
    marks = []
    for delivery, settlement in [(two, Ack()), (one, DeadLetter("bad")), (four, Ack()), (three, Later(5.0))]:
        log.settle([(delivery, settlement)])
        marks.append(log.watermark(0))
    assert marks == [0, 2, 2, 4]


def test_a_restart_goes_on_at_the_watermark_and_counts_the_crash(log):
    log.dispatch(orders("a", "b", "c", "d"))
    one, _two, three = log.fetch_transactions(3)
    settle_all(log, [one, three], Ack())
    again = restarted(log).fetch_transactions(10)
    # c was settled beyond the watermark: after a crash nobody knows.
    assert ids(again) == ["b", "c", "d"]
    assert [delivery.deliveries for delivery in again] == [2, 1, 1]


@pytest.mark.spec("CNN-01")
def test_after_an_orderly_close_settled_work_does_not_come_again(log):
    log.dispatch(orders("a", "b", "c"))
    one, _two, three = log.fetch_transactions(3)
    settle_all(log, [one, three], Ack())
    log.close()
    other = restarted(log)
    assert ids(other.fetch_transactions(10)) == ["b"]
    assert other.depth().ready == 0


def test_groups_are_apart(log, clock):
    log.dispatch(orders("a"))
    settle_all(log, log.fetch_transactions(1), Ack())
    other = MemoryLog("facts", group="audit", records=log.records, clock=clock)
    assert ids(other.fetch_transactions(1)) == ["a"]


# -- generations ------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-12", "CNN-06")
@pytest.mark.parametrize("settlement", [Ack(), Later(1.0), Release(), DeadLetter("late")], ids=repr)
def test_a_revoked_partition_fences_loses_and_hands_out_again(log, settlement):
    ear = Ear()
    log.listen(ear)
    log.dispatch(orders("a", "b", "c"))
    one, two, three = log.fetch_transactions(3)
    settle_all(log, [one, three], Ack())
    log.revoke(0)
    assert ear.gone == [two.receipt]
    assert log.extend([two]) == [None]
    assert settle_all(log, [two], settlement) == [LOST]
    assert log.watermark(0) == 1
    (again,) = log.fetch_transactions(10)
    assert (again.transaction.id, again.receipt.generation, again.deliveries) == ("b", 2, 2)
    assert settle_all(log, [two], settlement) == [LOST]
    assert settle_all(log, [again], Ack()) == [SETTLED]
    assert log.watermark(0) == 3


def test_revoking_one_partition_leaves_the_others_alone(clock):
    log = MemoryLog(partitions=2, clock=clock)
    for partition in (0, 1):
        log.records.partitions[partition].append((Transaction("x"), 0.0))
    deliveries = log.fetch_transactions(10)
    log.revoke(1)
    results = dict(
        zip([each.receipt.partition for each in deliveries], settle_all(log, deliveries, Ack()), strict=True)
    )
    assert results == {0: SETTLED, 1: LOST}


def test_a_consumer_that_was_replaced_is_fenced(log):
    log.dispatch(orders("a", "b"))
    (one,) = log.fetch_transactions(1)
    other = restarted(log)
    assert settle_all(log, [one], Ack()) == [LOST]
    assert log.extend([one]) == [None]
    with pytest.raises(ConnectionLost, match="taken over"):
        log.fetch_transactions(1)
    first, second = other.fetch_transactions(10)
    assert ids([first, second]) == ["a", "b"]
    settle_all(other, [first], Ack())
    log.close()  # says nothing about partitions it no longer has
    assert other.watermark(0) == 1


def test_a_closed_consumer_has_to_be_opened_again(log):
    log.dispatch(orders("a"))
    (one,) = log.fetch_transactions(1)
    log.close()
    assert settle_all(log, [one], Ack()) == [LOST]
    with pytest.raises(ConnectionLost, match="closed"):
        log.fetch_transactions(1)
    log.open()
    assert ids(log.fetch_transactions(1)) == ["a"]


def test_a_claim_that_is_held_lasts(log):
    log.dispatch(orders("a"))
    (one,) = log.fetch_transactions(1)
    assert one.lease_until is None
    assert log.extend([one]) == [float("inf")]


# -- settlements and the side store --------------------------------------------------------------------------


@pytest.mark.spec("CNN-04")
def test_a_release_comes_again_at_its_place_and_costs_nothing(log):
    log.dispatch(orders("a", "b", "c"))
    one, two = log.fetch_transactions(2)
    log.settle([(two, Release()), (one, Release())])
    again = log.fetch_transactions(10)
    assert ids(again) == ["a", "b", "c"]
    assert [delivery.deliveries for delivery in again] == [1, 1, 1]


@pytest.mark.spec("CNN-01", "CNN-09")
def test_later_is_kept_beside_the_log_and_survives_a_crash(log, clock):
    log.dispatch(orders("a", "b"))
    one, _two = log.fetch_transactions(2)
    settle_all(log, [one], Later(10.0, attempts=2))
    other = restarted(log)
    assert ids(other.fetch_transactions(10)) == ["b"]
    clock.advance(10.0)
    (again,) = other.fetch_transactions(10)
    assert (again.transaction.id, again.transaction.attempts, again.deliveries) == ("a", 2, 1)
    settle_all(other, [again], Ack())
    assert log.side.kept(0) == []


def test_a_crash_between_keeping_and_committing_delivers_once(log, clock):
    log.dispatch(orders("a", "b", "c"))
    _one, two, _three = log.fetch_transactions(3)
    settle_all(log, [two], Later(10.0))  # the watermark stays at a
    other = restarted(log)
    batch = other.fetch_transactions(10)
    assert ids(batch) == ["a", "c"]
    settle_all(other, batch, Ack())
    assert other.watermark(0) == 3
    clock.advance(10.0)
    assert ids(other.fetch_transactions(10)) == ["b"]


def test_what_is_due_when_its_partition_is_revoked_comes_again(log, clock):
    log.dispatch(orders("a"))
    settle_all(log, log.fetch_transactions(1), Later(1.0))
    clock.advance(1.0)
    (held,) = log.fetch_transactions(1)
    log.revoke(0)
    assert settle_all(log, [held], Ack()) == [LOST]
    (again,) = log.fetch_transactions(1)
    assert again.deliveries == 2
    settle_all(log, [again], Release())
    assert ids(log.fetch_transactions(1)) == ["a"]


@pytest.mark.spec("CNN-08")
def test_dead_letters_are_in_the_side_store_and_are_replayed_to_the_end(log):
    log.dispatch([Transaction("a", {"n": 1}, attempts=3), *orders("b")])
    settle_all(log, log.fetch_transactions(1), DeadLetter("declined"))
    assert [(record.id, record.reason, record.at) for record in log.dead_letters] == [("a", "declined", 1.5e9)]
    assert log.side.list_dead(DeadLetterQuery(), after=None, limit=9) == log.dead_letters
    log.replay_dead([log.dead_letters[0].place])
    batch = log.fetch_transactions(10)
    assert ids(batch) == ["b", "a"]
    assert batch[1].transaction.attempts == 0
    settle_all(log, batch, DeadLetter("declined"))
    first = log.dead_letters[0].place
    assert [result.became for result in log.discard_dead([first])] == [Became.DISCARDED]
    assert [record.id for record in log.dead_letters] == ["a"]
    assert [result.became for result in log.replay_dead([first])] == [Became.GONE]


def test_one_item_spoils_no_other(log):
    class Odd(Settlement):
        pass

    log.dispatch(orders("a", "b", "c"))
    one, two, three = log.fetch_transactions(3)
    foreign = Delivery(Transaction("x"), 7)
    settlings = [(one, Ack()), (one, Ack()), (foreign, Ack()), (two, Odd()), (three, Ack())]
    assert log.settle(settlings) == [SETTLED, LOST, LOST, FAILED, SETTLED]


class Down(MemorySideStore):
    """A side store whose server goes away for the places it is told."""

    def __init__(self):
        super().__init__()
        self.down = set()

    def _check(self, place):
        if place.offset in self.down:
            raise ConnectionLost("the side store is down")

    def count(self, place):
        self._check(place)
        return super().count(place)

    def forget(self, place):
        self._check(place)
        super().forget(place)


def test_a_side_store_that_is_down_fails_one_settlement_and_the_claim_stays(clock):
    side = Down()
    log = MemoryLog(side=side, clock=clock)
    log.dispatch(orders("a", "b"))
    one, two = log.fetch_transactions(2)
    side.down = {0}
    assert settle_all(log, [one, two], Ack()) == [FAILED, SETTLED]
    side.down = set()
    assert settle_all(log, [one], Ack()) == [SETTLED]
    assert log.watermark(0) == 2


def test_a_side_store_that_is_down_loses_no_record(clock):
    side = Down()
    log = MemoryLog(side=side, clock=clock)
    log.dispatch(orders("a", "b"))
    side.down = {1}
    assert ids(log.fetch_transactions(2)) == ["a"]
    with pytest.raises(ConnectionLost):
        log.fetch_transactions(2)
    side.down = set()
    assert ids(log.fetch_transactions(2)) == ["b"]


# -- what is there ---------------------------------------------------------------------------------------------


def test_depth_counts_everything(log, clock):
    assert log.depth().oldest_age is None
    log.dispatch(orders("a", "b", "c", "d", "e"))
    clock.advance(2.0)
    one, two, three, _four = log.fetch_transactions(4)
    log.settle([(one, Later(10.0)), (two, DeadLetter("bad")), (three, Release())])
    depth = log.depth()
    assert (depth.ready, depth.delayed, depth.in_flight, depth.dead, depth.oldest_age) == (2, 1, 1, 1, 2.0)
    assert log.next_due() == 10.0
    clock.advance(10.0)
    assert (log.depth().ready, log.depth().delayed) == (3, 0)


def test_listeners_are_woken_by_whatever_becomes_available(log):
    ear = Ear()
    log.listen(ear)
    log.dispatch(orders("a", "b", "c"))
    one, two, three = log.fetch_transactions(3)
    for delivery, settlement, wakes in [(one, Release(), 2), (two, Later(0.0), 3), (three, Later(5.0), 3)]:
        log.settle([(delivery, settlement)])
        assert ear.wakes == wakes


def test_a_wait_finds_what_arrives(log):
    async def world():
        waiting = asyncio.create_task(log.fetch_transactions_async(10, wait=600.0))
        await asyncio.sleep(0)
        await asyncio.to_thread(log.dispatch, orders("a"))
        return await asyncio.wait_for(waiting, 10.0)

    assert ids(asyncio.run(world())) == ["a"]
    assert list(log.fetch_transactions(1, wait=0.01)) == []


def test_closing_ends_a_wait_and_does_not_take_the_partitions_back(log):
    async def world():
        waiting = asyncio.create_task(log.fetch_transactions_async(10, wait=600.0))
        await asyncio.sleep(0)
        await log.close_async()
        return await asyncio.wait_for(waiting, 10.0)

    assert list(asyncio.run(world())) == []
    assert log._mine == []


def test_it_says_what_it_is(log):
    capabilities = log.capabilities
    assert (capabilities.mode, capabilities.fenced_by, capabilities.lease) == ("log", "generation", None)
    assert not capabilities.renewable
    assert capabilities.release_is_free
    assert capabilities.ordered_by_key
    assert capabilities.durable is False


@pytest.mark.spec("CNN-01")
def test_what_is_in_hand_from_beside_the_log_stays_so_while_its_record_is_passed():
    records, side = Records(1), MemorySideStore()
    client = MemoryLog(records=records, side=side)
    client.dispatch([Transaction(f"t-{number}") for number in range(3)])
    _, two, _ = client.fetch_transactions(3)
    client.settle([(two, Later(0.0))])
    heir = MemoryLog(records=records, side=side)
    found = heir.fetch_transactions(3)
    assert [each.transaction.id for each in found] == ["t-1", "t-0", "t-2"]
    assert heir.settle([(each, Ack()) for each in found]) == [SettleResult.SETTLED] * 3
    assert side.kept(0) == []
