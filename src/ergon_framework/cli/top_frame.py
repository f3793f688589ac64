"""A frame: what the fleet did between two looks, and how it is at the second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ergon_framework.cli.top_sources import Look
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import BY_NAME, Numbers, add
from ergon_framework.telemetry.names import Metric


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task; rates are per second, and *mean* is how long its work took in seconds, waits included."""

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
    """One queue; where only its task is known, it is called by that."""

    queue: str
    of_task: bool
    ready: int
    delayed: int
    in_flight: int
    dead: int
    oldest: float | None


@dataclass(frozen=True, slots=True)
class ProviderRow:
    """One capability of a provider; *breaker* is what is known of the worst of all tenants."""

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
    """A replicator, or a reader of the database's facts, and how far it is behind."""

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
    """What an operator has paused, and how many workers obey."""

    name: str
    by: str
    because: str
    obeying: int
    workers: int


@dataclass(frozen=True, slots=True)
class Frame:
    """All that is shown at once."""

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

    def told(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def frame(before: Look, now: Look, *, wall: Callable[[], float] = time.time) -> Frame:
    """What happened from *before* to *now*."""
    seconds = max(now.at - before.at, 1e-3)
    read = _Reading(before, now, seconds)
    return Frame(
        at=wall(),
        seconds=round(seconds, 3),
        asked=now.asked,
        unreached=now.unreached,
        unsaid=now.unsaid,
        tasks=[read.task(name) for name in read.tasks()],
        queues=list(_queues(read, now)),
        providers=list(_providers(read, now)),
        executors=[read.executors(kind) for kind in read.values(names.EXECUTORS)],
        replicas=list(_replicas(read, now)),
        pauses=[
            PauseRow(
                one.name,
                one.by,
                one.because,
                sum(each.obeys is not None for each in now.workers if each.is_called(one.name)),
                sum(each.is_called(one.name) for each in now.workers),
            )
            for one in now.pauses
        ],
    )


class _Reading:
    """The numbers of all runs as one: as they are, and what was added to them per second."""

    def __init__(self, before: Look, now: Look, seconds: float) -> None:
        self.sums: Numbers = {}
        self.rates: Numbers = {}
        for url, numbers in now.runs.items():
            add(self.sums, numbers)
            earlier = before.runs.get(url)
            if earlier is None:
                # Nobody knows since when it has counted.
                continue
            for key, value in numbers.items():
                if BY_NAME[key[0]].kind == "counter":
                    was = earlier.get(key, 0.0)
                    # One that went back has begun anew.
                    risen = value - was if value >= was else value
                    self.rates[key] = self.rates.get(key, 0.0) + risen / seconds

    def values(self, metric: Metric) -> list[str]:
        """The values of its first attribute."""
        return sorted({values[0] for name, values in self.sums if name == metric.name})

    def tasks(self) -> list[str]:
        """All that run or have a loop."""
        # An orchestrator runs under one name, and each of its kinds counts under another.
        return sorted({name for metric in (names.PROCESSES, names.SLOTS) for name in self.values(metric)})

    def of(self, metric: Metric, *first: str, rate: bool = False) -> Iterator[tuple[tuple[str, ...], float]]:
        """Its values below these of its first attributes, by those of the rest."""
        for (name, values), value in (self.rates if rate else self.sums).items():
            if name == metric.name and values[: len(first)] == first:
                yield values[len(first) :], value

    def total(self, metric: Metric, *first: str, rate: bool = False) -> float:
        return sum(value for _, value in self.of(metric, *first, rate=rate))

    def task(self, name: str) -> TaskRow:
        rates: dict[str, float] = {}
        for (outcome, *_), value in self.of(names.TRANSACTIONS, name, rate=True):
            rates[outcome] = rates.get(outcome, 0.0) + value
        steps = sum(self.total(names.STEPS, name, step, rate=True) for step in ("process", "produce"))
        took = sum(self.total(names.STEP_SECONDS, name, step, rate=True) for step in ("process", "produce"))
        held = [reason for (reason,), value in self.of(names.PAUSED, name) if value]
        return TaskRow(
            task=name,
            processes=int(self.total(names.PROCESSES, name)),
            rates=rates,
            retries=self.total(names.RETRIES, name, rate=True),
            slots={state: int(value) for (state,), value in self.of(names.SLOTS, name)},
            mean=took / steps if steps else None,
            died=int(self.total(names.PROCESSES_DIED, name)),
            paused=held[0] if held else None,
        )

    def executors(self, kind: str) -> ExecutorRow:
        return ExecutorRow(
            kind=kind,
            executors=int(self.total(names.EXECUTORS, kind)),
            jobs=int(self.total(names.EXECUTOR_JOBS, kind)),
            waiting=int(self.total(names.EXECUTOR_QUEUE, kind)),
            died=self.total(names.EXECUTORS_DIED, kind, rate=True),
        )


def _queues(read: _Reading, now: Look) -> Iterator[QueueRow]:
    for name, depth in sorted(now.queues.items()):
        yield QueueRow(
            queue=name,
            of_task=False,
            ready=depth.ready,
            delayed=depth.delayed,
            in_flight=depth.in_flight,
            dead=depth.dead,
            oldest=depth.oldest_age,
        )
    # The database has said it already of those whose workers have told which queue is theirs.
    known = {each.task for each in now.workers if each.queue in now.queues}
    for task in read.values(names.QUEUE_DEPTH):
        if task not in known:
            depth_of = {state: int(value) for (state,), value in read.of(names.QUEUE_DEPTH, task)}
            yield QueueRow(
                queue=task,
                of_task=True,
                ready=depth_of.get("ready", 0),
                delayed=depth_of.get("delayed", 0),
                in_flight=depth_of.get("in_flight", 0),
                dead=depth_of.get("dead", 0),
                oldest=read.total(names.QUEUE_LAG, task) if depth_of.get("ready") else None,
            )


def _providers(read: _Reading, now: Look) -> Iterator[ProviderRow]:
    # In the order of their states: of several tenants' breakers an open one is the last.
    told = {(one.provider, one.capability): one for one in now.breakers}
    seen = {values[:2] for name, values in read.sums if name == names.PROVIDER_CALLS.name}
    for provider, capability in sorted(seen | set(told)):
        state = "open" if read.total(names.PROVIDER_OPEN, provider, capability) else "closed"
        if (found := told.get((provider, capability))) is not None:
            state = found.state
        rates = list(read.of(names.PROVIDER_CALLS, provider, capability, rate=True))
        yield ProviderRow(
            provider=f"{provider}/{capability}",
            calls=sum(value for _, value in rates),
            failures=sum(value for (outcome, *_), value in rates if outcome == "failed"),
            breaker=state,
            exhausted=bool(read.total(names.PROVIDER_EXHAUSTED, provider, capability)),
        )


def _replicas(read: _Reading, now: Look) -> Iterator[ReplicaRow]:
    for replica, source, to in sorted({v[:3] for name, v in read.sums if name == names.REPLICA_STATUS.name}):
        states = [state for (state,), value in read.of(names.REPLICA_STATUS, replica, source, to) if value]
        yield ReplicaRow(
            replica=replica,
            from_zone=source,
            to_zone=to,
            status=states[0] if states else "unknown",
            facts=int(read.total(names.REPLICA_LAG, replica, source, to)),
            bytes=int(read.total(names.REPLICA_LAG_BYTES, replica, source, to)),
            seconds=read.total(names.REPLICA_LAG_SECONDS, replica, source, to),
            rate=read.total(names.REPLICA_FACTS, replica, source, to, rate=True),
        )
    for one in now.readers:
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
