"""Metrics: plain numbers that loops increment, and instruments that read them at collection.

To record on an instrument of the SDK takes longer than the rest of a transaction, so no loop does it. Each loop has its
own numbers, each written by only one of its scripts; when a loop ends, its counters are added to the process's totals.
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

#: Upper bounds of the buckets of durations, in seconds; there is one more bucket above them.
BUCKET_BOUNDS_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
_BUCKET_LABELS: Final = (*(f"{bound:g}" for bound in BUCKET_BOUNDS_SECONDS), "+Inf")

#: Number of distinct values of one label, and the value that replaces all further ones.
MAX_LABEL_VALUES: Final = 100
OTHER_VALUE: Final = "other"

#: A metric's name and the values of its attributes after the first, which is the task or the provider.
SeriesKey: TypeAlias = tuple[str, tuple[str, ...]]
Numbers: TypeAlias = dict[SeriesKey, float]
#: Returns the numbers of running transactions, abandoned calls and waiting deliveries.
SlotUsage: TypeAlias = Callable[[], tuple[int, int, int]]
_SLOT_STATES: Final = ("running", "abandoned", "waiting")


class HistogramValues:
    """The durations of one step, as a histogram."""

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets = [0] * len(_BUCKET_LABELS)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(BUCKET_BOUNDS_SECONDS, seconds)] += 1
        self.total += seconds


class LoopMetrics:
    """The metrics of one loop.

    ``plain`` and ``single`` count the common cases: both steps succeeded at the first attempt, or the
    first did and there was no second.
    """

    def __init__(
        self, task: str, *, steps: Iterable[str], success_steps: tuple[str, str], label_limiter: LabelLimiter
    ) -> None:
        self.task = task
        self.plain = 0
        self.single = 0
        self.durations = {step: HistogramValues() for step in steps}
        #: Both are set by the observer of the loop, and called at collection.
        self.usage: SlotUsage | None = None
        self.late_results: Callable[[], int] | None = None
        #: The age of the oldest transaction of the last fetch, and the largest such age since the last reading.
        self.age: float | None = None
        self.oldest: float | None = None
        #: The ages of the oldest transaction of each fetch.
        self.waited = HistogramValues()
        #: Why a gate pauses the loop; None while it fetches.
        self.paused: str | None = None
        self._success_steps = success_steps
        self._label_limiter = label_limiter
        self._numbers: Numbers = {}

    def add(self, metric: Metric, *values: str, amount: float = 1) -> None:
        """Add *amount* for the attributes after the task; an empty value means that the attribute is absent."""
        _add(self._numbers, (metric.name, self._label_limiter(metric, values)), amount)

    def observe_age(self, seconds: float) -> None:
        self.age = seconds
        self.waited.add(seconds)
        if self.oldest is None or seconds > self.oldest:
            self.oldest = seconds

    def counters(self) -> Numbers:
        """Return the current value of every counter of this loop."""
        # list() copies in one step: the loop may add a key meanwhile, in another thread.
        numbers: Numbers = dict(list(self._numbers.items()))
        for successes, steps in ((self.plain, self._success_steps), (self.single, self._success_steps[:1])):
            if successes:
                _add(numbers, (names.TRANSACTIONS.name, ("succeeded", "")), successes)
                for step in steps:
                    _add(numbers, (names.ATTEMPTS.name, (step,)), successes)
        for step, durations in self.durations.items():
            numbers.update(_build_histogram(STEP_DURATION, (step,), durations))
        numbers.update(_build_histogram(QUEUE_WAIT, (), self.waited))
        if self.late_results is not None and (late_results := self.late_results()):
            _add(numbers, (names.LATE_RESULTS.name, ()), late_results)
        return numbers

    def gauges(self) -> Numbers:
        """Return every gauge of this loop that can be added to those of other loops."""
        numbers: Numbers = {}
        if self.usage is not None:
            for state, count in zip(_SLOT_STATES, self.usage(), strict=True):
                numbers[names.SLOTS.name, (state,)] = count
        if self.paused is not None:
            numbers[names.PAUSED.name, self._label_limiter(names.PAUSED, (self.paused,))] = 1
        return numbers

    def take_oldest_age(self) -> float | None:
        """Return the largest age since the last call, and reset it."""
        oldest, self.oldest = self.oldest, None
        return oldest


@dataclass(frozen=True, slots=True)
class Histogram:
    """The three counters that form one histogram, for systems that support histograms."""

    count: Metric
    total: Metric
    bucket: Metric


STEP_DURATION: Final = Histogram(names.STEPS, names.STEP_SECONDS, names.STEP_BUCKETS)
QUEUE_WAIT: Final = Histogram(names.QUEUE_WAITS, names.QUEUE_WAIT_SECONDS, names.QUEUE_WAIT_BUCKETS)
HISTOGRAMS: Final = (STEP_DURATION, QUEUE_WAIT)


def _build_histogram(histogram: Histogram, values: tuple[str, ...], durations: HistogramValues) -> Numbers:
    numbers: Numbers = {}
    cumulative = 0
    for le, count in zip(_BUCKET_LABELS, list(durations.buckets), strict=True):
        cumulative += count
        numbers[histogram.bucket.name, (*values, le)] = cumulative
    numbers[histogram.count.name, values] = cumulative
    numbers[histogram.total.name, values] = durations.total
    return numbers if cumulative else {}


C = TypeVar("C", bound=LoopMetrics)


class LabelLimiter:
    """Limits the cardinality of labels: after a number of values of one label, all further ones are replaced."""

    def __init__(self, limit: int = MAX_LABEL_VALUES) -> None:
        self._limit = limit
        self._seen_values: dict[tuple[str, int], set[str]] = {}

    def __call__(self, metric: Metric, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.limit_value((metric.name, index), value) for index, value in enumerate(values))

    def limit_value(self, label: tuple[str, int], value: str) -> str:
        seen = self._seen_values.setdefault(label, set())
        if value in seen:
            return value
        if len(seen) >= self._limit:
            return OTHER_VALUE
        seen.add(value)
        return value


class Registry:
    """The metrics of all ended and running loops of this process, for one meter provider."""

    def __init__(self, limit: int = MAX_LABEL_VALUES) -> None:
        self._lock = threading.Lock()
        self._label_limiter = LabelLimiter(limit)
        # In the order of their start: with too many labels, the first ones keep theirs.
        self._live: dict[LoopMetrics, None] = {}
        #: The counters of ended loops, by task.
        self._totals: dict[str, Numbers] = {}
        #: The depths of queues that brokers have reported, by task.
        self._depths: dict[str, Numbers] = {}

    def new_loop_metrics(self, task: str, *, steps: Iterable[str], success_steps: tuple[str, str]) -> LoopMetrics:
        """Create the metrics of a new loop of *task*; they are collected once they are opened."""
        return LoopMetrics(
            self._label_limiter.limit_value(("", 0), task),
            steps=steps,
            success_steps=success_steps,
            label_limiter=self._label_limiter,
        )

    def register(self, metrics_class: Callable[..., C], name: str) -> C:
        """Create and open metrics of another class, with *name* in place of a task; the caller may close them."""
        loop_metrics = metrics_class(self._label_limiter.limit_value(("", 0), name), label_limiter=self._label_limiter)
        self.open(loop_metrics)
        return loop_metrics

    def open(self, loop_metrics: LoopMetrics) -> None:
        with self._lock:
            self._live[loop_metrics] = None

    def close(self, loop_metrics: LoopMetrics) -> None:
        """Add the counters of an ended loop to the totals, and drop the loop."""
        with self._lock:
            if loop_metrics in self._live:
                self._live.pop(loop_metrics, None)
                _add_all(self._totals, loop_metrics.task, loop_metrics.counters())

    def set_queue_depth(self, task: str, depth: Mapping[str, int] | None, oldest: float | None = None) -> None:
        """Set the depth of the queue of *task* by state, and the age of its oldest waiting message; None: unknown."""
        with self._lock:
            task = self._label_limiter.limit_value(("", 0), task)
            if depth is None:
                self._depths.pop(task, None)
                return
            numbers: Numbers = {(names.QUEUE_DEPTH.name, (state,)): count for state, count in depth.items()}
            numbers[names.QUEUE_LAG.name, ()] = oldest or 0.0
            self._depths[task] = numbers

    def read(self, metric: Metric) -> list[tuple[dict[str, str], float]]:
        """Return the metric's current values, each with its attributes."""
        with self._lock:
            by_task = self._collect_ages(metric) if metric in _AGE_METRICS else self._sum_by_task(metric.kind)
        return [
            (_build_labels(metric, task, values), value)
            for task, numbers in by_task.items()
            for (name, values), value in numbers.items()
            if name == metric.name
        ]

    def snapshot(self) -> Numbers:
        """Return every current value, by the metric's name and the values of all its attributes.

        The largest age since the last reading is left out: reading resets it, and it belongs to OpenTelemetry's reader.
        """
        with self._lock:
            parts = (self._sum_by_task("counter"), self._sum_by_task("gauge"), self._collect_ages(names.QUEUE_AGE))
        return {
            (name, (task, *values)): value
            for part in parts
            for task, numbers in part.items()
            for (name, values), value in numbers.items()
        }

    def instrument(self, meter: Meter) -> None:
        """Create the instruments on *meter*, which read all values at collection."""
        for metric in METRICS:
            create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            callback = partial(self._observe, metric)
            create(metric.name, callbacks=[callback], unit=metric.unit, description=metric.description)

    def _observe(self, metric: Metric, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, labels) for labels, value in self.read(metric)]

    def _sum_by_task(self, kind: str) -> dict[str, Numbers]:
        """Sum the numbers of the running loops; counters include those of ended loops, gauges the measured depths."""
        is_counter = kind == "counter"
        base = self._totals if is_counter else self._depths
        by_task = {task: dict(numbers) for task, numbers in base.items()}
        for loop_metrics in self._live:
            _add_all(by_task, loop_metrics.task, loop_metrics.counters() if is_counter else loop_metrics.gauges())
        return by_task

    def _collect_ages(self, metric: Metric) -> dict[str, Numbers]:
        """Return the highest age per task among its running loops; QUEUE_AGE_MAX restarts with every reading."""
        by_task: dict[str, Numbers] = {}
        for loop_metrics in self._live:
            age = loop_metrics.age if metric is names.QUEUE_AGE else loop_metrics.take_oldest_age()
            if age is not None:
                numbers = by_task.setdefault(loop_metrics.task, {})
                numbers[metric.name, ()] = max(age, numbers.get((metric.name, ()), age))
        return by_task


