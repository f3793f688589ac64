"""Spans of calls that go out: one for the call, one below it for each attempt. None of it can fail the call."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context, copy_context
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider, set_span_in_context

from ergon_framework.telemetry import logs
from ergon_framework.telemetry.context import within
from ergon_framework.telemetry.names import LIBRARY


class Outgoing:
    """The spans of one call."""

    __slots__ = ("_attempt", "_call", "_tracer")

    def __init__(self, tracer: Tracer, name: str, attributes: Mapping[str, Any]) -> None:
        self._tracer = tracer
        self._attempt: Span | None = None
        self._call = self._started(name, None, attributes)

    def attempt(self, name: str, attributes: Mapping[str, Any]) -> Context | None:
        """Begin an attempt; the variables that its body is to run in."""
        if self._call is None:
            return None
        self._attempt = span = self._started(name, self._call, attributes)
        return None if span is None else within(copy_context(), set_span_in_context(span))

    def attempted(self, attributes: Mapping[str, Any], failure: str | None) -> None:
        """End the attempt; *failure* is the name of what went wrong."""
        span, self._attempt = self._attempt, None
        _ended(span, attributes, failure)

    def over(self, attributes: Mapping[str, Any], failure: str | None) -> None:
        """End the call, and the attempt in the middle of which it was interrupted."""
        _ended(self._attempt, {}, None)
        _ended(self._call, attributes, failure)

    def _started(self, name: str, above: Span | None, attributes: Mapping[str, Any]) -> Span | None:
        context = None if above is None else set_span_in_context(above)
        kind = SpanKind.INTERNAL if above is None else SpanKind.CLIENT
        try:
            return self._tracer.start_span(name, context, kind, attributes)
        except Exception as error:  # noqa: BLE001 - samplers and processors are foreign code
            logs.telemetry_failed(error)
            return None


def _ended(span: Span | None, attributes: Mapping[str, Any], failure: str | None) -> None:
    if span is None:
        return
    try:
        span.set_attributes(attributes)
        if failure is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end()
    except Exception as error:  # noqa: BLE001 - as above
        logs.telemetry_failed(error)


_tracers: Final[dict[TracerProvider, Tracer]] = {}


def current_tracer() -> Tracer | None:
    """Who makes the spans of a call that begins here; None where nobody has asked for any."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    tracer = _tracers.get(provider)
    if tracer is None:
        _tracers.clear()
        tracer = _tracers[provider] = provider.get_tracer(LIBRARY)
    return tracer
