"""Scraped: numbers as they were exposed, read back from the text that Prometheus reads."""

from __future__ import annotations

import re
from typing import Final

from ergon_framework.telemetry.exposition import exposed_label, sample_name
from ergon_framework.telemetry.metrics import Numbers
from ergon_framework.telemetry.names import METRICS

_METRICS: Final = {sample_name(metric): metric for metric in METRICS}
_SAMPLE: Final = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)", re.DOTALL).fullmatch
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")


def scraped(text: str) -> Numbers:
    """Every value of a metric of ours in *text*; whatever else is there is passed over."""
    found: Numbers = {}
    # Only this ends a line: a label may hold whatever else Python takes for one.
    for line in text.split("\n"):
        sample = None if line.startswith("#") else _SAMPLE(line)
        metric = None if sample is None else _METRICS.get(sample[1])
        if sample is None or metric is None:
            continue
        labels = {name: _ESCAPED.sub(_plain, value) for name, value in _LABEL.findall(sample[2] or "")}
        try:
            value = float(sample[3])
        except ValueError:
            continue
        # What has no value is not exposed.
        values = tuple(labels.get(exposed_label(attribute), "") for attribute in metric.attributes)
        found[metric.name, values] = value
    return found


def _plain(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]
