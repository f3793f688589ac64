"""One frame of ``ergon top``, rendered as lines of text that fit a given width and height.

A frame has the fleet's activity between two samples, and its state at the second. In a set of metrics (``Numbers``) the
key of a value is the metric's name with the values of its attributes, the first of which is the task or the provider.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from textwrap import wrap
from typing import Any, Final, NamedTuple

from ergon_framework.cli.dlq_view import sanitize
from ergon_framework.cli.top_sources import Sample
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import METRICS_BY_NAME, Numbers, merge_numbers
from ergon_framework.telemetry.names import Metric


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task; *rates* (by outcome) and *retries* are per second.

    *mean* is the mean processing time in seconds, waits between attempts included. *crashed* counts exits of processes.
    """

    task: str
    processes: int
    rates: dict[str, float]
    retries: float
    slots: dict[str, int]
    mean: float | None
    crashed: int
    paused: str | None


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One queue, reported by the database, or by the metrics of a task: *of_task*, its name is then the task's."""

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
    crashes: float


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """The lag of a replicator (it copies the facts of another zone, a site), or of a reader of the database's facts."""

    replica: str
    from_zone: str
    to_zone: str
    status: str
    lag: int
    bytes: int
    oldest: float
    rate: float | None


@dataclass(frozen=True, slots=True)
class PauseRow:
    """A pause set by an operator, and the number of workers that have applied it."""

    name: str
    actor: str
    reason: str
    applied: int
    workers: int


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything that one refresh of ``ergon top`` shows.

    *seconds* is the time between the two samples, *sources* the number of sources; *unavailable* has the error of each
    source that did not answer, *incomplete* that of each part that a source did not answer.
    """

    at: float
    seconds: float
    sources: int
    unavailable: dict[str, str]
    incomplete: dict[str, str]
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
        sources=current.sources,
        unavailable=current.unavailable,
        incomplete=current.incomplete,
        tasks=[metrics.build_task_row(name) for name in metrics.list_tasks()],
        queues=list(_build_queue_rows(metrics, current)),
        providers=list(_build_provider_rows(metrics, current)),
        executors=[metrics.build_executor_row(kind) for kind in metrics.list_values(names.EXECUTORS)],
        replicas=list(_build_replica_rows(metrics, current)),
        pauses=[
            PauseRow(
                one.name,
                one.actor,
                one.reason,
                sum(each.applied is not None for each in current.workers if each.matches(one.name)),
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
            crashed=int(self.sum_values(names.PROCESSES_DIED, name)),
            paused=pause_reasons[0] if pause_reasons else None,
        )

    def build_executor_row(self, kind: str) -> ExecutorRow:
        return ExecutorRow(
            kind=kind,
            executors=int(self.sum_values(names.EXECUTORS, kind)),
            jobs=int(self.sum_values(names.EXECUTOR_JOBS, kind)),
            waiting=int(self.sum_values(names.EXECUTOR_QUEUE, kind)),
            crashes=self.sum_values(names.EXECUTORS_DIED, kind, rate=True),
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
    for replica, source, target in sorted({v[:3] for name, v in metrics.sums if name == names.REPLICATION_STATUS.name}):
        states = [
            state for (state,), value in metrics.iter_values(names.REPLICATION_STATUS, replica, source, target) if value
        ]
        yield ReplicaRow(
            replica=replica,
            from_zone=source,
            to_zone=target,
            status=states[0] if states else "unknown",
            lag=int(metrics.sum_values(names.REPLICATION_LAG, replica, source, target)),
            bytes=int(metrics.sum_values(names.REPLICATION_LAG_BYTES, replica, source, target)),
            oldest=metrics.sum_values(names.REPLICATION_LAG_SECONDS, replica, source, target),
            rate=metrics.sum_values(names.REPLICATED_FACTS, replica, source, target, rate=True),
        )
    for one in current.readers:
        yield ReplicaRow(
            replica=one.reader,
            from_zone=one.from_zone,
            to_zone=one.to_zone,
            status="reader",
            lag=one.facts,
            bytes=one.bytes,
            oldest=one.seconds,
            rate=None,
        )


# -- rendering --------------------------------------------------------------------------------------

#: Maximum length of a name or reason in the output.
_MAX_TEXT_CHARS: Final = 200
_DECIMALS_BELOW_SECONDS: Final = 10
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


class Column(NamedTuple):
    """One column of a table: columns with a higher *drop_rank* are left out first when space is short."""

    heading: str
    cells: Sequence[str]
    drop_rank: int = 0
    align_left: bool = False

    @property
    def width(self) -> int:
        return max(map(len, (self.heading, *self.cells)))


def render_lines(frame: Frame, *, width: int = 100, height: int | None = None) -> list[str]:
    """Render *frame* with at most *width* columns and *height* lines."""
    rendered = list(_render_all(frame, width))
    if height is not None and len(rendered) > height:
        more_line = f"… {len(rendered) - height + 1} more lines"
        rendered = [*rendered[: height - 1], more_line]
    return [_truncate(line, width) for line in rendered]


def _render_all(frame: Frame, width: int) -> Iterator[str]:
    up_count = frame.sources - len(frame.unavailable)
    time_text = datetime.fromtimestamp(frame.at).astimezone().strftime("%H:%M:%S")
    yield f"ergon top  {time_text}  rates over {frame.seconds:.1f} s  {up_count}/{frame.sources} sources up"
    for name, reason in sorted(frame.unavailable.items()):
        # Wrapped, not truncated, because the remedy is at its end.
        yield from wrap(
            f"! {sanitize(name, _MAX_TEXT_CHARS)} is unavailable: {sanitize(reason, _MAX_TEXT_CHARS)}",
            width,
            subsequent_indent="  ",
        )
    for name, reason in sorted(frame.incomplete.items()):
        yield from wrap(f"! {name} are unavailable: {sanitize(reason, _MAX_TEXT_CHARS)}", width, subsequent_indent="  ")
    tables = (
        _build_task_columns(frame.tasks),
        _build_queue_columns(frame.queues),
        _build_provider_columns(frame),
        _build_executor_columns(frame),
    )
    for columns in (*tables, _build_replica_columns(frame.replicas), _build_pause_columns(frame)):
        if columns[0].cells:
            yield ""
            yield from _render_table(columns, width)
    if not any((frame.tasks, frame.queues, frame.providers, frame.executors, frame.replicas, frame.pauses)):
        yield ""
        yield "nothing to show: no run has a task, and no queue is known"


def _build_task_columns(rows: Sequence[TaskRow]) -> list[Column]:
    def format_rates(*outcomes: str) -> list[str]:
        return [_format_rate(sum(row.rates.get(outcome, 0.0) for outcome in outcomes)) for row in rows]

    blocked_slots = [row.slots.get("abandoned", 0) + row.slots.get("waiting", 0) for row in rows]
    slots = [
        f"{row.slots.get('running', 0)}{f'+{more}' if more else ''}"
        for row, more in zip(rows, blocked_slots, strict=True)
    ]
    return [
        Column("TASK", [_format_name(row.task) for row in rows], align_left=True),
        Column("PROC", [str(row.processes or "-") for row in rows], 1),
        Column("DONE/S", format_rates("succeeded", "failed", "handler_failed", "deferred", "released")),
        Column("OK/S", format_rates("succeeded"), 3),
        Column("FAIL/S", format_rates("failed", "handler_failed")),
        Column("DEFERRED/S", format_rates("deferred", "released"), 5),
        Column("RETRY/S", [_format_rate(row.retries) for row in rows], 2),
        Column("SLOTS", [*slots], 1),
        Column("MEAN", ["-" if row.mean is None else _format_seconds(row.mean) for row in rows], 4),
        Column("CRASHED", [str(row.crashed) for row in rows], 6),
        Column(
            "STATE",
            [f"paused: {_format_name(row.paused)}" if row.paused else "running" for row in rows],
            2,
            align_left=True,
        ),
    ]


def _build_queue_columns(rows: Sequence[QueueRow]) -> list[Column]:
    return [
        Column(
            "QUEUE",
            [f"of {_format_name(row.queue)}" if row.of_task else _format_name(row.queue) for row in rows],
            align_left=True,
        ),
        Column("READY", [str(row.ready) for row in rows]),
        Column("DELAYED", [str(row.delayed) for row in rows], 3),
        Column("IN-FLIGHT", [str(row.in_flight) for row in rows], 2),
        Column("DEAD", [str(row.dead) for row in rows], 1),
        Column("OLDEST", ["-" if row.oldest is None else _format_seconds(row.oldest) for row in rows]),
    ]


def _build_provider_columns(frame: Frame) -> list[Column]:
    rows = frame.providers
    return [
        Column("PROVIDER", [_format_name(row.provider) for row in rows], align_left=True),
        Column("CALLS/S", [_format_rate(row.calls) for row in rows], 1),
        Column("FAIL/S", [_format_rate(row.failures) for row in rows]),
        Column("BREAKER", [row.breaker for row in rows], align_left=True),
        Column("QUOTA", ["exhausted" if row.exhausted else "-" for row in rows], 2, align_left=True),
    ]


def _build_executor_columns(frame: Frame) -> list[Column]:
    rows = frame.executors
    return [
        Column("EXECUTORS", [_format_name(row.kind) for row in rows], align_left=True),
        Column("RUN", [str(row.executors) for row in rows]),
        Column("JOBS", [str(row.jobs) for row in rows]),
        Column("WAITING", [str(row.waiting) for row in rows]),
        Column("CRASHES/S", [_format_rate(row.crashes) for row in rows], 1),
    ]


def _build_replica_columns(rows: Sequence[ReplicaRow]) -> list[Column]:
    return [
        Column(
            "FACTS", [f"{_format_name(row.from_zone)} > {_format_name(row.to_zone)}" for row in rows], align_left=True
        ),
        Column("READER", [_format_name(row.replica) for row in rows], 1, align_left=True),
        Column("STATUS", [row.status for row in rows], 2, align_left=True),
        Column("LAG", [str(row.lag) for row in rows]),
        Column("OLDEST", [_format_seconds(row.oldest) for row in rows]),
        Column("BYTES", [str(row.bytes) for row in rows], 4),
        Column("FACTS/S", ["-" if row.rate is None else _format_rate(row.rate) for row in rows], 3),
    ]


def _build_pause_columns(frame: Frame) -> list[Column]:
    rows = frame.pauses
    return [
        Column("PAUSED", [_format_name(row.name) for row in rows], align_left=True),
        Column("APPLIED", [f"{row.applied}/{row.workers}" for row in rows]),
        Column("ACTOR", [_format_name(row.actor) for row in rows], 1, align_left=True),
        Column("REASON", [_format_name(row.reason) for row in rows], 2, align_left=True),
    ]


def _render_table(columns: Sequence[Column], width: int) -> Iterator[str]:
    visible = list(columns)
    # The last column may be truncated, so only its heading counts.
    while len(visible) > 1 and sum(each.width + 2 for each in visible[:-1]) + len(visible[-1].heading) > width:
        dropped = max(visible[1:], key=lambda each: each.drop_rank)
        if dropped.drop_rank == 0:
            break
        visible.remove(dropped)
    for cells in zip(*([each.heading, *each.cells] for each in visible), strict=True):
        aligned = (
            cell.ljust(each.width) if each.align_left else cell.rjust(each.width)
            for cell, each in zip(cells, visible, strict=True)
        )
        yield "  ".join(aligned).rstrip()


def _truncate(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: max(0, width - 1)]}…"


def _format_name(name: str) -> str:
    return sanitize(name, _MAX_TEXT_CHARS)


def _format_rate(per_second: float) -> str:
    return f"{per_second:.1f}" if per_second < 1000 else f"{per_second:,.0f}"  # noqa: PLR2004 - no fraction above


def _format_seconds(seconds: float) -> str:
    """Format a duration in its most readable unit.

    >>> _format_seconds(0.0123), _format_seconds(3.21), _format_seconds(75), _format_seconds(7300)
    ('12 ms', '3.2 s', '1 min', '2.0 h')
    >>> _format_seconds(200_000)
    '2.3 d'
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s" if seconds < _DECIMALS_BELOW_SECONDS else f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h" if seconds < _DAY else f"{seconds / _DAY:.1f} d"
