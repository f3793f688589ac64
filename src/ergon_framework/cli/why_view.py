"""Output of a history: a table on a terminal, plain columns elsewhere, and a sentence at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.cli.dlq_view import format_time, sanitize, show_traceback
from ergon_framework.history import History, HistoryEvent, WorkState

#: Maximum length of the text in a cell, and of other texts.
_MAX_CELL_CHARS = 200
_MAX_TEXT_CHARS = 600
_HEADINGS = ("time", "what", "verdict", "how")
_POLICY_PREFIX = "policy."
_COLOURS: dict[str, str] = {
    **dict.fromkeys(("success", WorkState.SUCCEEDED, WorkState.DONE), "green"),
    **dict.fromkeys(
        ("failed", "dead_letter", "SYSTEM", "TIMEOUT", "BUSINESS", WorkState.DEAD, WorkState.FAILED), "red"
    ),
    **dict.fromkeys(
        ("retry", WorkState.DELAYED, WorkState.RETRYING, WorkState.UNKNOWN, WorkState.BLOCKED_BY_KEY), "yellow"
    ),
    **dict.fromkeys((WorkState.HELD, WorkState.RUNNING), "cyan"),
}


def show(history: History, *, providers: Sequence[str], sentence: str, advice: str) -> None:
    """Print one history, a line for each of its *providers*, its current state, and the advice."""
    title = f"{history.kind.value} {truncate(history.id)} in {truncate(history.where)}"
    details = list(_build_details(history))
    rows = [_format_cells(event) for event in history.events]
    provider_lines = [sanitize(line, _MAX_TEXT_CHARS) for line in providers]
    sentence = sanitize(sentence, _MAX_TEXT_CHARS)
    on_terminal = sys.stdout.isatty()
    (_print_table if on_terminal else _print_plain)(title, details, rows)
    for event in history.events:
        show_traceback(f"traceback, {sanitize(event.what, _MAX_CELL_CHARS)}", event.traceback)
    if on_terminal:
        _print_conclusion(provider_lines, state=history.place.state, sentence=sentence)
    else:
        for line in provider_lines:
            typer.echo(f"  provider: {line}")
        typer.echo(f"  now: {sentence}")
    if advice:
        typer.echo(f"  next: {sanitize(advice, _MAX_TEXT_CHARS)}")


def truncate(text: str) -> str:
    """Return *text* shortened to fit on one line."""
    return sanitize(text, _MAX_TEXT_CHARS)


def _print_plain(title: str, details: list[tuple[str, str]], rows: list[tuple[str, ...]]) -> None:
    typer.echo(title)
    width = max((len(label) for label, _ in details), default=0)
    for label, detail in details:
        typer.echo(f"  {label:<{width}}  {detail}")
    if rows:
        widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
        for row in (_HEADINGS, *rows):
            cells = (cell.ljust(cell_width) for cell, cell_width in zip(row, widths, strict=True))
            typer.echo("  " + "  ".join(cells).rstrip())


def _print_table(title: str, details: list[tuple[str, str]], rows: list[tuple[str, ...]]) -> None:
    console = Console()
    console.print(Text(title, style="bold"))
    for label, detail in details:
        console.print(Text(f"  {label}: ", style="dim") + Text(detail))
    if rows:
        table = Table(*_HEADINGS)
        for row in rows:
            # Text, because an error message may contain characters that rich reads as markup.
            table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
        console.print(table)


def _print_conclusion(provider_lines: list[str], *, state: WorkState, sentence: str) -> None:
    console = Console()
    for line in provider_lines:
        console.print(Text("  provider: ", style="bold") + Text(line))
    console.print(Text("  now: ", style="bold") + Text(sentence, style=_COLOURS.get(state, "")))


def _build_details(history: History) -> Iterator[tuple[str, str]]:
    policy_values = []
    for name, value in history.about.items():
        if name.startswith(_POLICY_PREFIX):
            policy_values.append(f"{name.removeprefix(_POLICY_PREFIX)} {_format_value(value)}")
        else:
            yield sanitize(name, _MAX_CELL_CHARS), sanitize(_format_value(value), _MAX_CELL_CHARS)
    if policy_values:
        yield "policy", ", ".join(policy_values)


def _format_cells(event: HistoryEvent) -> tuple[str, ...]:
    values = ", ".join(f"{name} {_format_value(value)}" for name, value in event.values.items())
    detail = sanitize(event.words, _MAX_TEXT_CHARS)
    if values:
        detail = f"{detail} ({sanitize(values, _MAX_CELL_CHARS)})" if detail else sanitize(values, _MAX_CELL_CHARS)
    time_text = "" if event.at is None else format_time(event.at, "milliseconds")
    return time_text, sanitize(event.what, _MAX_CELL_CHARS), sanitize(event.verdict, _MAX_CELL_CHARS), detail


def _format_value(value: str | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
