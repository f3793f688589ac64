"""Dead letters mean the same on every connector in memory and through both bridges."""

from __future__ import annotations

import asyncio

import pytest

from ergon_framework.connectors.base import AsyncConnector, Connector, ConnectorError, DeadLetter, Later, Release
from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, ReplayResult
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.memory_log import MemoryLog
from ergon_framework.connectors.side_store import MemorySideStore
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.failure import Attempt
from ergon_framework.transaction import Transaction
from tests.unit.connectors.test_contract import FLAVOURS, KINDS, Face
from tests.unit.connectors.worlds import Ear, ids, orders

EVERYTHING = DeadLetterQuery()


@pytest.fixture(params=[(kind, flavour) for kind in KINDS for flavour in FLAVOURS], ids=" ".join)
def face(request):
    face = Face(*request.param)
    face.open()
    yield face
    face.end()


def bury(face, *transactions, reason="bad"):
    face.dispatch(transactions)
    face.settle([(delivery, DeadLetter(reason)) for delivery in face.fetch_transactions(len(transactions))])


def became(results):
    return [(result.place, result.became) for result in results]


@pytest.mark.spec("CNN-08")
def test_dead_letters_are_listed_oldest_first_and_page_by_page(face):
    bury(face, *orders("a", "b", "c", "d", "e"))
    everything = face.list_dead(EVERYTHING)
    assert [record.id for record in everything] == ["a", "b", "c", "d", "e"]
    assert len({record.place for record in everything}) == 5
    pages, after = [], None
    while page := face.list_dead(EVERYTHING, after=after, limit=2):
        pages.append([record.id for record in page])
        after = page[-1].place
    assert pages == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.spec("CNN-08")
def test_a_page_goes_on_behind_a_place_that_is_gone(face):
    bury(face, *orders("a", "b", "c"))
    first, second, _ = face.list_dead(EVERYTHING)
    face.discard_dead([first.place, second.place])
    assert [record.id for record in face.list_dead(EVERYTHING, after=second.place)] == ["c"]


def test_pages_count_what_the_query_means(face):
    bury(face, *orders("a", "b"), reason="declined")
    bury(face, *orders("c", "d"), reason="late")
    query = DeadLetterQuery(reason="late")
    (first,) = face.list_dead(query, limit=1)
    assert first.id == "c"
    assert [record.id for record in face.list_dead(query, after=first.place, limit=1)] == ["d"]


@pytest.mark.spec("CNN-08")
def test_a_replay_keeps_who_it_is_and_forgets_what_counted_against_it(face):
    past = Attempt(attempt=0, category="SYSTEM", error="busy")
    bury(face, Transaction("a", {"n": 1}, correlation="basket", key="k", attempts=4, history=(past,)))
    (record,) = face.list_dead(EVERYTHING)
    assert became(face.replay_dead([record.place])) == [(record.place, Became.REPLAYED)]
    assert list(face.list_dead(EVERYTHING)) == []
    (again,) = face.fetch_transactions(9)
    got = again.transaction
    assert (got.id, got.source, got.correlation, got.key, got.payload) == ("a", "orders", "basket", "k", {"n": 1})
    assert (got.attempts, got.history, again.deliveries) == (0, (), 1)


@pytest.mark.spec("CNN-08")
def test_each_place_is_moved_once_and_answered_in_order(face):
    bury(face, *orders("a", "b", "c"))
    one, two, three = [record.place for record in face.list_dead(EVERYTHING)]
    assert became(face.replay_dead([two, "nowhere", two])) == [
        (two, Became.REPLAYED),
        ("nowhere", Became.GONE),
        (two, Became.GONE),
    ]
    assert became(face.discard_dead([one, two, one])) == [
        (one, Became.DISCARDED),
        (two, Became.GONE),
        (one, Became.GONE),
    ]
    assert [record.place for record in face.list_dead(EVERYTHING)] == [three]
    assert ids(face.fetch_transactions(9)) == ["b"]


def test_who_dies_again_has_a_new_place_behind_all_others(face):
    bury(face, *orders("a", "b"))
    old = face.list_dead(EVERYTHING)[0].place
    face.replay_dead([old])
    face.settle([(delivery, DeadLetter("again")) for delivery in face.fetch_transactions(1)])
    last = face.list_dead(EVERYTHING)[-1]
    assert (last.id, last.reason) == ("a", "again")
    assert last.place != old
    assert became(face.replay_dead([old])) == [(old, Became.GONE)]


