"""Metrics: plain numbers that loops count up, and instruments that read them when somebody collects.

A record on an instrument of the SDK costs more than all the rest of a transaction, so no loop
ever touches one. Each loop has numbers of its own, each of them written by one of its scripts
only; what a loop has counted is added to the process's totals when it is over.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from opentelemetry import metrics as api
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

from ergon_framework.telemetry import names
from ergon_framework.telemetry.names import LIBRARY, METRICS, Metric

#: Upper bounds of the buckets of durations, in seconds; there is one more above them.
BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LE: Final = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")

#: How many values of one label are told apart, and what all further ones are called.
VALUES: Final = 100
OTHER: Final = "other"

#: A metric's name and the values of its attributes after the first, which is the task, or the provider.
Key: TypeAlias = tuple[str, tuple[str, ...]]
Numbers: TypeAlias = dict[Key, float]
#: Running, abandoned, held.
Usage: TypeAlias = Callable[[], tuple[int, int, int]]
_STATES: Final = ("running", "abandoned", "held")


class Durations:
    """How long one step took, as a histogram."""

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets = [0] * len(_LE)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


class Counts:
    """What one loop counts.

    ``plain`` and ``single`` are the everyday cases: both steps succeeded at once, or the first
    did and there was no second.
    """

    def __init__(self, task: str, *, steps: Iterable[str], everyday: tuple[str, str], bound: Bound) -> None:
        self.task = task
        self.plain = 0
        self.single = 0
        self.durations = {step: Durations() for step in steps}
        self.usage: Usage | None = None
        self.fenced: Callable[[], int] | None = None
        self.age: float | None = None
        self.oldest: float | None = None
        self.waited = Durations()
        self.paused: str | None = None
        self._everyday = everyday
        self._bound = bound
        self._numbers: Numbers = {}

    def add(self, metric: Metric, *values: str, amount: float = 1) -> None:
        """Count *amount* for the attributes after the task; an empty value means that there is none."""
        _add(self._numbers, (metric.name, self._bound(metric, values)), amount)

    def aged(self, seconds: float) -> None:
        self.age = seconds
        self.waited.add(seconds)
        if self.oldest is None or seconds > self.oldest:
            self.oldest = seconds

    def counted(self) -> Numbers:
        """Every counter of this loop as it stands."""
        found: Numbers = dict(list(self._numbers.items()))
        for made, steps in ((self.plain, self._everyday), (self.single, self._everyday[:1])):
            if made:
                _add(found, (names.TRANSACTIONS.name, ("succeeded", "")), made)
                for step in steps:
                    _add(found, (names.ATTEMPTS.name, (step,)), made)
        for step, durations in self.durations.items():
            found.update(_histogram(STEP_DURATION, (step,), durations))
        found.update(_histogram(QUEUE_WAIT, (), self.waited))
        if self.fenced is not None and (fenced := self.fenced()):
            _add(found, (names.FENCED.name, ()), fenced)
        return found

    def gauged(self) -> Numbers:
        """Every gauge of this loop that can be added to those of others."""
        found: Numbers = {}
        if self.usage is not None:
            for state, count in zip(_STATES, self.usage(), strict=True):
                found[names.SLOTS.name, (state,)] = count
        if self.paused is not None:
            found[names.PAUSED.name, self._bound(names.PAUSED, (self.paused,))] = 1
        return found

    def oldest_since(self) -> float | None:
        """The largest age since this was last asked."""
        oldest, self.oldest = self.oldest, None
        return oldest


@dataclass(frozen=True, slots=True)
class Histogram:
    """The three counters that are one histogram, to those who know such a thing."""

    count: Metric
    total: Metric
    bucket: Metric


STEP_DURATION: Final = Histogram(names.STEPS, names.STEP_SECONDS, names.STEP_BUCKETS)
QUEUE_WAIT: Final = Histogram(names.QUEUE_WAITS, names.QUEUE_WAITED, names.QUEUE_WAIT_BUCKETS)
HISTOGRAMS: Final = (STEP_DURATION, QUEUE_WAIT)


def _histogram(histogram: Histogram, values: tuple[str, ...], durations: Durations) -> Numbers:
    found: Numbers = {}
    so_far = 0
    for le, count in zip(_LE, list(durations.buckets), strict=True):
        so_far += count
        found[histogram.bucket.name, (*values, le)] = so_far
    found[histogram.count.name, values] = so_far
    found[histogram.total.name, values] = durations.total
    return found if so_far else {}


C = TypeVar("C", bound=Counts)


class Bound:
    """Keeps labels few: after so many values of one, the others are one and the same."""

    def __init__(self, limit: int = VALUES) -> None:
        self._limit = limit
        self._known: dict[tuple[str, int], set[str]] = {}

    def __call__(self, metric: Metric, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.value((metric.name, place), value) for place, value in enumerate(values))

    def value(self, label: tuple[str, int], value: str) -> str:
        known = self._known.setdefault(label, set())
        if value in known:
            return value
        if len(known) >= self._limit:
            return OTHER
        known.add(value)
        return value


class Registry:
    """All that this process has counted and is counting, for one meter provider."""

    def __init__(self, limit: int = VALUES) -> None:
        self._lock = threading.Lock()
        self._bound = Bound(limit)
        # In the order in which they began: who is counted first keeps its label when there are too many.
        self._live: dict[Counts, None] = {}
        #: What loops that are over have counted, by task.
        self._totals: dict[str, Numbers] = {}
        #: What brokers have said about the queues of tasks, by task.
        self._levels: dict[str, Numbers] = {}

    def counts(self, task: str, *, steps: Iterable[str], everyday: tuple[str, str]) -> Counts:
        """The numbers of a new loop of *task*; they are seen once it is opened."""
        return Counts(self._bound.value(("", 0), task), steps=steps, everyday=everyday, bound=self._bound)

    def join(self, kind: Callable[..., C], name: str) -> C:
        """Numbers of a kind of their own, called *name* where others name a task; they are seen at once, and stay."""
        counts = kind(self._bound.value(("", 0), name), bound=self._bound)
        self.open(counts)
        return counts

    def open(self, counts: Counts) -> None:
        with self._lock:
            self._live[counts] = None

    def close(self, counts: Counts) -> None:
        """The loop is over: what it has counted is kept, and it is forgotten."""
        with self._lock:
            if counts in self._live:
                self._live.pop(counts, None)
                _add_all(self._totals, counts.task, counts.counted())

    def level(self, task: str, depth: Mapping[str, int] | None, oldest: float | None = None) -> None:
        """How full the queue of *task* is, by state, and how old the oldest that waits there; None: unknown."""
        with self._lock:
            task = self._bound.value(("", 0), task)
            if depth is None:
                self._levels.pop(task, None)
                return
            numbers: Numbers = {(names.QUEUE_DEPTH.name, (state,)): count for state, count in depth.items()}
            numbers[names.QUEUE_LAG.name, ()] = oldest or 0.0
            self._levels[task] = numbers

    def read(self, metric: Metric) -> list[tuple[dict[str, str], float]]:
        """The metric's values now, each with its attributes."""
        with self._lock:
            found = self._ages(metric) if metric in _AGES else self._sums(metric.kind)
        return [
            (_labels(metric, task, values), value)
            for task, numbers in found.items()
            for (name, values), value in numbers.items()
            if name == metric.name
        ]

    def snapshot(self) -> Numbers:
        """Every value now, by the metric's name and the values of all its attributes.

        The largest age since somebody last read it is left out: it belongs to whoever collects through OpenTelemetry.
        """
        with self._lock:
            parts = (self._sums("counter"), self._sums("gauge"), self._ages(names.QUEUE_AGE))
        return {
            (name, (task, *values)): value
            for found in parts
            for task, numbers in found.items()
            for (name, values), value in numbers.items()
        }

    def instrument(self, meter: Meter) -> None:
        """Have *meter* read everything when it collects."""
        for metric in METRICS:
            make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            callback = partial(self._observed, metric)
            make(metric.name, callbacks=[callback], unit=metric.unit, description=metric.description)

    def _observed(self, metric: Metric, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, labels) for labels, value in self.read(metric)]

    def _sums(self, kind: str) -> dict[str, Numbers]:
        counter = kind == "counter"
        told = self._totals if counter else self._levels
        found = {task: dict(numbers) for task, numbers in told.items()}
        for counts in self._live:
            _add_all(found, counts.task, counts.counted() if counter else counts.gauged())
        return found

    def _ages(self, metric: Metric) -> dict[str, Numbers]:
        found: dict[str, Numbers] = {}
        for counts in self._live:
            age = counts.age if metric is names.QUEUE_AGE else counts.oldest_since()
            if age is not None:
                numbers = found.setdefault(counts.task, {})
                numbers[metric.name, ()] = max(age, numbers.get((metric.name, ()), age))
        return found


