"""Spans: how a loop's are started, what they tell, and that none of it can break the loop."""

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
from ergon_framework.telemetry.context import ids, inbound, within
from ergon_framework.telemetry.names import LIBRARY, ExceptionEvent
from ergon_framework.telemetry.options import TelemetryOptions


class Node:
    """A span, and the context in which whatever is below it runs."""

    __slots__ = ("_links", "_tracing", "context", "recording", "span")

    def __init__(self, tracing: Tracing, span: Span, context: Context) -> None:
        self._tracing = tracing
        self.span = span
        self.context = set_span_in_context(span, context)
        #: Whether anybody will see it; below one that nobody sees there are no further spans.
        self.recording = span.is_recording()
        self._links: Sequence[Link] | None = None

    def child(self, name: str, attributes: Mapping[str, Any] | None = None) -> Node:
        tracing = self._tracing
        return Node(tracing, tracing.start(name, self.context, attributes=attributes), self.context)

    def body(self) -> Variables:
        """Where a body below this span runs; a new one for each, because it keeps what the body leaves in it."""
        return within(self._tracing.variables, self.context)

    @property
    def links(self) -> Sequence[Link]:
        """A link to this span, made once for all that carry it."""
        if self._links is None:
            found = self.span.get_span_context()
            self._links = (Link(found),) if found.is_valid else ()
        return self._links

    @property
    def ids(self) -> tuple[str, str] | None:
        return ids(self.span)

    def tell(self, attributes: Mapping[str, Any]) -> None:
        self.span.set_attributes(attributes)

    def record(self, attributes: Mapping[str, Any]) -> None:
        """Add an event that records an exception."""
        self.span.add_event(ExceptionEvent.NAME, attributes)

    def fail(self, message: str) -> None:
        self.span.set_status(Status(StatusCode.ERROR, message))

    def end(self) -> None:
        try:
            self.span.end()
        except Exception as error:  # noqa: BLE001 - span processors are foreign code and must not end a loop
            logs.telemetry_failed(error)


class Tracing:
    """Starts the spans of one loop, in the context in which the loop was called."""

    def __init__(self, tracer: Tracer, *, consumer: bool = True) -> None:
        self._tracer = tracer
        self._kind = SpanKind.CONSUMER if consumer else SpanKind.PRODUCER
        self.variables = copy_context()
        self._outer = api.get_current()

    def root(self, name: str, attributes: Mapping[str, Any]) -> Node:
        return Node(self, self.start(name, self._outer, attributes=attributes), self._outer)

    def transaction(
        self, name: str, root: Node | None, carrier: Mapping[str, str] | None, attributes: Mapping[str, Any]
    ) -> Node:
        """The span of one transaction: it continues the trace that it came with, or else belongs to *root*."""
        came_with = inbound(carrier) if carrier else None
        if came_with is not None:
            links = () if root is None else root.links
            span = self.start(name, came_with, attributes=attributes, kind=self._kind, links=links)
            return Node(self, span, came_with)
        above = self._outer if root is None else root.context
        return Node(self, self.start(name, above, attributes=attributes, kind=self._kind), above)

    def start(
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
        except Exception as error:  # noqa: BLE001 - samplers and processors are foreign code and must not end a loop
            logs.telemetry_failed(error)
            return INVALID_SPAN


def tracing(options: TelemetryOptions, *, consumer: bool = True) -> Tracing | None:
    """What starts a loop's spans; None when nobody has asked for any, which is decided once per loop."""
    provider = options.tracer_provider or trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return Tracing(provider.get_tracer(LIBRARY), consumer=consumer)
