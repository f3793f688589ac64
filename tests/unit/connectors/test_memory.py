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
    Defer,
    Delivery,
    Release,
    Settlement,
    SettleResult,
    UndecodableError,
)
from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.connectors.dead_letters import DeadLetterResult
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt
from ergon_framework.transaction import Transaction
from tests.unit.connectors.harness import ManualClock, RecordingListener, ids_of, make_orders

SETTLED, LOST, FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def queue(clock):
    return MemoryConnector("orders", lease=30.0, clock=clock, wall=lambda: 1.5e9)


def settle_all(queue, deliveries, settlement):
    return queue.settle([(delivery, settlement) for delivery in deliveries])


# -- fetching --------------------------------------------------------------------------------------


def test_fetch_hands_out_in_the_order_of_dispatch(queue):
    queue.dispatch(make_orders("a", "b"))
    queue.dispatch(make_orders("c"))
    assert ids_of(queue.fetch_transactions(2)) == ["a", "b"]
    assert ids_of(queue.fetch_transactions(2)) == ["c"]
    assert queue.fetch_transactions(2) == []


def test_dispatch_confirms_every_one(queue):
    assert [confirmation.transaction_id for confirmation in queue.dispatch(make_orders("a", "b"))] == ["a", "b"]
    assert queue.dispatch([]) == []


def test_the_same_id_twice_is_two_messages(queue):
    queue.dispatch(make_orders("a", "a"))
    first, second = queue.fetch_transactions(10)
    assert first.receipt != second.receipt
    assert queue.settle([(first, Ack()), (second, Ack())]) == [SETTLED, SETTLED]


def test_a_delivery_has_a_lease_and_counts_from_one(queue, clock):
    queue.dispatch(make_orders("a"))
    (delivery,) = queue.fetch_transactions(1)
    assert (delivery.deliveries, delivery.lease_until) == (1, clock.now + 30.0)


def test_fetching_nothing_claims_nothing(queue):
    queue.dispatch(make_orders("a"))
    assert queue.fetch_transactions(0, wait=60.0) == []
    assert queue.depth().ready == 1


def test_a_priority_is_accepted_and_ignored(queue):
    queue.dispatch(make_orders("a"))
    assert ids_of(queue.fetch_transactions(1, priority="high")) == ["a"]


# -- leases and fencing -----------------------------------------------------------------------------


@pytest.mark.spec("CNN-04")
def test_expired_claims_are_redelivered_in_their_original_order_and_counted(queue, clock):
    queue.dispatch(make_orders("a", "b", "c"))
    queue.fetch_transactions(2)
    clock.advance(30.0)
    redelivered = queue.fetch_transactions(10)
    assert ids_of(redelivered) == ["a", "b", "c"]
    assert [delivery.deliveries for delivery in redelivered] == [2, 2, 1]


@pytest.mark.spec("CNN-12")
@pytest.mark.parametrize("settlement", [Ack(), Defer(1.0), Release(), DeadLetter("late")], ids=repr)
def test_a_stale_receipt_settles_nothing(queue, clock, settlement):
    queue.dispatch(make_orders("a"))
    (stale,) = queue.fetch_transactions(1)
    clock.advance(30.0)
    assert settle_all(queue, [stale], settlement) == [LOST]
    (current,) = queue.fetch_transactions(1)
    assert settle_all(queue, [stale], settlement) == [LOST]
    assert settle_all(queue, [current], Ack()) == [SETTLED]
    assert queue.depth().dead == 0


def test_a_claim_is_valid_until_its_lease_ends(queue, clock):
    queue.dispatch(make_orders("a", "b"))
    first, second = queue.fetch_transactions(2)
    clock.advance(29.999)
    assert settle_all(queue, [first], Ack()) == [SETTLED]
    clock.advance(0.001)
    assert settle_all(queue, [second], Ack()) == [LOST]


def test_the_second_settlement_of_a_delivery_is_lost(queue):
    queue.dispatch(make_orders("a"))
    (delivery,) = queue.fetch_transactions(1)
    assert queue.settle([(delivery, Ack()), (delivery, Ack())]) == [SETTLED, LOST]


