"""Spans of a loop: started, filled and ended so that no telemetry error can break the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import Context as Variables
from contextvars import copy_context
from typing import Any

from opentelemetry import context as api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from ergon_framework.telemetry import logs
from ergon_framework.telemetry.context import context_with, extract_context, span_ids
from ergon_framework.telemetry.names import LIBRARY, ExceptionEvent
from ergon_framework.telemetry.options import TelemetryOptions


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

    def new_context(self) -> Variables:
        """Return the context variables of a handler call in this span; a new copy, because a call may change it."""
        return context_with(self._tracing.variables, self.context)

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
        self.variables = copy_context()
        self._outer_context = api.get_current()

    def start_root(self, name: str, attributes: Mapping[str, Any]) -> SpanNode:
        return SpanNode(self, self.start_span(name, self._outer_context, attributes=attributes), self._outer_context)

    def start_transaction(
        self, name: str, root: SpanNode | None, carrier: Mapping[str, str] | None, attributes: Mapping[str, Any]
    ) -> SpanNode:
        """Start the span of one transaction: it continues the trace in *carrier*, or otherwise belongs to *root*."""
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
