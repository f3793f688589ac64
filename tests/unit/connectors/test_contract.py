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
    Defer,
    Delivery,
    Release,
    SettleResult,
)
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt
from ergon_framework.testing.memory_log import MemoryLog
from ergon_framework.transaction import Transaction
from tests.unit.connectors.harness import (
    ManualClock,
    OnlyAsync,
    OnlySync,
    RecordingListener,
    ids_of,
    make_orders,
)

SETTLED, LOST = SettleResult.SETTLED, SettleResult.LOST

CONNECTORS = {"queue": MemoryConnector, "log": MemoryLog}
VARIANTS = ["sync", "async", "bridged to sync", "bridged to async"]


class VariantAdapter:
    """One flavour of a connector, called by the plain names."""

    def __init__(self, kind, variant):
        self.clock = ManualClock()
        inner = CONNECTORS[kind]("orders", clock=self.clock)
        if variant == "bridged to sync":
            self.connector = as_sync(OnlyAsync(inner))
        elif variant == "bridged to async":
            self.connector = as_async(OnlySync(inner))
        else:
            self.connector = inner
        self.runner = asyncio.Runner() if variant in ("async", "bridged to async") else None

    def __getattr__(self, name):
        if self.runner is None:
            return getattr(self.connector, name)
        method = getattr(self.connector, f"{name}_async")
        return lambda *args, **extra: self.runner.run(method(*args, **extra))

    def shut_down(self):
        self.close()
        if self.runner is not None:
            self.runner.close()


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(params=CONNECTORS)
def adapter(request, variant):
    adapter = VariantAdapter(request.param, variant)
    adapter.open()
    yield adapter
    adapter.shut_down()


def test_a_connector_implements_the_requested_variant(adapter, variant):
    assert isinstance(adapter.connector, AsyncConnector if "async" in variant else Connector)


def test_a_connector_has_a_name_and_capabilities(adapter):
    assert adapter.connector.name == "orders"
    assert isinstance(adapter.connector.capabilities, Capabilities)


def test_fetch_returns_at_most_a_batch_of_deliveries(adapter):
    adapter.dispatch(make_orders("a", "b", "c"))
    batch = adapter.fetch_transactions(2)
    assert all(isinstance(delivery, Delivery) for delivery in batch)
    assert ids_of(batch) == ["a", "b"]
    assert [delivery.deliveries for delivery in batch] == [1, 1]


def test_fetch_from_an_empty_queue_returns_nothing_also_after_a_wait(adapter):
    assert list(adapter.fetch_transactions(2)) == []
    assert list(adapter.fetch_transactions(2, wait=0.01)) == []


@pytest.mark.spec("CNN-02")
def test_dispatch_confirms_one_by_one_in_order(adapter):
    confirmations = adapter.dispatch(make_orders("a", "b"))
    assert [confirmation.transaction_id for confirmation in confirmations] == ["a", "b"]


@pytest.mark.spec("CNN-03")
def test_a_transaction_arrives_as_it_was_sent(adapter):
    transaction = Transaction(
        {"n": [1]}, id="a", source="shop", key="k", tenant="t", correlation="c", trace={"traceparent": "x"}
    )
    adapter.dispatch([transaction])
    assert adapter.fetch_transactions(1)[0].transaction == transaction


def test_receipts_are_hashable_and_unique_per_delivery(adapter):
    adapter.dispatch(make_orders("a", "a", "b"))
    batch = adapter.fetch_transactions(3)
    assert len({delivery.receipt for delivery in batch}) == 3


@pytest.mark.spec("CNN-02")
def test_an_acked_transaction_is_never_redelivered(adapter):
    adapter.dispatch(make_orders("a"))
    assert list(adapter.settle([(adapter.fetch_transactions(1)[0], Ack())])) == [SETTLED]
    adapter.clock.advance(1e6)
    assert list(adapter.fetch_transactions(1)) == []


