"""A trace travels with a fact, and never costs it."""

from __future__ import annotations

from opentelemetry import baggage, context, trace

from ergon_framework.facts.model import MAX_LABELS, Envelope, get_trace, with_trace

PARENT = f"00-{0xABC:032x}-{0xDEF:016x}-01"


def add_trace_in_span(labels, **baggage_items):
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=trace.TraceFlags(1)))
    otel_context = trace.set_span_in_context(span)
    for name, value in baggage_items.items():
        otel_context = baggage.set_baggage(name, value, otel_context)
    token = context.attach(otel_context)
    try:
        return with_trace(labels)
    finally:
        context.detach(token)


def test_the_current_trace_becomes_labels():
    labels = add_trace_in_span({"priority": "high"}, user="7")
    assert labels == {"priority": "high", "traceparent": PARENT, "baggage": "user=7"}
    assert get_trace(labels) == {"traceparent": PARENT, "baggage": "user=7"}
    assert with_trace({"a": "b"}) == {"a": "b"}


def test_given_labels_win():
    assert add_trace_in_span({"traceparent": "own"}) == {"traceparent": "own"}


def test_a_trace_beyond_the_label_limit_is_left_out():
    full = {f"label-{number}": "" for number in range(MAX_LABELS)}
    assert add_trace_in_span(full) == full
    Envelope(message_id="m", from_zone="a", to_zone="b", produced_at_unix_ms=0, labels=add_trace_in_span(full))
