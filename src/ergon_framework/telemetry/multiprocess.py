"""The merged metrics of several processes. A counter never decreases, even if a process is killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from ergon_framework.telemetry.metrics import (
    MAX_LABEL_VALUES,
    METRICS_BY_NAME,
    LabelLimiter,
    Numbers,
    SeriesKey,
    merge_numbers,
    snapshot,
)
from ergon_framework.telemetry.user_metrics import Families, FamilyTotals, collect_families, serialize_families

#: Values of one report: a line with that many stays far below the longest line that is read.
MAX_REPORT_VALUES: Final = 2_000


class MultiprocessMetrics:
    """Merges the metrics of this process with the reports of others. Thread-safe."""

    def __init__(self, read_own: Callable[[], Numbers] = snapshot, *, limit: int = MAX_LABEL_VALUES) -> None:
        self._read_own = read_own
        self._lock = threading.Lock()
        self._label_limiter = LabelLimiter(limit)
        self._reports: dict[int, Numbers] = {}
        #: The parts of incomplete reports.
        self._parts: dict[int, Numbers] = {}
        self._ended_counters: Numbers = {}
        self._last_shown: Numbers = {}
        self._family_totals = FamilyTotals()

    def update(self, source: int, report: dict[str, Any]) -> None:
        """Add a part of the report of process *source*; the last part replaces the report before."""
        with self._lock:
            parts = self._parts.setdefault(source, {})
            parts.update(_parse_rows(report.get("numbers")))
            self._family_totals.update(source, report.get("families"), is_last=report.get("last") is True)
            if report.get("last") is True:
                self._reports[source] = self._parts.pop(source)

    def remove(self, source: int) -> None:
        """Remove an ended process: its counters are kept, its gauges are not."""
        with self._lock:
            self._parts.pop(source, None)
            self._family_totals.remove(source)
            counters = {key: value for key, value in self._reports.pop(source, {}).items() if _is_counter(key)}
            merge_numbers(self._ended_counters, self._limit_labels(counters))

    def read(self) -> Numbers:
        """Return every current value, by the metric's name and the values of all its attributes."""
        own_numbers = self._read_own()
        with self._lock:
            merged = dict(self._ended_counters)
            for numbers in (own_numbers, *self._reports.values()):
                merge_numbers(merged, self._limit_labels(numbers))
            for key in filter(_is_counter, merged):
                # A float sum depends slightly on its order, which changes when a process ends. A collector would take
                # the smallest decrease of a counter for a restart.
                merged[key] = self._last_shown[key] = max(merged[key], self._last_shown.get(key, 0))
        return merged

    def read_families(self) -> Families:
        """Return the metrics of user code, of all processes."""
        own_families = collect_families()
        with self._lock:
            return self._family_totals.read(own_families)

    def _limit_labels(self, numbers: Numbers) -> Numbers:
        """Limit the labels of all processes together: each process has limited only its own."""
        limited: Numbers = {}
        for key, value in numbers.items():
            metric = METRICS_BY_NAME[key[0]]
            merge_numbers(limited, {(metric.name, self._label_limiter(metric, key[1])): value})
        return limited


def serialize_report(numbers: Numbers, families: Families) -> Iterator[dict[str, Any]]:
    """Serialize *families* and *numbers* to reports of plain data, of which the final one is marked as the last."""
    for part in serialize_families(families):
        yield {"families": part, "last": False}
    yield from serialize_numbers(numbers)


def serialize_numbers(numbers: Numbers) -> Iterator[dict[str, Any]]:
    """Serialize *numbers* to reports of plain data; exactly one report, the final one, is marked as the last."""
    rows = [[name, list(values), value] for (name, values), value in numbers.items()]
    for start in range(0, max(1, len(rows)), MAX_REPORT_VALUES):
        yield {"numbers": rows[start : start + MAX_REPORT_VALUES], "last": start + MAX_REPORT_VALUES >= len(rows)}


def _parse_rows(rows: Any) -> Iterator[tuple[SeriesKey, float]]:
    """Parse plain data; skip rows that do not match a known metric."""
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [str(name), list(values), int() | float() as value] if name in METRICS_BY_NAME:
                if len(values) == len(METRICS_BY_NAME[name].attributes):
                    yield (name, tuple(map(str, values))), value


def _is_counter(key: SeriesKey) -> bool:
    return METRICS_BY_NAME[key[0]].kind == "counter"
