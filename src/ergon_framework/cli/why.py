"""``ergon why``: the command with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.why_work import explained

why = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@why.command("why")
def why_(
    id_: Annotated[str, typer.Argument(metavar="ID", help="Of a transaction, a job, a fact, or a correlation.")],
    *,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:TASK", help="Ask the connector of this task too, and show its policy. May repeat."
        ),
    ] = None,
    queue: Annotated[
        list[str] | None, typer.Option(metavar="MODULE:CONNECTOR", help="Ask this connector too. May repeat.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Show what happened to a piece of work, where it is now, and what to do next.

    The database is asked if its address is known: ERGON_POSTGRES__DSN, or postgres.dsn of ergon.toml. Payloads are
    never shown.

    Exit codes: 0 something is known of it, 1 nobody who was asked knows it, 2 the command line or the configuration is
    wrong, 3 nothing was found and somebody did not answer.

    Example: ergon why order-3 --task app:charge
    """
    raise typer.Exit(explained(id_, tasks=task or (), queues=queue or (), config=config, as_json=json))
