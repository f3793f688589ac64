"""Publishing facts: FAC-05, 06, 09, 12, 25 and what a handler and a producer see of them, in both variants."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import Category, ConfigurationError, ConnectionLost
from ergon_framework.facts.blob import Blob
from ergon_framework.facts.boundary import CHUNK
from ergon_framework.facts.errors import (
    BufferFull,
    FactConflict,
    InvalidFactError,
    PublishError,
)
from ergon_framework.facts.facts import AsyncFacts, Facts
from ergon_framework.facts.identity import business_id
from ergon_framework.facts.model import Pair
from ergon_framework.facts.policy import AppendRetry, FactProducerPolicy
from ergon_framework.facts.publish import Upload
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.scope import Scope
from ergon_framework.task.decorators import consumer
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.report import Kind
from ergon_framework.transaction import Transaction
from tests.twins.stating import DOWN, LOST, once, produce, producer, tell

PAIR = Pair("Plant A", "Enterprise")
#: The moments of the first attempt and of all that follow it, and how many there are.
SCHEDULE = [0.0, 0.1, 0.3, 0.7, *(1.7 + second for second in range(9))]
ORDER = Transaction("order-7", {}, source="orders", correlation="process-1", created_at=1_700_000_000.5)


def below(transaction=ORDER, attempt=0, seconds=None):
    return lambda clock: Scope(transaction, "process", attempt, None if seconds is None else clock() + seconds, clock)


def upload(content=b"the order", key="orders/7.pdf"):
    return Upload("files", key, Blob.of(content), media_type="application/pdf")


def stored(store):
    return store.fetch_facts("test", PAIR, 1000)


# -- the schedule ----------------------------------------------------------------------------------


@pytest.mark.spec("FAC-05")
def test_an_append_is_tried_again_after_100_200_and_400_ms_and_then_once_a_second(flavour):
    told, store, _ = once(flavour, append=[DOWN] * 12)
    assert told.offset == 1
    assert store.times("append") == pytest.approx(SCHEDULE)


@pytest.mark.spec("FAC-05")
def test_after_ten_seconds_it_is_given_up_and_nobody_above_tries_again(flavour):
    told, store, over = once(flavour, append=[DOWN] * 100)
    assert isinstance(told, PublishError)
    assert told.final
    assert told.code == "connection_lost"
    assert isinstance(told.__cause__, ConnectionLost)
    assert store.times("append") == pytest.approx(SCHEDULE)
    assert over == pytest.approx(9.7)
    assert "append_fact failed 13 times" in str(told)


@pytest.mark.spec("FAC-05")
def test_the_strict_form_tries_again_three_times(flavour):
    told, store, _ = once(flavour, append=[DOWN] * 100, max_retries=3)
    assert isinstance(told, PublishError)
    assert store.times("append") == pytest.approx([0.0, 0.1, 0.3, 0.7])


@pytest.mark.spec("FAC-05")
def test_every_attempt_has_the_same_id_and_payload(flavour):
    _, store, _ = once(flavour, append=[DOWN, LOST, DOWN], stated={"object": {"total": 12.5}})
    first, *others = store.given("append")
    assert len(others) == 3
    assert all(other == first for other in others)


@pytest.mark.spec("FAC-05", "FAC-25")
def test_an_answer_that_gets_lost_doubles_nothing(flavour):
    told, store, _ = once(flavour, append=[LOST, LOST])
    assert (told.offset, told.duplicate) == (1, True)
    assert len(stored(store)) == 1


def test_without_retries_the_error_comes_out_as_it_is(flavour):
    told, store, _ = once(flavour, append=[DOWN], max_retries=0)
    assert told is DOWN
    assert len(store.calls) == 1


def test_a_stranger_s_error_is_tried_again(flavour):
    told, store, _ = once(flavour, append=[OSError("reset"), TimeoutError("slow")])
    assert told.offset == 1
    assert len(store.calls) == 3


@pytest.mark.spec("FAC-13")
def test_a_conflict_is_never_tried_again(flavour):
    def story(store):
        first = yield {"subject": "s", "predicate": "p", "object": 1, "message_id": "m"}
        second = yield {"subject": "s", "predicate": "p", "object": 2, "message_id": "m"}
        return first, second

    (first, second), store, over = tell(flavour, story)
    assert first.offset == 1
    assert isinstance(second, FactConflict)
    assert (len(store.calls), over) == (2, 0.0)


@pytest.mark.spec("FAC-16")
def test_a_full_buffer_is_told_at_once_and_costs_no_attempt(flavour):
    told, store, over = once(flavour, append=[BufferFull("no room")] * 5)
    assert isinstance(told, BufferFull)
    assert (told.later, told.final, told.category) == (True, False, Category.SYSTEM)
    assert (len(store.calls), over) == (1, 0.0)


def test_what_the_store_asks_to_wait_is_waited(flavour):
    told, store, _ = once(flavour, append=[ConnectionLost("busy", retry_after=2.5)])
    assert told.offset == 1
    assert store.times("append") == pytest.approx([0.0, 2.5])


# -- artifacts -------------------------------------------------------------------------------------


@pytest.mark.spec("FAC-05")
def test_the_artifact_is_stored_before_its_fact(flavour):
    told, store, _ = once(flavour, stated={"artifact": upload()})
    assert store.names == ["put", "append"]
    (fact,) = stored(store)
    reference = fact.fact.artifact
    assert (reference.bucket, reference.key, reference.size) == ("files", "orders/7.pdf", 9)
    assert reference.media_type == "application/pdf"
    assert b"".join(store.get_object("files", "orders/7.pdf")) == b"the order"
    assert told.offset == 1


@pytest.mark.spec("FAC-06")
def test_a_failed_upload_is_tried_again_with_the_same_bytes(flavour):
    _, store, _ = once(flavour, stated={"artifact": upload()}, put=[DOWN, LOST])
    assert store.names == ["put", "put", "put", "append"]
    assert store.given("put") == [("files", "orders/7.pdf", b"the order")] * 3
    assert store.times("put") == pytest.approx([0.0, 0.1, 0.3])


@pytest.mark.spec("FAC-06")
def test_after_a_failed_upload_no_fact_is_appended(flavour):
    told, store, _ = once(flavour, stated={"artifact": upload()}, put=[DOWN] * 100)
    assert isinstance(told, PublishError)
    assert set(store.names) == {"put"}
    assert stored(store) == []


@pytest.mark.spec("FAC-05", "FAC-06")
def test_a_stored_artifact_is_not_stored_again_for_the_sake_of_its_fact(flavour):
    _, store, _ = once(flavour, stated={"artifact": upload()}, append=[DOWN, DOWN])
    assert store.names == ["put", "append", "append", "append"]


@pytest.mark.spec("FAC-12")
def test_a_correction_is_a_new_artifact_and_a_fact_that_links_the_two(flavour):
    def story(store):
        stated = {"subject": "order:7", "predicate": "has_file"}
        yield stated | {"message_id": "m-1", "artifact": upload()}
        refused = yield stated | {"message_id": "m-2", "artifact": upload(b"corrected")}
        yield stated | {"message_id": "m-3", "artifact": upload(b"corrected", "orders/7-v2.pdf")}
        old, new = (fact.fact.object for fact in stored(store))
        yield {"subject": "order:7", "predicate": "corrects", "message_id": "m-4", "object": {"old": old, "new": new}}
        return refused

    refused, store, _ = tell(flavour, story)
    assert refused.code == "artifact_conflict"
    assert [fact.fact.predicate for fact in stored(store)] == ["has_file", "has_file", "corrects"]
    assert stored(store)[2].fact.artifact is None


def test_an_upload_that_can_be_read_only_once_is_refused(flavour):
    with pytest.raises(InvalidFactError, match="can be read only once"):
        Upload("files", "a", iter([b"x"]))


def test_a_fact_has_an_object_or_an_artifact(flavour):
    told, store, _ = once(flavour, stated={"artifact": upload(), "object": 1})
    assert isinstance(told, InvalidFactError)
    assert store.calls == []


def test_a_file_is_read_in_pieces_and_from_its_beginning_each_time(flavour, tmp_path):
    path = tmp_path / "big"
    path.write_bytes(b"x" * (CHUNK + 1))
    blob = Blob.file(path)
    assert [len(piece) for piece in blob] == [len(piece) for piece in blob] == [CHUNK, 1]
    assert [len(piece) for piece in Blob.of(b"x" * (CHUNK + 1))] == [CHUNK, 1]
    told, store, _ = once(flavour, stated={"artifact": Upload("files", "big", blob)}, put=[DOWN])
    assert told.offset == 1
    assert stored(store)[0].fact.artifact.size == CHUNK + 1


# -- below a handler -------------------------------------------------------------------------------


@pytest.mark.spec("FAC-25")
def test_below_a_handler_everything_comes_from_the_transaction(flavour):
    def story(store):
        yield {"subject": "order:7", "predicate": "paid"}

    _, store, _ = tell(flavour, story, below=below())
    (fact,) = stored(store)
    assert fact.envelope.message_id == ORDER.derive("Enterprise/order:7/paid")
    assert fact.envelope.produced_at_unix_ms == 1_700_000_000_500
    assert (fact.envelope.correlation_id, fact.envelope.causation_id) == ("process-1", "order-7")
    assert fact.envelope.from_zone == "Plant A"


@pytest.mark.spec("FAC-25")
def test_a_second_fact_of_one_name_needs_a_name_of_its_own(flavour):
    def story(store):
        stated = {"subject": "order:7", "predicate": "paid"}
        yield stated
        refused = yield stated
        yield stated | {"name": "second payment"}
        return refused

    refused, store, _ = tell(flavour, story, below=below())
    assert isinstance(refused, ConfigurationError)
    assert "name=" in str(refused)
    assert [fact.envelope.message_id for fact in stored(store)] == [
        ORDER.derive("Enterprise/order:7/paid"),
        ORDER.derive("second payment"),
    ]


def test_outside_a_handler_an_id_has_to_be_given(flavour):
    told, store, _ = once(flavour, stated={"message_id": None})
    assert isinstance(told, ConfigurationError)
    assert "business_id" in str(told)
    told, store, _ = once(flavour, stated={"message_id": business_id("order", "7", "paid"), "labels": {"a": "b"}})
    assert dict(stored(store)[0].envelope.labels) == {"a": "b"}
    assert stored(store)[0].envelope.produced_at_unix_ms == 1_700_000_000_000


@pytest.mark.spec("DX-40")
def test_correlation_and_time_of_production_can_be_given(flavour):
    given = {"correlation_id": "shipment-9", "produced_at": datetime(2026, 3, 6, 12, 30, tzinfo=UTC)}
    _, store, _ = once(flavour, stated=given)
    envelope = stored(store)[0].envelope
    assert (envelope.correlation_id, envelope.produced_at_unix_ms) == ("shipment-9", 1_772_800_200_000)

    def story(store):
        yield {"subject": "order:7", "predicate": "paid"} | given

    _, store, _ = tell(flavour, story, below=below())
    assert stored(store)[0].envelope.correlation_id == "shipment-9"


@pytest.mark.spec("DX-40")
def test_a_time_of_production_without_a_time_zone_is_refused(flavour):
    error, store, _ = once(flavour, stated={"produced_at": datetime(2026, 3, 6, 12, 30)})  # noqa: DTZ001 - the point
    assert isinstance(error, ConfigurationError)
    assert "2026-03-06T12:30:00 has no time zone" in str(error)
    assert store.names == []


@pytest.mark.spec("DX-40")
def test_an_upload_takes_bytes(flavour):
    _, store, _ = once(flavour, stated={"artifact": Upload("files", "orders/7.pdf", b"the order")}, put=[DOWN])
    assert b"".join(store.get_object("files", "orders/7.pdf")) == b"the order"


def test_the_deadline_of_the_handler_ends_the_attempts(flavour):
    def story(store):
        return (yield {"subject": "order:7", "predicate": "paid"})

    told, store, over = tell(flavour, story, below=below(seconds=0.5), append=[DOWN] * 100)
    assert isinstance(told, PublishError)
    assert store.times("append") == pytest.approx([0.0, 0.1, 0.3])
    assert over < 0.5


@pytest.mark.spec("FAC-25")
def test_a_handler_that_fails_after_its_append_appends_once(flavour):
    store, report, runs = consumed(flavour, fail_first=True)
    assert report.counts["succeeded"] == 1
    assert len(runs) == 2
    assert [fact.offset for fact in stored(store)] == [1]


@pytest.mark.spec("FAC-16")
def test_a_handler_that_meets_a_full_buffer_comes_later_and_loses_no_attempt(flavour):
    store, report, runs = consumed(flavour, max_facts=0)
    assert report.counts["deferred"] == 1
    assert len(runs) == 0
    assert stored(store) == []


@pytest.mark.spec("DX-41", "FAC-05")
def test_a_handler_that_meets_an_unavailable_boundary_is_deferred_until_it_is_back(flavour):
    boundary = Unavailable(calls=6)
    loop = {"streaming": True, "timeout": 30.0, "limit": 4, "max_deliveries": 1}
    store, report, runs = consumed(flavour, boundary=boundary, max_retries=1, loop=loop)
    # Two calls for each delivery: three deliveries find the boundary away, the fourth one appends.
    assert (report.counts["deferred"], report.counts["succeeded"], len(runs)) == (3, 1, 1)
    assert [fact.offset for fact in stored(store)] == [1]
    assert boundary.calls == 0


class Unavailable(MemoryBoundary):
    """A boundary that cannot be reached for the first *calls* calls."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def append_facts(self, facts):
        if self.calls:
            self.calls -= 1
            raise ConnectionLost("AppendFact has no answer, UNAVAILABLE")
        return super().append_facts(facts)


