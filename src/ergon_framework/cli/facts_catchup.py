"""Catch-up progress on stderr: a bar for each pair on a terminal, periodic lines elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ergon_framework.facts.replica import ReplicaState

#: Seconds between two lines, and between two updates of a bar.
CATCHUP_LINE_SECONDS, CATCHUP_BAR_SECONDS = 5.0, 0.5
#: Maximum seconds to wait for the last update, which may be writing to a slow terminal.
CATCHUP_JOIN_SECONDS = 5.0
#: Lag in facts from which progress is shown; the common case is no lag.
MIN_CATCHUP_FACTS = 1_000

States = Callable[[], Sequence[ReplicaState]]


@contextmanager
def catchup_progress(states: States) -> Iterator[None]:
    """Show the progress of each pair while its lag is large."""
    stopped = threading.Event()
    render = _draw_catchup_bars if sys.stderr.isatty() else _print_catchup_lines
    thread = threading.Thread(target=render, args=(states, stopped), name="ergon-catchup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(CATCHUP_JOIN_SECONDS)


def progress_of(state: ReplicaState) -> tuple[int, int] | None:
    """Return the number of copied facts and the total; return None if the lag is small."""
    if state.lag is None or state.lag.facts < MIN_CATCHUP_FACTS:
        return None
    return state.offset, state.offset + state.lag.facts


def _print_catchup_lines(states: States, stopped: threading.Event) -> None:
    while not stopped.wait(CATCHUP_LINE_SECONDS):
        for state in states():
            if (counts := progress_of(state)) is not None:
                typer.echo(f"ergon: {_format_pair(state)}: {counts[0]:,} of {counts[1]:,} facts", err=True)


def _draw_catchup_bars(states: States, stopped: threading.Event) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars: dict[str, TaskID] = {}
        while not stopped.wait(CATCHUP_BAR_SECONDS):
            for state in states():
                name, counts = _format_pair(state), progress_of(state)
                if counts is None:
                    if name in bars:
                        progress.remove_task(bars.pop(name))
                    continue
                if name not in bars:
                    bars[name] = progress.add_task(name)
                progress.update(bars[name], completed=counts[0], total=counts[1])


def _format_pair(state: ReplicaState) -> str:
    return f"{state.pair.from_zone} to {state.pair.to_zone}"
