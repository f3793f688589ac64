"""A root is told what was asked and what came, ends once, and is not held when it is over."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ergon_framework.connectors.base import Delivery
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.outline import consuming
from ergon_framework.task.rounds import Rounds
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.telemetry.spans import tracing
from ergon_framework.transaction import Transaction

A, B = Transaction("a"), Transaction("b")
RULES = ConsumerPolicy.load({"loop": {"concurrency": {"value": 2}, "batch": {"size": 5}}})
SHARED = {"ergon.task": "Orders", "ergon.concurrency": 2, "ergon.batch.size": 5}


class Watching:
    def __init__(self, *, streaming):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        outline = consuming("Orders", RULES)
        self.rounds = Rounds(tracing(TelemetryOptions(tracer_provider=provider)), outline, streaming=streaming)

    def fetch(self, asked, *transactions):
        self.rounds.begin(asked)
        self.rounds.brought([Delivery(transaction, transaction.id) for transaction in transactions])

    @property
    def told(self):
        return [dict(span.attributes) for span in self._exporter.get_finished_spans()]


@pytest.fixture
def streaming():
    return Watching(streaming=True)


@pytest.fixture
def single():
    return Watching(streaming=False)


def complaints(caplog):
    """What the SDK says about a span that is used after its end."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]


@pytest.mark.spec("CON-17")
def test_a_batch_s_root_says_what_was_asked_for_and_what_came(streaming):
    streaming.fetch(3, A, B)
    streaming.rounds.ended(A)
    streaming.rounds.ended(B)
    streaming.fetch(4)
    assert streaming.told == [
        SHARED | {"ergon.batch.asked": 3, "ergon.batch.fetched": 2},
        SHARED | {"ergon.batch.asked": 4, "ergon.batch.fetched": 0},
    ]


@pytest.mark.spec("CON-17")
def test_the_root_of_a_whole_loop_says_nothing_of_one_batch_and_survives_an_empty_one(single):
    single.fetch(5, A)
    single.rounds.ended(A)
    single.fetch(5)
    assert single.told == []
    single.rounds.close({"ergon.end": "empty"})
    assert single.told == [SHARED | {"ergon.end": "empty"}]


def test_the_present_root_is_that_of_the_last_batch(streaming):
    assert streaming.rounds.present is None
    streaming.fetch(1, A)
    first = streaming.rounds.present
    assert first is streaming.rounds.of(A)
    streaming.fetch(1, B)
    assert streaming.rounds.present is streaming.rounds.of(B) is not first


def test_what_comes_before_any_round_belongs_to_none(streaming):
    streaming.rounds.brought([Delivery(A, "a")])
    assert streaming.rounds.of(A) is None


@pytest.mark.spec("CON-17")
def test_only_the_last_root_says_how_the_loop_ended(streaming):
    streaming.fetch(1, A)
    streaming.fetch(1, B)
    streaming.rounds.close({"ergon.end": "stop"})
    fetched = SHARED | {"ergon.batch.asked": 1, "ergon.batch.fetched": 1}
    assert sorted(streaming.told, key=len) == [fetched, fetched | {"ergon.end": "stop"}]


def test_a_root_that_has_ended_is_neither_told_nor_ended_again(streaming, caplog):
    streaming.fetch(1, A)
    streaming.rounds.ended(A)
    streaming.rounds.close({"ergon.end": "stop"})
    assert streaming.told == [SHARED | {"ergon.batch.asked": 1, "ergon.batch.fetched": 1}]
    assert complaints(caplog) == []


def test_a_transaction_that_ends_after_its_loop_ends_nothing(streaming, caplog):
    streaming.fetch(1, A)
    streaming.rounds.close({})
    streaming.rounds.ended(A)
    assert len(streaming.told) == 1
    assert complaints(caplog) == []


def test_a_loop_that_never_began_a_round_can_be_closed(streaming):
    streaming.rounds.close({"ergon.end": "stop"})
    assert streaming.told == []
