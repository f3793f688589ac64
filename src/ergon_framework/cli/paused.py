"""``ergon paused``: the command with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.pause_work import list_paused

paused = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@paused.command("paused")
def paused_(
    *,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Show the pauses with operator and reason, and which workers obey them and their work in flight.

    Exit codes: 0 shown, 1 the database did not answer, 2 the command line or the configuration is invalid.

    Example: ergon paused
    """
    raise typer.Exit(list_paused(config=config, as_json=json))