def consumed(flavour, *, fail_first=False, boundary=None, max_retries=None, loop=None, **store):
    """One order through a consumer that appends a fact; the store, the report, and the runs that came that far."""
    boundary, orders, runs = boundary or MemoryBoundary(**store), MemoryConnector("orders"), []
    orders.dispatch([orders.transaction({}, id="order-7")])
    stated = {"subject": "order:7", "predicate": "paid"}

    def appended():
        runs.append("appended")
        if fail_first and len(runs) == 1:
            raise ConnectionError("lost right after the append")

    if flavour == "threads":
        facts = Facts(boundary, zone="Plant A", max_retries=max_retries)

        @consumer(orders)
        def handle(order):
            facts.append("Enterprise", **stated)
            appended()

    else:
        async_facts = AsyncFacts(boundary, zone="Plant A", max_retries=max_retries)

        @consumer(orders)
        async def handle(order):
            await async_facts.append("Enterprise", **stated)
            appended()

    rules = {"loop": loop or {}, "steps": {"process": {"retry": {"backoff": 0.0}}}}
    made = handle.consume_transactions(ConsumerPolicy.load(rules))
    return boundary, made if flavour == "threads" else asyncio.run(made), runs


# -- the producer ----------------------------------------------------------------------------------


def facts_of(count):
    return [
        Transaction(
            f"t-{number}",
            {"subject": f"order:{number}", "predicate": "paid", "object": {"number": number}},
            created_at=1_700_000_000 + number,
            correlation="process-1",
        )
        for number in range(count)
    ]


