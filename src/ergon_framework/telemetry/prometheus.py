"""Metrics in Prometheus' text format: rendered and parsed, with the names that OpenTelemetry's rules give them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ergon_framework.errors import Category, require_extra
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import HISTOGRAMS, Numbers
from ergon_framework.telemetry.names import METRICS, Metric
from ergon_framework.telemetry.user_metrics import Families

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_UNIT_SUFFIXES: Final = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}
#: By the name of a counter that is a part of a histogram: the histogram's name, and the suffix of this part.
_HISTOGRAM_PARTS: Final = {
    part.name: (histogram.bucket.name.removesuffix(".bucket"), suffix)
    for histogram in HISTOGRAMS
    for part, suffix in ((histogram.count, "_count"), (histogram.total, "_sum"), (histogram.bucket, "_bucket"))
}
_OUTCOME_VALUES: Final = (
    ("succeeded", ""),
    *((outcome, category.value) for outcome in ("failed", "handler_failed") for category in Category),
    ("deferred", ""),
    ("released", ""),
)
_REJECTION_REASONS: Final = tuple(
    (reason,) for reason in ("done", "expired", "max_deliveries", "missing_key", "undecodable")
)
#: Series that start with 0 before their first event, because a rate sees no rise in a series that begins with it. For
#: each metric: the metric whose series it follows, how many attributes they share, and the values of the others.
_ZERO_SERIES: Final[tuple[tuple[Metric, Metric, int, tuple[tuple[str, ...], ...]], ...]] = (
    (names.TRANSACTIONS, names.PROCESSES, 1, _OUTCOME_VALUES),
    *(
        (metric, names.PROCESSES, 1, (("process",),))
        for metric in (names.RETRIES, names.RETRY_BACKOFF_SECONDS, names.EVENT_LOOP_BLOCKED)
    ),
    *(
        (metric, names.PROCESSES, 1, ((),))
        for metric in (names.EMPTY_FETCHES, names.FAILED_FETCHES, names.ABANDONED_CALLS)
    ),
    *(
        (metric, names.PROCESSES, 1, ((),))
        for metric in (names.LATE_RESULTS, names.OVERSIZED_FETCHES, names.PROCESSES_DIED)
    ),
    (names.REJECTED_DELIVERIES, names.PROCESSES, 1, _REJECTION_REASONS),
    (names.SETTLED, names.PROCESSES, 1, (("settled",), ("lost",), ("failed",))),
    (names.PROVIDER_ATTEMPTS, names.PROVIDER_ATTEMPTS, 2, (("failed", "circuit_open"), ("failed", "quota_exhausted"))),
    (names.PROVIDER_BREAKERS, names.PROVIDER_ATTEMPTS, 2, (("closed",), ("half_open",), ("open",))),
    (
        names.PROVIDER_ROWS_DROPPED,
        names.PROVIDER_ATTEMPTS,
        2,
        (("full",), ("rejected",), ("outcome_unknown",), ("closed",)),
    ),
    *((metric, names.EXECUTORS, 1, ((),)) for metric in (names.EXECUTORS_STARTED, names.EXECUTORS_FAILED)),
    *((metric, names.EXECUTORS, 1, ((),)) for metric in (names.EXECUTORS_RETIRED, names.EXECUTORS_KILLED)),
    (names.EXECUTORS_DIED, names.EXECUTORS, 1, ((),)),
    (names.JOBS, names.JOBS, 1, (("succeeded",), ("retried",), ("failed",), ("killed",), ("released",), ("stale",))),
    (names.FACTS, names.FACTS, 1, (("stored",), ("repeated",), ("conflict",), ("rejected",), ("full",))),
    (names.REPLICATION_ERRORS, names.REPLICATED_FACTS, 3, (("unreachable",), ("unwritable",), ("faulty",), ("full",))),
)


def render_prometheus(numbers: Numbers, families: Families | None = None) -> bytes:
    """Render *numbers* and the metrics of user code in Prometheus' text format.

    Raises ConfigurationError if the library is missing.
    """
    exposition = require_extra("prometheus", "prometheus_client.exposition")
    core = require_extra("prometheus", "prometheus_client.metrics_core")
    collector = _MetricsCollector(core.Metric, numbers | _create_zero_series(numbers), families or {})
    text: bytes = exposition.generate_latest(collector)
    return text


def prometheus_name(metric: Metric) -> str:
    """Return the Prometheus name of *metric*; of a counter without the `_total` of its samples."""
    name, suffix = metric.name.replace(".", "_"), _UNIT_SUFFIXES.get(metric.unit, "")
    return name if suffix and name.endswith(suffix) else name + suffix


def sample_name(metric: Metric) -> str:
    """Return the Prometheus name of the samples of *metric*."""
    if metric.name in _HISTOGRAM_PARTS:
        family, suffix = _HISTOGRAM_PARTS[metric.name]
        return family.replace(".", "_") + "_seconds" + suffix
    return prometheus_name(metric) + ("_total" if metric.kind == "counter" else "")


def prometheus_label(attribute: str) -> str:
    """Return the Prometheus label of *attribute*."""
    return attribute.replace(".", "_")


class _MetricsCollector:
    """The collector that the library asks for all metric families."""

    def __init__(self, family: Any, numbers: Numbers, user_families: Families) -> None:
        self._family = family
        self._numbers = numbers
        self._user_families = user_families

    def collect(self) -> Iterator[Any]:
        by_metric: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for (name, values), value in self._numbers.items():
            by_metric.setdefault(name, []).append((values, value))
        for metric in METRICS:
            if metric.name not in _HISTOGRAM_PARTS and metric.name in by_metric:
                yield self._build_family(metric, by_metric[metric.name])
        for histogram in HISTOGRAMS:
            if histogram.bucket.name in by_metric:
                parts = (histogram.bucket, histogram.total, histogram.count)
                yield self._build_histogram(histogram.total, {part: by_metric[part.name] for part in parts})
        for user_family in self._user_families.values():
            family = self._family(user_family.name, user_family.description, user_family.kind)
            for (name, labels), value in user_family.samples.items():
                family.add_sample(name, dict(labels), value)
            yield family

    def _build_family(self, metric: Metric, rows: list[tuple[tuple[str, ...], float]]) -> Any:
        family = self._family(prometheus_name(metric), metric.description, metric.kind)
        suffix = "_total" if metric.kind == "counter" else ""
        for values, value in sorted(rows):
            family.add_sample(family.name + suffix, _build_labels(metric, values), value)
        return family

    def _build_histogram(self, total: Metric, parts: Mapping[Metric, list[tuple[tuple[str, ...], float]]]) -> Any:
        family = self._family(
            _HISTOGRAM_PARTS[total.name][0].replace(".", "_") + "_seconds", total.description, "histogram"
        )
        for part, rows in parts.items():
            for values, value in sorted(rows, key=_bucket_sort_key) if part.attributes[-1] == "le" else sorted(rows):
                family.add_sample(family.name + _HISTOGRAM_PARTS[part.name][1], _build_labels(part, values), value)
        return family


def _bucket_sort_key(row: tuple[tuple[str, ...], float]) -> tuple[tuple[str, ...], float]:
    return row[0][:-1], float(row[0][-1])


def _build_labels(metric: Metric, values: tuple[str, ...]) -> dict[str, str]:
    labels = zip(metric.attributes, values, strict=True)
    return {prometheus_label(name): value for name, value in labels if value}


def _create_zero_series(numbers: Numbers) -> Numbers:
    zeros: Numbers = {}
    for metric, followed, shared, others in _ZERO_SERIES:
        for name, values in numbers:
            if name == followed.name:
                zeros.update({(metric.name, (*values[:shared], *other)): 0 for other in others})
    return {key: value for key, value in zeros.items() if key not in numbers}


# -- parsing ----------------------------------------------------------------------------------------

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
