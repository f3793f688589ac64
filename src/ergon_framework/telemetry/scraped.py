"""Parse metrics from the text format of Prometheus."""

from __future__ import annotations

import re
from typing import Final

from ergon_framework.telemetry.exposition import prometheus_label, sample_name
from ergon_framework.telemetry.metrics import Numbers
from ergon_framework.telemetry.names import METRICS

_METRICS_BY_SAMPLE: Final = {sample_name(metric): metric for metric in METRICS}
_match_sample: Final = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)", re.DOTALL).fullmatch
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")


def parse_prometheus(text: str) -> Numbers:
    """Return every value of the framework's metrics in *text*; other metrics are skipped."""
    numbers: Numbers = {}
    # Only this character ends a line: a label may contain others that splitlines() splits at.
    for line in text.split("\n"):
        sample = None if line.startswith("#") else _match_sample(line)
        metric = None if sample is None else _METRICS_BY_SAMPLE.get(sample[1])
        if sample is None or metric is None:
            continue
        labels = {name: _ESCAPE.sub(_unescape, value) for name, value in _LABEL.findall(sample[2] or "")}
        try:
            value = float(sample[3])
        except ValueError:
            continue
        # An attribute without a value is not exported.
        values = tuple(labels.get(prometheus_label(attribute), "") for attribute in metric.attributes)
        numbers[metric.name, values] = value
    return numbers


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