@pytest.mark.spec("FAC-05")
def test_a_producer_tries_again_by_the_policy_of_its_produce_step(flavour):
    report, store = produce(flavour, facts_of(1), append=[DOWN] * 12)
    (outcome,) = report.outcomes
    assert (outcome.kind, outcome.attempts, outcome.result.offset) == (Kind.SUCCEEDED, 13, 1)
    assert store.times("append") == pytest.approx(SCHEDULE)


@pytest.mark.spec("FAC-05")
def test_there_is_no_second_loop_below_the_producer(flavour):
    report, store = produce(flavour, facts_of(1), append=[DOWN] * 100)
    (outcome,) = report.outcomes
    assert (outcome.kind, outcome.attempts) == (Kind.FAILED, 13)
    assert len(store.times("append")) == 13


@pytest.mark.spec("FAC-05")
def test_the_policy_of_the_user_is_the_one_that_holds(flavour):
    policy = FactProducerPolicy.load({"steps": {"produce": {"retry": {"max_attempts": 4}}}})
    _, store = produce(flavour, facts_of(1), policy=policy, append=[DOWN] * 100)
    assert store.times("append") == pytest.approx([0.0, 0.1, 0.3, 0.7])


@pytest.mark.spec("FAC-09")
def test_after_a_failed_attempt_the_producer_asks_before_it_appends(flavour):
    report, store = produce(flavour, facts_of(1), append=[LOST])
    assert store.names == ["append", "get"]
    (outcome,) = report.outcomes
    assert (outcome.result.offset, outcome.result.duplicate) == (1, True)
    report, store = produce(flavour, facts_of(1), append=[DOWN])
    assert store.names == ["append", "get", "append"]


