"""Publishing facts: FAC-05, 06, 09, 12, 25 and how a handler and a producer see them, in both variants."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import Category, ConfigurationError, ConnectionLostError
from ergon_framework.facts.append import AsyncFacts, Blob, Facts, Upload
from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.errors import (
    BufferFull,
    FactConflict,
    InvalidFactError,
    PublishError,
)
from ergon_framework.facts.identity import business_id
from ergon_framework.facts.model import ZonePair
from ergon_framework.facts.policy import AppendRetry, FactProducerPolicy
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.scope import Scope
from ergon_framework.task.decorators import consumer
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.report import OutcomeKind
from tests.both_drivers.facts_harness import DOWN, LOST, append_once, make_producer_class, produce, run_story

PAIR = ZonePair("Plant A", "Enterprise")
#: The times of the first attempt and of all following attempts.
ATTEMPT_TIMES = [0.0, 0.1, 0.3, 0.7, *(1.7 + second for second in range(9))]
ORDER = Transaction({}, id="order-7", source="orders", correlation="process-1", created_at=1_700_000_000.5)


def make_scope(transaction=ORDER, attempt=0, seconds=None):
    return lambda clock: Scope(transaction, "process", attempt, None if seconds is None else clock() + seconds, clock)


def make_upload(content=b"the order", key="orders/7.pdf"):
    return Upload("files", key, Blob.from_bytes(content), media_type="application/pdf")


def list_facts(store):
    return store.fetch_facts("test", PAIR, 1000)


# -- the schedule ----------------------------------------------------------------------------------


@pytest.mark.spec("FAC-05")
def test_an_append_is_retried_after_100_200_and_400_ms_and_then_once_a_second(variant):
    result, store, _ = append_once(variant, append=[DOWN] * 12)
    assert result.offset == 1
    assert store.times("append") == pytest.approx(ATTEMPT_TIMES)


@pytest.mark.spec("FAC-05")
def test_after_ten_seconds_the_append_fails_with_a_final_error(variant):
    result, store, ended_at = append_once(variant, append=[DOWN] * 100)
    assert isinstance(result, PublishError)
    assert result.final
    assert result.code == "connection_lost"
    assert isinstance(result.__cause__, ConnectionLostError)
    assert store.times("append") == pytest.approx(ATTEMPT_TIMES)
    assert ended_at == pytest.approx(9.7)
    assert "append_fact failed after 13 attempts" in str(result)


@pytest.mark.spec("FAC-05")
def test_max_retries_limits_the_retries(variant):
    result, store, _ = append_once(variant, append=[DOWN] * 100, max_retries=3)
    assert isinstance(result, PublishError)
    assert store.times("append") == pytest.approx([0.0, 0.1, 0.3, 0.7])


@pytest.mark.spec("FAC-05")
def test_every_attempt_has_the_same_id_and_payload(variant):
    _, store, _ = append_once(variant, append=[DOWN, LOST, DOWN], fields={"object": {"total": 12.5}})
    first, *others = store.list_arguments("append")
    assert len(others) == 3
    assert all(other == first for other in others)


@pytest.mark.spec("FAC-05", "FAC-25")
def test_a_lost_answer_does_not_append_a_fact_twice(variant):
    result, store, _ = append_once(variant, append=[LOST, LOST])
    assert (result.offset, result.duplicate) == (1, True)
    assert len(list_facts(store)) == 1


def test_without_retries_the_error_is_raised_unchanged(variant):
    result, store, _ = append_once(variant, append=[DOWN], max_retries=0)
    assert result is DOWN
    assert len(store.calls) == 1


def test_a_third_party_error_is_retried(variant):
    result, store, _ = append_once(variant, append=[OSError("reset"), TimeoutError("slow")])
    assert result.offset == 1
    assert len(store.calls) == 3


@pytest.mark.spec("FAC-13")
def test_a_conflict_is_never_retried(variant):
    def story(store):
        first = yield {"subject": "s", "predicate": "p", "object": 1, "message_id": "m"}
        second = yield {"subject": "s", "predicate": "p", "object": 2, "message_id": "m"}
        return first, second

    (first, second), store, ended_at = run_story(variant, story)
    assert first.offset == 1
    assert isinstance(second, FactConflict)
    assert (len(store.calls), ended_at) == (2, 0.0)


@pytest.mark.spec("FAC-16")
def test_a_full_buffer_is_reported_immediately_and_uses_no_attempt(variant):
    result, store, ended_at = append_once(variant, append=[BufferFull("no room")] * 5)
    assert isinstance(result, BufferFull)
    assert (result.not_attempted, result.final, result.category) == (True, False, Category.SYSTEM)
    assert (len(store.calls), ended_at) == (1, 0.0)


def test_the_retry_after_of_the_store_is_respected(variant):
    result, store, _ = append_once(variant, append=[ConnectionLostError("busy", retry_after=2.5)])
    assert result.offset == 1
    assert store.times("append") == pytest.approx([0.0, 2.5])


# -- artifacts -------------------------------------------------------------------------------------


@pytest.mark.spec("FAC-05")
def test_the_artifact_is_stored_before_its_fact(variant):
    result, store, _ = append_once(variant, fields={"artifact": make_upload()})
    assert store.names == ["put", "append"]
    (fact,) = list_facts(store)
    reference = fact.fact.artifact
    assert (reference.bucket, reference.key, reference.size) == ("files", "orders/7.pdf", 9)
    assert reference.media_type == "application/pdf"
    assert b"".join(store.get_object("files", "orders/7.pdf")) == b"the order"
    assert result.offset == 1


@pytest.mark.spec("FAC-06")
def test_a_failed_upload_is_retried_with_the_same_bytes(variant):
    _, store, _ = append_once(variant, fields={"artifact": make_upload()}, put=[DOWN, LOST])
    assert store.names == ["put", "put", "put", "append"]
    assert store.list_arguments("put") == [("files", "orders/7.pdf", b"the order")] * 3
    assert store.times("put") == pytest.approx([0.0, 0.1, 0.3])


@pytest.mark.spec("FAC-06")
def test_after_a_failed_upload_no_fact_is_appended(variant):
    result, store, _ = append_once(variant, fields={"artifact": make_upload()}, put=[DOWN] * 100)
    assert isinstance(result, PublishError)
    assert set(store.names) == {"put"}
    assert list_facts(store) == []


@pytest.mark.spec("FAC-05", "FAC-06")
def test_a_retried_append_does_not_store_the_artifact_again(variant):
    _, store, _ = append_once(variant, fields={"artifact": make_upload()}, append=[DOWN, DOWN])
    assert store.names == ["put", "append", "append", "append"]


@pytest.mark.spec("FAC-12")
def test_a_correction_is_a_new_artifact_and_a_fact_that_links_the_two(variant):
    def story(store):
        fields = {"subject": "order:7", "predicate": "has_file"}
        yield fields | {"message_id": "m-1", "artifact": make_upload()}
        rejection = yield fields | {"message_id": "m-2", "artifact": make_upload(b"corrected")}
        yield fields | {"message_id": "m-3", "artifact": make_upload(b"corrected", "orders/7-v2.pdf")}
        old, new = (fact.fact.object for fact in list_facts(store))
        yield {"subject": "order:7", "predicate": "corrects", "message_id": "m-4", "object": {"old": old, "new": new}}
        return rejection

    rejection, store, _ = run_story(variant, story)
    assert rejection.code == "artifact_conflict"
    assert [fact.fact.predicate for fact in list_facts(store)] == ["has_file", "has_file", "corrects"]
    assert list_facts(store)[2].fact.artifact is None


def test_an_upload_that_can_be_read_only_once_is_rejected(variant):
    with pytest.raises(InvalidFactError, match="must be readable more than once"):
        Upload("files", "a", iter([b"x"]))


def test_a_fact_has_an_object_or_an_artifact(variant):
    result, store, _ = append_once(variant, fields={"artifact": make_upload(), "object": 1})
    assert isinstance(result, InvalidFactError)
    assert store.calls == []


def test_a_file_is_read_in_chunks_and_from_its_beginning_each_time(variant, tmp_path):
    path = tmp_path / "big"
    path.write_bytes(b"x" * (CHUNK_BYTES + 1))
    blob = Blob.from_file(path)
    assert [len(chunk) for chunk in blob] == [len(chunk) for chunk in blob] == [CHUNK_BYTES, 1]
    assert [len(chunk) for chunk in Blob.from_bytes(b"x" * (CHUNK_BYTES + 1))] == [CHUNK_BYTES, 1]
    result, store, _ = append_once(variant, fields={"artifact": Upload("files", "big", blob)}, put=[DOWN])
    assert result.offset == 1
    assert list_facts(store)[0].fact.artifact.size == CHUNK_BYTES + 1


# -- inside a handler ------------------------------------------------------------------------------


@pytest.mark.spec("FAC-25")
def test_inside_a_handler_the_envelope_comes_from_the_transaction(variant):
    def story(store):
        yield {"subject": "order:7", "predicate": "paid"}

    _, store, _ = run_story(variant, story, make_scope=make_scope())
    (fact,) = list_facts(store)
    assert fact.envelope.message_id == ORDER.derive("Enterprise/order:7/paid")
    assert fact.envelope.produced_at_unix_ms == 1_700_000_000_500
    assert (fact.envelope.correlation_id, fact.envelope.causation_id) == ("process-1", "order-7")
    assert fact.envelope.from_zone == "Plant A"


@pytest.mark.spec("FAC-25")
def test_a_second_fact_with_the_same_name_needs_a_different_name(variant):
    def story(store):
        fields = {"subject": "order:7", "predicate": "paid"}
        yield fields
        rejection = yield fields
        yield fields | {"name": "second payment"}
        return rejection

    rejection, store, _ = run_story(variant, story, make_scope=make_scope())
    assert isinstance(rejection, ConfigurationError)
    assert "name=" in str(rejection)
    assert [fact.envelope.message_id for fact in list_facts(store)] == [
        ORDER.derive("Enterprise/order:7/paid"),
        ORDER.derive("second payment"),
    ]


def test_outside_a_handler_an_id_is_required(variant):
    result, store, _ = append_once(variant, fields={"message_id": None})
    assert isinstance(result, ConfigurationError)
    assert "business_id" in str(result)
    result, store, _ = append_once(
        variant, fields={"message_id": business_id("order", "7", "paid"), "labels": {"a": "b"}}
    )
    assert dict(list_facts(store)[0].envelope.labels) == {"a": "b"}
    assert list_facts(store)[0].envelope.produced_at_unix_ms == 1_700_000_000_000


@pytest.mark.spec("DX-40")
def test_correlation_and_time_of_production_can_be_set(variant):
    envelope_fields = {"correlation_id": "shipment-9", "produced_at": datetime(2026, 3, 6, 12, 30, tzinfo=UTC)}
    _, store, _ = append_once(variant, fields=envelope_fields)
    envelope = list_facts(store)[0].envelope
    assert (envelope.correlation_id, envelope.produced_at_unix_ms) == ("shipment-9", 1_772_800_200_000)

    def story(store):
        yield {"subject": "order:7", "predicate": "paid"} | envelope_fields

    _, store, _ = run_story(variant, story, make_scope=make_scope())
    assert list_facts(store)[0].envelope.correlation_id == "shipment-9"


@pytest.mark.spec("DX-40")
def test_a_time_of_production_without_a_time_zone_is_rejected(variant):
    error, store, _ = append_once(variant, fields={"produced_at": datetime(2026, 3, 6, 12, 30)})  # noqa: DTZ001 - the point
    assert isinstance(error, ConfigurationError)
    assert "2026-03-06T12:30:00 has no time zone" in str(error)
    assert store.names == []


@pytest.mark.spec("DX-40")
def test_an_upload_accepts_bytes(variant):
    _, store, _ = append_once(variant, fields={"artifact": Upload("files", "orders/7.pdf", b"the order")}, put=[DOWN])
    assert b"".join(store.get_object("files", "orders/7.pdf")) == b"the order"


def test_the_deadline_of_the_handler_ends_the_attempts(variant):
    def story(store):
        return (yield {"subject": "order:7", "predicate": "paid"})

    result, store, ended_at = run_story(variant, story, make_scope=make_scope(seconds=0.5), append=[DOWN] * 100)
    assert isinstance(result, PublishError)
    assert store.times("append") == pytest.approx([0.0, 0.1, 0.3])
    assert ended_at < 0.5


@pytest.mark.spec("FAC-25")
def test_a_handler_that_fails_after_its_append_appends_once(variant):
    store, report, runs = consume_order(variant, fail_first=True)
    assert report.counts["succeeded"] == 1
    assert len(runs) == 2
    assert [fact.offset for fact in list_facts(store)] == [1]


@pytest.mark.spec("FAC-16")
def test_a_handler_with_a_full_buffer_is_deferred_and_uses_no_attempt(variant):
    store, report, runs = consume_order(variant, max_facts=0)
    assert report.counts["deferred"] == 1
    assert len(runs) == 0
    assert list_facts(store) == []


@pytest.mark.spec("DX-41", "FAC-05")
def test_a_handler_is_deferred_while_the_boundary_is_unavailable(variant):
    boundary = UnavailableBoundary(calls=6)
    loop = {"streaming": True, "timeout": 30.0, "limit": 4, "max_deliveries": 1}
    store, report, runs = consume_order(variant, boundary=boundary, max_retries=1, loop=loop)
    # Two calls for each delivery: three deliveries find the boundary unavailable, the fourth one appends.
    assert (report.counts["deferred"], report.counts["succeeded"], len(runs)) == (3, 1, 1)
    assert [fact.offset for fact in list_facts(store)] == [1]
    assert boundary.calls == 0


class UnavailableBoundary(MemoryBoundary):
    """A boundary that is unavailable for the first *calls* calls."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def append_facts(self, facts):
        if self.calls:
            self.calls -= 1
            raise ConnectionLostError("AppendFact has no answer, UNAVAILABLE")
        return super().append_facts(facts)


