"""The promises of the contract, kept by every connector in memory and by both bridges."""

from __future__ import annotations

import asyncio

import pytest

from ergon_framework.connectors.base import (
    Ack,
    AsyncConnector,
    Capabilities,
    Connector,
    DeadLetter,
    Delivery,
    Later,
    Release,
    SettleResult,
)
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.memory_log import MemoryLog
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt
from ergon_framework.transaction import Transaction
from tests.unit.connectors.worlds import Clock, Ear, OnlyAsync, OnlySync, ids, orders

SETTLED, LOST = SettleResult.SETTLED, SettleResult.LOST

KINDS = {"queue": MemoryConnector, "log": MemoryLog}
FLAVOURS = ["sync", "async", "bridged to sync", "bridged to async"]


class Face:
    """One flavour of a connector, called by the plain names."""

    def __init__(self, kind, flavour):
        self.clock = Clock()
        inner = KINDS[kind]("orders", clock=self.clock)
        if flavour == "bridged to sync":
            self.connector = as_sync(OnlyAsync(inner))
        elif flavour == "bridged to async":
            self.connector = as_async(OnlySync(inner))
        else:
            self.connector = inner
        self.runner = asyncio.Runner() if flavour in ("async", "bridged to async") else None

    def __getattr__(self, name):
        if self.runner is None:
            return getattr(self.connector, name)
        method = getattr(self.connector, f"{name}_async")
        return lambda *args, **extra: self.runner.run(method(*args, **extra))

    def end(self):
        self.close()
        if self.runner is not None:
            self.runner.close()


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return request.param


@pytest.fixture(params=KINDS)
def face(request, flavour):
    face = Face(request.param, flavour)
    face.open()
    yield face
    face.end()


def test_it_has_the_flavour_that_was_asked_for(face, flavour):
    assert isinstance(face.connector, AsyncConnector if "async" in flavour else Connector)


def test_it_has_a_name_and_says_what_it_can_do(face):
    assert face.connector.name == "orders"
    assert isinstance(face.connector.capabilities, Capabilities)


def test_fetch_gives_at_most_a_batch_of_deliveries(face):
    face.dispatch(orders("a", "b", "c"))
    batch = face.fetch_transactions(2)
    assert all(isinstance(delivery, Delivery) for delivery in batch)
    assert ids(batch) == ["a", "b"]
    assert [delivery.deliveries for delivery in batch] == [1, 1]


def test_nothing_there_is_an_empty_answer_also_after_a_wait(face):
    assert list(face.fetch_transactions(2)) == []
    assert list(face.fetch_transactions(2, wait=0.01)) == []


@pytest.mark.spec("CNN-02")
def test_dispatch_confirms_one_by_one_in_order(face):
    confirmations = face.dispatch(orders("a", "b"))
    assert [confirmation.transaction_id for confirmation in confirmations] == ["a", "b"]


@pytest.mark.spec("CNN-03")
def test_a_transaction_arrives_as_it_was_sent(face):
    sent = Transaction("a", {"n": [1]}, source="shop", key="k", tenant="t", correlation="c", trace={"traceparent": "x"})
    face.dispatch([sent])
    assert face.fetch_transactions(1)[0].transaction == sent


def test_receipts_are_hashable_and_unique_per_delivery(face):
    face.dispatch(orders("a", "a", "b"))
    batch = face.fetch_transactions(3)
    assert len({delivery.receipt for delivery in batch}) == 3


@pytest.mark.spec("CNN-02")
def test_what_is_acked_never_comes_again(face):
    face.dispatch(orders("a"))
    assert list(face.settle([(face.fetch_transactions(1)[0], Ack())])) == [SETTLED]
    face.clock.advance(1e6)
    assert list(face.fetch_transactions(1)) == []


