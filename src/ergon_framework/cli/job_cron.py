"""``ergon job cron``: commands for jobs that are submitted on a schedule."""

from __future__ import annotations

import json as jsons
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ergon_framework.cli import job_view as view
from ergon_framework.cli.job_work import JobExit, Operator, run_with_client
from ergon_framework.cli.options import Actor, Reason

cron = typer.Typer(
    help="Shows, pauses, resumes and runs cron entries.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The entry's name.")]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


@cron.command("list")
def list_entries(
    *, config: Config = None, json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False
) -> None:
    """List the entries by name, with their next and last scheduled times.

    Exit codes: 0 listed, 2 database unavailable, request rejected, or invalid option or configuration.

    Example: ergon job cron list
    """

    def work(client: Any) -> JobExit:
        entries = client.schedules()
        if json:
            for entry in entries:
                typer.echo(view.to_json_line(entry))
        elif entries:
            view.show_crons(entries)
        else:
            typer.echo("there are no cron entries")
        return JobExit.OK

    raise typer.Exit(run_with_client(work, config=config, as_json=json))


@cron.command()
def pause(name: Name, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Stop submitting jobs of an entry until it is resumed.

    Exit codes: 0 paused, 1 not found, 2 database unavailable, request rejected, or invalid option or configuration.

    Example: ergon job cron pause nightly
    """
    work = _build_action("pause_schedule", name, as_json=json)
    raise typer.Exit(run_with_client(work, config=config, as_json=json, operator=Operator(actor, reason)))


@cron.command()
def resume(name: Name, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Resume an entry at its next scheduled time; times missed while paused are skipped.

    Exit codes: 0 resumed, 1 not found, 2 database unavailable, request rejected, or invalid option or configuration.

    Example: ergon job cron resume nightly
    """
    work = _build_action("resume_schedule", name, as_json=json)
    raise typer.Exit(run_with_client(work, config=config, as_json=json, operator=Operator(actor, reason)))


@cron.command("run-now")
def run_now(name: Name, *, config: Config = None, json: Json = False) -> None:
    """Submit the job of an entry now, in addition to its schedule, and print the job's id.

    Exit codes: 0 submitted, 1 not found, 2 database unavailable, request rejected, or invalid option or configuration.

    Example: ergon job cron run-now nightly
    """

    def work(client: Any) -> JobExit:
        submitted = client.run_schedule(name)
        typer.echo(
            jsons.dumps({"id": submitted.id, "created": submitted.created, "state": submitted.state})
            if json
            else submitted.id
        )
        return JobExit.OK

    raise typer.Exit(run_with_client(work, config=config, as_json=json))


def _build_action(method: str, name: str, *, as_json: bool) -> Callable[[Any], JobExit]:
    def work(client: Any) -> JobExit:
        getattr(client, method)(name)
        entries = [entry for entry in client.schedules() if entry.name == name]
        if as_json:
            for entry in entries:
                typer.echo(view.to_json_line(entry))
        else:
            view.show_crons(entries)
        return JobExit.OK

    return work
