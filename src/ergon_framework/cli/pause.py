"""``ergon pause``: the command with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.options import Actor, Reason, resolve_actor_name
from ergon_framework.cli.pause_work import PauseRequest, pause_loops

pause = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@pause.command("pause")
def pause_(
    name: Annotated[
        str, typer.Argument(metavar="TASK|QUEUE", help="Its name, as charge or orders; or MODULE:TASK, as app:charge.")
    ],
    *,
    reason: Reason = "",
    actor: Actor = "",
    force: Annotated[bool, typer.Option("--force", help="Pause a name that no worker has yet.")] = False,
    wait: Annotated[
        float, typer.Option(min=0, max=86400, metavar="SECONDS", help="Wait so long until all have finished.")
    ] = 0.0,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Stop the whole fleet from fetching for a task or a queue until ergon resume.

    Every worker that ergon run started with the same database sees the pause within one or two seconds, finishes its
    claimed work, and is not ready meanwhile. The pause also applies to workers started later.

    Exit codes: 0 paused, 1 the database did not answer, 2 the command line or the configuration is invalid, 3 some
    workers had not finished when --wait expired.

    A name that no running worker has is rejected with similar names, unless --force is given.

    Example: ergon pause charge --reason "the bank doubles amounts" --wait 30
    """
    request = PauseRequest(name=name, reason=reason, actor=resolve_actor_name(actor), force=force, wait=wait)
    raise typer.Exit(pause_loops(request, config=config, as_json=json))
