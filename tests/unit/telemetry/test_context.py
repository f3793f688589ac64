"""The trace context enters with a carrier and leaves with what is sent."""

from __future__ import annotations

import contextvars

import pytest
from opentelemetry import baggage
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ergon_framework.telemetry.context import carried, current_ids, inbound, outbound, within
from ergon_framework.transaction import Transaction

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.spec("CON-17")
@pytest.mark.parametrize(
    "carrier",
    [
        {"traceparent": PARENT},
        {"traceparent": f"00-{TRACE}-{SPAN}-00"},
        {"traceparent": PARENT, "tracestate": "vendor=1"},
        {"traceparent": f"cc-{TRACE}-{SPAN}-01-more"},
    ],
)
def test_a_carrier_is_read_as_the_propagator_reads_it(carrier):
    found = get_current_span(inbound(carrier)).get_span_context()
    assert found == get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    assert f"{found.trace_id:032x}" == TRACE
    assert found.is_remote


@pytest.mark.parametrize(
    "carrier",
    [
        {},
        {"tracestate": "vendor=1"},
        {"traceparent": ""},
        {"traceparent": "nonsense"},
        {"traceparent": f"00-{'0' * 32}-{SPAN}-01"},
        {"traceparent": f"00-{TRACE}-{'0' * 16}-01"},
        {"traceparent": f"ff-{TRACE}-{SPAN}-01"},
        {"traceparent": PARENT + "-more"},
    ],
)
def test_a_carrier_without_a_valid_trace_brings_none(carrier):
    assert inbound(carrier) is None


@pytest.mark.spec("CON-25")
def test_a_carrier_brings_its_own_baggage():
    found = inbound({"traceparent": PARENT, "baggage": "customer=7"})
    assert baggage.get_all(found) == {"customer": "7"}
    assert baggage.get_all(inbound({"traceparent": PARENT})) == {}


def test_without_a_trace_nothing_is_sent_along():
    assert outbound() == {}
    assert current_ids() is None
    transaction = Transaction("a")
    assert carried(transaction) is transaction


def test_what_is_sent_carries_the_current_trace():
    span = TracerProvider().get_tracer("t").start_span("here")
    variables = within(contextvars.copy_context(), set_span_in_context(span, Context()))
    sent = variables.run(carried, Transaction("a"))
    assert get_current_span(inbound(sent.trace)).get_span_context().span_id == span.get_span_context().span_id


def test_a_transaction_that_carries_a_trace_keeps_it():
    span = TracerProvider().get_tracer("t").start_span("here")
    variables = within(contextvars.copy_context(), set_span_in_context(span, Context()))
    transaction = Transaction("a", trace={"traceparent": PARENT})
    assert variables.run(carried, transaction) is transaction


def test_a_copy_of_the_variables_leaves_the_original_alone():
    span = TracerProvider().get_tracer("t").start_span("here")
    base = contextvars.copy_context()
    assert within(base, set_span_in_context(span, Context())).run(current_ids) is not None
    assert base.run(current_ids) is None
