"""Labels: metadata that travels with a fact but is not part of its identity, such as its trace context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ergon_framework.facts.model import MAX_LABEL_VALUE_CHARS, MAX_LABELS
from ergon_framework.telemetry.context import inject_carrier

#: The names of a trace carrier, as W3C defines them.
TRACE_LABELS: Final = ("traceparent", "tracestate", "baggage")


def with_trace(labels: Mapping[str, str]) -> dict[str, str]:
    """Return *labels* with the current trace, as far as it fits: a trace never makes a fact invalid."""
    result, carrier = dict(labels), inject_carrier()
    for name in TRACE_LABELS:
        value = carrier.get(name, "")
        if value and len(value) <= MAX_LABEL_VALUE_CHARS and value.isprintable() and len(result) < MAX_LABELS:
            # Labels of the caller take precedence over the current trace.
            result.setdefault(name, value)
    return result


def get_trace(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the trace carrier among *labels*."""
    return {name: labels[name] for name in TRACE_LABELS if name in labels}