@pytest.mark.spec("FAC-09")
def test_a_producer_that_goes_on_after_a_crash_asks_first(flavour):
    kind = producer(flavour, asks=True)
    _, store = produce(flavour, facts_of(1), kind=kind)
    assert store.names == ["get", "append"]
    report, _ = produce(flavour, facts_of(1), kind=kind, store=store)
    assert store.names == ["get", "append", "get"]
    assert report.outcomes[0].result.offset == 1


@pytest.mark.spec("FAC-09", "FAC-13")
def test_an_id_that_is_found_with_another_payload_is_a_conflict(flavour):
    _, store = produce(flavour, facts_of(1))
    other = facts_of(2)[1].replace(id="t-0")
    report, _ = produce(flavour, [other], kind=producer(flavour, asks=True), store=store)
    (outcome,) = report.outcomes
    assert (outcome.kind, outcome.attempts, outcome.error.code) == (Kind.FAILED, 1, "fact_conflict")
    assert store.names == ["append", "get"]


def test_a_produced_fact_is_its_transaction(flavour):
    report, store = produce(flavour, facts_of(3))
    assert {outcome.kind for outcome in report.outcomes} == {Kind.SUCCEEDED}
    facts = {fact.envelope.message_id: fact for fact in stored(store)}
    assert facts.keys() == {"t-0", "t-1", "t-2"}
    assert facts["t-1"].envelope.produced_at_unix_ms == 1_700_000_001_000
    assert facts["t-1"].envelope.correlation_id == "process-1"
    assert facts["t-1"].fact.object == {"number": 1}


