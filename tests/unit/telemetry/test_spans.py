"""Spans cannot break the loop, and there are none where nobody asked for them."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import NoOpTracerProvider

from ergon_framework.telemetry.options import DEFAULTS, TelemetryOptions
from ergon_framework.telemetry.spans import tracing


class Broken(SpanProcessor):
    def __init__(self, *, start):
        self._start = start

    def on_start(self, span, parent_context=None):
        if self._start:
            raise OSError

    def on_end(self, span):
        raise OSError


def test_without_an_sdk_there_is_no_tracing():
    assert tracing(DEFAULTS) is None
    assert tracing(TelemetryOptions(tracer_provider=NoOpTracerProvider())) is None


@pytest.mark.parametrize("start", [True, False])
def test_a_processor_that_raises_is_logged_and_nothing_else(caplog, start):
    provider = TracerProvider()
    provider.add_span_processor(Broken(start=start))
    with caplog.at_level(logging.WARNING, "ergon_framework"):
        root = tracing(TelemetryOptions(tracer_provider=provider)).root("root", {})
        root.end()
    assert [(record.event, record.error_type) for record in caplog.records] == [("telemetry failed", "OSError")]
    assert root.recording == (not start)


def test_an_invalid_root_is_not_linked_to():
    provider = TracerProvider()
    provider.add_span_processor(Broken(start=True))
    assert tracing(TelemetryOptions(tracer_provider=provider)).root("root", {}).links == ()
