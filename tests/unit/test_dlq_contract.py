"""Dead letters mean the same on every connector in memory and through both bridges."""

from __future__ import annotations

import asyncio

import pytest

from ergon_framework.connectors.base import AsyncConnector, Connector, ConnectorError, DeadLetter, Defer, Release
from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult, ReplayResult
from ergon_framework.connectors.log_consumer import MemoryLogConsumerStore
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.failure import Attempt
from ergon_framework.testing.memory_log import MemoryLog
from ergon_framework.transaction import Transaction
from tests.unit.connectors.harness import RecordingListener, ids_of, make_orders
from tests.unit.connectors.test_contract import CONNECTORS, VARIANTS, VariantAdapter

ALL_DEAD_LETTERS = DeadLetterQuery()


@pytest.fixture(params=[(kind, flavour) for kind in CONNECTORS for flavour in VARIANTS], ids=" ".join)
def adapter(request):
    adapter = VariantAdapter(*request.param)
    adapter.open()
    yield adapter
    adapter.shut_down()


def add_dead_letters(adapter, *transactions, reason="bad"):
    adapter.dispatch(transactions)
    adapter.settle([(delivery, DeadLetter(reason)) for delivery in adapter.fetch_transactions(len(transactions))])


def list_outcomes(results):
    return [(result.handle, result.outcome) for result in results]


@pytest.mark.spec("CNN-08")
def test_dead_letters_are_listed_oldest_first_and_page_by_page(adapter):
    add_dead_letters(adapter, *make_orders("a", "b", "c", "d", "e"))
    everything = adapter.list_dead(ALL_DEAD_LETTERS)
    assert [record.id for record in everything] == ["a", "b", "c", "d", "e"]
    assert len({record.handle for record in everything}) == 5
    pages, after = [], None
    while page := adapter.list_dead(ALL_DEAD_LETTERS, after=after, limit=2):
        pages.append([record.id for record in page])
        after = page[-1].handle
    assert pages == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.spec("CNN-08")
def test_a_page_continues_after_a_removed_handle(adapter):
    add_dead_letters(adapter, *make_orders("a", "b", "c"))
    first, second, _ = adapter.list_dead(ALL_DEAD_LETTERS)
    adapter.discard_dead([first.handle, second.handle])
    assert [record.id for record in adapter.list_dead(ALL_DEAD_LETTERS, after=second.handle)] == ["c"]


def test_pages_contain_only_matches_of_the_query(adapter):
    add_dead_letters(adapter, *make_orders("a", "b"), reason="declined")
    add_dead_letters(adapter, *make_orders("c", "d"), reason="late")
    query = DeadLetterQuery(reason="late")
    (first,) = adapter.list_dead(query, limit=1)
    assert first.id == "c"
    assert [record.id for record in adapter.list_dead(query, after=first.handle, limit=1)] == ["d"]


@pytest.mark.spec("CNN-08")
def test_a_replay_keeps_the_identity_and_resets_the_attempts(adapter):
    earlier = Attempt(attempt=0, category="SYSTEM", error="busy")
    add_dead_letters(
        adapter, Transaction({"n": 1}, id="a", correlation="basket", key="k", attempts=4, history=(earlier,))
    )
    (record,) = adapter.list_dead(ALL_DEAD_LETTERS)
    assert list_outcomes(adapter.replay_dead([record.handle])) == [(record.handle, DeadLetterResult.REPLAYED)]
    assert list(adapter.list_dead(ALL_DEAD_LETTERS)) == []
    (redelivery,) = adapter.fetch_transactions(9)
    transaction = redelivery.transaction
    assert (transaction.id, transaction.source, transaction.correlation, transaction.key, transaction.payload) == (
        "a",
        "orders",
        "basket",
        "k",
        {"n": 1},
    )
    assert (transaction.attempts, transaction.history, redelivery.deliveries) == (0, (), 1)


@pytest.mark.spec("CNN-08")
def test_each_handle_is_moved_once_and_results_keep_the_order(adapter):
    add_dead_letters(adapter, *make_orders("a", "b", "c"))
    one, two, three = [record.handle for record in adapter.list_dead(ALL_DEAD_LETTERS)]
    assert list_outcomes(adapter.replay_dead([two, "nowhere", two])) == [
        (two, DeadLetterResult.REPLAYED),
        ("nowhere", DeadLetterResult.GONE),
        (two, DeadLetterResult.GONE),
    ]
    assert list_outcomes(adapter.discard_dead([one, two, one])) == [
        (one, DeadLetterResult.DISCARDED),
        (two, DeadLetterResult.GONE),
        (one, DeadLetterResult.GONE),
    ]
    assert [record.handle for record in adapter.list_dead(ALL_DEAD_LETTERS)] == [three]
    assert ids_of(adapter.fetch_transactions(9)) == ["b"]


def test_a_letter_that_is_dead_lettered_again_gets_a_new_handle_at_the_end(adapter):
    add_dead_letters(adapter, *make_orders("a", "b"))
    old = adapter.list_dead(ALL_DEAD_LETTERS)[0].handle
    adapter.replay_dead([old])
    adapter.settle([(delivery, DeadLetter("again")) for delivery in adapter.fetch_transactions(1)])
    last = adapter.list_dead(ALL_DEAD_LETTERS)[-1]
    assert (last.id, last.reason) == ("a", "again")
    assert last.handle != old
    assert list_outcomes(adapter.replay_dead([old])) == [(old, DeadLetterResult.GONE)]