@pytest.mark.spec("CNN-06")
def test_extend_renews_valid_claims_and_returns_none_for_lost_ones(queue, clock):
    queue.dispatch(make_orders("a", "b"))
    first, second = queue.fetch_transactions(2)
    clock.advance(20.0)
    assert queue.extend([first]) == [clock.now + 30.0]
    clock.advance(15.0)
    assert queue.extend([first, second]) == [clock.now + 30.0, None]
    assert queue.settle([(first, Ack()), (second, Ack())]) == [SETTLED, LOST]


@pytest.mark.spec("CNN-06")
def test_listeners_are_notified_of_lost_claims(queue, clock):
    listener = RecordingListener()
    queue.dispatch(make_orders("a", "b"))
    first, second = queue.fetch_transactions(2)
    settle_all(queue, [second], Ack())
    queue.listen(listener)
    clock.advance(30.0)
    queue.depth()
    assert listener.gone == [first.receipt]
    assert listener.wakes == 1


# -- settlements --------------------------------------------------------------------------------------


def test_an_acked_transaction_is_never_redelivered(queue, clock):
    queue.dispatch(make_orders("a"))
    assert settle_all(queue, queue.fetch_transactions(1), Ack()) == [SETTLED]
    clock.advance(1e6)
    assert queue.fetch_transactions(1) == []


@pytest.mark.spec("CNN-04", "CNN-09")
def test_later_redelivers_after_its_delay_with_its_changes_and_uncounted(queue, clock):
    history = (Attempt(attempt=0, category=Category.SYSTEM, error="busy"),)
    queue.dispatch(make_orders("a", "b"))
    settle_all(queue, queue.fetch_transactions(1), Defer(60.0, attempts=3, history=history))
    assert ids_of(queue.fetch_transactions(10)) == ["b"]
    clock.advance(59.999)
    assert "a" not in ids_of(queue.fetch_transactions(10))
    clock.advance(0.001)
    (redelivered,) = [delivery for delivery in queue.fetch_transactions(10) if delivery.transaction.id == "a"]
    assert (redelivered.transaction.attempts, redelivered.transaction.history, redelivered.deliveries) == (
        3,
        history,
        1,
    )
    assert redelivered.transaction.payload == {"order": "a"}


def test_later_without_a_delay_moves_to_the_end_of_the_queue(queue):
    queue.dispatch(make_orders("a", "b"))
    settle_all(queue, queue.fetch_transactions(1), Defer(0.0))
    assert ids_of(queue.fetch_transactions(10)) == ["b", "a"]


def test_delays_end_in_order_of_their_due_time(queue, clock):
    queue.dispatch(make_orders("a", "b", "c"))
    first, second, third = queue.fetch_transactions(3)
    queue.settle([(first, Defer(3.0)), (second, Defer(1.0)), (third, Defer(1.0))])
    clock.advance(5.0)
    assert ids_of(queue.fetch_transactions(3)) == ["b", "c", "a"]


@pytest.mark.spec("CNN-04")
def test_release_restores_the_original_position_immediately_and_uncounted(queue):
    queue.dispatch(make_orders("a", "b", "c"))
    first, second = queue.fetch_transactions(2)
    queue.settle([(second, Release()), (first, Release())])
    redelivered = queue.fetch_transactions(10)
    assert ids_of(redelivered) == ["a", "b", "c"]
    assert [delivery.deliveries for delivery in redelivered] == [1, 1, 1]


@pytest.mark.spec("CNN-13")
def test_one_failed_settlement_affects_no_other(queue, clock):
    class UnknownSettlement(Settlement):
        pass

    queue.dispatch(make_orders("a", "b", "c", "d", "e"))
    (stale,) = queue.fetch_transactions(1)
    clock.advance(30.0)
    one, two, three, four, five = queue.fetch_transactions(5)
    foreign = Delivery(Transaction(id="x"), "foreign receipt")
    settlings = [
        (one, Ack()),
        (stale, Ack()),
        (two, UnknownSettlement()),
        (foreign, DeadLetter("x")),
        (three, Release()),
        (four, DeadLetter("bad")),
        (five, Defer(1.0)),
    ]
    assert queue.settle(settlings) == [SETTLED, LOST, FAILED, LOST, SETTLED, SETTLED, SETTLED]
    assert queue.settle([(two, Ack())]) == [SETTLED]  # a failed one is still held


