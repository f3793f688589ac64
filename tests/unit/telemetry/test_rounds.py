"""The root of a streaming loop covers one batch: from its fetch to the end of its last transaction."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from ergon_framework.connectors.base import Delivery
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.outline import consuming
from ergon_framework.task.rounds import Rounds
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.telemetry.spans import tracing
from ergon_framework.transaction import Transaction


class Watching:
    def __init__(self, *, streaming=True, sampler=ALWAYS_ON):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        outline = consuming("Orders", ConsumerPolicy())
        self.rounds = Rounds(tracing(TelemetryOptions(tracer_provider=provider)), outline, streaming=streaming)

    def fetch(self, *ids):
        self.rounds.begin(len(ids))
        transactions = [Transaction(name) for name in ids]
        self.rounds.brought([Delivery(transaction, transaction.id) for transaction in transactions])
        return transactions

    @property
    def over(self):
        return len(self._exporter.get_finished_spans())


@pytest.mark.spec("CON-17")
def test_a_root_ends_with_the_last_of_its_transactions_whatever_is_fetched_meanwhile():
    watching = Watching()
    a, b = watching.fetch("a", "b")
    root = watching.rounds.of(a)
    (c,) = watching.fetch("c")
    assert watching.rounds.of(b) is root is not watching.rounds.of(c)
    watching.rounds.ended(a)
    assert watching.over == 0
    watching.rounds.ended(b)
    assert watching.over == 1
    watching.rounds.ended(c)
    assert watching.over == 2


def test_the_root_of_an_empty_fetch_ends_at_once():
    watching = Watching()
    watching.fetch()
    assert watching.over == 1


def test_what_is_still_open_ends_with_the_loop_and_only_once():
    watching = Watching()
    (a,) = watching.fetch("a")
    watching.fetch("b")
    watching.rounds.ended(a)
    watching.rounds.close({})
    assert watching.over == 2
    watching.rounds.ended(a)
    assert watching.over == 2


@pytest.mark.spec("CON-17")
def test_a_loop_that_does_not_stream_has_one_root_until_it_ends():
    watching = Watching(streaming=False)
    (a,) = watching.fetch("a")
    (b,) = watching.fetch("b")
    assert watching.rounds.of(a) is watching.rounds.of(b)
    watching.rounds.ended(a)
    watching.rounds.ended(b)
    assert watching.over == 0
    watching.rounds.close({})
    assert watching.over == 1


def test_outside_any_loop_there_is_no_root():
    assert Watching().rounds.of(Transaction("a")) is None


def test_a_transaction_that_is_brought_twice_belongs_to_the_round_that_brought_it_first():
    watching = Watching()
    (a,) = watching.fetch("a")
    root = watching.rounds.of(a)
    watching.rounds.begin(1)
    watching.rounds.brought([Delivery(a, "again")])
    assert watching.rounds.of(a) is root
    assert watching.over == 1, "the second round has nothing of its own"


def test_a_round_that_is_sampled_out_is_told_nothing():
    watching = Watching(sampler=ALWAYS_OFF)
    (a,) = watching.fetch("a")
    watching.rounds.ended(a)
    assert watching.over == 0
