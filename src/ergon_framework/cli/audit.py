"""``ergon audit``: list recorded operator actions."""

from __future__ import annotations

import importlib
import json as json_lib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ergon_framework.cli.dlq_view import format_time, sanitize
from ergon_framework.cli.options import TIME_FORMS, Config, JsonLines, parse_time
from ergon_framework.cli.output import explain_error
from ergon_framework.database import extras
from ergon_framework.errors import ErgonError, error_message
from ergon_framework.runner.exit import ExitCode
from ergon_framework.runner.settings import database_dsn

#: Maximum length of the text in a cell; JSON has the whole text.
MAX_CELL_CHARS = 60


class AuditExit(ExitCode):
    """Exit codes of ``ergon audit`` and their meanings."""

    OK = 0, "listed"
    FAILED = 2, "the database is unavailable or rejected the request, or an option or the configuration is invalid"


audit = typer.Typer(
    help="List operator actions.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@audit.callback()
def audit_() -> None:
    """List operator actions."""


@audit.command("list")
def list_(
    *,
    action: Annotated[
        str | None, typer.Option(metavar="ACTION", help="Only this action, for example dlq.replay or pause.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only actions on this queue, task, cron entry or provider.")
    ] = None,
    actor: Annotated[str | None, typer.Option(metavar="NAME", help="Only actions of this operator.")] = None,
    since: Annotated[
        float | None,
        typer.Option(parser=parse_time, metavar="TIME", help=f"Only actions at or after TIME: {TIME_FORMS}."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Maximum number of actions to show.")] = 50,
    config: Config = None,
    json: JsonLines = False,
) -> None:
    """List replays, discards, edits, pauses, resumes, kills, overrides and other actions, newest first.

    Exit codes: 0 listed, 2 invalid option or configuration, or the database is unavailable or rejected the request.

    Example: ergon audit list --name orders --since 7d
    """
    filters = {"action": action, "name": name, "actor": actor, "since": since, "limit": limit}
    raise typer.Exit(list_rows(filters, config=config, as_json=json))


def list_rows(filters: dict[str, Any], *, config: Path | None, as_json: bool) -> AuditExit:
    """Print the rows that match *filters*, newest first."""
    try:
        dsn = database_dsn(config)
        # Imported on demand: the libraries are an optional extra.
        extras.require_psycopg()
        rows = importlib.import_module("ergon_framework.connectors.postgres.audit").list_rows(dsn, **filters)
    except ErgonError as error:
        if as_json:
            typer.echo(json_lib.dumps({"error": error_message(error), "exit_code": int(AuditExit.FAILED)}))
        else:
            typer.echo(f"ergon: {explain_error(error)}", err=True)
        return AuditExit.FAILED
    if as_json:
        for row in rows:
            typer.echo(json_lib.dumps(asdict(row)))
    elif rows:
        _print_table(rows)
    else:
        typer.echo("no matching action is recorded")
    return AuditExit.OK


def _print_table(rows: list[Any]) -> None:
    headings = ("at", "actor", "action", "name", "targets", "count", "outcome", "reason")
    cells = [[sanitize(cell, MAX_CELL_CHARS) for cell in _format_cells(row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    for line in (headings, *cells):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _format_cells(row: Any) -> tuple[str, ...]:
    filters = " ".join(f"{name}={value}" for name, value in row.selection.items())
    targets = ", ".join(row.targets) if len(row.targets) == 1 or not filters else filters
    outcome = row.outcome or "unknown"
    count = "" if row.count is None else str(row.count)
    return (format_time(row.at), row.actor, row.action, row.name, targets, count, outcome, row.reason)