def test_an_unencodable_later_fails_alone():
    queue = MemoryConnector(codec=JsonCodec())
    queue.dispatch(make_orders("a", "b"))
    first, second = queue.fetch_transactions(2)
    assert queue.settle([(first, Defer(0.0, attempts=-1)), (second, Ack())]) == [FAILED, SETTLED]
    assert queue.depth().in_flight == 1


def test_dispatch_with_an_unencodable_transaction_adds_nothing():
    queue = MemoryConnector(codec=JsonCodec())
    with pytest.raises(UnencodableError):
        queue.dispatch([*make_orders("a"), Transaction(object(), id="b")])
    assert queue.depth().ready == 0


# -- dead letters ---------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-08")
def test_a_dead_letter_can_be_listed_replayed_and_discarded(queue):
    queue.dispatch([Transaction({"n": 1}, id="a", correlation="basket", attempts=4)])
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
    assert [result.outcome for result in queue.replay_dead([record.handle])] == [DeadLetterResult.REPLAYED]
    assert queue.dead_letters == []
    (redelivered,) = queue.fetch_transactions(1)
    assert (redelivered.transaction.id, redelivered.transaction.correlation, redelivered.transaction.attempts) == (
        "a",
        "basket",
        0,
    )
    assert (redelivered.transaction.history, redelivered.deliveries) == ((), 1)
    settle_all(queue, [redelivered], DeadLetter("declined"))
    (record,) = queue.dead_letters
    assert [result.outcome for result in queue.discard_dead([record.handle])] == [DeadLetterResult.DISCARDED]
    assert (queue.dead_letters, queue.depth().ready) == ([], 0)


def test_an_id_that_is_dead_lettered_twice_has_two_records(queue):
    queue.dispatch([Transaction(1, id="a"), Transaction(2, id="a")])
    settle_all(queue, queue.fetch_transactions(2), DeadLetter("bad"))
    queue.replay_dead([queue.dead_letters[0].handle])
    assert [delivery.transaction.payload for delivery in queue.fetch_transactions(2)] == [1]
    assert [record.payload for record in queue.dead_letters] == [2]


@pytest.mark.spec("CNN-05")
@pytest.mark.parametrize("headers", [{}, {"ergon-id": "a", "x": "y"}])
def test_an_undecodable_message_is_delivered_with_its_bytes_and_replayed_unchanged(headers):
    queue = MemoryConnector(codec=JsonCodec())
    queue.dispatch(make_orders("before"))
    queue.inject(b"\xff\x00", headers)
    queue.dispatch(make_orders("after"))
    before, undecodable, after = queue.fetch_transactions(3)
    assert (before.error, after.error) == (None, None)
    assert isinstance(undecodable.error, UndecodableError)
    assert undecodable.transaction.payload == b"\xff\x00"
    settle_all(queue, [undecodable], Defer(0.0, attempts=1))  # goes back as it came
    (undecodable,) = queue.fetch_transactions(1)
    settle_all(queue, [undecodable], DeadLetter("undecodable"))
    (record,) = queue.dead_letters
    assert (record.raw, record.headers, record.payload) == (b"\xff\x00", headers, None)
    queue.replay_dead([record.handle])
    (redelivered,) = queue.fetch_transactions(1)
    assert (redelivered.transaction.id, redelivered.transaction.payload) == (undecodable.transaction.id, b"\xff\x00")
    assert redelivered.error is not None


# -- what is there ----------------------------------------------------------------------------------------


def test_depth_counts_everything(queue, clock):
    assert queue.depth().oldest_age is None
    queue.dispatch(make_orders("a", "b", "c"))
    clock.advance(2.0)
    queue.dispatch(make_orders("d"))
    one, two, three = queue.fetch_transactions(3)
    queue.settle([(one, Defer(10.0)), (two, DeadLetter("bad"))])
    depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.in_flight, depth.dead, depth.oldest_age) == (1, 1, 1, 1, 0.0)
    queue.settle([(three, Release())])
    assert queue.depth().oldest_age == 2.0
    clock.advance(12.0)
    depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.in_flight) == (3, 0, 0)


def test_capabilities_describe_the_queue(queue):
    capabilities = queue.capabilities
    assert (capabilities.mode, capabilities.fenced_by, capabilities.lease) == ("queue", "token", 30.0)
    assert capabilities.renewable
    assert capabilities.release_uncounted
    assert capabilities.durable is False
    assert MemoryConnector(codec=JsonCodec(max_bytes=7)).capabilities.max_payload == 7


