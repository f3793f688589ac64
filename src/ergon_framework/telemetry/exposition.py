"""Exposition: numbers as the text that Prometheus reads. Names are those that OpenTelemetry's rules give them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ergon_framework.errors import Category, extra
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import HISTOGRAMS, Numbers
from ergon_framework.telemetry.names import METRICS, Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_UNITS: Final = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}
_PARTS: Final = {
    part.name: (histogram.bucket.name.removesuffix(".bucket"), suffix)
    for histogram in HISTOGRAMS
    for part, suffix in ((histogram.count, "_count"), (histogram.total, "_sum"), (histogram.bucket, "_bucket"))
}
_OUTCOMES: Final = (
    ("succeeded", ""),
    *((outcome, category.value) for outcome in ("failed", "handler_failed") for category in Category),
    ("deferred", ""),
    ("released", ""),
)
_REFUSALS: Final = tuple((reason,) for reason in ("done", "expired", "max_deliveries", "missing_key", "undecodable"))
#: What is 0 before it happens for the first time: a rate sees no rise in a series that begins with it. Of each
#: metric the one that says whose series there are, how many of its attributes they share, and what the others are.
_ZEROS: Final[tuple[tuple[Metric, Metric, int, tuple[tuple[str, ...], ...]], ...]] = (
    (names.TRANSACTIONS, names.PROCESSES, 1, _OUTCOMES),
    *((metric, names.PROCESSES, 1, (("process",),)) for metric in (names.RETRIES, names.WAITED, names.BLOCKED)),
    *((metric, names.PROCESSES, 1, ((),)) for metric in (names.EMPTY_FETCHES, names.FAILED_FETCHES, names.ABANDONED)),
    *((metric, names.PROCESSES, 1, ((),)) for metric in (names.FENCED, names.BREACHES, names.PROCESSES_DIED)),
    (names.REFUSED, names.PROCESSES, 1, _REFUSALS),
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


def exposed(numbers: Numbers) -> bytes:
    """All of *numbers*, in Prometheus' text format; ConfigurationError where the library is missing."""
    exposition = extra("prometheus", "prometheus_client.exposition")
    core = extra("prometheus", "prometheus_client.metrics_core")
    text: bytes = exposition.generate_latest(_Collected(core.Metric, numbers | _zeros(numbers)))
    return text


def exposed_name(metric: Metric) -> str:
    """What *metric* is called in Prometheus; of a counter without the `_total` that its samples have."""
    return metric.name.replace(".", "_") + _UNITS.get(metric.unit, "")


def sample_name(metric: Metric) -> str:
    """What its values are called there."""
    if metric.name in _PARTS:
        family, suffix = _PARTS[metric.name]
        return family.replace(".", "_") + "_seconds" + suffix
    return exposed_name(metric) + ("_total" if metric.kind == "counter" else "")


def exposed_label(attribute: str) -> str:
    """What *attribute* is called there."""
    return attribute.replace(".", "_")


class _Collected:
    """What the library asks for all that there is."""

    def __init__(self, family: Any, numbers: Numbers) -> None:
        self._family = family
        self._numbers = numbers

    def collect(self) -> Iterator[Any]:
        by_metric: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for (name, values), value in self._numbers.items():
            by_metric.setdefault(name, []).append((values, value))
        for metric in METRICS:
            if metric.name not in _PARTS and metric.name in by_metric:
                yield self._one(metric, by_metric[metric.name])
        for histogram in HISTOGRAMS:
            if histogram.bucket.name in by_metric:
                parts = (histogram.bucket, histogram.total, histogram.count)
                yield self._histogram(histogram.total, {part: by_metric[part.name] for part in parts})

    def _one(self, metric: Metric, rows: list[tuple[tuple[str, ...], float]]) -> Any:
        family = self._family(exposed_name(metric), metric.description, metric.kind)
        suffix = "_total" if metric.kind == "counter" else ""
        for values, value in sorted(rows):
            family.add_sample(family.name + suffix, _labels(metric, values), value)
        return family

    def _histogram(self, total: Metric, parts: Mapping[Metric, list[tuple[tuple[str, ...], float]]]) -> Any:
        family = self._family(_PARTS[total.name][0].replace(".", "_") + "_seconds", total.description, "histogram")
        for part, rows in parts.items():
            for values, value in sorted(rows, key=_by_bound) if part.attributes[-1] == "le" else sorted(rows):
                family.add_sample(family.name + _PARTS[part.name][1], _labels(part, values), value)
        return family


def _by_bound(row: tuple[tuple[str, ...], float]) -> tuple[tuple[str, ...], float]:
    return row[0][:-1], float(row[0][-1])


def _labels(metric: Metric, values: tuple[str, ...]) -> dict[str, str]:
    labels = zip(metric.attributes, values, strict=True)
    return {exposed_label(name): value for name, value in labels if value}


def _zeros(numbers: Numbers) -> Numbers:
    found: Numbers = {}
    for metric, known, shared, others in _ZEROS:
        for name, values in numbers:
            if name == known.name:
                found.update({(metric.name, (*values[:shared], *other)): 0 for other in others})
    return {key: value for key, value in found.items() if key not in numbers}
