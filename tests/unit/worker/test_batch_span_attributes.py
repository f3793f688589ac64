"""A batch span records the requested and the fetched number, ends once, and is released after its end."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ergon_framework.connectors.base import Delivery
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.telemetry.spans import create_tracing
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.spans import BatchSpans, consumer_span_names

A, B = Transaction(id="a"), Transaction(id="b")
POLICY = ConsumerPolicy.load({"loop": {"concurrency": {"value": 2}, "batch": {"size": 5}}})
SHARED = {"ergon.task": "Orders", "ergon.concurrency": 2, "ergon.batch.size": 5}


class RootSpanHarness:
    def __init__(self, *, streaming):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        outline = consumer_span_names("Orders", POLICY)
        self.rounds = BatchSpans(
            create_tracing(TelemetryOptions(tracer_provider=provider)), outline, streaming=streaming
        )

    def fetch(self, requested, *transactions):
        self.rounds.begin(requested)
        self.rounds.assign([Delivery(transaction, transaction.id) for transaction in transactions])

    @property
    def root_attributes(self):
        return [dict(span.attributes) for span in self._exporter.get_finished_spans()]


@pytest.fixture
def streaming():
    return RootSpanHarness(streaming=True)


@pytest.fixture
def single():
    return RootSpanHarness(streaming=False)


def collect_warnings(caplog):
    """Return the SDK's warnings about a span that is used after its end."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]


@pytest.mark.spec("CON-17")
def test_the_root_of_a_batch_has_the_requested_and_the_fetched_number(streaming):
    streaming.fetch(3, A, B)
    streaming.rounds.end_transaction(A)
    streaming.rounds.end_transaction(B)
    streaming.fetch(4)
    assert streaming.root_attributes == [
        SHARED | {"ergon.batch.requested": 3, "ergon.batch.fetched": 2},
        SHARED | {"ergon.batch.requested": 4, "ergon.batch.fetched": 0},
    ]


@pytest.mark.spec("CON-17")
def test_the_root_of_a_loop_has_no_batch_numbers_and_survives_an_empty_batch(single):
    single.fetch(5, A)
    single.rounds.end_transaction(A)
    single.fetch(5)
    assert single.root_attributes == []
    single.rounds.close({"ergon.stop_reason": "empty"})
    assert single.root_attributes == [SHARED | {"ergon.stop_reason": "empty"}]


def test_the_present_root_is_that_of_the_last_batch(streaming):
    assert streaming.rounds.current is None
    streaming.fetch(1, A)
    first = streaming.rounds.current
    assert first is streaming.rounds.for_transaction(A)
    streaming.fetch(1, B)
    assert streaming.rounds.current is streaming.rounds.for_transaction(B) is not first


def test_a_transaction_before_any_batch_has_no_root(streaming):
    streaming.rounds.assign([Delivery(A, "a")])
    assert streaming.rounds.for_transaction(A) is None


@pytest.mark.spec("CON-17")
def test_only_the_last_root_has_the_end_of_the_loop(streaming):
    streaming.fetch(1, A)
    streaming.fetch(1, B)
    streaming.rounds.close({"ergon.stop_reason": "stop"})
    fetched = SHARED | {"ergon.batch.requested": 1, "ergon.batch.fetched": 1}
    assert sorted(streaming.root_attributes, key=len) == [fetched, fetched | {"ergon.stop_reason": "stop"}]


def test_an_ended_root_is_neither_changed_nor_ended_again(streaming, caplog):
    streaming.fetch(1, A)
    streaming.rounds.end_transaction(A)
    streaming.rounds.close({"ergon.stop_reason": "stop"})
    assert streaming.root_attributes == [SHARED | {"ergon.batch.requested": 1, "ergon.batch.fetched": 1}]
    assert collect_warnings(caplog) == []


def test_a_transaction_that_ends_after_its_loop_ends_nothing(streaming, caplog):
    streaming.fetch(1, A)
    streaming.rounds.close({})
    streaming.rounds.end_transaction(A)
    assert len(streaming.root_attributes) == 1
    assert collect_warnings(caplog) == []


def test_a_loop_without_a_batch_can_be_closed(streaming):
    streaming.rounds.close({"ergon.stop_reason": "stop"})
    assert streaming.root_attributes == []
