"""Spans of outgoing calls: one for the call, one child for each attempt. A telemetry error never fails the call."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context, copy_context
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider, set_span_in_context

from ergon_framework.telemetry import logs
from ergon_framework.telemetry.context import context_with
from ergon_framework.telemetry.names import LIBRARY


class ClientSpan:
    """The spans of one call."""

    __slots__ = ("_attempt_span", "_call_span", "_tracer")

    def __init__(self, tracer: Tracer, name: str, attributes: Mapping[str, Any]) -> None:
        self._tracer = tracer
        self._attempt_span: Span | None = None
        self._call_span = self._start_span(name, None, attributes)

    def start_attempt(self, name: str, attributes: Mapping[str, Any]) -> Context | None:
        """Begin an attempt; return the context variables in which its body is to run."""
        if self._call_span is None:
            return None
        self._attempt_span = span = self._start_span(name, self._call_span, attributes)
        return None if span is None else context_with(copy_context(), set_span_in_context(span))

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
    except Exception as error:  # noqa: BLE001 - as above
        logs.log_telemetry_failure(error)


_tracers: Final[dict[TracerProvider, Tracer]] = {}


def current_tracer() -> Tracer | None:
    """Return the tracer for a call that begins here; None if no tracer provider is set."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    tracer = _tracers.get(provider)
    if tracer is None:
        _tracers.clear()
        tracer = _tracers[provider] = provider.get_tracer(LIBRARY)
    return tracer
