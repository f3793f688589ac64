"""What a task may say about its telemetry."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from ergon_framework.errors import ConfigurationError
from ergon_framework.telemetry.redaction import Redact, redact


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """Set as the attribute ``telemetry`` of a task; without it, the defaults.

    Results and payloads are recorded only if they are asked for here, and then only as *redact*
    leaves them. The providers are the global ones unless they are given.
    """

    record_results: bool = False
    record_payloads: bool = False
    redact: Redact = redact
    tracer_provider: TracerProvider | None = None
    meter_provider: MeterProvider | None = None


DEFAULTS = TelemetryOptions()


def options_of(task: object) -> TelemetryOptions:
    """The options that *task* carries."""
    options = getattr(task, "telemetry", DEFAULTS)
    if not isinstance(options, TelemetryOptions):
        raise ConfigurationError(
            f"the attribute telemetry of {type(task).__name__} must be a TelemetryOptions, not "
            f"{type(options).__name__}; rename it if it is meant for something else"
        )
    return options
