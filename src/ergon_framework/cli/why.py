"""``ergon why``: the command with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.why_work import explain

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
    """Show what happened to a piece of work, its current state, and what to do next.

    The database is queried if its address is set by ERGON_POSTGRES__DSN or by postgres.dsn of ergon.toml. Payloads are
    never shown.

    Exit codes: 0 found, 1 no source knows the id, 2 the command line or the configuration is invalid, 3 not found, and
    at least one source did not answer.

    Example: ergon why order-3 --task app:charge
    """
    raise typer.Exit(explain(id_, tasks=task or (), queues=queue or (), config=config, as_json=json))
