"""Exporting: traces and metrics over OTLP, switched on by the variables that OpenTelemetry has for it."""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Mapping
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, extra

#: The one protocol whose exporter comes with the extra.
PROTOCOL: Final = "http/protobuf"
_SIGNALS: Final = ("traces", "metrics")


def wanted(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The signals that the environment asks for: by their exporter's name, or by an address to send them to."""
    given = os.environ if environ is None else environ
    if given.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    return tuple(signal for signal in _SIGNALS if _asked(signal, given))


def export(task: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Send what the environment asks for, of a program that has no provider of its own; the signals that are sent.

    Sampling, batching, intervals, headers and resource are the SDK's, which reads their variables itself.
    """
    given = os.environ if environ is None else environ
    sent = tuple(signal for signal in wanted(given) if not _provided(signal))
    for signal in sent:
        _check(signal, given)
    if sent:
        resource = _resource(task, given)
        for signal in sent:
            _SETUPS[signal](resource)
    return sent


def _asked(signal: str, given: Mapping[str, str]) -> bool:
    name = f"OTEL_{signal.upper()}_EXPORTER"
    exporters = [one.strip() for one in given.get(name, "").split(",") if one.strip()]
    if not exporters:
        # Without a word nothing is sent, although the standard would have it go to the own machine.
        return any(given.get(f"OTEL_EXPORTER_OTLP_{part}ENDPOINT") for part in ("", f"{signal.upper()}_"))
    return "otlp" in exporters


def _check(signal: str, given: Mapping[str, str]) -> None:
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = given.get(name, "").strip()
        if protocol and protocol != PROTOCOL:
            raise ConfigurationError(
                f"{name} is {protocol!r}, and only {PROTOCOL} can be sent; a collector takes it at port 4318"
            )
        if protocol:
            return


def _provided(signal: str) -> bool:
    """Whether the program has set up a provider itself: only an SDK's can be flushed."""
    api = importlib.import_module("opentelemetry.trace" if signal == "traces" else "opentelemetry.metrics")
    provider = api.get_tracer_provider() if signal == "traces" else api.get_meter_provider()
    return hasattr(provider, "force_flush")


def _resource(task: str, given: Mapping[str, str]) -> Any:
    said = given.get("OTEL_RESOURCE_ATTRIBUTES", "")
    # Each process counts by itself: without an id of its own, one would be taken for the other.
    attributes = {"service.name": task, "service.instance.id": str(uuid.uuid4())}
    if given.get("OTEL_SERVICE_NAME"):
        del attributes["service.name"]
    kept = {key: value for key, value in attributes.items() if f"{key}=" not in said}
    return extra("otel", "opentelemetry.sdk.resources").Resource.create(kept)


def _traces(resource: Any) -> None:
    sdk, batches = extra("otel", "opentelemetry.sdk.trace"), extra("otel", "opentelemetry.sdk.trace.export")
    exporter = extra("otel", "opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
    provider = sdk.TracerProvider(resource=resource)
    provider.add_span_processor(batches.BatchSpanProcessor(exporter))
    importlib.import_module("opentelemetry.trace").set_tracer_provider(provider)


def _metrics(resource: Any) -> None:
    sdk, readers = extra("otel", "opentelemetry.sdk.metrics"), extra("otel", "opentelemetry.sdk.metrics.export")
    exporter = extra("otel", "opentelemetry.exporter.otlp.proto.http.metric_exporter").OTLPMetricExporter()
    reader = readers.PeriodicExportingMetricReader(exporter)
    provider = sdk.MeterProvider(metric_readers=[reader], resource=resource)
    importlib.import_module("opentelemetry.metrics").set_meter_provider(provider)


_SETUPS: Final = {"traces": _traces, "metrics": _metrics}