def test_a_producer_stores_an_artifact_first(flavour):
    stated = {"subject": "s", "predicate": "has_file", "artifact": upload()}
    kind = producer(flavour, state=lambda self, transaction: stated)
    _, store = produce(flavour, [Transaction("t-0")], kind=kind, put=[DOWN])
    assert store.names == ["put", "get", "put", "append"]


def test_a_payload_that_states_nothing_is_told_what_it_lacks(flavour):
    for payload in ({"subject": "s"}, {"subject": "s", "predicate": "p", "objekt": 1}, None):
        report, store = produce(flavour, [Transaction("t-0", payload)])
        (outcome,) = report.outcomes
        assert (outcome.kind, outcome.attempts, outcome.error.code) == (Kind.FAILED, 1, "invalid_fact")
        assert "state()" in str(outcome.error)
        assert store.calls == []


def test_a_producer_of_facts_has_a_connector_of_facts(flavour):
    task = producer(flavour)(MemoryConnector())
    made = task.produce_transactions(facts_of(1))
    report = made if flavour == "threads" else asyncio.run(made)
    assert "was given a MemoryConnector" in str(report.outcomes[0].error)
    assert report.outcomes[0].attempts == 1


# -- the policy ------------------------------------------------------------------------------------


@pytest.mark.spec("FAC-05")
def test_the_schedule_is_the_default_of_produce_retry(flavour):
    retry = FactProducerPolicy().steps.produce.retry
    assert isinstance(retry, AppendRetry)
    waits = [retry.delay(attempt) for attempt in range(retry.max_attempts - 1)]
    assert waits == [0.1, 0.2, 0.4] + [1.0] * 9
    assert sum(waits) <= retry.within < sum(waits) + 1.0
    assert AppendRetry.times(3).max_attempts == 4
    assert AppendRetry.times(0).max_attempts == 1
    assert AppendRetry(jitter=0.5).delay(5, lambda: 1.0) == 1.5
    assert AppendRetry(cap=0.0).delay(4) == pytest.approx(1.6)
    with pytest.raises(ConfigurationError, match="0 or more, not -1"):
        AppendRetry.times(-1)
