"""Render metrics in the text format of Prometheus, with the names that OpenTelemetry's rules give them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ergon_framework.errors import Category, require_extra
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import HISTOGRAMS, Numbers
from ergon_framework.telemetry.names import METRICS, Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_UNIT_SUFFIXES: Final = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}
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
    *((metric, names.PROCESSES, 1, (("process",),)) for metric in (names.RETRIES, names.WAITED, names.BLOCKED)),
    *((metric, names.PROCESSES, 1, ((),)) for metric in (names.EMPTY_FETCHES, names.FAILED_FETCHES, names.ABANDONED)),
    *((metric, names.PROCESSES, 1, ((),)) for metric in (names.FENCED, names.BREACHES, names.PROCESSES_DIED)),
    (names.REFUSED, names.PROCESSES, 1, _REJECTION_REASONS),
    (names.SETTLED, names.PROCESSES, 1, (("settled",), ("lost",), ("failed",))),
    (names.PROVIDER_ATTEMPTS, names.PROVIDER_ATTEMPTS, 2, (("failed", "circuit_open"), ("failed", "quota_exhausted"))),
    (names.PROVIDER_BREAKERS, names.PROVIDER_ATTEMPTS, 2, (("closed",), ("half_open",), ("open",))),
    (names.PROVIDER_ROWS_DROPPED, names.PROVIDER_ATTEMPTS, 2, (("full",), ("refused",), ("doubt",), ("closed",))),
    *((metric, names.EXECUTORS, 1, ((),)) for metric in (names.EXECUTORS_STARTED, names.EXECUTORS_FAILED)),
    *((metric, names.EXECUTORS, 1, ((),)) for metric in (names.EXECUTORS_RETIRED, names.EXECUTORS_KILLED)),
    (names.EXECUTORS_DIED, names.EXECUTORS, 1, ((),)),
    (names.JOBS, names.JOBS, 1, (("succeeded",), ("retried",), ("failed",), ("killed",), ("given_back",), ("stale",))),
    (names.FACTS, names.FACTS, 1, (("stored",), ("repeated",), ("conflict",), ("refused",), ("full",))),
    (names.REPLICA_TROUBLES, names.REPLICA_FACTS, 3, (("unreachable",), ("unwritable",), ("faulty",), ("full",))),
)


def render_prometheus(numbers: Numbers) -> bytes:
    """Render *numbers* in Prometheus' text format; raise ConfigurationError if the library is missing."""
    exposition = require_extra("prometheus", "prometheus_client.exposition")
    core = require_extra("prometheus", "prometheus_client.metrics_core")
    text: bytes = exposition.generate_latest(_MetricsCollector(core.Metric, numbers | _create_zero_series(numbers)))
    return text


def prometheus_name(metric: Metric) -> str:
    """Return the Prometheus name of *metric*; of a counter without the `_total` of its samples."""
    return metric.name.replace(".", "_") + _UNIT_SUFFIXES.get(metric.unit, "")


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

    def __init__(self, family: Any, numbers: Numbers) -> None:
        self._family = family
        self._numbers = numbers

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
