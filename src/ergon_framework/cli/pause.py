"""``ergon pause``: the command with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.pause_work import paused_now

pause = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@pause.command("pause")
def pause_(
    name: Annotated[
        str, typer.Argument(metavar="TASK|QUEUE", help="Its name, as charge or orders; or MODULE:TASK, as app:charge.")
    ],
    *,
    because: Annotated[str, typer.Option(metavar="TEXT", help="Why; whoever asks a worker is told.")] = "",
    by: Annotated[str | None, typer.Option(metavar="NAME", help="Who says so. Default: the system's user.")] = None,
    wait: Annotated[
        float, typer.Option(min=0, max=86400, metavar="SECONDS", help="Wait so long until all have finished.")
    ] = 0.0,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Have the whole fleet fetch nothing more for a task or a queue, until ergon resume.

    Every worker that ergon run has started with the same database hears it within a second or two, finishes what it
    has in hand, and is not ready meanwhile. It holds for workers that start later too.

    Exit codes: 0 paused, 1 the database did not answer, 2 the command line or the configuration is wrong, 3 not all had
    finished when the time of --wait was over.

    Example: ergon pause charge --because "the bank doubles amounts" --wait 30
    """
    raise typer.Exit(paused_now(name, because=because, by=by, wait=wait, config=config, as_json=json))
