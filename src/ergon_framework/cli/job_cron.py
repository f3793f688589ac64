"""``ergon job cron``: what is submitted at set times."""

from __future__ import annotations

import json as jsons
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ergon_framework.cli import job_view as view
from ergon_framework.cli.job_work import JobExit, Operator, done
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
def list_(
    *, config: Config = None, json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False
) -> None:
    """List the entries by name, with the next scheduled time and the last one that was fired.

    Exit codes: 0 listed, 2 out of reach, refused, or wrong.

    Example: ergon job cron list
    """

    def work(client: Any) -> JobExit:
        found = client.schedules()
        if json:
            for one in found:
                typer.echo(view.as_line(one))
        elif found:
            view.show_crons(found)
        else:
            typer.echo("there are no cron entries")
        return JobExit.OK

    raise typer.Exit(done(work, config=config, as_json=json))


@cron.command()
def pause(name: Name, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Have nothing submitted for an entry until it is resumed.

    Exit codes: 0 paused, 1 there is none, 2 out of reach, refused, or wrong.

    Example: ergon job cron pause nightly
    """
    work = _steering("pause_schedule", name, as_json=json)
    raise typer.Exit(done(work, config=config, as_json=json, operator=Operator(actor, reason)))


@cron.command()
def resume(name: Name, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Have an entry go on with the next time to come; what passed meanwhile is not made up for.

    Exit codes: 0 resumed, 1 there is none, 2 out of reach, refused, or wrong.

    Example: ergon job cron resume nightly
    """
    work = _steering("resume_schedule", name, as_json=json)
    raise typer.Exit(done(work, config=config, as_json=json, operator=Operator(actor, reason)))


@cron.command("run-now")
def run_now(name: Name, *, config: Config = None, json: Json = False) -> None:
    """Submit the job of an entry now, beside its scheduled times, and print the job's id.

    Exit codes: 0 submitted, 1 there is none, 2 out of reach, refused, or wrong.

    Example: ergon job cron run-now nightly
    """

    def work(client: Any) -> JobExit:
        made = client.run_schedule(name)
        typer.echo(jsons.dumps({"id": made.id, "created": made.created, "state": made.state}) if json else made.id)
        return JobExit.OK

    raise typer.Exit(done(work, config=config, as_json=json))


def _steering(method: str, name: str, *, as_json: bool) -> Callable[[Any], JobExit]:
    def work(client: Any) -> JobExit:
        getattr(client, method)(name)
        found = [one for one in client.schedules() if one.name == name]
        if as_json:
            for one in found:
                typer.echo(view.as_line(one))
        else:
            view.show_crons(found)
        return JobExit.OK

    return work
