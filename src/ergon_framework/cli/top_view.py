"""Render a frame as lines of text that fit a given width and height."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Final, NamedTuple

from ergon_framework.cli.dlq_view import sanitize
from ergon_framework.cli.top_frame import Frame, QueueRow, ReplicaRow, TaskRow

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
    answer_count = frame.asked - len(frame.unreached)
    time_text = datetime.fromtimestamp(frame.at).astimezone().strftime("%H:%M:%S")
    yield f"ergon top  {time_text}  rates over {frame.seconds:.1f} s  {answer_count} of {frame.asked} sources answer"
    for name, reason in sorted(frame.unreached.items()):
        # Wrapped, not truncated, because the remedy is at its end.
        yield from wrap(
            f"! {sanitize(name, _MAX_TEXT_CHARS)} cannot be reached: {sanitize(reason, _MAX_TEXT_CHARS)}",
            width,
            subsequent_indent="  ",
        )
    for name, reason in sorted(frame.unsaid.items()):
        yield from wrap(f"! {name} are not known: {sanitize(reason, _MAX_TEXT_CHARS)}", width, subsequent_indent="  ")
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
        yield "there is nothing to show: no run that was asked has a task, and no queue is known"


def _build_task_columns(rows: Sequence[TaskRow]) -> list[Column]:
    def format_rates(*outcomes: str) -> list[str]:
        return [_format_rate(sum(row.rates.get(outcome, 0.0) for outcome in outcomes)) for row in rows]

    blocked_slots = [row.slots.get("abandoned", 0) + row.slots.get("held", 0) for row in rows]
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
        Column("LATER/S", format_rates("deferred", "released"), 5),
        Column("RETRY/S", [_format_rate(row.retries) for row in rows], 2),
        Column("SLOTS", [*slots], 1),
        Column("MEAN", ["-" if row.mean is None else _format_seconds(row.mean) for row in rows], 4),
        Column("DIED", [str(row.died) for row in rows], 6),
        Column(
            "STATE", [f"held: {_format_name(row.paused)}" if row.paused else "runs" for row in rows], 2, align_left=True
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
        Column("IN HAND", [str(row.in_flight) for row in rows], 2),
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
        Column("QUOTA", ["used up" if row.exhausted else "-" for row in rows], 2, align_left=True),
    ]


def _build_executor_columns(frame: Frame) -> list[Column]:
    rows = frame.executors
    return [
        Column("EXECUTORS", [_format_name(row.kind) for row in rows], align_left=True),
        Column("RUN", [str(row.executors) for row in rows]),
        Column("JOBS", [str(row.jobs) for row in rows]),
        Column("WAITING", [str(row.waiting) for row in rows]),
        Column("DIE/S", [_format_rate(row.died) for row in rows], 1),
    ]


def _build_replica_columns(rows: Sequence[ReplicaRow]) -> list[Column]:
    return [
        Column(
            "FACTS", [f"{_format_name(row.from_zone)} > {_format_name(row.to_zone)}" for row in rows], align_left=True
        ),
        Column("READER", [_format_name(row.replica) for row in rows], 1, align_left=True),
        Column("STATUS", [row.status for row in rows], 2, align_left=True),
        Column("BEHIND", [str(row.facts) for row in rows]),
        Column("LAG", [_format_seconds(row.seconds) for row in rows]),
        Column("BYTES", [str(row.bytes) for row in rows], 4),
        Column("FACTS/S", ["-" if row.rate is None else _format_rate(row.rate) for row in rows], 3),
    ]


def _build_pause_columns(frame: Frame) -> list[Column]:
    rows = frame.pauses
    return [
        Column("PAUSED", [_format_name(row.name) for row in rows], align_left=True),
        Column("OBEY", [f"{row.obeying} of {row.workers}" for row in rows]),
        Column("BY", [_format_name(row.by) for row in rows], 1, align_left=True),
        Column("BECAUSE", [_format_name(row.because) for row in rows], 2, align_left=True),
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
