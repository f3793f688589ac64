"""Progress of catching up, on stderr: a bar for each pair on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ergon_framework.facts.replica import ReplicaState

#: Seconds between two lines, and between two looks of a bar.
EVERY, OFTEN = 5.0, 0.5
#: Seconds within which the last look is over: it may be writing to a slow terminal.
LEAVE = 5.0
#: Facts from which on it is worth telling: the everyday lag is none.
BACKLOG = 1_000

States = Callable[[], Sequence[ReplicaState]]


@contextmanager
def shown(states: States) -> Iterator[None]:
    """Tell how far each pair is for as long as it is far behind."""
    over = threading.Event()
    watch = _bars if sys.stderr.isatty() else _lines
    thread = threading.Thread(target=watch, args=(states, over), name="ergon-catchup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LEAVE)


def behind(state: ReplicaState) -> tuple[int, int] | None:
    """How many facts of how many are here; None if it is not worth telling."""
    if state.lag is None or state.lag.facts < BACKLOG:
        return None
    return state.offset, state.offset + state.lag.facts


def _lines(states: States, over: threading.Event) -> None:
    while not over.wait(EVERY):
        for state in states():
            if (far := behind(state)) is not None:
                typer.echo(f"ergon: {_name(state)}: {far[0]:,} of {far[1]:,} facts", err=True)


def _bars(states: States, over: threading.Event) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars: dict[str, TaskID] = {}
        while not over.wait(OFTEN):
            for state in states():
                name, far = _name(state), behind(state)
                if far is None:
                    if name in bars:
                        progress.remove_task(bars.pop(name))
                    continue
                if name not in bars:
                    bars[name] = progress.add_task(name)
                progress.update(bars[name], completed=far[0], total=far[1])


def _name(state: ReplicaState) -> str:
    return f"{state.pair.from_zone} to {state.pair.to_zone}"
