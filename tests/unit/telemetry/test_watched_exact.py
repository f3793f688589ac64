"""The spans of one lifecycle say exactly how each part of it ended."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, Sampler, SamplingResult
from opentelemetry.trace import StatusCode

from ergon_framework.engine.attempts import Deferred, Failed, Step
from ergon_framework.engine.outcome import Ok, Stopped
from ergon_framework.task.exceptions import BusinessError, TransactionException
from ergon_framework.task.lifecycle import classify, expired
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy, RetryPolicy
from ergon_framework.task.outline import consuming, producing
from ergon_framework.task.report import Kind, Outcome
from ergon_framework.task.watched import Unrecorded, Watched
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.telemetry.spans import tracing
from ergon_framework.transaction import Transaction

OWN = {"ergon.transaction.id": "a"}


class Selective(Sampler):
    """Drops the spans of one name, and remembers all that it was asked about."""

    def __init__(self, dropped):
        self._dropped = dropped
        self.asked = []

    def should_sample(self, parent_context, trace_id, name, *args, **more):
        self.asked.append(name)
        return SamplingResult(Decision.DROP if name == self._dropped else Decision.RECORD_AND_SAMPLE)

    def get_description(self):
        return "selective"


class Seen:
    """One transaction that is watched, and what its spans were told."""

    def __init__(self, outline=None, *, sampler=ALWAYS_ON, **options):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        given = TelemetryOptions(tracer_provider=provider, **options)
        self.found = []
        self.node = tracing(given).root("transaction", {})
        outline = outline or consuming("Orders", ConsumerPolicy())
        self.watched = Watched(self.node, outline, OWN, options=given, remember=self.remember)

    def remember(self, outcome, node):
        self.found.append((outcome, node))

    def step(self, name, ended):
        attempts = self.watched.step(step(name))
        self.watched.stepped(ended)
        return attempts

    @property
    def spans(self):
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def told(self, name):
        """The attributes of a span beyond those of its transaction, and its status."""
        span = self.spans[name]
        status = span.status.description if span.status.status_code is StatusCode.ERROR else None
        return {key: value for key, value in span.attributes.items() if key not in {"ergon.task", *OWN}}, status


def step(name):
    return Step(name, int, RetryPolicy(), classify=classify, expired=expired)


def complaints(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]


def outcome(kind, *, error=None, reason=None, attempts=0):
    made = Outcome(Transaction("a"), kind, reason=reason)
    made.error, made.attempts = error, attempts
    return made


def with_cause(error, cause):
    error.__cause__ = cause
    return error


# -- a step ---------------------------------------------------------------------------------------


@pytest.mark.spec("CON-16")
@pytest.mark.parametrize(
    "ended, told, status",
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
        (Stopped(), {"ergon.outcome": "stopped"}, None),
        (Ok("a result"), {}, None),
    ],
    ids=["failed", "deferred", "stopped", "succeeded"],
)
def test_a_step_says_how_it_ended(caplog, ended, told, status):
    seen = Seen()
    seen.step("process", ended)
    assert seen.told("process") == (told | {"ergon.attempts": 0}, status)
    assert complaints(caplog) == []


@pytest.mark.spec("CON-16", "PRO-10", "DX-15")
@pytest.mark.parametrize(
    "outline, name, span",
    [
        (consuming("Orders", ConsumerPolicy()), "process", "process"),
        (consuming("Orders", ConsumerPolicy()), "exception", "handle_exception"),
        (producing("Orders", ProducerPolicy()), "produce", "produce"),
    ],
)
def test_a_step_carries_its_transaction_and_its_attempts(outline, name, span):
    seen = Seen(outline)
    attempts = seen.watched.step(step(name))
    for number in (4, 5, 6):  # the attempts of earlier deliveries have the numbers before
        attempts.attempt(number)
        attempts.attempted(number, None)
    seen.watched.stepped(Stopped())
    assert seen.spans[span].attributes["ergon.transaction.id"] == "a"
    assert seen.spans[span].attributes["ergon.attempts"] == 3


class Unmeasured:
    def __len__(self):
        raise AssertionError("nobody may ask for the length of this")


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
        (Unmeasured(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_result_shows_its_type_and_its_size_if_that_is_known_at_once(result, size):
    seen = Seen(producing("Orders", ProducerPolicy()))
    seen.step("produce", Ok(result))
    expected = {"ergon.result.type": type(result).__name__}
    expected |= {"ergon.attempts": 0} | ({} if size is None else {"ergon.result.size": size})
    assert seen.told("produce") == (expected, None)


@pytest.mark.spec("PRO-10")
def test_the_value_of_a_result_is_shown_if_it_was_asked_for():
    seen = Seen(producing("Orders", ProducerPolicy()), record_results=True)
    seen.step("produce", Ok([1, 2]))
    told, _ = seen.told("produce")
    told.pop("ergon.attempts")
    assert told == {"ergon.result.type": "list", "ergon.result.size": 2, "ergon.result.value": "[1, 2]"}


def test_only_what_produce_returned_is_a_result():
    seen = Seen(producing("Orders", ProducerPolicy()), record_results=True)
    seen.step("success", Ok("handled"))
    assert seen.told("handle_produce_success") == ({"ergon.attempts": 0}, None)


# -- attempts -------------------------------------------------------------------------------------


@pytest.mark.spec("CON-16")
def test_each_attempt_is_a_span_of_its_own_in_which_its_body_runs():
    seen = Seen()
    attempts = seen.watched.step(step("process"))
    first = attempts.attempt(0)
    assert first.run(trace.get_current_span).name == "process.attempt"
    attempts.attempted(0, OSError("no route"))
    failed = seen.spans["process.attempt"]
    assert failed.attributes["ergon.attempt"] == 0
    assert failed.attributes["ergon.exception.message"] == "no route"
    second = attempts.attempt(1)
    attempts.attempted(1, None)
    done = seen.spans["process.attempt"]
    assert (done.attributes["ergon.attempt"], done.status.status_code) == (1, StatusCode.UNSET)
    assert second.run(trace.get_current_span).get_span_context() == done.context != failed.context


def test_below_a_step_that_nobody_sees_there_are_no_spans_and_bodies_run_in_it():
    sampler = Selective("process")
    seen = Seen(sampler=sampler)
    attempts = seen.watched.step(step("process"))
    context = attempts.attempt(0)
    assert sampler.asked == ["transaction", "process"]
    assert not context.run(trace.get_current_span).get_span_context().trace_flags.sampled
    attempts.attempted(0, OSError("no route"))
    seen.watched.stepped(Ok(None))
    seen.watched.ended(outcome(Kind.SUCCEEDED, attempts=1))
    assert list(seen.spans) == ["transaction"]


# -- the transaction ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made, told, status",
    [
        (outcome(Kind.SUCCEEDED, attempts=3), {"ergon.outcome": "succeeded", "ergon.attempts": 3}, None),
        (
            outcome(Kind.RELEASED, reason="stop"),
            {"ergon.outcome": "released", "ergon.attempts": 0, "ergon.reason": "stop"},
            None,
        ),
        (
            outcome(Kind.FAILED, error=BusinessError("no", code="unknown"), attempts=1),
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
def test_a_transaction_says_how_it_ended_and_where_it_is_found(caplog, made, told, status):
    seen = Seen()
    seen.watched.ended(made)
    assert seen.told("transaction") == (told, status)
    assert seen.found == [(made, seen.node)]
    assert complaints(caplog) == []


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
def test_the_type_that_is_blamed_is_the_one_that_the_user_s_code_raised(error, name):
    seen = Seen()
    attempts = seen.watched.step(step("process"))
    attempts.attempt(0)
    attempts.attempted(0, error)
    attributes = seen.spans["process.attempt"].attributes
    assert (attributes["ergon.exception.type"], attributes["ergon.exception.message"]) == (name, "down")


# -- what nobody sees -----------------------------------------------------------------------------


def test_whether_anything_is_kept_decides_if_steps_that_nobody_wrote_are_shown():
    assert Seen().watched.recording is True
    seen = Seen(sampler=ALWAYS_OFF)
    assert Unrecorded(seen.node, seen.remember).recording is False


def test_an_unrecorded_transaction_is_found_in_its_trace_and_shares_nothing_between_bodies():
    seen = Seen(sampler=ALWAYS_OFF)
    unrecorded = Unrecorded(seen.node, seen.remember)
    made = outcome(Kind.FAILED)
    assert unrecorded.step(step("process")) is unrecorded
    first, second = unrecorded.attempt(0), unrecorded.attempt(1)
    assert first is not second
    assert first.run(trace.get_current_span) is second.run(trace.get_current_span) is seen.node.span
    unrecorded.attempted(0, OSError("down"))
    unrecorded.stepped(Ok(None))
    unrecorded.ended(made)
    assert seen.found == [(made, seen.node)]
