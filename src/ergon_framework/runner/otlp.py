"""Export traces and metrics over OTLP, enabled by OpenTelemetry's environment variables.

OpenTelemetry calls traces and metrics signals.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Mapping
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, require_extra

#: The only protocol whose exporter is part of the extra.
PROTOCOL: Final = "http/protobuf"
_SIGNALS: Final = ("traces", "metrics")


def requested_signals(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the signals that the environment requests: by the name of an exporter, or by an endpoint."""
    variables = os.environ if environ is None else environ
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    return tuple(signal for signal in _SIGNALS if _is_requested(signal, variables))


def configure_otlp(task: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Export the requested signals of a program that has no provider of its own; return the exported signals.

    The SDK reads the variables for sampling, batching, intervals, headers and resource itself.
    """
    variables = os.environ if environ is None else environ
    exported = tuple(signal for signal in requested_signals(variables) if not _has_provider(signal))
    for signal in exported:
        _check_protocol(signal, variables)
    if exported:
        resource = _create_resource(task, variables)
        for signal in exported:
            _SETUPS[signal](resource)
    return exported


def _is_requested(signal: str, variables: Mapping[str, str]) -> bool:
    name = f"OTEL_{signal.upper()}_EXPORTER"
    exporters = [one.strip() for one in variables.get(name, "").split(",") if one.strip()]
    if not exporters:
        # Nothing is exported by default, although the standard defaults to an endpoint on localhost.
        return any(variables.get(f"OTEL_EXPORTER_OTLP_{part}ENDPOINT") for part in ("", f"{signal.upper()}_"))
    return "otlp" in exporters


def _check_protocol(signal: str, variables: Mapping[str, str]) -> None:
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = variables.get(name, "").strip()
        if protocol and protocol != PROTOCOL:
            raise ConfigurationError(
                f"{name} is {protocol!r}, but only {PROTOCOL} is supported; a collector accepts it at port 4318"
            )
        if protocol:
            return


def _has_provider(signal: str) -> bool:
    """Return whether the program has set up a provider itself: only an SDK's provider can be flushed."""
    api = importlib.import_module("opentelemetry.trace" if signal == "traces" else "opentelemetry.metrics")
    provider = api.get_tracer_provider() if signal == "traces" else api.get_meter_provider()
    return hasattr(provider, "force_flush")


def _create_resource(task: str, variables: Mapping[str, str]) -> Any:
    declared = variables.get("OTEL_RESOURCE_ATTRIBUTES", "")
    # Each process counts separately: without an instance id, the series of two processes would be mixed.
    attributes = {"service.name": task, "service.instance.id": str(uuid.uuid4())}
    if variables.get("OTEL_SERVICE_NAME"):
        del attributes["service.name"]
    added = {key: value for key, value in attributes.items() if f"{key}=" not in declared}
    return require_extra("otel", "opentelemetry.sdk.resources").Resource.create(added)


def _set_up_traces(resource: Any) -> None:
    sdk, batches = (
        require_extra("otel", "opentelemetry.sdk.trace"),
        require_extra("otel", "opentelemetry.sdk.trace.export"),
    )
    exporter = require_extra("otel", "opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
    provider = sdk.TracerProvider(resource=resource)
    provider.add_span_processor(batches.BatchSpanProcessor(exporter))
    importlib.import_module("opentelemetry.trace").set_tracer_provider(provider)


def _set_up_metrics(resource: Any) -> None:
    sdk, readers = (
        require_extra("otel", "opentelemetry.sdk.metrics"),
        require_extra("otel", "opentelemetry.sdk.metrics.export"),
    )
    exporter = require_extra("otel", "opentelemetry.exporter.otlp.proto.http.metric_exporter").OTLPMetricExporter()
    reader = readers.PeriodicExportingMetricReader(exporter)
    provider = sdk.MeterProvider(metric_readers=[reader], resource=resource)
    importlib.import_module("opentelemetry.metrics").set_meter_provider(provider)


_SETUPS: Final = {"traces": _set_up_traces, "metrics": _set_up_metrics}