def consume_order(variant, *, fail_first=False, boundary=None, max_retries=None, loop=None, **store):
    """Consume one order that appends a fact; return the store, the report, and the runs that reached the append."""
    boundary, orders, runs = boundary or MemoryBoundary(**store), MemoryConnector("orders"), []
    orders.dispatch([orders.transaction({}, id="order-7")])
    fields = {"subject": "order:7", "predicate": "paid"}

    def fail_if_first():
        runs.append("appended")
        if fail_first and len(runs) == 1:
            raise ConnectionError("lost right after the append")

    if variant == "threads":
        facts = Facts(boundary, zone="Plant A", max_retries=max_retries)

        @consumer(orders)
        def handle(order):
            facts.append("Enterprise", **fields)
            fail_if_first()

    else:
        async_facts = AsyncFacts(boundary, zone="Plant A", max_retries=max_retries)

        @consumer(orders)
        async def handle(order):
            await async_facts.append("Enterprise", **fields)
            fail_if_first()

    policy_values = {"loop": loop or {}, "steps": {"process": {"retry": {"backoff": 0.0}}}}
    call = handle.consume_transactions(ConsumerPolicy.load(policy_values))
    return boundary, call if variant == "threads" else asyncio.run(call), runs


# -- the producer ----------------------------------------------------------------------------------


