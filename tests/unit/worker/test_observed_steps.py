"""The spans of one lifecycle state exactly how each part of it ended."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, Sampler, SamplingResult
from opentelemetry.trace import StatusCode

from ergon_framework.engine.effects import Interrupted, Ok
from ergon_framework.engine.retry import Deferred, Failed, Step
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.telemetry.spans import create_tracing
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, TransactionException
from ergon_framework.worker.lifecycle import classify, timeout_error
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy, RetryPolicy
from ergon_framework.worker.report import Outcome, OutcomeKind
from ergon_framework.worker.spans import (
    RecordedTransaction,
    UnsampledTransaction,
    consumer_span_names,
    producer_span_names,
)

TRANSACTION_ATTRIBUTES = {"ergon.transaction.id": "a"}


class SelectiveSampler(Sampler):
    """A sampler that drops the spans of one name and records every name that it decides on."""

    def __init__(self, dropped):
        self._dropped = dropped
        self.names = []

    def should_sample(self, parent_context, trace_id, name, *args, **more):
        self.names.append(name)
        return SamplingResult(Decision.DROP if name == self._dropped else Decision.RECORD_AND_SAMPLE)

    def get_description(self):
        return "selective"


class TransactionHarness:
    """One observed transaction, and what its spans recorded."""

    def __init__(self, outline=None, *, sampler=ALWAYS_ON, **options):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        telemetry_options = TelemetryOptions(tracer_provider=provider, **options)
        self.outcomes = []
        self.node = create_tracing(telemetry_options).start_root("transaction", {})
        outline = outline or consumer_span_names("Orders", ConsumerPolicy())
        self.observer = RecordedTransaction(
            self.node, outline, TRANSACTION_ATTRIBUTES, options=telemetry_options, on_span_ended=self.record_outcome
        )

    def record_outcome(self, outcome, node):
        self.outcomes.append((outcome, node))

    def run_step(self, name, result):
        attempts = self.observer.on_step_start(make_step(name))
        self.observer.on_step_end(result)
        return attempts

    @property
    def spans(self):
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def get_attributes(self, name):
        """Return the attributes of a span beyond those of its transaction, and its status."""
        span = self.spans[name]
        status = span.status.description if span.status.status_code is StatusCode.ERROR else None
        return {
            key: value for key, value in span.attributes.items() if key not in {"ergon.task", *TRANSACTION_ATTRIBUTES}
        }, status


def make_step(name):
    return Step(name, int, RetryPolicy(), classify=classify, timeout_error=timeout_error)


def collect_warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]


def make_outcome(kind, *, error=None, reason=None, attempts=0):
    result = Outcome(Transaction(id="a"), kind, reason=reason)
    result.error, result.attempts = error, attempts
    return result


def with_cause(error, cause):
    error.__cause__ = cause
    return error


# -- a step ---------------------------------------------------------------------------------------


@pytest.mark.spec("CON-16")
@pytest.mark.parametrize(
    "result, attributes, status",
    [
        (
            Failed(TransactionException("down", code="offline"), 1),
            {
                "ergon.exception.type": "TransactionException",
                "ergon.exception.message": "down",
                "ergon.category": "SYSTEM",
                "ergon.code": "offline",
                "ergon.outcome": "failed",
            },
            "down",
        ),
        (
            Deferred(BusinessError("busy"), 0, 90.0),
            {
                "ergon.exception.type": "BusinessError",
                "ergon.exception.message": "busy",
                "ergon.category": "BUSINESS",
                "ergon.outcome": "deferred",
            },
            "busy",
        ),
        (Interrupted(), {"ergon.outcome": "stopped"}, None),
        (Ok("a result"), {}, None),
    ],
    ids=["failed", "deferred", "stopped", "succeeded"],
)
def test_a_step_span_has_its_outcome(caplog, result, attributes, status):
    harness = TransactionHarness()
    harness.run_step("process", result)
    assert harness.get_attributes("process") == (attributes | {"ergon.attempts": 0}, status)
    assert collect_warnings(caplog) == []


@pytest.mark.spec("CON-16", "PRO-10", "DX-15")
@pytest.mark.parametrize(
    "outline, name, span",
    [
        (consumer_span_names("Orders", ConsumerPolicy()), "process", "process"),
        (consumer_span_names("Orders", ConsumerPolicy()), "exception", "handle_exception"),
        (producer_span_names("Orders", ProducerPolicy()), "produce", "produce"),
    ],
)
def test_a_step_span_has_its_transaction_and_its_attempts(outline, name, span):
    harness = TransactionHarness(outline)
    attempts = harness.observer.on_step_start(make_step(name))
    for number in (4, 5, 6):  # the attempts of earlier deliveries have lower numbers
        attempts.on_attempt_start(number)
        attempts.on_attempt_end(number, None)
    harness.observer.on_step_end(Interrupted())
    assert harness.spans[span].attributes["ergon.transaction.id"] == "a"
    assert harness.spans[span].attributes["ergon.attempts"] == 3


class UnmeasurableResult:
    def __len__(self):
        raise AssertionError("the length of this must not be read")


@pytest.mark.spec("PRO-10")
@pytest.mark.parametrize(
    "result, size",
    [
        ("four", 4),
        (b"three", 5),
        (bytearray(b"two"), 3),
        ([1, 2], 2),
        ((1, 2, 3), 3),
        ({"a": 1}, 1),
        ({1, 2}, 2),
        (frozenset({1, 2, 3}), 3),
        ([], 0),
        (7, None),
        (None, None),
        (UnmeasurableResult(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_result_is_recorded_with_its_type_and_its_size_if_known(result, size):
    harness = TransactionHarness(producer_span_names("Orders", ProducerPolicy()))
    harness.run_step("produce", Ok(result))
    expected = {"ergon.result.type": type(result).__name__}
    expected |= {"ergon.attempts": 0} | ({} if size is None else {"ergon.result.size": size})
    assert harness.get_attributes("produce") == (expected, None)


@pytest.mark.spec("PRO-10")
def test_the_value_of_a_result_is_recorded_with_record_results():
    harness = TransactionHarness(producer_span_names("Orders", ProducerPolicy()), record_results=True)
    harness.run_step("produce", Ok([1, 2]))
    attributes, _ = harness.get_attributes("produce")
    attributes.pop("ergon.attempts")
    assert attributes == {"ergon.result.type": "list", "ergon.result.size": 2, "ergon.result.value": "[1, 2]"}


def test_only_the_value_of_produce_is_recorded_as_a_result():
    harness = TransactionHarness(producer_span_names("Orders", ProducerPolicy()), record_results=True)
    harness.run_step("success", Ok("handled"))
    assert harness.get_attributes("handle_produce_success") == ({"ergon.attempts": 0}, None)


# -- attempts -------------------------------------------------------------------------------------


@pytest.mark.spec("CON-16")
def test_each_attempt_has_its_own_span_in_which_its_handler_runs():
    harness = TransactionHarness()
    attempts = harness.observer.on_step_start(make_step("process"))
    first = attempts.on_attempt_start(0)
    assert first.run(trace.get_current_span).name == "process.attempt"
    attempts.on_attempt_end(0, OSError("no route"))
    failed = harness.spans["process.attempt"]
    assert failed.attributes["ergon.attempt"] == 0
    assert failed.attributes["ergon.exception.message"] == "no route"
    second = attempts.on_attempt_start(1)
    attempts.on_attempt_end(1, None)
    done = harness.spans["process.attempt"]
    assert (done.attributes["ergon.attempt"], done.status.status_code) == (1, StatusCode.UNSET)
    assert second.run(trace.get_current_span).get_span_context() == done.context != failed.context


def test_an_unsampled_step_has_no_attempt_spans_and_its_handlers_run_in_it():
    sampler = SelectiveSampler("process")
    harness = TransactionHarness(sampler=sampler)
    attempts = harness.observer.on_step_start(make_step("process"))
    context = attempts.on_attempt_start(0)
    assert sampler.names == ["transaction", "process"]
    assert not context.run(trace.get_current_span).get_span_context().trace_flags.sampled
    attempts.on_attempt_end(0, OSError("no route"))
    harness.observer.on_step_end(Ok(None))
    harness.observer.on_end(make_outcome(OutcomeKind.SUCCEEDED, attempts=1))
    assert list(harness.spans) == ["transaction"]


# -- the transaction ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result, attributes, status",
    [
        (make_outcome(OutcomeKind.SUCCEEDED, attempts=3), {"ergon.outcome": "succeeded", "ergon.attempts": 3}, None),
        (
            make_outcome(OutcomeKind.RELEASED, reason="stop"),
            {"ergon.outcome": "released", "ergon.attempts": 0, "ergon.reason": "stop"},
            None,
        ),
        (
            make_outcome(OutcomeKind.FAILED, error=BusinessError("no", code="unknown"), attempts=1),
            {
                "ergon.outcome": "failed",
                "ergon.attempts": 1,
                "ergon.exception.type": "BusinessError",
                "ergon.exception.message": "no",
                "ergon.category": "BUSINESS",
                "ergon.code": "unknown",
            },
            "no",
        ),
    ],
    ids=["succeeded", "released", "failed"],
)
def test_a_transaction_span_has_its_outcome_and_is_recorded(caplog, result, attributes, status):
    harness = TransactionHarness()
    harness.observer.on_end(result)
    assert harness.get_attributes("transaction") == (attributes, status)
    assert harness.outcomes == [(result, harness.node)]
    assert collect_warnings(caplog) == []


@pytest.mark.parametrize(
    "error, name",
    [
        (TransactionException("down"), "TransactionException"),
        (with_cause(TransactionException("down"), OSError("no route")), "OSError"),
        (with_cause(OSError("down"), KeyError("x")), "OSError"),
        (OSError("down"), "OSError"),
    ],
    ids=["own", "wrapped", "foreign with a cause", "foreign"],
)
def test_the_reported_type_is_that_of_the_users_exception(error, name):
    harness = TransactionHarness()
    attempts = harness.observer.on_step_start(make_step("process"))
    attempts.on_attempt_start(0)
    attempts.on_attempt_end(0, error)
    attributes = harness.spans["process.attempt"].attributes
    assert (attributes["ergon.exception.type"], attributes["ergon.exception.message"]) == (name, "down")


# -- unsampled transactions -----------------------------------------------------------------------


def test_recording_is_true_only_for_a_sampled_transaction():
    assert TransactionHarness().observer.recording is True
    harness = TransactionHarness(sampler=ALWAYS_OFF)
    assert UnsampledTransaction(harness.node, harness.record_outcome).recording is False


def test_an_unrecorded_transaction_is_recorded_in_its_trace_with_a_context_per_attempt():
    harness = TransactionHarness(sampler=ALWAYS_OFF)
    unrecorded = UnsampledTransaction(harness.node, harness.record_outcome)
    result = make_outcome(OutcomeKind.FAILED)
    assert unrecorded.on_step_start(make_step("process")) is unrecorded
    first, second = unrecorded.on_attempt_start(0), unrecorded.on_attempt_start(1)
    assert first is not second
    assert first.run(trace.get_current_span) is second.run(trace.get_current_span) is harness.node.span
    unrecorded.on_attempt_end(0, OSError("down"))
    unrecorded.on_step_end(Ok(None))
    unrecorded.on_end(result)
    assert harness.outcomes == [(result, harness.node)]
