"""A frame as lines of text, no wider and no higher than the place it is shown in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Final, NamedTuple

from ergon_framework.cli.dlq_view import clean
from ergon_framework.cli.top_frame import Frame, QueueRow, ReplicaRow, TaskRow

#: The longest name or reason that is repeated.
_LONGEST: Final = 200
_FEW: Final = 10
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


class Column(NamedTuple):
    """One column of a table: the higher its *rank*, the sooner it is left out where there is no room."""

    head: str
    cells: Sequence[str]
    rank: int = 0
    left: bool = False

    @property
    def width(self) -> int:
        return max(map(len, (self.head, *self.cells)))


def lines(frame: Frame, *, width: int = 100, height: int | None = None) -> list[str]:
    """*frame* for a place of *width* columns and *height* lines."""
    found = list(_all(frame, width))
    if height is not None and len(found) > height:
        cut = f"… {len(found) - height + 1} more lines"
        found = [*found[: height - 1], cut]
    return [_cut(line, width) for line in found]


def _all(frame: Frame, width: int) -> Iterator[str]:
    answered = frame.asked - len(frame.unreached)
    at = datetime.fromtimestamp(frame.at).astimezone().strftime("%H:%M:%S")
    yield f"ergon top  {at}  rates over {frame.seconds:.1f} s  {answered} of {frame.asked} sources answer"
    for name, why in sorted(frame.unreached.items()):
        # Whole, because what to do stands at its end.
        yield from wrap(
            f"! {clean(name, _LONGEST)} cannot be reached: {clean(why, _LONGEST)}", width, subsequent_indent="  "
        )
    for name, why in sorted(frame.unsaid.items()):
        yield from wrap(f"! {name} are not known: {clean(why, _LONGEST)}", width, subsequent_indent="  ")
    tables = (_tasks(frame.tasks), _queues(frame.queues), _providers(frame), _executors(frame))
    for columns in (*tables, _replicas(frame.replicas), _pauses(frame)):
        if columns[0].cells:
            yield ""
            yield from _table(columns, width)
    if not any((frame.tasks, frame.queues, frame.providers, frame.executors, frame.replicas, frame.pauses)):
        yield ""
        yield "there is nothing to show: no run that was asked has a task, and no queue is known"


def _tasks(rows: Sequence[TaskRow]) -> list[Column]:
    def rate(*outcomes: str) -> list[str]:
        return [_rate(sum(row.rates.get(outcome, 0.0) for outcome in outcomes)) for row in rows]

    held = [row.slots.get("abandoned", 0) + row.slots.get("held", 0) for row in rows]
    slots = [f"{row.slots.get('running', 0)}{f'+{more}' if more else ''}" for row, more in zip(rows, held, strict=True)]
    return [
        Column("TASK", [_name(row.task) for row in rows], left=True),
        Column("PROC", [str(row.processes or "-") for row in rows], 1),
        Column("DONE/S", rate("succeeded", "failed", "handler_failed", "deferred", "released")),
        Column("OK/S", rate("succeeded"), 3),
        Column("FAIL/S", rate("failed", "handler_failed")),
        Column("LATER/S", rate("deferred", "released"), 5),
        Column("RETRY/S", [_rate(row.retries) for row in rows], 2),
        Column("SLOTS", [*slots], 1),
        Column("MEAN", ["-" if row.mean is None else _time(row.mean) for row in rows], 4),
        Column("DIED", [str(row.died) for row in rows], 6),
        Column("STATE", [f"held: {_name(row.paused)}" if row.paused else "runs" for row in rows], 2, left=True),
    ]


def _queues(rows: Sequence[QueueRow]) -> list[Column]:
    return [
        Column("QUEUE", [f"of {_name(row.queue)}" if row.of_task else _name(row.queue) for row in rows], left=True),
        Column("READY", [str(row.ready) for row in rows]),
        Column("DELAYED", [str(row.delayed) for row in rows], 3),
        Column("IN HAND", [str(row.in_flight) for row in rows], 2),
        Column("DEAD", [str(row.dead) for row in rows], 1),
        Column("OLDEST", ["-" if row.oldest is None else _time(row.oldest) for row in rows]),
    ]


def _providers(frame: Frame) -> list[Column]:
    rows = frame.providers
    return [
        Column("PROVIDER", [_name(row.provider) for row in rows], left=True),
        Column("CALLS/S", [_rate(row.calls) for row in rows], 1),
        Column("FAIL/S", [_rate(row.failures) for row in rows]),
        Column("BREAKER", [row.breaker for row in rows], left=True),
        Column("QUOTA", ["used up" if row.exhausted else "-" for row in rows], 2, left=True),
    ]


def _executors(frame: Frame) -> list[Column]:
    rows = frame.executors
    return [
        Column("EXECUTORS", [_name(row.kind) for row in rows], left=True),
        Column("RUN", [str(row.executors) for row in rows]),
        Column("JOBS", [str(row.jobs) for row in rows]),
        Column("WAITING", [str(row.waiting) for row in rows]),
        Column("DIE/S", [_rate(row.died) for row in rows], 1),
    ]


def _replicas(rows: Sequence[ReplicaRow]) -> list[Column]:
    return [
        Column("FACTS", [f"{_name(row.from_zone)} > {_name(row.to_zone)}" for row in rows], left=True),
        Column("READER", [_name(row.replica) for row in rows], 1, left=True),
        Column("STATUS", [row.status for row in rows], 2, left=True),
        Column("BEHIND", [str(row.facts) for row in rows]),
        Column("LAG", [_time(row.seconds) for row in rows]),
        Column("BYTES", [str(row.bytes) for row in rows], 4),
        Column("FACTS/S", ["-" if row.rate is None else _rate(row.rate) for row in rows], 3),
    ]


def _pauses(frame: Frame) -> list[Column]:
    rows = frame.pauses
    return [
        Column("PAUSED", [_name(row.name) for row in rows], left=True),
        Column("OBEY", [f"{row.obeying} of {row.workers}" for row in rows]),
        Column("BY", [_name(row.by) for row in rows], 1, left=True),
        Column("BECAUSE", [_name(row.because) for row in rows], 2, left=True),
    ]


def _table(columns: Sequence[Column], width: int) -> Iterator[str]:
    kept = list(columns)
    # The last one may be cut, so it counts with its head only.
    while len(kept) > 1 and sum(each.width + 2 for each in kept[:-1]) + len(kept[-1].head) > width:
        worst = max(kept[1:], key=lambda each: each.rank)
        if worst.rank == 0:
            break
        kept.remove(worst)
    for cells in zip(*([each.head, *each.cells] for each in kept), strict=True):
        placed = (
            cell.ljust(each.width) if each.left else cell.rjust(each.width)
            for cell, each in zip(cells, kept, strict=True)
        )
        yield "  ".join(placed).rstrip()


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: max(0, width - 1)]}…"


def _name(given: str) -> str:
    return clean(given, _LONGEST)


def _rate(per_second: float) -> str:
    return f"{per_second:.1f}" if per_second < 1000 else f"{per_second:,.0f}"  # noqa: PLR2004 - no fractions of many


def _time(seconds: float) -> str:
    """A time in the unit that a person would choose.

    >>> _time(0.0123), _time(3.21), _time(75), _time(7300), _time(200_000)
    ('12 ms', '3.2 s', '1 min', '2.0 h', '2.3 d')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s" if seconds < _FEW else f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h" if seconds < _DAY else f"{seconds / _DAY:.1f} d"