def make_fact_transactions(count):
    return [
        Transaction(
            {"subject": f"order:{number}", "predicate": "paid", "object": {"number": number}},
            id=f"t-{number}",
            created_at=1_700_000_000 + number,
            correlation="process-1",
        )
        for number in range(count)
    ]


@pytest.mark.spec("FAC-05")
def test_a_producer_retries_by_the_policy_of_its_produce_step(variant):
    report, store = produce(variant, make_fact_transactions(1), append=[DOWN] * 12)
    (outcome,) = report.outcomes
    assert (outcome.kind, outcome.attempts, outcome.result.offset) == (OutcomeKind.SUCCEEDED, 13, 1)
    assert store.times("append") == pytest.approx(ATTEMPT_TIMES)


@pytest.mark.spec("FAC-05")
def test_the_producer_has_no_second_retry_loop(variant):
    report, store = produce(variant, make_fact_transactions(1), append=[DOWN] * 100)
    (outcome,) = report.outcomes
    assert (outcome.kind, outcome.attempts) == (OutcomeKind.FAILED, 13)
    assert len(store.times("append")) == 13


@pytest.mark.spec("FAC-05")
def test_a_custom_policy_replaces_the_default_retries(variant):
    policy = FactProducerPolicy.load({"steps": {"produce": {"retry": {"max_attempts": 4}}}})
    _, store = produce(variant, make_fact_transactions(1), policy=policy, append=[DOWN] * 100)
    assert store.times("append") == pytest.approx([0.0, 0.1, 0.3, 0.7])


