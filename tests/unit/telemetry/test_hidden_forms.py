"""No secret of an error is in the spans and log records of a loop."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ergon_framework import ConsumerPolicy, MemoryConnector, Transaction, consumer
from ergon_framework.telemetry.options import TelemetryOptions
from tests.secret_forms import FORMS


@pytest.mark.spec("SEC-02")
def test_no_secret_of_an_error_is_in_spans_and_logs(caplog):
    caplog.set_level(logging.DEBUG)
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction({"form": form}, id=form.replace(" ", "-")) for form in FORMS])

    @consumer(queue, policy=ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 1}}}}))
    def charge(payload):
        raise RuntimeError(FORMS[payload["form"]][0])

    charge.telemetry = TelemetryOptions(tracer_provider=provider)
    charge.run()
    spans = "\n".join(span.to_json() for span in exporter.get_finished_spans())
    records = "\n".join(f"{vars(record)} {record.exc_info and record.exc_info[1]!r}" for record in caplog.records)
    assert spans.count("exception.message") >= len(FORMS)
    assert records.count("transaction failed") >= len(FORMS)
    assert [form for form, (_, value) in FORMS.items() if value in spans] == []
    assert [form for form, (_, value) in FORMS.items() if value in records] == []
