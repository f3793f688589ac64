"""A trace travels with a fact, and never costs it."""

from __future__ import annotations

from opentelemetry import baggage, context, trace

from ergon_framework.facts.labels import trace_of, with_trace
from ergon_framework.facts.model import LABELS, Envelope

PARENT = f"00-{0xABC:032x}-{0xDEF:016x}-01"


def below_a_span(labels, **carried):
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=trace.TraceFlags(1)))
    here = trace.set_span_in_context(span)
    for name, value in carried.items():
        here = baggage.set_baggage(name, value, here)
    token = context.attach(here)
    try:
        return with_trace(labels)
    finally:
        context.detach(token)


def test_the_trace_that_is_current_becomes_labels():
    made = below_a_span({"priority": "high"}, user="7")
    assert made == {"priority": "high", "traceparent": PARENT, "baggage": "user=7"}
    assert trace_of(made) == {"traceparent": PARENT, "baggage": "user=7"}
    assert with_trace({"a": "b"}) == {"a": "b"}


def test_what_was_given_wins():
    assert below_a_span({"traceparent": "own"}) == {"traceparent": "own"}


def test_a_trace_that_has_no_room_is_left_out():
    full = {f"label-{number}": "" for number in range(LABELS)}
    assert below_a_span(full) == full
    Envelope(message_id="m", from_zone="a", to_zone="b", produced_at_unix_ms=0, labels=below_a_span(full))
