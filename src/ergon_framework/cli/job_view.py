"""Output of jobs and cron entries for people and programs."""

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

from ergon_framework.cli.dlq_view import sanitize
from ergon_framework.cli.summary import print_rows

#: Maximum length of the text in a cell of a list, and of a result; JSON has the whole text.
_MAX_CELL_CHARS = 60
_MAX_TEXT_CHARS = 10_000
_COLOURS = {"succeeded": "green", "failed": "red", "killed": "red", "running": "cyan", "cancelled": "dim"}
_JOB_HEADINGS = ("number", "id", "kind", "function", "state", "attempts", "submitted", "ended", "error")
_CRON_HEADINGS = ("name", "expression", "zone", "kind", "function", "misfire", "next", "last")


def to_json_line(item: Any) -> str:
    """Return one line of JSON; times are in UTC."""
    return json.dumps(
        asdict(item), default=lambda value: _format_time(value) if isinstance(value, datetime) else str(value)
    )


def show_list(jobs: Sequence[Any]) -> None:
    """Print one line for each job."""
    _print_table(_JOB_HEADINGS, [_format_job_cells(job) for job in jobs])


def show_crons(entries: Sequence[Any]) -> None:
    """Print one line for each cron entry."""
    _print_table(_CRON_HEADINGS, [_format_cron_cells(entry) for entry in entries])


def _print_table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    if sys.stdout.isatty():
        table = Table(*headings)
        for row in rows:
            # Text, because job data may contain characters that rich reads as markup.
            table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _format_job_cells(job: Any) -> tuple[str, ...]:
    error = "" if job.error is None else f"{job.error.code}: {job.error.message}"
    return (
        str(job.number),
        sanitize(job.id, _MAX_CELL_CHARS),
        sanitize(job.kind, _MAX_CELL_CHARS),
        sanitize(job.function_name, _MAX_CELL_CHARS),
        job.state.value,
        str(job.attempts),
        _format_time(job.created_at),
        "" if job.ended_at is None else _format_time(job.ended_at),
        sanitize(error, _MAX_CELL_CHARS),
    )


def _format_cron_cells(entry: Any) -> tuple[str, ...]:
    next_text = "never" if entry.next_at is None else _format_time(entry.next_at)
    return (
        sanitize(entry.name, _MAX_CELL_CHARS),
        sanitize(entry.expression, _MAX_CELL_CHARS),
        sanitize(entry.zone, _MAX_CELL_CHARS),
        sanitize(entry.kind, _MAX_CELL_CHARS),
        sanitize(entry.function_name, _MAX_CELL_CHARS),
        entry.misfire.value,
        next_text if entry.enabled else "paused",
        "" if entry.last_at is None else _format_time(entry.last_at),
    )


def show_one(job: Any, wait_text: str | None = None) -> None:
    """Print all details of one job; *wait_text* describes its wait for an orchestrator."""
    print_rows(sanitize(job.id, _MAX_CELL_CHARS), list(_build_rows(job, wait_text)))
    if job.error is not None and job.error.traceback:
        typer.echo("\n".join(sanitize(line, _MAX_TEXT_CHARS) for line in job.error.traceback.splitlines()))


def _build_rows(job: Any, wait_text: str | None) -> Iterator[tuple[str, str]]:
    yield "state", f"{job.state.value}{', to be killed' if job.kill_asked and not job.state.is_final else ''}"
    yield "function", sanitize(f"{job.kind}#{job.function_name}", _MAX_TEXT_CHARS)
    limit_text = "" if job.max_attempts is None else f" of {job.max_attempts}"
    yield "attempts", f"{job.attempts}{limit_text}"
    for name in ("tenant", "correlation", "unique_key"):
        if getattr(job, name) is not None:
            yield name.replace("_", " "), sanitize(getattr(job, name), _MAX_TEXT_CHARS)
    for name, label in _TIME_LABELS.items():
        if getattr(job, name) is not None:
            yield label, _format_time(getattr(job, name))
    if wait_text is not None:
        yield "waits for an orchestrator", sanitize(wait_text, _MAX_TEXT_CHARS)
    if job.state == "pending":
        yield "what it waits for", f"ergon why {shlex.quote(sanitize(job.id, _MAX_TEXT_CHARS))}"
    if job.state == "succeeded":
        yield "result", sanitize(json.dumps(job.result), _MAX_TEXT_CHARS)
    if job.error is not None:
        type_text = f" ({job.error.type})" if job.error.type not in {None, job.error.code} else ""
        yield "error", sanitize(f"{job.error.code}{type_text}: {job.error.message}", _MAX_TEXT_CHARS)


_TIME_LABELS = {
    "created_at": "submitted",
    "due_at": "due",
    "started_at": "started",
    "ended_at": "ended",
    "expires_at": "kept until",
}


def _format_time(timestamp: datetime) -> str:
    return timestamp.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
