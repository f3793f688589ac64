"""Spans cannot break the loop, and none exist without tracing."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import NoOpTracerProvider

from ergon_framework.telemetry.options import DEFAULT_OPTIONS, TelemetryOptions
from ergon_framework.telemetry.spans import create_tracing


class FailingProcessor(SpanProcessor):
    def __init__(self, *, start):
        self._start = start

    def on_start(self, span, parent_context=None):
        if self._start:
            raise OSError

    def on_end(self, span):
        raise OSError


def test_without_an_sdk_there_is_no_tracing():
    assert create_tracing(DEFAULT_OPTIONS) is None
    assert create_tracing(TelemetryOptions(tracer_provider=NoOpTracerProvider())) is None


@pytest.mark.parametrize("start", [True, False])
def test_a_processor_that_raises_is_logged_and_nothing_else(caplog, start):
    provider = TracerProvider()
    provider.add_span_processor(FailingProcessor(start=start))
    with caplog.at_level(logging.WARNING, "ergon_framework"):
        root = create_tracing(TelemetryOptions(tracer_provider=provider)).start_root("root", {})
        root.end()
    assert [(record.event, record.error_type) for record in caplog.records] == [("telemetry failed", "OSError")]
    assert root.recording == (not start)


def test_an_invalid_root_has_no_links():
    provider = TracerProvider()
    provider.add_span_processor(FailingProcessor(start=True))
    assert create_tracing(TelemetryOptions(tracer_provider=provider)).start_root("root", {}).links == ()
