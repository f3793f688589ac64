"""Spans of outgoing calls and of loops; no error of telemetry can fail a call or end a loop.

An outgoing call has one span, and one child for each attempt. Starting and ending a span run samplers, processors and
exporters, which are third-party code and may raise: their errors are logged. Setting attributes, a status or an event
only changes the span object; the SDK logs invalid values there and does not raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import Context as ContextVars
from contextvars import copy_context
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    TracerProvider,
    set_span_in_context,
)

from ergon_framework.telemetry import logs
from ergon_framework.telemetry.context import copy_with_otel_context, extract_context, span_ids
from ergon_framework.telemetry.names import LIBRARY, ExceptionEvent
from ergon_framework.telemetry.options import TelemetryOptions


class CallSpans:
    """The spans of one call."""

    __slots__ = ("_attempt_span", "_call_span", "_tracer")

    def __init__(self, tracer: Tracer, name: str, attributes: Mapping[str, Any]) -> None:
        self._tracer = tracer
        self._attempt_span: Span | None = None
        self._call_span = self._start_span(name, None, attributes)

    def start_attempt(self, name: str, attributes: Mapping[str, Any]) -> ContextVars | None:
        """Begin an attempt; return the context variables in which the attempt is to run."""
        if self._call_span is None:
            return None
        self._attempt_span = span = self._start_span(name, self._call_span, attributes)
        return None if span is None else copy_with_otel_context(copy_context(), set_span_in_context(span))

    def end_attempt(self, attributes: Mapping[str, Any], failure: str | None) -> None:
        """End the attempt; *failure* is the name of the error."""
        span, self._attempt_span = self._attempt_span, None
        _end_span(span, attributes, failure)

    def end(self, attributes: Mapping[str, Any], failure: str | None) -> None:
        """End the call, and an interrupted attempt."""
        _end_span(self._attempt_span, {}, None)
        _end_span(self._call_span, attributes, failure)

    def _start_span(self, name: str, parent: Span | None, attributes: Mapping[str, Any]) -> Span | None:
        context = None if parent is None else set_span_in_context(parent)
        kind = SpanKind.INTERNAL if parent is None else SpanKind.CLIENT
        try:
            return self._tracer.start_span(name, context, kind, attributes)
        except Exception as error:  # noqa: BLE001 - samplers and processors are third-party code
            logs.log_telemetry_failure(error)
            return None


def _end_span(span: Span | None, attributes: Mapping[str, Any], failure: str | None) -> None:
    if span is None:
        return
    try:
        span.set_attributes(attributes)
        if failure is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end()
    except Exception as error:  # noqa: BLE001 - span processors are third-party code
        logs.log_telemetry_failure(error)


_tracers: Final[dict[TracerProvider, Tracer]] = {}


def current_tracer() -> Tracer | None:
    """Return the tracer for a call that begins here; None if no tracer provider is set."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    tracer = _tracers.get(provider)
    if tracer is None:
        # The program has replaced its provider: there is only one at a time.
        _tracers.clear()
        tracer = _tracers[provider] = provider.get_tracer(LIBRARY)
    return tracer


# -- spans of a loop --------------------------------------------------------------------------------


class SpanNode:
    """A span, and the context in which its children run."""

    __slots__ = ("_links", "_tracing", "context", "recording", "span")

    def __init__(self, tracing: Tracing, span: Span, context: Context) -> None:
        self._tracing = tracing
        self.span = span
        self.context = set_span_in_context(span, context)
        #: Whether the span is recorded; one that is not recorded has no child spans.
        self.recording = span.is_recording()
        self._links: Sequence[Link] | None = None

    def start_child(self, name: str, attributes: Mapping[str, Any] | None = None) -> SpanNode:
        tracing = self._tracing
        return SpanNode(tracing, tracing.start_span(name, self.context, attributes=attributes), self.context)

    def new_context(self) -> ContextVars:
        """Return the context variables of a handler call in this span; a new copy, because a call may change it."""
        return copy_with_otel_context(self._tracing.variables, self.context)

    @property
    def links(self) -> Sequence[Link]:
        """A link to this span, created once for all spans that carry it."""
        if self._links is None:
            span_context = self.span.get_span_context()
            self._links = (Link(span_context),) if span_context.is_valid else ()
        return self._links

    @property
    def ids(self) -> tuple[str, str] | None:
        return span_ids(self.span)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self.span.set_attributes(attributes)

    def add_exception_event(self, attributes: Mapping[str, Any]) -> None:
        """Add an event that records an exception."""
        self.span.add_event(ExceptionEvent.NAME, attributes)

    def set_error(self, message: str) -> None:
        self.span.set_status(Status(StatusCode.ERROR, message))

    def end(self) -> None:
        try:
            self.span.end()
        except Exception as error:  # noqa: BLE001 - span processors are third-party code and must not end a loop
            logs.log_telemetry_failure(error)


class Tracing:
    """Starts the spans of one loop, in the context in which the loop was called."""

    def __init__(self, tracer: Tracer, *, consumer: bool = True) -> None:
        self._tracer = tracer
        self._kind = SpanKind.CONSUMER if consumer else SpanKind.PRODUCER
        #: The context variables and the trace context of the caller of the loop.
        self.variables = copy_context()
        self._outer_context = otel_context.get_current()

    def start_root(self, name: str, attributes: Mapping[str, Any]) -> SpanNode:
        return SpanNode(self, self.start_span(name, self._outer_context, attributes=attributes), self._outer_context)

    def start_transaction(
        self, name: str, root: SpanNode | None, carrier: Mapping[str, str] | None, attributes: Mapping[str, Any]
    ) -> SpanNode:
        """Start the span of one transaction: it continues the trace in *carrier*, or otherwise belongs to *root*.

        *carrier* has the W3C trace headers that the sender stored in the message. A span that continues such a trace
        has its parent there, so a link connects it to *root*, the span of the loop or batch here.
        """
        remote_context = extract_context(carrier) if carrier else None
        if remote_context is not None:
            links = () if root is None else root.links
            span = self.start_span(name, remote_context, attributes=attributes, kind=self._kind, links=links)
            return SpanNode(self, span, remote_context)
        parent = self._outer_context if root is None else root.context
        return SpanNode(self, self.start_span(name, parent, attributes=attributes, kind=self._kind), parent)

    def start_span(
        self,
        name: str,
        context: Context,
        *,
        attributes: Mapping[str, Any] | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
    ) -> Span:
        try:
            return self._tracer.start_span(name, context, kind, attributes, links)
        except Exception as error:  # noqa: BLE001 - samplers and processors are third-party code, must not end a loop
            logs.log_telemetry_failure(error)
            return INVALID_SPAN


def create_tracing(options: TelemetryOptions, *, consumer: bool = True) -> Tracing | None:
    """Return the tracing of a loop; None if no tracer provider is set, which is decided once per loop."""
    provider = options.tracer_provider or trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return Tracing(provider.get_tracer(LIBRARY), consumer=consumer)
