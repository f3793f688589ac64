"""OpenTelemetry's own variables switch its export on; real exporters send to a receiver of the test's own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner import exporting
from tests.servers.otlp import attributes, receiver, spans

HERE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}

APP = """
from ergon_framework import *
queue = MemoryConnector("orders")
queue.dispatch([Transaction(f"order-{n}", {}) for n in range(3)])

@consumer(queue)
def task(order): ...
"""
OWN = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
"""
ERGON = [sys.executable, "-P", "-c", "from ergon_framework.cli.main import main; main()", "run", "app:task"]


def run(folder, source, **environ):
    (folder / "app.py").write_text(source, encoding="utf-8")
    done = subprocess.run(ERGON, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=150)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_traces_and_metrics_of_every_process_arrive_at_the_address_of_the_environment(tmp_path, processes):
    (tmp_path / "ergon.toml").write_text(f"[run]\nprocesses = {processes}\n")
    with receiver() as (received, url):
        assert run(tmp_path, APP, OTEL_EXPORTER_OTLP_ENDPOINT=url)[0] == 0
    names = [span.name for span in spans(received["/v1/traces"])]
    assert names.count("start_processing") == 3 * int(processes)
    sent = [ExportMetricsServiceRequest.FromString(body) for body in received["/v1/metrics"]]
    instances, done = set(), {}
    for part in (part for one in sent for part in one.resource_metrics):
        told = attributes(part.resource)
        assert told["service.name"] == "task"
        instances.add(told["service.instance.id"])
        for metric in (metric for scope in part.scope_metrics for metric in scope.metrics):
            if metric.name == "ergon.transactions":
                done[told["service.instance.id"]] = sum(point.as_int for point in metric.sum.data_points)
    assert len(instances) == int(processes)
    assert list(done.values()) == [3] * int(processes)


def test_one_signal_may_be_sent_alone_under_the_name_that_the_environment_gives(tmp_path):
    with receiver() as (received, url):
        code, _ = run(
            tmp_path,
            APP,
            OTEL_EXPORTER_OTLP_ENDPOINT=url,
            OTEL_METRICS_EXPORTER="none",
            OTEL_SERVICE_NAME="shop",
            OTEL_RESOURCE_ATTRIBUTES="service.instance.id=one",
        )
    assert (code, list(received)) == (0, ["/v1/traces"])
    told = ExportTraceServiceRequest.FromString(received["/v1/traces"][0]).resource_spans[0].resource
    assert attributes(told) | {"service.name": "shop", "service.instance.id": "one"} == attributes(told)


def test_a_program_that_has_set_up_a_provider_keeps_it(tmp_path):
    with receiver() as (received, url):
        code, said = run(tmp_path, OWN + APP, OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert (code, list(received)) == (0, ["/v1/metrics"])
    # What OpenTelemetry says to whoever sets up a second one.
    assert "Overriding" not in said


def test_a_protocol_that_cannot_be_sent_is_a_mistake_of_the_configuration(tmp_path):
    code, said = run(tmp_path, APP, **HERE, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert code == 2
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', and only http/protobuf can be sent" in said


@pytest.mark.parametrize(
    "environ, signals",
    [
        ({}, ()),
        (HERE, ("traces", "metrics")),
        ({**HERE, "OTEL_SDK_DISABLED": "TRUE"}, ()),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://a"}, ("metrics",)),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ("traces",)),
        ({**HERE, "OTEL_TRACES_EXPORTER": "none"}, ("metrics",)),
        ({**HERE, "OTEL_TRACES_EXPORTER": "console, otlp", "OTEL_METRICS_EXPORTER": "console"}, ("traces",)),
    ],
)
def test_a_signal_is_sent_if_its_exporter_or_an_address_is_named(environ, signals):
    assert exporting.wanted(environ) == signals


def test_the_protocol_of_a_signal_wins_over_that_of_all():
    exporting._check(
        "traces", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    )
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        exporting._check("traces", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"})
