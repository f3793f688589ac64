"""What the connector of facts does beyond the exam: foreign facts, epochs, and receipts that cannot be sent at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Later, SettleResult
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery
from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.errors import EpochChanged, FactConflict, InvalidFactError
from ergon_framework.facts.facts import Facts
from ergon_framework.facts.model import Cursor, Pair, Side
from ergon_framework.facts.side import MemoryFactSide
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.window import Window
from ergon_framework.transaction import Transaction
from tests.log_events import event_of

PAIR = Pair("Plant A", "Enterprise")


class Cut(MemoryBoundary):
    """A store to which receipts do not get through for a while."""

    cut = False

    def confirm_receipt(self, reader, pair, cursor):
        if self.cut:
            raise ConnectionLost("the line is down")
        super().confirm_receipt(reader, pair, cursor)


def connector(store, side=None, **given):
    return FactConnector(store, **PAIR._asdict(), side=side or MemoryFactSide(), **given)


def sent(count):
    return [Transaction(f"t-{number}", {"number": number}) for number in range(1, count + 1)]


@pytest.mark.spec("FAC-01")
def test_a_fact_of_somebody_else_is_a_transaction_too():
    store = MemoryBoundary()
    Facts(store, zone="Plant A").append(
        "Enterprise",
        subject="order:7",
        predicate="paid",
        object={"charge": "c-1"},
        message_id="m-1",
        labels={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "priority": "high"},
    )
    (delivery,) = connector(store).fetch_transactions(5)
    transaction = delivery.transaction
    assert (transaction.id, transaction.source) == ("m-1", "Plant A")
    assert transaction.payload == {"subject": "order:7", "predicate": "paid", "object": {"charge": "c-1"}}
    assert (transaction.type, transaction.key) == ("paid", "order:7")
    assert transaction.trace == {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


def test_labels_that_lie_make_no_other_transaction():
    store = MemoryBoundary()
    facts = Facts(store, zone="Plant A")
    for number, labels in enumerate(({"ergon-id": "other"}, {"ergon-id": "m-1", "ergon-attempts": "many"})):
        facts.append("Enterprise", subject="s", predicate="p", message_id=f"m-{number}", labels=labels)
    found = connector(store).fetch_transactions(5)
    assert [delivery.transaction.id for delivery in found] == ["m-0", "m-1"]
    assert all(delivery.error is None and delivery.transaction.type == "p" for delivery in found)


@pytest.mark.spec("FAC-03")
def test_dispatching_an_id_again_adds_nothing():
    store = MemoryBoundary()
    client = connector(store)
    first, second = (client.dispatch([Transaction("t-1", 7)])[0] for _ in range(2))
    assert (first.duplicate, second.duplicate) == (False, True)
    assert first.detail["offset"] == second.detail["offset"] == 1
    with pytest.raises(FactConflict):
        client.dispatch([Transaction("t-1", 8)])
    assert client.capabilities.once_per_id


def test_an_id_that_no_fact_can_have_is_refused_before_anything_is_sent():
    store = MemoryBoundary()
    with pytest.raises(InvalidFactError, match="beyond ±2"):
        connector(store).dispatch([Transaction("t-1", 1), Transaction("t-2", 2**60)])
    assert store.end_of(PAIR) is None


@pytest.mark.spec("FAC-16")
def test_a_receipt_that_does_not_get_through_is_sent_with_the_next_call():
    store = Cut()
    client = connector(store)
    client.dispatch(sent(3))
    one, two, three = client.fetch_transactions(3)
    store.cut = True
    assert client.settle([(one, Ack()), (two, Ack())]) == [SettleResult.SETTLED] * 2
    assert store.cursor_of("default", PAIR).offset == 0
    store.cut = False
    assert client.fetch_transactions(1) == []
    assert store.cursor_of("default", PAIR).offset == 2
    client.settle([(three, Ack())])
    assert store.cursor_of("default", PAIR).offset == 3


@pytest.mark.spec("FAC-16", "CNN-01")
def test_what_is_settled_out_of_order_comes_again_only_after_a_crash():
    store, side = MemoryBoundary(), MemoryFactSide()
    client = connector(store, side)
    client.dispatch(sent(3))
    _, two, _ = client.fetch_transactions(3)
    client.settle([(two, Ack())])
    assert store.cursor_of("default", PAIR).offset == 0
    crashed = connector(store, side)
    assert [each.transaction.id for each in crashed.fetch_transactions(5)] == ["t-1", "t-2", "t-3"]
    with pytest.raises(ConnectionLost, match="taken over"):
        client.fetch_transactions(1)
    heir = connector(store, side)
    _, two, _ = heir.fetch_transactions(3)
    heir.settle([(two, Ack())])
    heir.close()
    after = connector(store, side)
    assert [each.transaction.id for each in after.fetch_transactions(5)] == ["t-1", "t-3"]


@pytest.mark.spec("FAC-16", "CNN-01")
def test_what_could_not_be_confirmed_at_the_end_is_handed_over():
    store, side = Cut(), MemoryFactSide()
    client = connector(store, side)
    client.dispatch(sent(3))
    one, _, three = client.fetch_transactions(3)
    store.cut = True
    client.settle([(one, Ack()), (three, Ack())])
    client.close()
    store.cut = False
    heir = connector(store, side)
    (two,) = heir.fetch_transactions(5)
    assert two.transaction.id == "t-2"
    heir.settle([(two, Ack())])
    assert store.cursor_of("default", PAIR).offset == 3


@pytest.mark.spec("CNN-01")
def test_what_the_one_before_confirms_while_it_is_taken_over_does_not_come_again():
    class Slow(MemoryBoundary):
        meanwhile = None

        def cursor_of(self, reader, pair):
            found = super().cursor_of(reader, pair)
            act, self.meanwhile = self.meanwhile, None
            if act is not None:
                act()
            return found

    store, side = Slow(), MemoryFactSide()
    client = connector(store, side)
    client.dispatch(sent(2))
    (one,) = client.fetch_transactions(1)
    heir = connector(store, side)
    store.meanwhile = lambda: client.settle([(one, Ack())])
    assert [each.transaction.id for each in heir.fetch_transactions(5)] == ["t-2"]


def test_those_who_fetch_first_at_the_same_time_do_not_take_it_from_each_other():
    async def main():
        store = MemoryBoundary()
        client = AsyncFactConnector(store, **PAIR._asdict())
        gates = [asyncio.Event(), asyncio.Event()]
        inner, left = store.cursor_of_async, list(gates)

        async def slow(reader, pair):
            if left:
                await left.pop().wait()
            return await inner(reader, pair)

        client._log._calls = replace(client._log._calls, cursor_of=slow)
        await client.dispatch_async(sent(2))
        fetching = [asyncio.ensure_future(client.fetch_transactions_async(1)) for _ in range(2)]
        batches = []
        for gate in gates:
            await asyncio.sleep(0)
            gate.set()
            done, _ = await asyncio.wait(
                [each for each in fetching if each not in batches], return_when="FIRST_COMPLETED"
            )
            batches += done
        held = [delivery for batch in batches for delivery in batch.result()]
        return await client.settle_async([(delivery, Ack()) for delivery in held])

    assert asyncio.run(main()) == [SettleResult.SETTLED] * 2


@pytest.mark.spec("FAC-15")
def test_a_consumer_notices_that_its_store_was_put_back():
    store, side = MemoryBoundary(), MemoryFactSide()
    client = connector(store, side)
    client.dispatch(sent(2))
    client.settle([(each, Ack()) for each in client.fetch_transactions(2)])
    restored = store.restored()
    client = connector(restored, side)
    with pytest.raises(EpochChanged, match="put back from a backup"):
        client.fetch_transactions(1)
    side.epoch = None
    client.dispatch([Transaction("t-3")])
    assert [each.transaction.id for each in client.fetch_transactions(5)] == ["t-3"]


@pytest.mark.spec("FAC-15")
def test_what_is_said_of_facts_of_one_epoch_is_not_said_of_those_of_another():
    store, side = MemoryBoundary(), MemoryFactSide()
    client = connector(store, side)
    client.dispatch(sent(3))
    _, two, three = client.fetch_transactions(3)
    client.settle([(two, Later(60.0)), (three, Ack())])
    client.close()
    other = MemoryBoundary()
    client = connector(other, side)
    client.dispatch([Transaction(f"u-{number}") for number in range(1, 4)])
    assert side.forget_epoch() == 1
    assert [each.transaction.id for each in client.fetch_transactions(5)] == ["u-1", "u-2", "u-3"]
    assert [(record.id, record.reason) for record in client.list_dead(DeadLetterQuery())] == [("t-2", "epoch_changed")]


@pytest.mark.spec("FAC-15", "FAC-10")
def test_forwarded_facts_are_read_by_the_offsets_of_their_origin():
    origin, other = MemoryBoundary(), MemoryBoundary(side=Side.OUTER)
    client = connector(other)
    client.open()  # before the first fact has come
    connector(origin).dispatch(sent(2))
    other.forward_facts(origin.fetch_facts("peer", PAIR, 10))
    found = client.fetch_transactions(5)
    client.settle([(each, Ack()) for each in found])
    assert other.cursor_of("default", PAIR) == Cursor(origin.epoch, 2)


def test_a_dead_letter_that_somebody_else_replays_reaches_the_one_who_reads():
    store, side = MemoryBoundary(), MemoryFactSide()
    client = connector(store, side)
    client.dispatch(sent(1))
    client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    operator = connector(store, side)
    (record,) = operator.list_dead(DeadLetterQuery())
    assert [each.became for each in operator.replay_dead([record.place, record.place])] == [
        Became.REPLAYED,
        Became.GONE,
    ]
    (again,) = client.fetch_transactions(5)
    assert again.transaction.id == "t-1"
    client.settle([(again, Ack())])
    assert client.fetch_transactions(5) == []
    assert operator.list_dead(DeadLetterQuery()) == []


class Lasting(MemoryBoundary):
    """A store that says it outlives its process."""

    @property
    def capabilities(self):
        return replace(super().capabilities, durable=True)


def test_a_dead_letter_that_ends_with_the_process_before_its_fact_leaves_a_line_in_the_log(caplog):
    client = connector(Lasting(), reader="ledger")
    client.dispatch(sent(1))
    with caplog.at_level("WARNING"):
        client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    (record,) = caplog.records
    assert event_of(record) == "dead letter of a fact is in memory only"
    assert (record.queue, record.transaction, record.reason) == (client.name, "t-1", "odd")


def test_a_dead_letter_that_ends_together_with_its_fact_leaves_none(caplog):
    client = connector(MemoryBoundary())
    client.dispatch(sent(1))
    with caplog.at_level("WARNING"):
        client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    assert caplog.records == []
    assert len(client.list_dead(DeadLetterQuery())) == 1


def test_a_dead_letter_whose_fact_nobody_knows_stays_one():
    store, side = MemoryBoundary(), MemoryFactSide()
    client = connector(store, side)
    client.dispatch(sent(1))
    client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    store._ids.clear()
    (record,) = client.list_dead(DeadLetterQuery())
    (result,) = client.replay_dead([record.place])
    assert result.became is Became.FAILED
    assert "no longer knows the fact 't-1'" in result.words
    assert len(client.list_dead(DeadLetterQuery())) == 1


def test_two_loads_at_once_are_one():
    store = MemoryBoundary()
    connector(store).dispatch(sent(3))
    loaded = [(stored, stored.envelope.message_id) for stored in store.fetch_facts("r", PAIR, 10)]
    window = Window(1)
    window.add(loaded[:2])
    window.add(loaded)
    window.forget(1)
    window.add(loaded)  # one that came late
    assert (len(window), window.last) == (4, 3)
    assert [window[offset][0] for offset in (2, 3)] == ["t-2", "t-3"]
    assert window.since(1) is None
    assert [each[0] for each in window[0:10]] == ["t-2", "t-3"]


def test_what_was_put_off_waits_by_the_clock_of_the_day():
    now = [1000.0]
    store = MemoryBoundary()
    client = connector(store, wall=lambda: now[0])
    client.dispatch(sent(1))
    client.settle([(client.fetch_transactions(1)[0], Later(60.0))])
    assert client.fetch_transactions(1) == []
    assert client.depth().delayed == 1
    now[0] += 60
    assert [each.transaction.id for each in client.fetch_transactions(1)] == ["t-1"]


def test_a_fetch_that_is_cancelled_on_the_way_gives_back_what_it_took():
    class Slow(MemoryBoundary):
        slow = False

        async def fetch_facts_async(self, reader, pair, limit, *, after=None):
            if self.slow:
                await asyncio.sleep(60)
            return await super().fetch_facts_async(reader, pair, limit, after=after)

    async def main():
        store = Slow()
        client = AsyncFactConnector(store, **PAIR._asdict())
        await client.dispatch_async(sent(1))
        (delivery,) = await client.fetch_transactions_async(1)
        await client.settle_async([(delivery, Later(0.0))])
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


class Moody(MemoryFactSide):
    """A side store that fails from its n-th count on, for a while."""

    good = 0

    def count(self, place):
        self.good -= 1
        if self.good < 0:
            raise ConnectionLost("the side store is away")
        return super().count(place)

    def exhume(self, place):
        if self.good < 0:
            raise ConnectionLost("the side store is away")
        return super().exhume(place)


def test_what_a_failing_side_store_has_counted_reaches_somebody_and_the_rest_comes_later():
    store, side = MemoryBoundary(), Moody()
    client = connector(store, side)
    client.dispatch(sent(3))
    side.good = 1
    assert [each.transaction.id for each in client.fetch_transactions(3)] == ["t-1"]
    with pytest.raises(ConnectionLost, match="side store"):
        client.fetch_transactions(3)
    side.good = 9
    assert [each.transaction.id for each in client.fetch_transactions(3)] == ["t-2", "t-3"]


def test_a_replay_that_the_side_store_cannot_finish_says_so():
    store, side = MemoryBoundary(), Moody()
    side.good = 9
    client = connector(store, side)
    client.dispatch(sent(1))
    client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    (record,) = client.list_dead(DeadLetterQuery())
    side.good = -1
    (result,) = client.replay_dead([record.place])
    assert (result.became, "side store" in result.words) == (Became.FAILED, True)


def test_a_receipt_that_is_refused_is_no_outage():
    class Refuses(MemoryBoundary):
        def confirm_receipt(self, reader, pair, cursor):
            raise EpochChanged("another store")

    client = connector(Refuses())
    client.dispatch(sent(1))
    (one,) = client.fetch_transactions(1)
    with pytest.raises(EpochChanged):
        client.settle([(one, Ack())])


def test_nothing_can_be_settled_that_nobody_has_in_hand():
    store = MemoryBoundary()
    client = connector(store)
    client.dispatch(sent(1))
    (one,) = client.fetch_transactions(1)
    client.close()
    assert client.settle([(one, Ack())]) == [SettleResult.LOST]
    with pytest.raises(ConnectionLost, match="was closed"):
        client.fetch_transactions(1)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.fetch_transactions_async(1),
        lambda client: client.open_async(),
        lambda client: client.depth_async(),
        lambda client: client.dispatch_async(sent(1)),
        lambda client: client.replay_dead_async(["1"]),
    ],
    ids=["fetch", "open", "depth", "dispatch", "replay"],
)
def test_a_caller_who_is_cancelled_is_told_so_and_leaves_nothing_behind(call):
    class Hangs(MemoryBoundary):
        hangs = True

        async def hang(self):
            if self.hangs:
                await asyncio.sleep(60)

        async def cursor_of_async(self, reader, pair):
            await self.hang()
            return await super().cursor_of_async(reader, pair)

        async def append_facts_async(self, facts):
            await self.hang()
            return await super().append_facts_async(facts)

        async def get_fact_async(self, from_zone, message_id):
            await self.hang()
            return await super().get_fact_async(from_zone, message_id)

    async def main():
        store, side = Hangs(), MemoryFactSide()
        store.hangs = False
        client = AsyncFactConnector(store, **PAIR._asdict(), side=side)
        await client.dispatch_async(sent(2))
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
        heir = AsyncFactConnector(store, **PAIR._asdict(), side=side)
        found = await heir.fetch_transactions_async(5)
        return [(each.transaction.id, each.deliveries) for each in found], len(
            await heir.list_dead_async(DeadLetterQuery())
        )

    assert asyncio.run(main()) == ([("t-2", 1)], 1)
