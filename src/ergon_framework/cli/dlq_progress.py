"""Progress of a long move on stderr: a bar on a terminal, periodic lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ergon_framework.cli.dlq_moving import MoveProgress

#: Seconds between two lines.
LINE_INTERVAL_SECONDS = 5.0


@contextmanager
def progress(
    label: str, total: int, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[MoveProgress], None]]:
    """Yield a function to call after each batch."""
    if not sys.stderr.isatty():
        yield _make_line_printer(label, total, clock=clock)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as display:
        bar = display.add_task(label, total=total)
        yield lambda state: display.update(bar, completed=state.counts.total())


def _make_line_printer(label: str, total: int, *, clock: Callable[[], float]) -> Callable[[MoveProgress], None]:
    last_printed_at = clock()

    def print_line(state: MoveProgress) -> None:
        nonlocal last_printed_at
        if clock() - last_printed_at >= LINE_INTERVAL_SECONDS:
            last_printed_at = clock()
            typer.echo(f"ergon: {label} {state.counts.total()} of {total}", err=True)

    return print_line
