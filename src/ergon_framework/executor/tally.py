"""Metrics of a pool: numbers that the pool counts anyway, read when metrics are collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import LabelLimiter, LoopMetrics, Numbers


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The state and the counters of a pool at one moment."""

    running: int
    in_flight: int
    waiting: int
    served: int
    wait_seconds: float
    #: started, failed_starts, retired, killed and died.
    events: Mapping[str, int]
    strays: Mapping[str, int]


_METRIC_BY_EVENT = {
    "started": names.EXECUTORS_STARTED,
    "failed_starts": names.EXECUTORS_FAILED,
    "retired": names.EXECUTORS_RETIRED,
    "killed": names.EXECUTORS_KILLED,
    "died": names.EXECUTORS_DIED,
}


class PoolMetrics(LoopMetrics):
    """The metrics of one pool for the metrics registry; thread-safe."""

    def __init__(self, name: str, *, bound: LabelLimiter, figures: Callable[[], PoolStats]) -> None:
        super().__init__(name, steps=(), success_steps=("", ""), bound=bound)
        self._get_stats = figures

    def counters(self) -> Numbers:
        stats = self._get_stats()
        numbers: Numbers = {
            (_METRIC_BY_EVENT[event].name, ()): count
            for event, count in stats.events.items()
            if event in _METRIC_BY_EVENT
        }
        numbers |= {(names.EXECUTOR_STRAYS.name, (kind,)): count for kind, count in stats.strays.items()}
        numbers[names.EXECUTOR_WAITS.name, ()] = stats.served
        numbers[names.EXECUTOR_WAITED.name, ()] = stats.wait_seconds
        return numbers

    def gauges(self) -> Numbers:
        stats = self._get_stats()
        return {
            (names.EXECUTORS.name, ()): stats.running,
            (names.EXECUTOR_JOBS.name, ()): stats.in_flight,
            (names.EXECUTOR_QUEUE.name, ()): stats.waiting,
        }