BY_NAME: Final = {metric.name: metric for metric in METRICS}
_AGES: Final = (names.QUEUE_AGE, names.QUEUE_AGE_MAX)


def _add(numbers: Numbers, key: Key, amount: float) -> None:
    numbers[key] = numbers.get(key, 0) + amount


def _add_all(sums: dict[str, Numbers], task: str, numbers: Numbers) -> None:
    into = sums.setdefault(task, {})
    for key, amount in numbers.items():
        _add(into, key, amount)


def _labels(metric: Metric, task: str, values: tuple[str, ...]) -> dict[str, str]:
    labels = dict(zip(metric.attributes[1:], values, strict=True))
    return {metric.attributes[0]: task} | {name: value for name, value in labels.items() if value}


_registries: WeakKeyDictionary[MeterProvider, Registry] = WeakKeyDictionary()
_lock: Final = threading.Lock()


def registry_of(provider: MeterProvider | None = None) -> Registry:
    """The registry that *provider* reads, or the process's own if there is none given.

    Without a provider the instruments are made on the global one; set later, it takes them over.
    """
    # The global provider is replaced when the SDK is set up; its stand-in would be a second registry.
    key = provider or _GLOBAL
    with _lock:
        registry = _registries.get(key)
        if registry is None:
            registry = _registries[key] = Registry()
            registry.instrument(api.get_meter(LIBRARY) if provider is None else provider.get_meter(LIBRARY))
        return registry


def snapshot() -> Numbers:
    """All that this process has counted, for whichever provider."""
    with _lock:
        registries = list(_registries.values())
    found: Numbers = {}
    for registry in registries:
        add(found, registry.snapshot())
    return found


def add(into: Numbers, numbers: Numbers) -> None:
    """Put *numbers* together with what is there, as each metric says."""
    for key, value in numbers.items():
        metric = BY_NAME[key[0]]
        into[key] = max(value, into.get(key, value)) if metric.across == "max" else into.get(key, 0) + value


_GLOBAL: Final = api.NoOpMeterProvider()
