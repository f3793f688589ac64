"""The metrics that user code has registered with prometheus_client, for the metrics page of the framework.

A family is one metric with all its samples. This process reads the default registry of prometheus_client; with several
processes, each of them reports its families, and the supervisor adds them up. Nothing here imports prometheus_client:
user code that registers a metric has imported it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias

from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import Event, Field

#: Families whose names begin with this are those of the framework.
RESERVED_PREFIX: Final = "ergon_"
#: Maximum samples of one process; families that come after them are left out.
MAX_SAMPLES: Final = 10_000
#: Approximate maximum characters of one report: far below the longest line that is read.
MAX_REPORT_CHARS: Final = 200_000

#: The values of these kinds only grow, so those of an ended process are kept.
_CUMULATIVE_KINDS: Final = frozenset({"counter", "histogram", "summary"})
#: The values of these kinds are 0 or 1 and describe a state, so a sum has no meaning.
_STATE_KINDS: Final = frozenset({"info", "stateset"})
_LIBRARY: Final = "prometheus_client"
_logger: Final = logging.getLogger(__name__)

#: The name of a sample and its labels.
SampleKey: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class UserFamily:
    """One metric of user code; *kind* is the type that prometheus_client gives it."""

    name: str
    kind: str
    description: str
    samples: dict[SampleKey, float] = field(default_factory=dict)


Families: TypeAlias = dict[str, UserFamily]


def collect_families() -> Families:
    """Return the families of the default registry of this process, without those of prometheus_client itself.

    A collector that raises ends the collection; the families that came before it are returned.
    """
    library: Any = sys.modules.get(_LIBRARY)
    families: Families = {}
    if library is None or not hasattr(library, "REGISTRY"):
        return families
    count = 0
    try:
        own_names = _list_library_names()
        for metric in library.REGISTRY.collect():
            if metric.name in own_names or metric.name.startswith(RESERVED_PREFIX):
                continue
            samples = {
                (sample.name, tuple(sorted((str(k), str(v)) for k, v in sample.labels.items()))): float(sample.value)
                for sample in metric.samples
                # The time at which a series was created has no sum.
                if not sample.name.endswith("_created")
            }
            count += len(samples)
            if count > MAX_SAMPLES:
                break
            families[metric.name] = UserFamily(metric.name, metric.type, metric.documentation, samples)
    except Exception as error:  # noqa: BLE001 - collectors are third-party code
        logs.log_event(logging.WARNING, Event.TELEMETRY_FAILED, {Field.ERROR_TYPE: type(error).__name__}, to=_logger)
    return families


@cache
def _list_library_names() -> frozenset[str]:
    """Return the families that prometheus_client registers on its import: each process has its own values."""
    library: Any = sys.modules[_LIBRARY]
    collectors = (library.GC_COLLECTOR, library.PLATFORM_COLLECTOR, library.PROCESS_COLLECTOR)
    return frozenset(metric.name for collector in collectors for metric in collector.collect())


def serialize_families(families: Families) -> Iterator[list[Any]]:
    """Serialize *families* to parts of plain data; a family may be spread over several parts."""
    rows: list[Any] = []
    chars = 0
    for family in families.values():
        samples: list[Any] = []
        rows.append([family.name, family.kind, family.description, samples])
        chars += len(family.name) + len(family.description)
        for (name, labels), value in family.samples.items():
            samples.append([name, [list(label) for label in labels], value])
            # Escapes make a text up to six times as long.
            chars += 6 * (len(name) + sum(len(key) + len(text) for key, text in labels) + 20)
            if chars > MAX_REPORT_CHARS:
                yield rows
                samples, chars = [], 0
                rows = [[family.name, family.kind, family.description, samples]]
    if rows:
        yield rows


def parse_families(rows: Any) -> Iterator[UserFamily]:
    """Parse plain data; skip what has another form."""
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [str(name), str(kind), str(description), list(samples)]:
                yield UserFamily(name, kind, description, dict(_parse_samples(samples)))


def _parse_samples(rows: list[Any]) -> Iterator[tuple[SampleKey, float]]:
    for row in rows:
        match row:
            case [str(name), list(labels), int() | float() as value]:
                yield (name, tuple((str(key), str(text)) for key, text in labels)), value


class FamilyTotals:
    """The families of several processes, added up; not thread-safe.

    Counters, histograms and summaries are sums over all processes, ended ones included, and never decrease. Gauges are
    sums over the running processes. A state (Info, Enum) is 1 where any process reports it.
    """

    def __init__(self) -> None:
        self._reports: dict[int, Families] = {}
        #: The parts of incomplete reports.
        self._parts: dict[int, Families] = {}
        self._ended: Families = {}
        self._last_shown: dict[SampleKey, float] = {}

    def update(self, source: int, rows: Any, *, is_last: bool) -> None:
        """Add a part of the report of process *source*; the last part replaces the report before."""
        _add(self._parts.setdefault(source, {}), parse_families(rows))
        if is_last:
            self._reports[source] = self._parts.pop(source)

    def remove(self, source: int) -> None:
        """Remove an ended process."""
        self._parts.pop(source, None)
        families = self._reports.pop(source, {})
        _add(self._ended, (family for family in families.values() if family.kind in _CUMULATIVE_KINDS))

    def read(self, own: Families) -> Families:
        """Return the sums of all processes and of *own*, the families of this one."""
        totals: Families = {}
        for families in (self._ended, own, *self._reports.values()):
            _add(totals, families.values())
        for family in totals.values():
            if family.kind in _CUMULATIVE_KINDS:
                for key, value in family.samples.items():
                    # A float sum depends slightly on its order; a collector takes a decrease for a restart.
                    family.samples[key] = self._last_shown[key] = max(value, self._last_shown.get(key, value))
        return totals


def _add(target: Families, families: Iterable[UserFamily]) -> None:
    """Add *families* to *target*; a family that has another kind there is skipped."""
    for family in families:
        total = target.setdefault(family.name, UserFamily(family.name, family.kind, family.description))
        if total.kind != family.kind:
            continue
        for key, value in family.samples.items():
            previous = total.samples.get(key)
            if previous is None:
                total.samples[key] = value
            else:
                total.samples[key] = max(previous, value) if family.kind in _STATE_KINDS else previous + value
