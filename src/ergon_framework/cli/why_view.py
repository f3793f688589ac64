"""A history as a person reads it: a table on a terminal, plain columns elsewhere, and a sentence at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.cli.dlq_view import clean, show_traceback, told
from ergon_framework.history import Event, History, State

#: The longest text in a cell, and anywhere else.
_CELL = 200
_LONGEST = 600
_HEADS = ("time", "what", "verdict", "how")
_POLICY = "policy."
_COLOURS: dict[str, str] = {
    **dict.fromkeys(("success", State.SUCCEEDED, State.DONE), "green"),
    **dict.fromkeys(("failed", "dead_letter", "SYSTEM", "TIMEOUT", "BUSINESS", State.DEAD, State.FAILED), "red"),
    **dict.fromkeys(("retry", State.DELAYED, State.RETRYING, State.DOUBTFUL, State.BEHIND), "yellow"),
    **dict.fromkeys((State.HELD, State.RUNNING), "cyan"),
}


def show(history: History, *, providers: Sequence[str], sentence: str, advice: str) -> None:
    """Print one history, a line for each of its *providers*, where it is, and what to do."""
    title = f"{history.kind.value} {short(history.id)} in {short(history.where)}"
    about = list(_about(history))
    rows = [_cells(event) for event in history.events]
    seen = [clean(line, _LONGEST) for line in providers]
    sentence = clean(sentence, _LONGEST)
    on_terminal = sys.stdout.isatty()
    (_picture if on_terminal else _plain)(title, about, rows)
    for event in history.events:
        show_traceback(f"traceback, {clean(event.what, _CELL)}", event.traceback)
    if on_terminal:
        _conclude(seen, state=history.place.state, sentence=sentence)
    else:
        for line in seen:
            typer.echo(f"  provider: {line}")
        typer.echo(f"  now: {sentence}")
    if advice:
        typer.echo(f"  next: {clean(advice, _LONGEST)}")


def short(text: str) -> str:
    """*text* as it can be said in a line."""
    return clean(text, _LONGEST)


def _plain(title: str, about: list[tuple[str, str]], rows: list[tuple[str, ...]]) -> None:
    typer.echo(title)
    width = max((len(what) for what, _ in about), default=0)
    for what, how in about:
        typer.echo(f"  {what:<{width}}  {how}")
    if rows:
        widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
        for row in (_HEADS, *rows):
            cells = (cell.ljust(wide) for cell, wide in zip(row, widths, strict=True))
            typer.echo("  " + "  ".join(cells).rstrip())


def _picture(title: str, about: list[tuple[str, str]], rows: list[tuple[str, ...]]) -> None:
    console = Console()
    console.print(Text(title, style="bold"))
    for what, how in about:
        console.print(Text(f"  {what}: ", style="dim") + Text(how))
    if rows:
        table = Table(*_HEADS)
        for row in rows:
            # Text, because what an error says is no markup.
            table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
        console.print(table)


def _conclude(seen: list[str], *, state: State, sentence: str) -> None:
    console = Console()
    for line in seen:
        console.print(Text("  provider: ", style="bold") + Text(line))
    console.print(Text("  now: ", style="bold") + Text(sentence, style=_COLOURS.get(state, "")))


def _about(history: History) -> Iterator[tuple[str, str]]:
    rules = []
    for name, value in history.about.items():
        if name.startswith(_POLICY):
            rules.append(f"{name.removeprefix(_POLICY)} {_value(value)}")
        else:
            yield clean(name, _CELL), clean(_value(value), _CELL)
    if rules:
        yield "policy", ", ".join(rules)


def _cells(event: Event) -> tuple[str, ...]:
    values = ", ".join(f"{name} {_value(value)}" for name, value in event.values.items())
    how = clean(event.words, _LONGEST)
    if values:
        how = f"{how} ({clean(values, _CELL)})" if how else clean(values, _CELL)
    when = "" if event.at is None else told(event.at, "milliseconds")
    return when, clean(event.what, _CELL), clean(event.verdict, _CELL), how


def _value(value: str | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
