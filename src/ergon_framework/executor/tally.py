"""What is seen of a pool: plain numbers that it counts anyway, read when somebody collects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import Bound, Counts, Numbers


@dataclass(frozen=True, slots=True)
class Figures:
    """A pool at one moment: what there is, and what has happened so far."""

    running: int
    in_flight: int
    waiting: int
    served: int
    waited: float
    #: started, failed_starts, retired, killed and died.
    ends: Mapping[str, int]
    strays: Mapping[str, int]


_ENDS = {
    "started": names.EXECUTORS_STARTED,
    "failed_starts": names.EXECUTORS_FAILED,
    "retired": names.EXECUTORS_RETIRED,
    "killed": names.EXECUTORS_KILLED,
    "died": names.EXECUTORS_DIED,
}


class PoolTally(Counts):
    """The figures of one pool, for the registry of metrics; any thread may ask."""

    def __init__(self, name: str, *, bound: Bound, figures: Callable[[], Figures]) -> None:
        super().__init__(name, steps=(), everyday=("", ""), bound=bound)
        self._figures = figures

    def counted(self) -> Numbers:
        now = self._figures()
        found: Numbers = {(_ENDS[end].name, ()): count for end, count in now.ends.items() if end in _ENDS}
        found |= {(names.EXECUTOR_STRAYS.name, (kind,)): count for kind, count in now.strays.items()}
        found[names.EXECUTOR_WAITS.name, ()] = now.served
        found[names.EXECUTOR_WAITED.name, ()] = now.waited
        return found

    def gauged(self) -> Numbers:
        now = self._figures()
        return {
            (names.EXECUTORS.name, ()): now.running,
            (names.EXECUTOR_JOBS.name, ()): now.in_flight,
            (names.EXECUTOR_QUEUE.name, ()): now.waiting,
        }
