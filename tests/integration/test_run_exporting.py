"""Check that OpenTelemetry's own variables enable its export; real exporters send to a receiver of the test."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner import otlp
from tests.servers.otlp import decode_spans, get_string_attributes, run_receiver

ENDPOINT_ENVIRONMENT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}

APP_MODULE = """
from ergon_framework import *
queue = MemoryConnector("orders")
queue.dispatch([Transaction({}, id=f"order-{n}") for n in range(3)])

@consumer(queue)
def task(order): ...
"""
PROVIDER_SETUP = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
"""
ERGON_COMMAND = [sys.executable, "-P", "-c", "from ergon_framework.cli.main import main; main()", "run", "app:task"]


def run_app(folder, source, **environ):
    (folder / "app.py").write_text(source, encoding="utf-8")
    result = subprocess.run(
        ERGON_COMMAND, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=150
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_traces_and_metrics_of_every_process_arrive_at_the_address_of_the_environment(tmp_path, processes):
    (tmp_path / "ergon.toml").write_text(f"[run]\nprocesses = {processes}\n")
    with run_receiver() as (received, url):
        assert run_app(tmp_path, APP_MODULE, OTEL_EXPORTER_OTLP_ENDPOINT=url)[0] == 0
    names = [span.name for span in decode_spans(received["/v1/traces"])]
    assert names.count("start_processing") == 3 * int(processes)
    requests = [ExportMetricsServiceRequest.FromString(body) for body in received["/v1/metrics"]]
    instances, succeeded = set(), {}
    for part in (part for request in requests for part in request.resource_metrics):
        resource_attributes = get_string_attributes(part.resource)
        assert resource_attributes["service.name"] == "task"
        instances.add(resource_attributes["service.instance.id"])
        for metric in (metric for scope in part.scope_metrics for metric in scope.metrics):
            if metric.name == "ergon.transactions":
                succeeded[resource_attributes["service.instance.id"]] = sum(
                    point.as_int for point in metric.sum.data_points
                )
    assert len(instances) == int(processes)
    assert list(succeeded.values()) == [3] * int(processes)


def test_one_signal_can_be_exported_alone_under_the_configured_service_name(tmp_path):
    with run_receiver() as (received, url):
        code, _ = run_app(
            tmp_path,
            APP_MODULE,
            OTEL_EXPORTER_OTLP_ENDPOINT=url,
            OTEL_METRICS_EXPORTER="none",
            OTEL_SERVICE_NAME="shop",
            OTEL_RESOURCE_ATTRIBUTES="service.instance.id=one",
        )
    assert (code, list(received)) == (0, ["/v1/traces"])
    resource = ExportTraceServiceRequest.FromString(received["/v1/traces"][0]).resource_spans[0].resource
    assert get_string_attributes(resource) | {
        "service.name": "shop",
        "service.instance.id": "one",
    } == get_string_attributes(resource)


def test_a_provider_set_up_by_the_program_is_kept(tmp_path):
    with run_receiver() as (received, url):
        code, output = run_app(tmp_path, PROVIDER_SETUP + APP_MODULE, OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert (code, list(received)) == (0, ["/v1/metrics"])
    # OpenTelemetry's warning when a second provider is set up.
    assert "Overriding" not in output


def test_an_unsupported_protocol_is_a_configuration_error(tmp_path):
    code, output = run_app(tmp_path, APP_MODULE, **ENDPOINT_ENVIRONMENT, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert code == 2
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', but only http/protobuf is supported" in output


@pytest.mark.parametrize(
    "environ, signals",
    [
        ({}, ()),
        (ENDPOINT_ENVIRONMENT, ("traces", "metrics")),
        ({**ENDPOINT_ENVIRONMENT, "OTEL_SDK_DISABLED": "TRUE"}, ()),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://a"}, ("metrics",)),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ("traces",)),
        ({**ENDPOINT_ENVIRONMENT, "OTEL_TRACES_EXPORTER": "none"}, ("metrics",)),
        (
            {**ENDPOINT_ENVIRONMENT, "OTEL_TRACES_EXPORTER": "console, otlp", "OTEL_METRICS_EXPORTER": "console"},
            ("traces",),
        ),
    ],
)
def test_a_signal_is_exported_if_its_exporter_or_an_address_is_named(environ, signals):
    assert otlp.requested_signals(environ) == signals


def test_the_protocol_of_one_signal_overrides_the_general_one():
    otlp._check_protocol(
        "traces", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    )
    with pytest.raises(ConfigurationError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        otlp._check_protocol("traces", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"})
