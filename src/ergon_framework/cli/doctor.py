"""``ergon doctor``: the command with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.doctor_work import run_doctor

doctor = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@doctor.command("doctor")
def doctor_(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODULE:NAME]...",
            help="Look at these too: a task with its queue, policy and executors, a connector, or a boundary of facts.",
        ),
    ] = None,
    *,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600, metavar="SECONDS", help="How long each of them may take.")
    ] = 15.0,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Check everything that ergon.toml and the environment name, and print problems with their remedies.

    Connections, versions, settings, topology, clocks and permissions: the database, the queues, the servers of
    RabbitMQ, NATS and Redis. Nothing is created, moved or changed, and no credential is shown.

    Exit codes: 0 no problem, 1 something is broken, 2 the command line is invalid, 3 warnings only.

    Example: ergon doctor app:charge --timeout 5
    """
    raise typer.Exit(run_doctor(names or (), config=config, timeout=timeout, as_json=json))
