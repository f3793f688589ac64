"""Progress of uploads, downloads and catch-up on stderr: a bar on a terminal, periodic lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

#: Seconds between two lines.
PROGRESS_LINE_SECONDS = 5.0


@contextmanager
def byte_progress(
    label: str, total: int | None, *, unit: str = "bytes", clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the completed amount."""
    if not sys.stderr.isatty():
        yield _make_line_printer(label, total, unit, clock=clock)
        return
    count_columns = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    columns = TextColumn("{task.description}"), BarColumn(), *count_columns, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        bar = display.add_task(label, total=total)
        yield lambda completed: display.update(bar, completed=completed)


def _make_line_printer(
    label: str, total: int | None, unit: str, *, clock: Callable[[], float]
) -> Callable[[int], None]:
    last_printed_at = clock()

    def print_line(completed: int) -> None:
        nonlocal last_printed_at
        if clock() - last_printed_at >= PROGRESS_LINE_SECONDS:
            last_printed_at = clock()
            total_text = "" if total is None else f" of {total:,}"
            typer.echo(f"ergon: {label} {completed:,}{total_text} {unit}", err=True)

    return print_line