@pytest.mark.spec("CNN-01", "CNN-04")
def test_later_redelivers_after_its_delay_with_its_changes_and_uncounted(adapter):
    history = (Attempt(attempt=0, category=Category.SYSTEM),)
    adapter.dispatch(make_orders("a"))
    (delivery,) = adapter.fetch_transactions(1)
    assert list(adapter.settle([(delivery, Defer(5.0, attempts=1, history=history))])) == [SETTLED]
    adapter.clock.advance(4.999)
    assert list(adapter.fetch_transactions(1)) == []
    adapter.clock.advance(0.001)
    (redelivery,) = adapter.fetch_transactions(1)
    assert redelivery.transaction == delivery.transaction.replace(attempts=1, history=history)
    assert redelivery.deliveries == 1


@pytest.mark.spec("CNN-01", "CNN-04")
def test_release_redelivers_immediately_unchanged_and_uncounted(adapter):
    adapter.dispatch(make_orders("a", "b"))
    (delivery,) = adapter.fetch_transactions(1)
    assert list(adapter.settle([(delivery, Release())])) == [SETTLED]
    (redelivery,) = adapter.fetch_transactions(1)
    assert (redelivery.transaction, redelivery.deliveries) == (delivery.transaction, 1)
    assert redelivery.receipt is not None


@pytest.mark.spec("CNN-01")
def test_a_dead_letter_is_not_redelivered(adapter):
    adapter.dispatch(make_orders("a"))
    assert list(adapter.settle([(adapter.fetch_transactions(1)[0], DeadLetter("bad"))])) == [SETTLED]
    assert list(adapter.fetch_transactions(1)) == []
    assert adapter.depth().dead == 1


@pytest.mark.spec("CNN-13")
def test_settle_returns_results_in_order_and_one_loss_affects_no_other(adapter):
    adapter.dispatch(make_orders("a", "b", "c"))
    one, two, three = adapter.fetch_transactions(3)
    adapter.settle([(two, Ack())])
    assert list(adapter.settle([(one, Ack()), (two, Ack()), (three, Ack())])) == [SETTLED, LOST, SETTLED]
    assert list(adapter.settle([])) == []


@pytest.mark.spec("CNN-06")
def test_extend_returns_lease_ends_in_order(adapter):
    adapter.dispatch(make_orders("a", "b"))
    one, two = adapter.fetch_transactions(2)
    adapter.settle([(one, Ack())])
    lost, lease_end = adapter.extend([one, two])
    assert lost is None
    assert lease_end > adapter.clock.now


def test_depth_counts_ready_and_in_flight(adapter):
    adapter.dispatch(make_orders("a", "b"))
    adapter.fetch_transactions(1)
    assert (adapter.depth().ready, adapter.depth().in_flight) == (1, 1)


def test_listeners_are_woken_until_they_unsubscribe(adapter):
    listener = RecordingListener()
    unlisten = adapter.connector.listen(listener)
    adapter.dispatch(make_orders("a"))
    assert listener.wakes == 1
    unlisten()
    adapter.dispatch(make_orders("b"))
    assert listener.wakes == 1


def test_a_connector_can_be_reopened(adapter):
    adapter.dispatch(make_orders("a"))
    adapter.close()
    adapter.open()
    assert ids_of(adapter.fetch_transactions(1)) == ["a"]


# -- what the base classes give to those who have nothing to say -----------------------------------------------


class PlainConnector(Connector, AsyncConnector):
    name = "plain"
    capabilities = None

    def fetch_transactions(self, batch_size, **extra): ...
    def settle(self, requests): ...
    def dispatch(self, transactions): ...
    async def fetch_transactions_async(self, batch_size, **extra): ...
    async def settle_async(self, requests): ...
    async def dispatch_async(self, transactions): ...


def test_extend_without_renewal_returns_lease_ends_and_never_none():
    deliveries = [Delivery(Transaction(id="a"), 1, 1, 5.0), Delivery(Transaction(id="b"), 2)]
    assert PlainConnector().extend(deliveries) == [5.0, float("inf")]
    assert asyncio.run(PlainConnector().extend_async(deliveries)) == [5.0, float("inf")]


def test_a_connector_without_signals_or_depth_returns_no_depth():
    plain = PlainConnector()
    plain.listen(RecordingListener())()
    plain.open()
    plain.close()
    assert plain.depth() is None

    async def main():
        await plain.open_async()
        await plain.close_async()
        return await plain.depth_async()

    assert asyncio.run(main()) is None


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf")])
def test_a_delay_must_be_finite_and_not_negative(delay):
    with pytest.raises(ValueError, match="delay"):
        Defer(delay)
