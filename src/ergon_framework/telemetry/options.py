"""The telemetry options of a task."""

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
    """The options, set as the attribute ``telemetry`` of a task; without it, the defaults apply.

    Results and payloads are recorded only if they are enabled here, and then only as *redact*
    leaves them; with payloads, validation errors quote their input too. ``record_tracebacks=False`` leaves
    tracebacks out of logs, spans and failure records. The providers default to the global ones.
    """

    record_results: bool = False
    record_payloads: bool = False
    record_tracebacks: bool = True
    redact: Redact = redact
    tracer_provider: TracerProvider | None = None
    meter_provider: MeterProvider | None = None


DEFAULT_OPTIONS = TelemetryOptions()


def disable_tracebacks(task: Any) -> None:
    """Turn tracebacks off for *task*, even if its own options turn them on."""
    task.telemetry = replace(get_options(task), record_tracebacks=False)


def get_options(task: object) -> TelemetryOptions:
    """Return the options of *task*; raise ConfigurationError if the redaction rules are invalid."""
    try:
        load_environment()
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    options = getattr(task, "telemetry", DEFAULT_OPTIONS)
    if not isinstance(options, TelemetryOptions):
        raise ConfigurationError(
            f"the attribute telemetry of {type(task).__name__} must be a TelemetryOptions, not "
            f"{type(options).__name__}; rename it if it has another purpose"
        )
    return options
