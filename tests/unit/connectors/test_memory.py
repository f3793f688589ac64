"""The queue in memory: order, leases, fencing, delays, dead letters, waiting."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

import pytest

from ergon_framework.connectors.base import (
    Ack,
    DeadLetter,
    Delivery,
    Later,
    Release,
    Settlement,
    SettleResult,
    UndecodableError,
)
from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.connectors.deadletters import Became
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt
from ergon_framework.transaction import Transaction
from tests.unit.connectors.worlds import Clock, Ear, ids, orders

SETTLED, LOST, FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=[None, JsonCodec()], ids=["objects", "wire"])
def queue(request, clock):
    return MemoryConnector("orders", lease=30.0, clock=clock, wall=lambda: 1.5e9, codec=request.param)


def settle_all(queue, deliveries, settlement):
    return queue.settle([(delivery, settlement) for delivery in deliveries])


# -- fetching --------------------------------------------------------------------------------------


def test_fetch_hands_out_in_the_order_of_dispatch(queue):
    queue.dispatch(orders("a", "b"))
    queue.dispatch(orders("c"))
    assert ids(queue.fetch_transactions(2)) == ["a", "b"]
    assert ids(queue.fetch_transactions(2)) == ["c"]
    assert queue.fetch_transactions(2) == []


def test_dispatch_confirms_every_one(queue):
    assert [confirmation.transaction_id for confirmation in queue.dispatch(orders("a", "b"))] == ["a", "b"]
    assert queue.dispatch([]) == []


def test_the_same_id_twice_is_two_messages(queue):
    queue.dispatch(orders("a", "a"))
    first, second = queue.fetch_transactions(10)
    assert first.receipt != second.receipt
    assert queue.settle([(first, Ack()), (second, Ack())]) == [SETTLED, SETTLED]


def test_a_delivery_has_a_lease_and_counts_from_one(queue, clock):
    queue.dispatch(orders("a"))
    (delivery,) = queue.fetch_transactions(1)
    assert (delivery.deliveries, delivery.lease_until) == (1, clock.now + 30.0)


def test_fetching_nothing_claims_nothing(queue):
    queue.dispatch(orders("a"))
    assert queue.fetch_transactions(0, wait=60.0) == []
    assert queue.depth().ready == 1


def test_a_priority_is_taken_and_means_nothing(queue):
    queue.dispatch(orders("a"))
    assert ids(queue.fetch_transactions(1, priority="high")) == ["a"]


# -- leases and fencing -----------------------------------------------------------------------------


@pytest.mark.spec("CNN-04")
def test_what_is_not_settled_comes_again_in_its_old_order_and_is_counted(queue, clock):
    queue.dispatch(orders("a", "b", "c"))
    queue.fetch_transactions(2)
    clock.advance(30.0)
    again = queue.fetch_transactions(10)
    assert ids(again) == ["a", "b", "c"]
    assert [delivery.deliveries for delivery in again] == [2, 2, 1]


@pytest.mark.spec("CNN-12")
@pytest.mark.parametrize("settlement", [Ack(), Later(1.0), Release(), DeadLetter("late")], ids=repr)
def test_a_stale_receipt_settles_nothing(queue, clock, settlement):
    queue.dispatch(orders("a"))
    (stale,) = queue.fetch_transactions(1)
    clock.advance(30.0)
    assert settle_all(queue, [stale], settlement) == [LOST]
    (current,) = queue.fetch_transactions(1)
    assert settle_all(queue, [stale], settlement) == [LOST]
    assert settle_all(queue, [current], Ack()) == [SETTLED]
    assert queue.depth().dead == 0


def test_a_claim_is_good_until_the_lease_is_over_and_not_a_moment_longer(queue, clock):
    queue.dispatch(orders("a", "b"))
    first, second = queue.fetch_transactions(2)
    clock.advance(29.999)
    assert settle_all(queue, [first], Ack()) == [SETTLED]
    clock.advance(0.001)
    assert settle_all(queue, [second], Ack()) == [LOST]


def test_settling_twice_is_lost_the_second_time(queue):
    queue.dispatch(orders("a"))
    (delivery,) = queue.fetch_transactions(1)
    assert queue.settle([(delivery, Ack()), (delivery, Ack())]) == [SETTLED, LOST]


@pytest.mark.spec("CNN-06")
def test_extend_renews_each_claim_and_says_which_are_gone(queue, clock):
    queue.dispatch(orders("a", "b"))
    first, second = queue.fetch_transactions(2)
    clock.advance(20.0)
    assert queue.extend([first]) == [clock.now + 30.0]
    clock.advance(15.0)
    assert queue.extend([first, second]) == [clock.now + 30.0, None]
    assert queue.settle([(first, Ack()), (second, Ack())]) == [SETTLED, LOST]


@pytest.mark.spec("CNN-06")
def test_listeners_are_told_of_lost_claims(queue, clock):
    ear = Ear()
    queue.dispatch(orders("a", "b"))
    first, second = queue.fetch_transactions(2)
    settle_all(queue, [second], Ack())
    queue.listen(ear)
    clock.advance(30.0)
    queue.depth()
    assert ear.gone == [first.receipt]
    assert ear.wakes == 1


# -- settlements --------------------------------------------------------------------------------------


def test_an_ack_is_the_end(queue, clock):
    queue.dispatch(orders("a"))
    assert settle_all(queue, queue.fetch_transactions(1), Ack()) == [SETTLED]
    clock.advance(1e6)
    assert queue.fetch_transactions(1) == []


@pytest.mark.spec("CNN-04", "CNN-09")
def test_later_comes_after_the_delay_with_what_it_was_given_and_costs_no_delivery(queue, clock):
    history = (Attempt(attempt=0, category=Category.SYSTEM, error="busy"),)
    queue.dispatch(orders("a", "b"))
    settle_all(queue, queue.fetch_transactions(1), Later(60.0, attempts=3, history=history))
    assert ids(queue.fetch_transactions(10)) == ["b"]
    clock.advance(59.999)
    assert "a" not in ids(queue.fetch_transactions(10))
    clock.advance(0.001)
    (again,) = [delivery for delivery in queue.fetch_transactions(10) if delivery.transaction.id == "a"]
    assert (again.transaction.attempts, again.transaction.history, again.deliveries) == (3, history, 1)
    assert again.transaction.payload == {"order": "a"}


def test_later_at_once_goes_to_the_end(queue):
    queue.dispatch(orders("a", "b"))
    settle_all(queue, queue.fetch_transactions(1), Later(0.0))
    assert ids(queue.fetch_transactions(10)) == ["b", "a"]


def test_delays_end_in_order_of_their_due_time(queue, clock):
    queue.dispatch(orders("a", "b", "c"))
    first, second, third = queue.fetch_transactions(3)
    queue.settle([(first, Later(3.0)), (second, Later(1.0)), (third, Later(1.0))])
    clock.advance(5.0)
    assert ids(queue.fetch_transactions(3)) == ["b", "c", "a"]


@pytest.mark.spec("CNN-04")
def test_a_release_goes_back_to_its_old_place_at_once_and_costs_nothing(queue):
    queue.dispatch(orders("a", "b", "c"))
    first, second = queue.fetch_transactions(2)
    queue.settle([(second, Release()), (first, Release())])
    again = queue.fetch_transactions(10)
    assert ids(again) == ["a", "b", "c"]
    assert [delivery.deliveries for delivery in again] == [1, 1, 1]


@pytest.mark.spec("CNN-13")
def test_one_item_spoils_no_other(queue, clock):
    class Odd(Settlement):
        pass

    queue.dispatch(orders("a", "b", "c", "d", "e"))
    (gone,) = queue.fetch_transactions(1)
    clock.advance(30.0)
    one, two, three, four, five = queue.fetch_transactions(5)
    foreign = Delivery(Transaction("x"), "somebody else's")
    settlings = [
        (one, Ack()),
        (gone, Ack()),
        (two, Odd()),
        (foreign, DeadLetter("x")),
        (three, Release()),
        (four, DeadLetter("bad")),
        (five, Later(1.0)),
    ]
    assert queue.settle(settlings) == [SETTLED, LOST, FAILED, LOST, SETTLED, SETTLED, SETTLED]
    assert queue.settle([(two, Ack())]) == [SETTLED]  # a failed one is still held


def test_a_later_that_cannot_be_written_fails_alone():
    queue = MemoryConnector(codec=JsonCodec())
    queue.dispatch(orders("a", "b"))
    first, second = queue.fetch_transactions(2)
    assert queue.settle([(first, Later(0.0, attempts=-1)), (second, Ack())]) == [FAILED, SETTLED]
    assert queue.depth().in_flight == 1


def test_dispatch_is_all_or_nothing_if_one_cannot_be_written():
    queue = MemoryConnector(codec=JsonCodec())
    with pytest.raises(UnencodableError):
        queue.dispatch([*orders("a"), Transaction("b", object())])
    assert queue.depth().ready == 0


# -- dead letters ---------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-08")
def test_a_dead_letter_can_be_listed_replayed_and_discarded(queue):
    queue.dispatch([Transaction("a", {"n": 1}, correlation="basket", attempts=4)])
    settle_all(queue, queue.fetch_transactions(1), DeadLetter("declined"))
    (record,) = queue.dead_letters
    assert (record.id, record.reason, record.deliveries, record.at, record.queue) == (
        "a",
        "declined",
        1,
        1.5e9,
        "orders",
    )
    assert queue.fetch_transactions(1) == []
    assert [result.became for result in queue.replay_dead([record.place])] == [Became.REPLAYED]
    assert queue.dead_letters == []
    (again,) = queue.fetch_transactions(1)
    assert (again.transaction.id, again.transaction.correlation, again.transaction.attempts) == ("a", "basket", 0)
    assert (again.transaction.history, again.deliveries) == ((), 1)
    settle_all(queue, [again], DeadLetter("declined"))
    (record,) = queue.dead_letters
    assert [result.became for result in queue.discard_dead([record.place])] == [Became.DISCARDED]
    assert (queue.dead_letters, queue.depth().ready) == ([], 0)


def test_a_transaction_that_is_dead_twice_has_two_places(queue):
    queue.dispatch([Transaction("a", 1), Transaction("a", 2)])
    settle_all(queue, queue.fetch_transactions(2), DeadLetter("bad"))
    queue.replay_dead([queue.dead_letters[0].place])
    assert [delivery.transaction.payload for delivery in queue.fetch_transactions(2)] == [1]
    assert [record.payload for record in queue.dead_letters] == [2]


@pytest.mark.spec("CNN-05")
@pytest.mark.parametrize("headers", [{}, {"ergon-id": "a", "x": "y"}])
def test_what_cannot_be_decoded_is_delivered_with_its_bytes_and_replayed_as_it_came(headers):
    queue = MemoryConnector(codec=JsonCodec())
    queue.dispatch(orders("before"))
    queue.receive(b"\xff\x00", headers)
    queue.dispatch(orders("after"))
    before, bad, after = queue.fetch_transactions(3)
    assert (before.error, after.error) == (None, None)
    assert isinstance(bad.error, UndecodableError)
    assert bad.transaction.payload == b"\xff\x00"
    settle_all(queue, [bad], Later(0.0, attempts=1))  # goes back as it came
    (bad,) = queue.fetch_transactions(1)
    settle_all(queue, [bad], DeadLetter("undecodable"))
    (record,) = queue.dead_letters
    assert (record.raw, record.headers, record.payload) == (b"\xff\x00", headers, None)
    queue.replay_dead([record.place])
    (again,) = queue.fetch_transactions(1)
    assert (again.transaction.id, again.transaction.payload) == (bad.transaction.id, b"\xff\x00")
    assert again.error is not None


def test_bytes_from_elsewhere_take_a_codec():
    with pytest.raises(TypeError, match="codec"):
        MemoryConnector().receive(b"1", {})


# -- what is there ----------------------------------------------------------------------------------------


def test_depth_counts_everything(queue, clock):
    assert queue.depth().oldest_age is None
    queue.dispatch(orders("a", "b", "c"))
    clock.advance(2.0)
    queue.dispatch(orders("d"))
    one, two, three = queue.fetch_transactions(3)
    queue.settle([(one, Later(10.0)), (two, DeadLetter("bad"))])
    depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.in_flight, depth.dead, depth.oldest_age) == (1, 1, 1, 1, 0.0)
    queue.settle([(three, Release())])
    assert queue.depth().oldest_age == 2.0
    clock.advance(12.0)
    depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.in_flight) == (3, 0, 0)


def test_it_says_what_it_is(queue):
    capabilities = queue.capabilities
    assert (capabilities.mode, capabilities.fenced_by, capabilities.lease) == ("queue", "token", 30.0)
    assert capabilities.renewable
    assert capabilities.release_is_free
    assert capabilities.durable is False
    assert MemoryConnector(codec=JsonCodec(max_bytes=7)).capabilities.max_payload == 7


@pytest.mark.parametrize("lease", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_is_a_finite_time(lease):
    with pytest.raises(ValueError, match="lease"):
        MemoryConnector(lease=lease)


# -- signals ----------------------------------------------------------------------------------------------


def test_listeners_are_woken_by_whatever_becomes_available(queue):
    ear = Ear()
    unlisten = queue.listen(ear)
    queue.dispatch(orders("a", "b", "c", "d"))
    assert ear.wakes == 1
    one, two, three, four = queue.fetch_transactions(4)
    for delivery, settlement, wakes in [
        (one, Release(), 2),
        (two, Later(0.0), 3),
        (three, Later(5.0), 3),
        (four, DeadLetter("bad"), 3),
    ]:
        queue.settle([(delivery, settlement)])
        assert ear.wakes == wakes
    queue.replay_dead([record.place for record in queue.dead_letters])
    assert ear.wakes == 4
    unlisten()
    queue.dispatch(orders("e"))
    assert ear.wakes == 4


def test_a_delayed_transaction_wakes_nobody_but_says_when_to_look(queue, clock):
    assert queue.next_due() is None
    queue.dispatch(orders("a", "b"))
    first, _second = queue.fetch_transactions(2)
    assert queue.next_due() == 30.0
    settle_all(queue, [first], Later(5.0))
    clock.advance(2.0)
    assert queue.next_due() == 3.0


def test_a_listener_may_call_back(queue):
    class Eager(Ear):
        def wake(self):
            super().wake()
            self.found = queue.fetch_transactions(1)

    ear = Eager()
    queue.listen(ear)
    queue.dispatch(orders("a"))
    assert ids(ear.found) == ["a"]


# -- waiting ----------------------------------------------------------------------------------------------


class Waiting(threading.Thread):
    """A fetch in a thread of its own, known to be waiting once the constructor returns."""

    def __init__(self, queue, seconds):
        super().__init__(daemon=True)
        self.queue, self.seconds, self.found = queue, seconds, None
        asked, due = threading.Event(), queue.next_due

        def next_due():
            asked.set()
            return due()

        queue.next_due = next_due  # asked right before it waits, by then its bell hangs
        self.start()
        assert asked.wait(10.0)

    def run(self):
        self.found = self.queue.fetch_transactions(10, wait=self.seconds)

    def result(self):
        self.join(10.0)
        assert not self.is_alive()
        return ids(self.found)


def test_a_waiting_fetch_returns_what_arrives(queue):
    waiting = Waiting(queue, 600.0)
    queue.dispatch(orders("a"))
    assert waiting.result() == ["a"]


def test_a_waiting_fetch_returns_what_is_released(queue):
    queue.dispatch(orders("a"))
    (delivery,) = queue.fetch_transactions(1)
    waiting = Waiting(queue, 600.0)
    settle_all(queue, [delivery], Release())
    assert waiting.result() == ["a"]


@pytest.mark.parametrize("end", ["interrupt", "close"])
def test_a_waiting_fetch_can_be_ended(queue, end):
    waiting = Waiting(queue, 600.0)
    getattr(queue, end)()
    assert waiting.result() == []
    queue.dispatch(orders("a"))
    assert ids(queue.fetch_transactions(1, wait=600.0)) == ["a"]  # the next one is not ended


def test_a_wait_is_over_when_its_time_is(queue):
    assert list(queue.fetch_transactions(1, wait=0.01)) == []
    assert list(asyncio.run(queue.fetch_transactions_async(1, wait=0.01))) == []


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_wait_finds_what_becomes_due_meanwhile(flavour):
    queue = MemoryConnector()
    queue.dispatch(orders("a"))
    settle_all(queue, queue.fetch_transactions(1), Later(0.01))
    if flavour == "sync":
        found = queue.fetch_transactions(1, wait=600.0)
    else:
        found = asyncio.run(queue.fetch_transactions_async(1, wait=600.0))
    assert ids(found) == ["a"]


def test_an_async_wait_does_not_block_the_loop_and_is_woken_from_any_thread(queue):
    async def world():
        waiting = asyncio.create_task(queue.fetch_transactions_async(10, wait=600.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(queue.dispatch, orders("a"))
        return await asyncio.wait_for(waiting, 10.0)

    assert ids(asyncio.run(world())) == ["a"]


def test_an_async_wait_can_be_ended(queue):
    async def world():
        waiting = asyncio.create_task(queue.fetch_transactions_async(10, wait=600.0))
        await asyncio.sleep(0)
        await queue.close_async()
        return await asyncio.wait_for(waiting, 10.0)

    assert list(asyncio.run(world())) == []


def test_a_cancelled_wait_has_claimed_nothing_and_hears_nothing_more(queue):
    async def world():
        waiting = asyncio.create_task(queue.fetch_transactions_async(10, wait=600.0))
        await asyncio.sleep(0)
        queue.dispatch(orders("a"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return waiting.cancelled()

    cancelled = asyncio.run(world())
    depth = queue.depth()
    assert cancelled
    assert (depth.ready, depth.in_flight) == (1, 0)
    assert queue._arrivals._bells == ()


# -- threads ------------------------------------------------------------------------------------------------


def test_many_threads_settle_every_message_once():
    queue, settled, lock = MemoryConnector(), Counter(), threading.Lock()
    queue.dispatch(orders(*(f"{number}" for number in range(2000))))

    def work(seed):
        dice = random.Random(seed)
        while batch := queue.fetch_transactions(7):
            settlings = [(delivery, Ack() if dice.random() < 0.7 else Release()) for delivery in batch]
            for (delivery, settlement), result in zip(settlings, queue.settle(settlings), strict=True):
                assert result is SETTLED
                if isinstance(settlement, Ack):
                    with lock:
                        settled[delivery.transaction.id] += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work(5)  # what the last of them released
    assert len(settled) == 2000
    assert set(settled.values()) == {1}


@pytest.mark.spec("CON-48")
def test_what_is_dispatched_has_its_queue_as_its_source_unless_it_has_one():
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("7"), Transaction("8", source="shop")])
    assert [delivery.transaction.source for delivery in queue.fetch_transactions(2)] == ["orders", "shop"]
