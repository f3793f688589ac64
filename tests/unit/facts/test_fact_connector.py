"""The fact connector beyond the conformance suite: external facts, epochs, and receipts that are sent later."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.append import Facts
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.consumer_state import MemoryFactConsumerStore
from ergon_framework.facts.errors import EpochChanged, FactConflict, InvalidFactError
from ergon_framework.facts.fact_log import LoadedFacts
from ergon_framework.facts.model import BoundarySide, Cursor, ZonePair
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.transaction import Transaction
from tests.log_events import get_event

PAIR = ZonePair("Plant A", "Enterprise")


class StoreWithoutReceipts(MemoryBoundary):
    """A store to which receipts do not get through for a while."""

    cut = False

    def confirm_receipt(self, reader, pair, cursor):
        if self.cut:
            raise ConnectionLostError("the line is down")
        super().confirm_receipt(reader, pair, cursor)


def make_connector(store, side=None, **options):
    return FactConnector(store, **PAIR._asdict(), side=side or MemoryFactConsumerStore(), **options)


def make_transactions(count):
    return [Transaction({"number": number}, id=f"t-{number}") for number in range(1, count + 1)]


@pytest.mark.spec("FAC-01")
def test_a_third_party_fact_is_a_transaction_too():
    store = MemoryBoundary()
    Facts(store, zone="Plant A").append(
        "Enterprise",
        subject="order:7",
        predicate="paid",
        object={"charge": "c-1"},
        message_id="m-1",
        labels={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "priority": "high"},
    )
    (delivery,) = make_connector(store).fetch_transactions(5)
    transaction = delivery.transaction
    assert (transaction.id, transaction.source) == ("m-1", "Plant A")
    assert transaction.payload == {"subject": "order:7", "predicate": "paid", "object": {"charge": "c-1"}}
    assert (transaction.type, transaction.key) == ("paid", "order:7")
    assert transaction.trace == {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


def test_false_labels_do_not_change_the_transaction():
    store = MemoryBoundary()
    facts = Facts(store, zone="Plant A")
    for number, labels in enumerate(({"ergon-id": "other"}, {"ergon-id": "m-1", "ergon-attempts": "many"})):
        facts.append("Enterprise", subject="s", predicate="p", message_id=f"m-{number}", labels=labels)
    deliveries = make_connector(store).fetch_transactions(5)
    assert [delivery.transaction.id for delivery in deliveries] == ["m-0", "m-1"]
    assert all(delivery.error is None and delivery.transaction.type == "p" for delivery in deliveries)


@pytest.mark.spec("FAC-03")
def test_dispatching_an_id_again_adds_nothing():
    store = MemoryBoundary()
    client = make_connector(store)
    first, second = (client.dispatch([Transaction(7, id="t-1")])[0] for _ in range(2))
    assert (first.duplicate, second.duplicate) == (False, True)
    assert first.detail["offset"] == second.detail["offset"] == 1
    with pytest.raises(FactConflict):
        client.dispatch([Transaction(8, id="t-1")])
    assert client.capabilities.deduplicates_ids


def test_an_invalid_fact_is_rejected_before_any_fact_is_sent():
    store = MemoryBoundary()
    with pytest.raises(InvalidFactError, match="outside ±2"):
        make_connector(store).dispatch([Transaction(1, id="t-1"), Transaction(2**60, id="t-2")])
    assert store.last_offset(PAIR) is None


@pytest.mark.spec("FAC-16")
def test_an_unsent_receipt_is_sent_with_the_next_call():
    store = StoreWithoutReceipts()
    client = make_connector(store)
    client.dispatch(make_transactions(3))
    one, two, three = client.fetch_transactions(3)
    store.cut = True
    assert client.settle([(one, Ack()), (two, Ack())]) == [SettleResult.SETTLED] * 2
    assert store.get_cursor("default", PAIR).offset == 0
    store.cut = False
    assert client.fetch_transactions(1) == []
    assert store.get_cursor("default", PAIR).offset == 2
    client.settle([(three, Ack())])
    assert store.get_cursor("default", PAIR).offset == 3


@pytest.mark.spec("FAC-16", "CNN-01")
def test_deliveries_settled_out_of_order_are_redelivered_only_after_a_crash():
    store, side = MemoryBoundary(), MemoryFactConsumerStore()
    client = make_connector(store, side)
    client.dispatch(make_transactions(3))
    _, two, _ = client.fetch_transactions(3)
    client.settle([(two, Ack())])
    assert store.get_cursor("default", PAIR).offset == 0
    crashed = make_connector(store, side)
    assert [each.transaction.id for each in crashed.fetch_transactions(5)] == ["t-1", "t-2", "t-3"]
    with pytest.raises(ConnectionLostError, match="taken over"):
        client.fetch_transactions(1)
    successor = make_connector(store, side)
    _, two, _ = successor.fetch_transactions(3)
    successor.settle([(two, Ack())])
    successor.close()
    after = make_connector(store, side)
    assert [each.transaction.id for each in after.fetch_transactions(5)] == ["t-1", "t-3"]


@pytest.mark.spec("FAC-16", "CNN-01")
def test_unconfirmed_settlements_are_handed_over_at_close():
    store, side = StoreWithoutReceipts(), MemoryFactConsumerStore()
    client = make_connector(store, side)
    client.dispatch(make_transactions(3))
    one, _, three = client.fetch_transactions(3)
    store.cut = True
    client.settle([(one, Ack()), (three, Ack())])
    client.close()
    store.cut = False
    successor = make_connector(store, side)
    (two,) = successor.fetch_transactions(5)
    assert two.transaction.id == "t-2"
    successor.settle([(two, Ack())])
    assert store.get_cursor("default", PAIR).offset == 3


@pytest.mark.spec("CNN-01")
def test_a_delivery_confirmed_during_a_takeover_is_not_redelivered():
    class Slow(MemoryBoundary):
        meanwhile = None

        def get_cursor(self, reader, pair):
            cursor = super().get_cursor(reader, pair)
            act, self.meanwhile = self.meanwhile, None
            if act is not None:
                act()
            return cursor

    store, side = Slow(), MemoryFactConsumerStore()
    client = make_connector(store, side)
    client.dispatch(make_transactions(2))
    (one,) = client.fetch_transactions(1)
    successor = make_connector(store, side)
    store.meanwhile = lambda: client.settle([(one, Ack())])
    assert [each.transaction.id for each in successor.fetch_transactions(5)] == ["t-2"]


def test_concurrent_first_fetches_do_not_take_over_from_each_other():
    async def main():
        store = MemoryBoundary()
        client = AsyncFactConnector(store, **PAIR._asdict())
        gates = [asyncio.Event(), asyncio.Event()]
        inner, remaining = store.get_cursor_async, list(gates)

        async def wait_for_gate(reader, pair):
            if remaining:
                await remaining.pop().wait()
            return await inner(reader, pair)

        client._log._calls = replace(client._log._calls, get_cursor=wait_for_gate)
        await client.dispatch_async(make_transactions(2))
        fetching = [asyncio.ensure_future(client.fetch_transactions_async(1)) for _ in range(2)]
        batches = []
        for gate in gates:
            await asyncio.sleep(0)
            gate.set()
            done, _ = await asyncio.wait(
                [each for each in fetching if each not in batches], return_when="FIRST_COMPLETED"
            )
            batches += done
        deliveries = [delivery for batch in batches for delivery in batch.result()]
        return await client.settle_async([(delivery, Ack()) for delivery in deliveries])

    assert asyncio.run(main()) == [SettleResult.SETTLED] * 2


@pytest.mark.spec("FAC-15")
def test_a_consumer_detects_that_its_store_was_restored():
    store, side = MemoryBoundary(), MemoryFactConsumerStore()
    client = make_connector(store, side)
    client.dispatch(make_transactions(2))
    client.settle([(each, Ack()) for each in client.fetch_transactions(2)])
    restored = store.as_restored_backup()
    client = make_connector(restored, side)
    with pytest.raises(EpochChanged, match="restored from a backup"):
        client.fetch_transactions(1)
    side.epoch = None
    client.dispatch([Transaction(id="t-3")])
    assert [each.transaction.id for each in client.fetch_transactions(5)] == ["t-3"]


@pytest.mark.spec("FAC-15")
def test_the_state_of_one_epoch_does_not_apply_to_another():
    store, side = MemoryBoundary(), MemoryFactConsumerStore()
    client = make_connector(store, side)
    client.dispatch(make_transactions(3))
    _, two, three = client.fetch_transactions(3)
    client.settle([(two, Defer(60.0)), (three, Ack())])
    client.close()
    other = MemoryBoundary()
    client = make_connector(other, side)
    client.dispatch([Transaction(id=f"u-{number}") for number in range(1, 4)])
    assert side.forget_epoch() == 1
    assert [each.transaction.id for each in client.fetch_transactions(5)] == ["u-1", "u-2", "u-3"]
    assert [(record.id, record.reason) for record in client.list_dead(DeadLetterQuery())] == [("t-2", "epoch_changed")]


@pytest.mark.spec("FAC-15", "FAC-10")
def test_forwarded_facts_are_read_by_the_offsets_of_their_origin():
    origin, other = MemoryBoundary(), MemoryBoundary(side=BoundarySide.OUTER)
    client = make_connector(other)
    client.open()  # before the first fact has come
    make_connector(origin).dispatch(make_transactions(2))
    other.forward_facts(origin.fetch_facts("peer", PAIR, 10))
    deliveries = client.fetch_transactions(5)
    client.settle([(each, Ack()) for each in deliveries])
    assert other.get_cursor("default", PAIR) == Cursor(origin.epoch, 2)


def test_a_dead_letter_replayed_by_another_connector_reaches_the_reader():
    store, side = MemoryBoundary(), MemoryFactConsumerStore()
    client = make_connector(store, side)
    client.dispatch(make_transactions(1))
    client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    operator = make_connector(store, side)
    (record,) = operator.list_dead(DeadLetterQuery())
    assert [each.outcome for each in operator.replay_dead([record.handle, record.handle])] == [
        DeadLetterResult.REPLAYED,
        DeadLetterResult.GONE,
    ]
    (again,) = client.fetch_transactions(5)
    assert again.transaction.id == "t-1"
    client.settle([(again, Ack())])
    assert client.fetch_transactions(5) == []
    assert operator.list_dead(DeadLetterQuery()) == []


class DurableMemoryBoundary(MemoryBoundary):
    """A store that says it outlives its process."""

    @property
    def capabilities(self):
        return replace(super().capabilities, durable=True)


def test_a_dead_letter_less_durable_than_its_fact_is_logged(caplog):
    client = make_connector(DurableMemoryBoundary(), reader="ledger")
    client.dispatch(make_transactions(1))
    with caplog.at_level("WARNING"):
        client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    (record,) = caplog.records
    assert get_event(record) == "dead letter not durable"
    assert (record.queue, record.transaction_id, record.reason) == (client.name, "t-1", "odd")


def test_a_dead_letter_as_durable_as_its_fact_is_not_logged(caplog):
    client = make_connector(MemoryBoundary())
    client.dispatch(make_transactions(1))
    with caplog.at_level("WARNING"):
        client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    assert caplog.records == []
    assert len(client.list_dead(DeadLetterQuery())) == 1


def test_a_dead_letter_of_an_unknown_fact_is_not_removed():
    store, side = MemoryBoundary(), MemoryFactConsumerStore()
    client = make_connector(store, side)
    client.dispatch(make_transactions(1))
    client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    store._ids.clear()
    (record,) = client.list_dead(DeadLetterQuery())
    (result,) = client.replay_dead([record.handle])
    assert result.outcome is DeadLetterResult.FAILED
    assert "no longer knows the fact 't-1'" in result.message
    assert len(client.list_dead(DeadLetterQuery())) == 1


def test_concurrent_loads_are_merged():
    store = MemoryBoundary()
    make_connector(store).dispatch(make_transactions(3))
    facts = [(stored, stored.envelope.message_id) for stored in store.fetch_facts("r", PAIR, 10)]
    window = LoadedFacts(1)
    window.add(facts[:2])
    window.add(facts)
    window.forget(1)
    window.add(facts)  # one that came late
    assert (len(window), window.last) == (4, 3)
    assert [window[offset][0] for offset in (2, 3)] == ["t-2", "t-3"]
    assert window.stored_at(1) is None
    assert [each[0] for each in window[0:10]] == ["t-2", "t-3"]


def test_a_deferred_delivery_waits_by_the_wall_clock():
    now = [1000.0]
    store = MemoryBoundary()
    client = make_connector(store, wall=lambda: now[0])
    client.dispatch(make_transactions(1))
    client.settle([(client.fetch_transactions(1)[0], Defer(60.0))])
    assert client.fetch_transactions(1) == []
    assert client.depth().delayed == 1
    now[0] += 60
    assert [each.transaction.id for each in client.fetch_transactions(1)] == ["t-1"]


def test_a_cancelled_fetch_releases_its_deliveries():
    class Slow(MemoryBoundary):
        slow = False

        async def fetch_facts_async(self, reader, pair, limit, *, after=None):
            if self.slow:
                await asyncio.sleep(60)
            return await super().fetch_facts_async(reader, pair, limit, after=after)

    async def main():
        store = Slow()
        client = AsyncFactConnector(store, **PAIR._asdict())
        await client.dispatch_async(make_transactions(1))
        (delivery,) = await client.fetch_transactions_async(1)
        await client.settle_async([(delivery, Defer(0.0))])
        store.slow = True
        fetching = asyncio.ensure_future(client.fetch_transactions_async(2))
        await asyncio.sleep(0.01)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        store.slow = False
        (again,) = await client.fetch_transactions_async(2)
        return again.deliveries

    assert asyncio.run(main()) == 1


class FlakySideStore(MemoryFactConsumerStore):
    """A side store that fails from its n-th count on, for a while."""

    good = 0

    def increment(self, position):
        self.good -= 1
        if self.good < 0:
            raise ConnectionLostError("the side store is away")
        return super().increment(position)

    def remove_dead_letter(self, handle):
        if self.good < 0:
            raise ConnectionLostError("the side store is away")
        return super().remove_dead_letter(handle)


def test_deliveries_counted_before_a_failure_of_the_side_store_are_returned_first():
    store, side = MemoryBoundary(), FlakySideStore()
    client = make_connector(store, side)
    client.dispatch(make_transactions(3))
    side.good = 1
    assert [each.transaction.id for each in client.fetch_transactions(3)] == ["t-1"]
    with pytest.raises(ConnectionLostError, match="side store"):
        client.fetch_transactions(3)
    side.good = 9
    assert [each.transaction.id for each in client.fetch_transactions(3)] == ["t-2", "t-3"]


def test_a_replay_that_the_side_store_cannot_finish_is_reported_as_failed():
    store, side = MemoryBoundary(), FlakySideStore()
    side.good = 9
    client = make_connector(store, side)
    client.dispatch(make_transactions(1))
    client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    (record,) = client.list_dead(DeadLetterQuery())
    side.good = -1
    (result,) = client.replay_dead([record.handle])
    assert (result.outcome, "side store" in result.message) == (DeadLetterResult.FAILED, True)


def test_a_rejected_receipt_is_not_an_outage():
    class Refuses(MemoryBoundary):
        def confirm_receipt(self, reader, pair, cursor):
            raise EpochChanged("another store")

    client = make_connector(Refuses())
    client.dispatch(make_transactions(1))
    (one,) = client.fetch_transactions(1)
    with pytest.raises(EpochChanged):
        client.settle([(one, Ack())])


def test_a_released_delivery_cannot_be_settled():
    store = MemoryBoundary()
    client = make_connector(store)
    client.dispatch(make_transactions(1))
    (one,) = client.fetch_transactions(1)
    client.close()
    assert client.settle([(one, Ack())]) == [SettleResult.LOST]
    with pytest.raises(ConnectionLostError, match="is closed"):
        client.fetch_transactions(1)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.fetch_transactions_async(1),
        lambda client: client.open_async(),
        lambda client: client.depth_async(),
        lambda client: client.dispatch_async(make_transactions(1)),
        lambda client: client.replay_dead_async(["1"]),
    ],
    ids=["fetch", "open", "depth", "dispatch", "replay"],
)
def test_a_cancelled_call_raises_and_leaves_no_claim_behind(call):
    class Hangs(MemoryBoundary):
        hangs = True

        async def hang(self):
            if self.hangs:
                await asyncio.sleep(60)

        async def get_cursor_async(self, reader, pair):
            await self.hang()
            return await super().get_cursor_async(reader, pair)

        async def append_facts_async(self, facts):
            await self.hang()
            return await super().append_facts_async(facts)

        async def get_fact_async(self, from_zone, message_id):
            await self.hang()
            return await super().get_fact_async(from_zone, message_id)

    async def main():
        store, side = Hangs(), MemoryFactConsumerStore()
        store.hangs = False
        client = AsyncFactConnector(store, **PAIR._asdict(), side=side)
        await client.dispatch_async(make_transactions(2))
        (one,) = await client.fetch_transactions_async(1)
        await client.settle_async([(one, DeadLetter("odd"))])
        await client.close_async()
        client = AsyncFactConnector(store, **PAIR._asdict(), side=side)
        store.hangs = True
        calling = asyncio.ensure_future(call(client))
        await asyncio.sleep(0.01)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        store.hangs = False
        successor = AsyncFactConnector(store, **PAIR._asdict(), side=side)
        deliveries = await successor.fetch_transactions_async(5)
        return [(each.transaction.id, each.deliveries) for each in deliveries], len(
            await successor.list_dead_async(DeadLetterQuery())
        )

    assert asyncio.run(main()) == ([("t-2", 1)], 1)