def test_an_invalid_handle_cannot_start_a_page(adapter):
    for handle in ("", "x", "-1", "²", str(2**63), "9" * 5000):
        with pytest.raises(ConnectorError, match="is not the handle"):
            adapter.list_dead(ALL_DEAD_LETTERS, after=handle)


def test_a_replay_notifies_listeners(adapter):
    add_dead_letters(adapter, *make_orders("a"))
    listener = RecordingListener()
    adapter.connector.listen(listener)
    adapter.discard_dead(["nowhere"])
    adapter.replay_dead(["nowhere"])
    assert listener.wakes == 0
    adapter.replay_dead([adapter.list_dead(ALL_DEAD_LETTERS)[0].handle])
    assert listener.wakes == 1


@pytest.mark.parametrize("codec", [None, JsonCodec()])
def test_a_queue_reports_which_ids_are_ready_delayed_or_in_flight(codec):
    queue = MemoryConnector("orders", codec=codec)
    queue.dispatch(make_orders("acked", "delayed", "dead", "held", "returned", "ready"))
    batch = queue.fetch_transactions(5)
    returned = batch.pop()
    queue.settle([(returned, Release()), (batch[1], Defer(60.0)), (batch[2], DeadLetter("bad"))])
    queue.discard_dead([])
    all_ids = {"acked", "delayed", "dead", "held", "returned", "ready", "other"}
    assert queue.find_queued(all_ids) == {"acked", "delayed", "held", "returned", "ready"}
    assert queue.find_queued({"ready", "dead"}) == {"ready"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bridges_forward_the_queued_ids(variant):
    adapter = VariantAdapter("queue", variant)
    adapter.dispatch(make_orders("a"))
    assert set(adapter.find_queued(["a", "b"])) == {"a"}
    adapter.shut_down()


def test_a_log_cannot_report_queued_ids():
    log = MemoryLog("facts")
    assert log.find_queued(["a"]) is None
    assert asyncio.run(log.find_queued_async(["a"])) is None


def test_listing_the_dead_letters_of_a_log_takes_no_partition_over():
    log = MemoryLog("facts")
    log.open()
    add_dead_letters(log, *make_orders("a"))
    log.dispatch(make_orders("b"))
    (delivery,) = log.fetch_transactions(1)
    other = MemoryLog("facts", records=log.records, store=log.store)
    assert list_outcomes(other.replay_dead([other.list_dead(ALL_DEAD_LETTERS)[0].handle])) == [
        ("1", DeadLetterResult.REPLAYED)
    ]
    assert log.extend([delivery]) == [float("inf")]


def test_a_letter_that_cannot_be_written_stays_dead_and_the_result_says_why():
    queue = MemoryConnector("orders", codec=JsonCodec())
    add_dead_letters(queue, Transaction({"n": 1}, id="a"), Transaction({"n": 2}, id="b"))
    first, second = queue.list_dead(ALL_DEAD_LETTERS)
    first.payload["n"] = object()  # as a handler that changed its payload
    failed, moved = queue.replay_dead([first.handle, second.handle])
    assert (failed.outcome, moved.outcome) == (DeadLetterResult.FAILED, DeadLetterResult.REPLAYED)
    assert "'a'" in failed.message
    assert [record.id for record in queue.list_dead(ALL_DEAD_LETTERS)] == ["a"]
    assert ids_of(queue.fetch_transactions(9)) == ["b"]


class FailingSideStore(MemoryLogConsumerStore):
    failing_handle: str | None = None

    def remove_dead_letter(self, handle):
        if handle == self.failing_handle:
            raise ConnectionLostError("the side store is down")
        return super().remove_dead_letter(handle)


def test_a_side_store_that_fails_affects_no_other_handle():
    side = FailingSideStore()
    log = MemoryLog("facts", store=side)
    add_dead_letters(log, *make_orders("a", "b"))
    side.failing_handle = "1"
    assert log.discard_dead(["1", "2"]) == [
        ReplayResult("1", DeadLetterResult.FAILED, "the side store is down"),
        ReplayResult("2", DeadLetterResult.DISCARDED),
    ]
    # Appended before it is removed: doubled rather than lost.
    assert list_outcomes(log.replay_dead(["1"])) == [("1", DeadLetterResult.FAILED)]
    assert ids_of(log.fetch_transactions(9)) == ["a"]
    assert [record.id for record in log.list_dead(ALL_DEAD_LETTERS)] == ["a"]


class NoDeadLettersConnector(Connector, AsyncConnector):
    """A queue that keeps no dead letters."""

    name = "orders"
    capabilities = fetch_transactions = settle = dispatch = None
    fetch_transactions_async = settle_async = dispatch_async = None


@pytest.mark.parametrize("call", ["list_dead", "replay_dead", "discard_dead"])
def test_a_connector_without_dead_letters_raises_in_both_variants(call):
    argument = ALL_DEAD_LETTERS if call == "list_dead" else ["1"]
    with pytest.raises(ConfigurationError, match="'orders' keeps no dead letters"):
        getattr(NoDeadLettersConnector(), call)(argument)
    with pytest.raises(ConfigurationError, match="'orders' keeps no dead letters"):
        asyncio.run(getattr(NoDeadLettersConnector(), f"{call}_async")(argument))
