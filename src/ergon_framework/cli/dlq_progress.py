"""Progress of a long move on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ergon_framework.cli.dlq_moving import Tally

#: Seconds between two lines.
EVERY = 5.0


@contextmanager
def shown(what: str, total: int, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[Tally], None]]:
    """Call what it yields after each part."""
    if not sys.stderr.isatty():
        yield _lines(what, total, clock=clock)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda tally: progress.update(bar, completed=tally.counts.total())


def _lines(what: str, total: int, *, clock: Callable[[], float]) -> Callable[[Tally], None]:
    last = clock()

    def moved(tally: Tally) -> None:
        nonlocal last
        if clock() - last >= EVERY:
            last = clock()
            typer.echo(f"ergon: {what} {tally.counts.total()} of {total}", err=True)

    return moved
