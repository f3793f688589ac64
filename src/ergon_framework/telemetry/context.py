"""The trace context: how it enters with a transaction, reaches its bodies and leaves with what they send."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import Context as Variables
from typing import Final

from opentelemetry import context as api
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
#: A traceparent as nearly all of them are. Reading it here takes a third of the time that the propagator
#: takes, and every transaction pays for it, also the one that nobody records.
_EVERYDAY: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
#: Nothing of where the loop was started belongs into a trace that began elsewhere.
_NOTHING: Final = Context()


def inbound(carrier: Mapping[str, str]) -> Context | None:
    """The context that *carrier* brings, with its own baggage and nobody else's; None if it brings no trace."""
    parent = carrier.get("traceparent")
    if parent is None:
        return None
    everyday = _EVERYDAY.fullmatch(parent) if "tracestate" not in carrier else None
    if everyday is None:
        found = _trace.extract(carrier, _NOTHING)
        came = get_current_span(found).get_span_context()
    else:
        trace_id, span_id, flags = everyday.groups()
        came = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
        found = set_span_in_context(NonRecordingSpan(came), _NOTHING)
    if not came.is_valid:
        return None
    return _baggage.extract(carrier, found) if "baggage" in carrier else found


def outbound() -> dict[str, str]:
    """The carrier of what is current here: empty where there is no trace."""
    carrier: dict[str, str] = {}
    if get_current_span().get_span_context().is_valid:
        _trace.inject(carrier)
        _baggage.inject(carrier)
    return carrier


def carried(transaction: Transaction) -> Transaction:
    """*transaction* with the current trace as its carrier, unless it has one already or there is none."""
    if transaction.trace:
        return transaction
    carrier = outbound()
    return transaction.replace(trace=carrier) if carrier else transaction


def within(variables: Variables, context: Context) -> Variables:
    """A copy of *variables* in which *context* is the current one."""
    copy = variables.copy()
    copy.run(api.attach, context)
    return copy


def ids(span: Span) -> tuple[str, str] | None:
    """Trace and span id in hexadecimal; None where there is no trace."""
    found = span.get_span_context()
    return (f"{found.trace_id:032x}", f"{found.span_id:016x}") if found.is_valid else None


def current_ids() -> tuple[str, str] | None:
    """The ids of the span that is current here."""
    return ids(get_current_span())
