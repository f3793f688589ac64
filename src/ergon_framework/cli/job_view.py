"""Jobs and cron entries as a person or a program reads them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.cli.dlq_view import clean
from ergon_framework.cli.summary import tell

#: The longest text in a cell of a list, and the longest result that is shown; JSON has the whole one.
_CELL = 60
_LONGEST = 10_000
_COLOURS = {"succeeded": "green", "failed": "red", "killed": "red", "running": "cyan", "cancelled": "dim"}
_HEADS = ("number", "id", "kind", "function", "state", "attempts", "submitted", "ended", "error")
_CRON_HEADS = ("name", "expression", "zone", "kind", "function", "misfire", "next", "last")


def as_line(found: Any) -> str:
    """One line of JSON; times are in UTC."""
    return json.dumps(
        asdict(found), default=lambda moment: _at(moment) if isinstance(moment, datetime) else str(moment)
    )


def show_list(found: Sequence[Any]) -> None:
    """Print one line for each job."""
    _show(_HEADS, [_cells(one) for one in found])


def show_crons(found: Sequence[Any]) -> None:
    """Print one line for each cron entry."""
    _show(_CRON_HEADS, [_cron_cells(one) for one in found])


def _show(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    if sys.stdout.isatty():
        table = Table(*heads)
        for row in rows:
            # Text, because what a job carries is no markup.
            table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cells(one: Any) -> tuple[str, ...]:
    error = "" if one.error is None else f"{one.error.code}: {one.error.message}"
    return (
        str(one.number),
        clean(one.id, _CELL),
        clean(one.kind, _CELL),
        clean(one.function_name, _CELL),
        one.state.value,
        str(one.attempts),
        _at(one.created_at),
        "" if one.ended_at is None else _at(one.ended_at),
        clean(error, _CELL),
    )


def _cron_cells(one: Any) -> tuple[str, ...]:
    coming = "never" if one.next_at is None else _at(one.next_at)
    return (
        clean(one.name, _CELL),
        clean(one.expression, _CELL),
        clean(one.zone, _CELL),
        clean(one.kind, _CELL),
        clean(one.function_name, _CELL),
        one.misfire.value,
        coming if one.enabled else "paused",
        "" if one.last_at is None else _at(one.last_at),
    )


def show_one(found: Any, waits: str | None = None) -> None:
    """Print everything about one job; *waits* describes its wait for an orchestrator."""
    tell(clean(found.id, _CELL), list(_rows(found, waits)))
    if found.error is not None and found.error.traceback:
        typer.echo("\n".join(clean(line, _LONGEST) for line in found.error.traceback.splitlines()))


def _rows(found: Any, waits: str | None) -> Iterator[tuple[str, str]]:
    yield "state", f"{found.state.value}{', to be killed' if found.kill_asked and not found.state.over else ''}"
    yield "function", clean(f"{found.kind}#{found.function_name}", _LONGEST)
    most = "" if found.max_attempts is None else f" of {found.max_attempts}"
    yield "attempts", f"{found.attempts}{most}"
    for name in ("tenant", "correlation", "unique_key"):
        if getattr(found, name) is not None:
            yield name.replace("_", " "), clean(getattr(found, name), _LONGEST)
    for name, words in _TIMES.items():
        if getattr(found, name) is not None:
            yield words, _at(getattr(found, name))
    if waits is not None:
        yield "waits for an orchestrator", clean(waits, _LONGEST)
    if found.state == "pending":
        yield "what it waits for", f"ergon why {shlex.quote(clean(found.id, _LONGEST))}"
    if found.state == "succeeded":
        yield "result", clean(json.dumps(found.result), _LONGEST)
    if found.error is not None:
        kind = f" ({found.error.type})" if found.error.type not in {None, found.error.code} else ""
        yield "error", clean(f"{found.error.code}{kind}: {found.error.message}", _LONGEST)


_TIMES = {
    "created_at": "submitted",
    "due_at": "due",
    "started_at": "started",
    "ended_at": "ended",
    "expires_at": "kept until",
}


def _at(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
