"""Labels: what travels with a fact and is no part of it, such as the trace it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ergon_framework.facts.model import LABEL_VALUE, LABELS
from ergon_framework.telemetry.context import outbound

#: The names of a trace carrier, as W3C has them.
TRACE: Final = ("traceparent", "tracestate", "baggage")


def with_trace(labels: Mapping[str, str]) -> dict[str, str]:
    """*labels*, and the trace that is current here as far as there is room: a trace never costs a fact."""
    found, carrier = dict(labels), outbound()
    for name in TRACE:
        value = carrier.get(name, "")
        if value and len(value) <= LABEL_VALUE and value.isprintable() and len(found) < LABELS:
            # What was given wins over the trace that happens to be current here.
            found.setdefault(name, value)
    return found


def trace_of(labels: Mapping[str, str]) -> dict[str, str]:
    """The trace carrier among *labels*."""
    return {name: labels[name] for name in TRACE if name in labels}
