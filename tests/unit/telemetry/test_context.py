"""The trace context enters with a carrier and is sent along with transactions."""

from __future__ import annotations

import contextvars

import pytest
from opentelemetry import baggage
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ergon_framework.telemetry.context import (
    copy_with_otel_context,
    current_ids,
    extract_context,
    inject_carrier,
    with_current_trace,
)
from ergon_framework.transaction import Transaction

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.mark.spec("CON-17")
@pytest.mark.parametrize(
    "carrier",
    [
        {"traceparent": TRACEPARENT},
        {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"},
        {"traceparent": TRACEPARENT, "tracestate": "vendor=1"},
        {"traceparent": f"cc-{TRACE_ID}-{SPAN_ID}-01-more"},
    ],
)
def test_a_carrier_is_parsed_like_the_w3c_propagator(carrier):
    span_context = get_current_span(extract_context(carrier)).get_span_context()
    assert span_context == get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    assert f"{span_context.trace_id:032x}" == TRACE_ID
    assert span_context.is_remote


@pytest.mark.parametrize(
    "carrier",
    [
        {},
        {"tracestate": "vendor=1"},
        {"traceparent": ""},
        {"traceparent": "nonsense"},
        {"traceparent": f"00-{'0' * 32}-{SPAN_ID}-01"},
        {"traceparent": f"00-{TRACE_ID}-{'0' * 16}-01"},
        {"traceparent": f"ff-{TRACE_ID}-{SPAN_ID}-01"},
        {"traceparent": TRACEPARENT + "-more"},
    ],
)
def test_a_carrier_without_a_valid_trace_has_no_context(carrier):
    assert extract_context(carrier) is None


@pytest.mark.spec("CON-25")
def test_a_carrier_has_its_own_baggage():
    context = extract_context({"traceparent": TRACEPARENT, "baggage": "customer=7"})
    assert baggage.get_all(context) == {"customer": "7"}
    assert baggage.get_all(extract_context({"traceparent": TRACEPARENT})) == {}


def test_without_a_trace_no_carrier_is_added():
    assert inject_carrier() == {}
    assert current_ids() is None
    transaction = Transaction(id="a")
    assert with_current_trace(transaction) is transaction


def test_a_sent_transaction_has_the_current_trace():
    span = TracerProvider().get_tracer("t").start_span("here")
    variables = copy_with_otel_context(contextvars.copy_context(), set_span_in_context(span, Context()))
    sent = variables.run(with_current_trace, Transaction(id="a"))
    assert get_current_span(extract_context(sent.trace)).get_span_context().span_id == span.get_span_context().span_id


def test_a_transaction_with_a_trace_keeps_it():
    span = TracerProvider().get_tracer("t").start_span("here")
    variables = copy_with_otel_context(contextvars.copy_context(), set_span_in_context(span, Context()))
    transaction = Transaction(id="a", trace={"traceparent": TRACEPARENT})
    assert variables.run(with_current_trace, transaction) is transaction


def test_a_new_context_does_not_change_the_original():
    span = TracerProvider().get_tracer("t").start_span("here")
    base = contextvars.copy_context()
    assert copy_with_otel_context(base, set_span_in_context(span, Context())).run(current_ids) is not None
    assert base.run(current_ids) is None
