"""The trace context: extracted from a transaction, current in its handlers, and injected into what they send.

A carrier is the form of the context in a message: a mapping with the W3C headers traceparent, tracestate and baggage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import Context as ContextVars
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ergon_framework.transaction import Transaction

_trace: Final = TraceContextTextMapPropagator()
_baggage: Final = W3CBaggagePropagator()
#: A traceparent in its usual form. Parsing it here takes a third of the propagator's time, and every transaction has to
#: be parsed, including those that are not recorded.
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
#: A trace that began elsewhere must not contain the context in which the loop was started.
_EMPTY_CONTEXT: Final = Context()


def extract_context(carrier: Mapping[str, str]) -> Context | None:
    """Extract the context from *carrier*, with only its own baggage; return None if it has no trace."""
    traceparent = carrier.get("traceparent")
    if traceparent is None:
        return None
    match = _TRACEPARENT.fullmatch(traceparent) if "tracestate" not in carrier else None
    if match is None:
        context = _trace.extract(carrier, _EMPTY_CONTEXT)
        span_context = get_current_span(context).get_span_context()
    else:
        trace_id, span_id, flags = match.groups()
        span_context = SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
        )
        context = set_span_in_context(NonRecordingSpan(span_context), _EMPTY_CONTEXT)
    if not span_context.is_valid:
        return None
    return _baggage.extract(carrier, context) if "baggage" in carrier else context


def inject_carrier() -> dict[str, str]:
    """Return a carrier of the current context; empty if there is no trace."""
    carrier: dict[str, str] = {}
    if get_current_span().get_span_context().is_valid:
        _trace.inject(carrier)
        _baggage.inject(carrier)
    return carrier


def with_current_trace(transaction: Transaction) -> Transaction:
    """Return *transaction* with the current trace as its carrier, unless it has one or there is no trace."""
    if transaction.trace:
        return transaction
    carrier = inject_carrier()
    return transaction.replace(trace=carrier) if carrier else transaction


def copy_with_otel_context(variables: ContextVars, context: Context) -> ContextVars:
    """Return a copy of *variables* in which *context* is the current one."""
    copy = variables.copy()
    copy.run(otel_context.attach, context)
    return copy


def span_ids(span: Span) -> tuple[str, str] | None:
    """Return the trace and span ids in hexadecimal; None if there is no trace."""
    span_context = span.get_span_context()
    return (f"{span_context.trace_id:032x}", f"{span_context.span_id:016x}") if span_context.is_valid else None


def current_ids() -> tuple[str, str] | None:
    """Return the trace and span ids of the current span."""
    return span_ids(get_current_span())
