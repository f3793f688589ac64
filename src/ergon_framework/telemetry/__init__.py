"""Telemetry: spans, metrics and log events of loops and calls."""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.telemetry.logs import TransactionFilter
    from ergon_framework.telemetry.options import TelemetryOptions
    from ergon_framework.telemetry.redaction import redact
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "logs": ("TransactionFilter",),
            "options": ("TelemetryOptions",),
            "redaction": ("redact",),
        },
    )

__all__ = [
    "TelemetryOptions",
    "TransactionFilter",
    "redact",
]
