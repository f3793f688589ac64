"""The app: every command with its options, and nothing that does the work."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.run import LogLevel, run_task

app = typer.Typer(
    name="ergon",
    help="Runs business transactions between systems.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with the flag
    if wanted:
        typer.echo(f"ergon {version('ergon-framework')}")
        raise typer.Exit


@app.callback()
def ergon(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Runs business transactions between systems."""


@app.command()
def run(
    task: Annotated[str, typer.Argument(metavar="MODULE:TASK", help="Where the task is, for example app:charge.")],
    *,
    streaming: Annotated[
        bool | None,
        typer.Option("--streaming/--once", help="Go on when the queue is empty, or end. Default: as the policy says."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Start that many transactions, then end.")] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A policy in TOML or JSON, in place of the task's own.")
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="The least that is logged.")] = LogLevel.WARNING,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one line of JSON at the end.")] = False,
) -> None:
    """Run a task until its queue is empty, its limit is reached, or a signal comes.

    SIGTERM and Ctrl-C let running work finish, up to the policy's loop.drain_timeout; a second one ends at once.

    Example: ergon run app:charge --streaming
    """
    code = run_task(task, streaming=streaming, limit=limit, policy=policy, log_level=log_level, as_json=json)
    raise typer.Exit(code)