def test_a_place_that_was_never_listed_is_no_start_of_a_page(face):
    for place in ("", "x", "-1", "²", str(2**63), "9" * 5000):
        with pytest.raises(ConnectorError, match="is no place"):
            face.list_dead(EVERYTHING, after=place)


def test_a_replay_wakes_who_waits(face):
    bury(face, *orders("a"))
    ear = Ear()
    face.connector.listen(ear)
    face.discard_dead(["nowhere"])
    face.replay_dead(["nowhere"])
    assert ear.wakes == 0
    face.replay_dead([face.list_dead(EVERYTHING)[0].place])
    assert ear.wakes == 1


@pytest.mark.parametrize("codec", [None, JsonCodec()])
def test_a_queue_knows_who_is_ready_delayed_or_in_flight(codec):
    queue = MemoryConnector("orders", codec=codec)
    queue.dispatch(orders("acked", "delayed", "dead", "held", "returned", "ready"))
    batch = queue.fetch_transactions(5)
    returned = batch.pop()
    queue.settle([(returned, Release()), (batch[1], Later(60.0)), (batch[2], DeadLetter("bad"))])
    queue.discard_dead([])
    every = {"acked", "delayed", "dead", "held", "returned", "ready", "other"}
    assert queue.queued(every) == {"acked", "delayed", "held", "returned", "ready"}
    assert queue.queued({"ready", "dead"}) == {"ready"}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_bridges_pass_on_who_is_queued(flavour):
    face = Face("queue", flavour)
    face.dispatch(orders("a"))
    assert set(face.queued(["a", "b"])) == {"a"}
    face.end()


def test_a_log_cannot_say_who_is_queued():
    log = MemoryLog("facts")
    assert log.queued(["a"]) is None
    assert asyncio.run(log.queued_async(["a"])) is None


def test_listing_the_dead_letters_of_a_log_takes_no_partition_over():
    log = MemoryLog("facts")
    log.open()
    bury(log, *orders("a"))
    log.dispatch(orders("b"))
    (held,) = log.fetch_transactions(1)
    other = MemoryLog("facts", records=log.records, side=log.side)
    assert became(other.replay_dead([other.list_dead(EVERYTHING)[0].place])) == [("1", Became.REPLAYED)]
    assert log.extend([held]) == [float("inf")]


def test_what_cannot_be_written_stays_a_dead_letter_and_says_why():
    queue = MemoryConnector("orders", codec=JsonCodec())
    bury(queue, Transaction("a", {"n": 1}), Transaction("b", {"n": 2}))
    first, second = queue.list_dead(EVERYTHING)
    first.payload["n"] = object()  # as a handler that changed what it was given
    failed, moved = queue.replay_dead([first.place, second.place])
    assert (failed.became, moved.became) == (Became.FAILED, Became.REPLAYED)
    assert "'a'" in failed.words
    assert [record.id for record in queue.list_dead(EVERYTHING)] == ["a"]
    assert ids(queue.fetch_transactions(9)) == ["b"]


class Down(MemorySideStore):
    down: str | None = None

    def exhume(self, place):
        if place == self.down:
            raise ConnectionLost("the side store is down")
        return super().exhume(place)


def test_a_side_store_that_fails_spoils_no_other_place():
    side = Down()
    log = MemoryLog("facts", side=side)
    bury(log, *orders("a", "b"))
    side.down = "1"
    assert log.discard_dead(["1", "2"]) == [
        ReplayResult("1", Became.FAILED, "the side store is down"),
        ReplayResult("2", Became.DISCARDED),
    ]
    # Appended before it is forgotten: doubled rather than lost.
    assert became(log.replay_dead(["1"])) == [("1", Became.FAILED)]
    assert ids(log.fetch_transactions(9)) == ["a"]
    assert [record.id for record in log.list_dead(EVERYTHING)] == ["a"]


class Forgetful(Connector, AsyncConnector):
    """Keeps no dead letters."""

    name = "orders"
    capabilities = fetch_transactions = settle = dispatch = None
    fetch_transactions_async = settle_async = dispatch_async = None


@pytest.mark.parametrize("call", ["list_dead", "replay_dead", "discard_dead"])
def test_a_connector_without_dead_letters_says_so_in_both_flavours(call):
    argument = EVERYTHING if call == "list_dead" else ["1"]
    with pytest.raises(ConfigurationError, match="'orders' keeps no dead letters"):
        getattr(Forgetful(), call)(argument)
    with pytest.raises(ConfigurationError, match="'orders' keeps no dead letters"):
        asyncio.run(getattr(Forgetful(), f"{call}_async")(argument))