@pytest.mark.spec("FAC-09")
def test_after_a_failed_attempt_the_producer_looks_up_the_fact_before_it_appends(variant):
    report, store = produce(variant, make_fact_transactions(1), append=[LOST])
    assert store.names == ["append", "get"]
    (outcome,) = report.outcomes
    assert (outcome.result.offset, outcome.result.duplicate) == (1, True)
    report, store = produce(variant, make_fact_transactions(1), append=[DOWN])
    assert store.names == ["append", "get", "append"]


@pytest.mark.spec("FAC-09")
def test_a_producer_that_resumes_after_a_crash_looks_up_the_fact_first(variant):
    producer_class = make_producer_class(variant, check_first=True)
    _, store = produce(variant, make_fact_transactions(1), task_class=producer_class)
    assert store.names == ["get", "append"]
    report, _ = produce(variant, make_fact_transactions(1), task_class=producer_class, store=store)
    assert store.names == ["get", "append", "get"]
    assert report.outcomes[0].result.offset == 1


@pytest.mark.spec("FAC-09", "FAC-13")
def test_an_existing_id_with_another_payload_is_a_conflict(variant):
    _, store = produce(variant, make_fact_transactions(1))
    conflicting = make_fact_transactions(2)[1].replace(id="t-0")
    report, _ = produce(variant, [conflicting], task_class=make_producer_class(variant, check_first=True), store=store)
    (outcome,) = report.outcomes
    assert (outcome.kind, outcome.attempts, outcome.error.code) == (OutcomeKind.FAILED, 1, "fact_conflict")
    assert store.names == ["append", "get"]


