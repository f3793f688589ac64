"""The root of a streaming loop covers one batch: from its fetch to the end of its last transaction."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from ergon_framework.connectors.base import Delivery
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.telemetry.spans import create_tracing
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.spans import BatchSpans, consumer_span_names


class BatchHarness:
    def __init__(self, *, streaming=True, sampler=ALWAYS_ON):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        outline = consumer_span_names("Orders", ConsumerPolicy())
        self.rounds = BatchSpans(
            create_tracing(TelemetryOptions(tracer_provider=provider)), outline, streaming=streaming
        )

    def fetch(self, *ids):
        self.rounds.begin(len(ids))
        transactions = [Transaction(id=name) for name in ids]
        self.rounds.assign([Delivery(transaction, transaction.id) for transaction in transactions])
        return transactions

    @property
    def ended_count(self):
        return len(self._exporter.get_finished_spans())


@pytest.mark.spec("CON-17")
def test_a_root_ends_with_its_last_transaction_whatever_is_fetched_meanwhile():
    harness = BatchHarness()
    a, b = harness.fetch("a", "b")
    root = harness.rounds.for_transaction(a)
    (c,) = harness.fetch("c")
    assert harness.rounds.for_transaction(b) is root is not harness.rounds.for_transaction(c)
    harness.rounds.end_transaction(a)
    assert harness.ended_count == 0
    harness.rounds.end_transaction(b)
    assert harness.ended_count == 1
    harness.rounds.end_transaction(c)
    assert harness.ended_count == 2


def test_the_root_of_an_empty_fetch_ends_immediately():
    harness = BatchHarness()
    harness.fetch()
    assert harness.ended_count == 1


def test_open_roots_end_once_with_the_loop():
    harness = BatchHarness()
    (a,) = harness.fetch("a")
    harness.fetch("b")
    harness.rounds.end_transaction(a)
    harness.rounds.close({})
    assert harness.ended_count == 2
    harness.rounds.end_transaction(a)
    assert harness.ended_count == 2


@pytest.mark.spec("CON-17")
def test_a_loop_that_does_not_stream_has_one_root_until_it_ends():
    harness = BatchHarness(streaming=False)
    (a,) = harness.fetch("a")
    (b,) = harness.fetch("b")
    assert harness.rounds.for_transaction(a) is harness.rounds.for_transaction(b)
    harness.rounds.end_transaction(a)
    harness.rounds.end_transaction(b)
    assert harness.ended_count == 0
    harness.rounds.close({})
    assert harness.ended_count == 1


def test_outside_any_loop_there_is_no_root():
    assert BatchHarness().rounds.for_transaction(Transaction(id="a")) is None


def test_a_transaction_that_is_fetched_twice_belongs_to_its_first_batch():
    harness = BatchHarness()
    (a,) = harness.fetch("a")
    root = harness.rounds.for_transaction(a)
    harness.rounds.begin(1)
    harness.rounds.assign([Delivery(a, "again")])
    assert harness.rounds.for_transaction(a) is root
    assert harness.ended_count == 1, "the second round has nothing of its own"


def test_an_unsampled_batch_exports_no_span():
    harness = BatchHarness(sampler=ALWAYS_OFF)
    (a,) = harness.fetch("a")
    harness.rounds.end_transaction(a)
    assert harness.ended_count == 0
