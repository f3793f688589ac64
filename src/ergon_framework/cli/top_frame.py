"""One frame of ``ergon top``: the fleet's activity between two samples, and its state at the second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ergon_framework.cli.top_sources import Sample
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import METRICS_BY_NAME, Numbers, merge_numbers
from ergon_framework.telemetry.names import Metric


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task; rates are per second, *mean* is the mean processing time in seconds, waits included."""

    task: str
    processes: int
    rates: dict[str, float]
    retries: float
    slots: dict[str, int]
    mean: float | None
    died: int
    paused: str | None


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One queue; it has the name of its task if only the task is known."""

    queue: str
    of_task: bool
    ready: int
    delayed: int
    in_flight: int
    dead: int
    oldest: float | None


@dataclass(frozen=True, slots=True)
class ProviderRow:
    """One capability of a provider; *breaker* is the worst known state over all tenants."""

    provider: str
    calls: float
    failures: float
    breaker: str
    exhausted: bool


@dataclass(frozen=True, slots=True)
class ExecutorRow:
    """Executors of one kind."""

    kind: str
    executors: int
    jobs: int
    waiting: int
    died: float


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """The lag of a replicator, or of a reader of the database's facts."""

    replica: str
    from_zone: str
    to_zone: str
    status: str
    facts: int
    bytes: int
    seconds: float
    rate: float | None


@dataclass(frozen=True, slots=True)
class PauseRow:
    """A pause set by an operator, and the number of workers that obey it."""

    name: str
    by: str
    because: str
    obeying: int
    workers: int


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything that one refresh of ``ergon top`` shows."""

    at: float
    seconds: float
    asked: int
    unreached: dict[str, str]
    unsaid: dict[str, str]
    tasks: list[TaskRow] = field(default_factory=list)
    queues: list[QueueRow] = field(default_factory=list)
    providers: list[ProviderRow] = field(default_factory=list)
    executors: list[ExecutorRow] = field(default_factory=list)
    replicas: list[ReplicaRow] = field(default_factory=list)
    pauses: list[PauseRow] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the frame as plain data."""
        return asdict(self)


def build_frame(previous: Sample, current: Sample, *, wall: Callable[[], float] = time.time) -> Frame:
    """Build the frame for the time from *previous* to *current*."""
    seconds = max(current.at - previous.at, 1e-3)
    metrics = _FleetMetrics(previous, current, seconds)
    return Frame(
        at=wall(),
        seconds=round(seconds, 3),
        asked=current.asked,
        unreached=current.unreached,
        unsaid=current.unsaid,
        tasks=[metrics.build_task_row(name) for name in metrics.list_tasks()],
        queues=list(_build_queue_rows(metrics, current)),
        providers=list(_build_provider_rows(metrics, current)),
        executors=[metrics.build_executor_row(kind) for kind in metrics.list_values(names.EXECUTORS)],
        replicas=list(_build_replica_rows(metrics, current)),
        pauses=[
            PauseRow(
                one.name,
                one.by,
                one.because,
                sum(each.obeys is not None for each in current.workers if each.matches(one.name)),
                sum(each.matches(one.name) for each in current.workers),
            )
            for one in current.pauses
        ],
    )


class _FleetMetrics:
    """Metrics of all runs, summed: the current values, and the increase of counters per second."""

    def __init__(self, previous: Sample, current: Sample, seconds: float) -> None:
        self.sums: Numbers = {}
        self.rates: Numbers = {}
        for url, numbers in current.runs.items():
            merge_numbers(self.sums, numbers)
            earlier = previous.runs.get(url)
            if earlier is None:
                # The start time of its counters is unknown.
                continue
            for key, value in numbers.items():
                if METRICS_BY_NAME[key[0]].kind == "counter":
                    previous_value = earlier.get(key, 0.0)
                    # A counter that decreased was restarted from zero.
                    increase = value - previous_value if value >= previous_value else value
                    self.rates[key] = self.rates.get(key, 0.0) + increase / seconds

    def list_values(self, metric: Metric) -> list[str]:
        """Return the values of the metric's first attribute."""
        return sorted({values[0] for name, values in self.sums if name == metric.name})

    def list_tasks(self) -> list[str]:
        """Return the names of all tasks that have a process or a loop."""
        # An orchestrator runs under one name, and each of its kinds counts under another name.
        return sorted({name for metric in (names.PROCESSES, names.SLOTS) for name in self.list_values(metric)})

    def iter_values(self, metric: Metric, *first: str, rate: bool = False) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the metric's values whose first attributes are *first*, with the remaining attributes."""
        for (name, values), value in (self.rates if rate else self.sums).items():
            if name == metric.name and values[: len(first)] == first:
                yield values[len(first) :], value

    def sum_values(self, metric: Metric, *first: str, rate: bool = False) -> float:
        return sum(value for _, value in self.iter_values(metric, *first, rate=rate))

    def build_task_row(self, name: str) -> TaskRow:
        rates: dict[str, float] = {}
        for (outcome, *_), value in self.iter_values(names.TRANSACTIONS, name, rate=True):
            rates[outcome] = rates.get(outcome, 0.0) + value
        steps = sum(self.sum_values(names.STEPS, name, step, rate=True) for step in ("process", "produce"))
        total_seconds = sum(
            self.sum_values(names.STEP_SECONDS, name, step, rate=True) for step in ("process", "produce")
        )
        pause_reasons = [reason for (reason,), value in self.iter_values(names.PAUSED, name) if value]
        return TaskRow(
            task=name,
            processes=int(self.sum_values(names.PROCESSES, name)),
            rates=rates,
            retries=self.sum_values(names.RETRIES, name, rate=True),
            slots={state: int(value) for (state,), value in self.iter_values(names.SLOTS, name)},
            mean=total_seconds / steps if steps else None,
            died=int(self.sum_values(names.PROCESSES_DIED, name)),
            paused=pause_reasons[0] if pause_reasons else None,
        )

    def build_executor_row(self, kind: str) -> ExecutorRow:
        return ExecutorRow(
            kind=kind,
            executors=int(self.sum_values(names.EXECUTORS, kind)),
            jobs=int(self.sum_values(names.EXECUTOR_JOBS, kind)),
            waiting=int(self.sum_values(names.EXECUTOR_QUEUE, kind)),
            died=self.sum_values(names.EXECUTORS_DIED, kind, rate=True),
        )