def test_a_produced_fact_has_the_id_and_payload_of_its_transaction(variant):
    report, store = produce(variant, make_fact_transactions(3))
    assert {outcome.kind for outcome in report.outcomes} == {OutcomeKind.SUCCEEDED}
    facts = {fact.envelope.message_id: fact for fact in list_facts(store)}
    assert facts.keys() == {"t-0", "t-1", "t-2"}
    assert facts["t-1"].envelope.produced_at_unix_ms == 1_700_000_001_000
    assert facts["t-1"].envelope.correlation_id == "process-1"
    assert facts["t-1"].fact.object == {"number": 1}


def test_a_producer_stores_an_artifact_first(variant):
    fields = {"subject": "s", "predicate": "has_file", "artifact": make_upload()}
    producer_class = make_producer_class(variant, state=lambda self, transaction: fields)
    _, store = produce(variant, [Transaction(id="t-0")], task_class=producer_class, put=[DOWN])
    assert store.names == ["put", "get", "put", "append"]


def test_an_incomplete_payload_fails_with_a_helpful_error(variant):
    for payload in ({"subject": "s"}, {"subject": "s", "predicate": "p", "objekt": 1}, None):
        report, store = produce(variant, [Transaction(payload, id="t-0")])
        (outcome,) = report.outcomes
        assert (outcome.kind, outcome.attempts, outcome.error.code) == (OutcomeKind.FAILED, 1, "invalid_fact")
        assert "state()" in str(outcome.error)
        assert store.calls == []


def test_a_fact_producer_requires_a_fact_connector(variant):
    task = make_producer_class(variant)(MemoryConnector())
    call = task.produce_transactions(make_fact_transactions(1))
    report = call if variant == "threads" else asyncio.run(call)
    assert "its connector is a MemoryConnector" in str(report.outcomes[0].error)
    assert report.outcomes[0].attempts == 1


# -- the policy ------------------------------------------------------------------------------------


@pytest.mark.spec("FAC-05")
def test_the_retry_schedule_is_the_default_of_produce_retry(variant):
    retry = FactProducerPolicy().steps.produce.retry
    assert isinstance(retry, AppendRetry)
    waits = [retry.delay(attempt) for attempt in range(retry.max_attempts - 1)]
    assert waits == [0.1, 0.2, 0.4] + [1.0] * 9
    assert sum(waits) <= retry.within < sum(waits) + 1.0
    assert AppendRetry.with_retries(3).max_attempts == 4
    assert AppendRetry.with_retries(0).max_attempts == 1
    assert AppendRetry(jitter=0.5).delay(5, lambda: 1.0) == 1.5
    assert AppendRetry(cap=0.0).delay(4) == pytest.approx(1.6)
    with pytest.raises(ConfigurationError, match="0 or more, not -1"):
        AppendRetry.with_retries(-1)