@pytest.mark.spec("CNN-01", "CNN-04")
def test_later_comes_again_after_its_delay_changed_and_uncounted(face):
    history = (Attempt(attempt=0, category=Category.SYSTEM),)
    face.dispatch(orders("a"))
    (delivery,) = face.fetch_transactions(1)
    assert list(face.settle([(delivery, Later(5.0, attempts=1, history=history))])) == [SETTLED]
    face.clock.advance(4.999)
    assert list(face.fetch_transactions(1)) == []
    face.clock.advance(0.001)
    (again,) = face.fetch_transactions(1)
    assert again.transaction == delivery.transaction.replace(attempts=1, history=history)
    assert again.deliveries == 1


@pytest.mark.spec("CNN-01", "CNN-04")
def test_a_release_comes_again_at_once_unchanged_and_uncounted(face):
    face.dispatch(orders("a", "b"))
    (delivery,) = face.fetch_transactions(1)
    assert list(face.settle([(delivery, Release())])) == [SETTLED]
    (again,) = face.fetch_transactions(1)
    assert (again.transaction, again.deliveries) == (delivery.transaction, 1)
    assert again.receipt is not None


@pytest.mark.spec("CNN-01")
def test_a_dead_letter_is_put_aside(face):
    face.dispatch(orders("a"))
    assert list(face.settle([(face.fetch_transactions(1)[0], DeadLetter("bad"))])) == [SETTLED]
    assert list(face.fetch_transactions(1)) == []
    assert face.depth().dead == 1


@pytest.mark.spec("CNN-13")
def test_settle_answers_each_in_order_and_one_spoils_no_other(face):
    face.dispatch(orders("a", "b", "c"))
    one, two, three = face.fetch_transactions(3)
    face.settle([(two, Ack())])
    assert list(face.settle([(one, Ack()), (two, Ack()), (three, Ack())])) == [SETTLED, LOST, SETTLED]
    assert list(face.settle([])) == []


@pytest.mark.spec("CNN-06")
def test_extend_answers_each_in_order(face):
    face.dispatch(orders("a", "b"))
    one, two = face.fetch_transactions(2)
    face.settle([(one, Ack())])
    gone, held = face.extend([one, two])
    assert gone is None
    assert held > face.clock.now


def test_depth_says_how_much_there_is(face):
    face.dispatch(orders("a", "b"))
    face.fetch_transactions(1)
    assert (face.depth().ready, face.depth().in_flight) == (1, 1)


def test_listeners_are_woken_until_they_leave(face):
    ear = Ear()
    unlisten = face.connector.listen(ear)
    face.dispatch(orders("a"))
    assert ear.wakes == 1
    unlisten()
    face.dispatch(orders("b"))
    assert ear.wakes == 1


def test_it_can_be_opened_again(face):
    face.dispatch(orders("a"))
    face.close()
    face.open()
    assert ids(face.fetch_transactions(1)) == ["a"]


# -- what the base classes give to those who have nothing to say -----------------------------------------------


class Plain(Connector, AsyncConnector):
    name = "plain"
    capabilities = None

    def fetch_transactions(self, batch_size, **extra): ...
    def settle(self, settlings): ...
    def dispatch(self, transactions): ...
    async def fetch_transactions_async(self, batch_size, **extra): ...
    async def settle_async(self, settlings): ...
    async def dispatch_async(self, transactions): ...


def test_a_connector_without_renewal_says_when_claims_end_and_never_that_they_are_gone():
    deliveries = [Delivery(Transaction("a"), 1, 1, 5.0), Delivery(Transaction("b"), 2)]
    assert Plain().extend(deliveries) == [5.0, float("inf")]
    assert asyncio.run(Plain().extend_async(deliveries)) == [5.0, float("inf")]


def test_a_connector_without_signals_or_depth_says_so():
    plain = Plain()
    plain.listen(Ear())()
    plain.open()
    plain.close()
    assert plain.depth() is None

    async def world():
        await plain.open_async()
        await plain.close_async()
        return await plain.depth_async()

    assert asyncio.run(world()) is None


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf")])
def test_a_delay_is_a_finite_time(delay):
    with pytest.raises(ValueError, match="delay"):
        Later(delay)