@pytest.mark.parametrize("lease", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_must_be_positive_and_finite(lease):
    with pytest.raises(ValueError, match="lease"):
        MemoryConnector(lease=lease)


# -- signals ----------------------------------------------------------------------------------------------


def test_listeners_are_woken_when_a_transaction_becomes_available(queue):
    listener = RecordingListener()
    unlisten = queue.listen(listener)
    queue.dispatch(make_orders("a", "b", "c", "d"))
    assert listener.wakes == 1
    one, two, three, four = queue.fetch_transactions(4)
    for delivery, settlement, wakes in [
        (one, Release(), 2),
        (two, Defer(0.0), 3),
        (three, Defer(5.0), 3),
        (four, DeadLetter("bad"), 3),
    ]:
        queue.settle([(delivery, settlement)])
        assert listener.wakes == wakes
    queue.replay_dead([record.handle for record in queue.dead_letters])
    assert listener.wakes == 4
    unlisten()
    queue.dispatch(make_orders("e"))
    assert listener.wakes == 4


def test_a_delayed_transaction_wakes_no_listener_and_sets_next_due(queue, clock):
    assert queue.next_due() is None
    queue.dispatch(make_orders("a", "b"))
    first, _second = queue.fetch_transactions(2)
    assert queue.next_due() == 30.0
    settle_all(queue, [first], Defer(5.0))
    clock.advance(2.0)
    assert queue.next_due() == 3.0


def test_a_listener_may_call_back(queue):
    class FetchingListener(RecordingListener):
        def wake(self):
            super().wake()
            self.deliveries = queue.fetch_transactions(1)

    listener = FetchingListener()
    queue.listen(listener)
    queue.dispatch(make_orders("a"))
    assert ids_of(listener.deliveries) == ["a"]


# -- waiting ----------------------------------------------------------------------------------------------


class WaitingFetch(threading.Thread):
    """A fetch in a thread of its own, known to be waiting once the constructor returns."""

    def __init__(self, queue, seconds):
        super().__init__(daemon=True)
        self.queue, self.seconds, self.deliveries = queue, seconds, None
        is_waiting, original_next_due = threading.Event(), queue.next_due

        def next_due():
            is_waiting.set()
            return original_next_due()

        queue.next_due = next_due  # asked right before it waits, by then its bell hangs
        self.start()
        assert is_waiting.wait(10.0)

    def run(self):
        self.deliveries = self.queue.fetch_transactions(10, wait=self.seconds)

    def wait_for_ids(self):
        self.join(10.0)
        assert not self.is_alive()
        return ids_of(self.deliveries)


def test_a_waiting_fetch_returns_new_transactions(queue):
    waiting = WaitingFetch(queue, 600.0)
    queue.dispatch(make_orders("a"))
    assert waiting.wait_for_ids() == ["a"]


def test_a_waiting_fetch_returns_released_transactions(queue):
    queue.dispatch(make_orders("a"))
    (delivery,) = queue.fetch_transactions(1)
    waiting = WaitingFetch(queue, 600.0)
    settle_all(queue, [delivery], Release())
    assert waiting.wait_for_ids() == ["a"]


@pytest.mark.parametrize("method_name", ["interrupt", "close"])
def test_interrupt_or_close_ends_a_waiting_fetch(queue, method_name):
    waiting = WaitingFetch(queue, 600.0)
    getattr(queue, method_name)()
    assert waiting.wait_for_ids() == []
    queue.dispatch(make_orders("a"))
    assert ids_of(queue.fetch_transactions(1, wait=600.0)) == ["a"]  # the next one is not ended


def test_a_waiting_fetch_returns_empty_after_its_wait(queue):
    assert list(queue.fetch_transactions(1, wait=0.01)) == []
    assert list(asyncio.run(queue.fetch_transactions_async(1, wait=0.01))) == []


@pytest.mark.parametrize("variant", ["sync", "async"])
def test_a_waiting_fetch_returns_a_delayed_transaction_when_it_is_due(variant):
    queue = MemoryConnector()
    queue.dispatch(make_orders("a"))
    settle_all(queue, queue.fetch_transactions(1), Defer(0.01))
    if variant == "sync":
        deliveries = queue.fetch_transactions(1, wait=600.0)
    else:
        deliveries = asyncio.run(queue.fetch_transactions_async(1, wait=600.0))
    assert ids_of(deliveries) == ["a"]


def test_an_async_wait_does_not_block_the_loop_and_is_woken_from_any_thread(queue):
    async def main():
        waiting = asyncio.create_task(queue.fetch_transactions_async(10, wait=600.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(queue.dispatch, make_orders("a"))
        return await asyncio.wait_for(waiting, 10.0)

    assert ids_of(asyncio.run(main())) == ["a"]


def test_close_ends_a_waiting_async_fetch(queue):
    async def main():
        waiting = asyncio.create_task(queue.fetch_transactions_async(10, wait=600.0))
        await asyncio.sleep(0)
        await queue.close_async()
        return await asyncio.wait_for(waiting, 10.0)

    assert list(asyncio.run(main())) == []


def test_a_cancelled_wait_claims_nothing_and_is_no_longer_notified(queue):
    async def main():
        waiting = asyncio.create_task(queue.fetch_transactions_async(10, wait=600.0))
        await asyncio.sleep(0)
        queue.dispatch(make_orders("a"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return waiting.cancelled()

    cancelled = asyncio.run(main())
    depth = queue.depth()
    assert cancelled
    assert (depth.ready, depth.in_flight) == (1, 0)
    assert queue._arrivals._callbacks == ()


# -- threads ------------------------------------------------------------------------------------------------


def test_many_threads_settle_every_message_once():
    queue, ack_counts, lock = MemoryConnector(), Counter(), threading.Lock()
    queue.dispatch(make_orders(*(f"{number}" for number in range(2000))))

    def work(seed):
        rng = random.Random(seed)
        while batch := queue.fetch_transactions(7):
            settlings = [(delivery, Ack() if rng.random() < 0.7 else Release()) for delivery in batch]
            for (delivery, settlement), result in zip(settlings, queue.settle(settlings), strict=True):
                assert result is SETTLED
                if isinstance(settlement, Ack):
                    with lock:
                        ack_counts[delivery.transaction.id] += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work(5)  # what the last of them released
    assert len(ack_counts) == 2000
    assert set(ack_counts.values()) == {1}


@pytest.mark.spec("CON-48")
def test_the_source_of_a_dispatched_transaction_defaults_to_its_queue():
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction(id="7"), Transaction(id="8", source="shop")])
    assert [delivery.transaction.source for delivery in queue.fetch_transactions(2)] == ["orders", "shop"]


# -- delayed dispatch -------------------------------------------------------------------------------


@pytest.mark.spec("CNN-09")
def test_a_delayed_dispatch_is_ready_at_its_time_and_never_before(clock):
    queue = MemoryConnector("orders", clock=clock, wall=clock)
    queue.dispatch(
        [
            Transaction(id="late", not_before=clock.now + 60),
            Transaction(id="now"),
            Transaction(id="past", not_before=1.0),
        ]
    )
    deliveries = queue.fetch_transactions(10)
    assert ids_of(deliveries) == ["now", "past"]
    queue.settle([(delivery, Ack()) for delivery in deliveries])
    assert queue.depth().delayed == 1
    clock.advance(60.0)
    assert queue.fetch_transactions(10) == []
    clock.advance(0.001)
    assert ids_of(queue.fetch_transactions(10)) == ["late"]


@pytest.mark.spec("CNN-08")
def test_a_replayed_or_replaced_dead_letter_is_due_at_once(clock):
    queue = MemoryConnector("orders", clock=clock, wall=clock)
    queue.dispatch([Transaction(id="a", not_before=clock.now + 1, priority=0)])
    clock.advance(2.0)
    (delivery,) = queue.fetch_transactions(1)
    assert delivery.transaction.not_before is not None
    for replay in (
        lambda record: queue.replay_dead([record.handle]),
        lambda record: queue.replace_dead(record.handle, record.transaction().replace(not_before=clock.now + 60)),
    ):
        queue.settle([(delivery, DeadLetter("why"))])
        (record,) = queue.dead_letters
        replay(record)
        (delivery,) = queue.fetch_transactions(1)
        assert delivery.transaction.not_before is None
