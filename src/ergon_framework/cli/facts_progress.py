"""Progress of uploads, downloads and catching up, on stderr: a bar on a terminal, a line now and then elsewhere."""

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
EVERY = 5.0


@contextmanager
def shown(
    what: str, total: int | None, *, unit: str = "bytes", clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Call what it yields with how far it is."""
    if not sys.stderr.isatty():
        yield _lines(what, total, unit, clock=clock)
        return
    counted = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    columns = TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda done: progress.update(bar, completed=done)


def _lines(what: str, total: int | None, unit: str, *, clock: Callable[[], float]) -> Callable[[int], None]:
    last = clock()

    def moved(done: int) -> None:
        nonlocal last
        if clock() - last >= EVERY:
            last = clock()
            of = "" if total is None else f" of {total:,}"
            typer.echo(f"ergon: {what} {done:,}{of} {unit}", err=True)

    return moved