def _build_queue_rows(metrics: _FleetMetrics, current: Sample) -> Iterator[QueueRow]:
    for name, depth in sorted(current.queues.items()):
        yield QueueRow(
            queue=name,
            of_task=False,
            ready=depth.ready,
            delayed=depth.delayed,
            in_flight=depth.in_flight,
            dead=depth.dead,
            oldest=depth.oldest_age,
        )
    # The database already reported the queues of workers that registered their queue.
    reported_tasks = {each.task for each in current.workers if each.queue in current.queues}
    for task in metrics.list_values(names.QUEUE_DEPTH):
        if task not in reported_tasks:
            counts = {state: int(value) for (state,), value in metrics.iter_values(names.QUEUE_DEPTH, task)}
            yield QueueRow(
                queue=task,
                of_task=True,
                ready=counts.get("ready", 0),
                delayed=counts.get("delayed", 0),
                in_flight=counts.get("in_flight", 0),
                dead=counts.get("dead", 0),
                oldest=metrics.sum_values(names.QUEUE_LAG, task) if counts.get("ready") else None,
            )


def _build_provider_rows(metrics: _FleetMetrics, current: Sample) -> Iterator[ProviderRow]:
    # The breakers are sorted by state: among those of several tenants an open one is the last.
    breakers = {(one.provider, one.capability): one for one in current.breakers}
    called = {values[:2] for name, values in metrics.sums if name == names.PROVIDER_CALLS.name}
    for provider, capability in sorted(called | set(breakers)):
        state = "open" if metrics.sum_values(names.PROVIDER_OPEN, provider, capability) else "closed"
        if (breaker := breakers.get((provider, capability))) is not None:
            state = breaker.state
        rates = list(metrics.iter_values(names.PROVIDER_CALLS, provider, capability, rate=True))
        yield ProviderRow(
            provider=f"{provider}/{capability}",
            calls=sum(value for _, value in rates),
            failures=sum(value for (outcome, *_), value in rates if outcome == "failed"),
            breaker=state,
            exhausted=bool(metrics.sum_values(names.PROVIDER_EXHAUSTED, provider, capability)),
        )


def _build_replica_rows(metrics: _FleetMetrics, current: Sample) -> Iterator[ReplicaRow]:
    for replica, source, target in sorted({v[:3] for name, v in metrics.sums if name == names.REPLICA_STATUS.name}):
        states = [
            state for (state,), value in metrics.iter_values(names.REPLICA_STATUS, replica, source, target) if value
        ]
        yield ReplicaRow(
            replica=replica,
            from_zone=source,
            to_zone=target,
            status=states[0] if states else "unknown",
            facts=int(metrics.sum_values(names.REPLICA_LAG, replica, source, target)),
            bytes=int(metrics.sum_values(names.REPLICA_LAG_BYTES, replica, source, target)),
            seconds=metrics.sum_values(names.REPLICA_LAG_SECONDS, replica, source, target),
            rate=metrics.sum_values(names.REPLICA_FACTS, replica, source, target, rate=True),
        )
    for one in current.readers:
        yield ReplicaRow(
            replica=one.reader,
            from_zone=one.from_zone,
            to_zone=one.to_zone,
            status="reader",
            facts=one.facts,
            bytes=one.bytes,
            seconds=one.seconds,
            rate=None,
        )
