"""What a task may say about its telemetry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from ergon_framework.errors import ConfigurationError
from ergon_framework.redaction import load_environment
from ergon_framework.telemetry.redaction import Redact, redact


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """Set as the attribute ``telemetry`` of a task; without it, the defaults.

    Results and payloads are recorded only if they are asked for here, and then only as *redact*
    leaves them; with payloads, validation errors quote their input too. ``record_tracebacks=False`` leaves
    tracebacks out of logs, spans and failure records. The providers are the global ones unless they are given.
    """

    record_results: bool = False
    record_payloads: bool = False
    record_tracebacks: bool = True
    redact: Redact = redact
    tracer_provider: TracerProvider | None = None
    meter_provider: MeterProvider | None = None


DEFAULTS = TelemetryOptions()


def without_tracebacks(task: Any) -> None:
    """Turn tracebacks off for *task*, also if its own options turn them on."""
    task.telemetry = replace(options_of(task), record_tracebacks=False)


def options_of(task: object) -> TelemetryOptions:
    """The options that *task* carries; ConfigurationError if the rules of redaction are invalid."""
    try:
        load_environment()
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    options = getattr(task, "telemetry", DEFAULTS)
    if not isinstance(options, TelemetryOptions):
        raise ConfigurationError(
            f"the attribute telemetry of {type(task).__name__} must be a TelemetryOptions, not "
            f"{type(options).__name__}; rename it if it is meant for something else"
        )
    return options
