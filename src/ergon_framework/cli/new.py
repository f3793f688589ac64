"""``ergon new``: the command with its options."""

from __future__ import annotations

from typing import Annotated

import typer

from ergon_framework.cli.new_work import Broker, create_project

new = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@new.command("new")
def new_(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="What the project and its package are called, for example shop.")
    ],
    *,
    broker: Annotated[
        Broker, typer.Option(help="Where its queue is. One changed line of its ergon.toml moves it later.")
    ] = Broker.POSTGRES,
) -> None:
    """Write a project that is ready to run, test, lint and deploy into a new folder called NAME.

    A task with its policy and a test in virtual time, pyproject.toml, Dockerfile, compose.yaml, and manifests for
    Kubernetes with probes and scaling by queue depth. An existing folder must be empty: nothing is overwritten.

    Exit codes: 0 written, 1 writing failed, 2 the name or the folder is invalid.

    Example: ergon new shop --broker redis
    """
    raise typer.Exit(create_project(name, broker))