METRICS_BY_NAME: Final = {metric.name: metric for metric in METRICS}
_AGE_METRICS: Final = (names.QUEUE_AGE, names.QUEUE_AGE_MAX)


def _add(numbers: Numbers, key: SeriesKey, amount: float) -> None:
    numbers[key] = numbers.get(key, 0) + amount


def _add_all(totals: dict[str, Numbers], task: str, numbers: Numbers) -> None:
    target = totals.setdefault(task, {})
    for key, amount in numbers.items():
        _add(target, key, amount)


def _build_labels(metric: Metric, task: str, values: tuple[str, ...]) -> dict[str, str]:
    labels = dict(zip(metric.attributes[1:], values, strict=True))
    return {metric.attributes[0]: task} | {name: value for name, value in labels.items() if value}


_registries: WeakKeyDictionary[MeterProvider, Registry] = WeakKeyDictionary()
_lock: Final = threading.Lock()


def get_registry(provider: MeterProvider | None = None) -> Registry:
    """Return the registry that *provider* reads; the process's own if *provider* is None.

    Without a provider the instruments are created on the global one; a provider that is set later takes them over.
    """
    # The global provider is replaced when the SDK is set up; its proxy would be the key of a second registry.
    key = provider or _GLOBAL_PROVIDER_KEY
    with _lock:
        registry = _registries.get(key)
        if registry is None:
            registry = _registries[key] = Registry()
            registry.instrument(api.get_meter(LIBRARY) if provider is None else provider.get_meter(LIBRARY))
        return registry


def snapshot() -> Numbers:
    """Return all values of this process, of all providers."""
    with _lock:
        registries = list(_registries.values())
    numbers: Numbers = {}
    for registry in registries:
        merge_numbers(numbers, registry.snapshot())
    return numbers


def merge_numbers(target: Numbers, numbers: Numbers) -> None:
    """Merge *numbers* into *target*: the sum of both values, or the larger one, as each metric defines."""
    for key, value in numbers.items():
        metric = METRICS_BY_NAME[key[0]]
        target[key] = max(value, target.get(key, value)) if metric.across == "max" else target.get(key, 0) + value


_GLOBAL_PROVIDER_KEY: Final = api.NoOpMeterProvider()
