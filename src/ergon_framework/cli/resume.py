"""``ergon resume``: the command with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.options import Actor, Reason, resolve_actor_name
from ergon_framework.cli.pause_work import resume_loops

resume = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@resume.command("resume")
def resume_(
    name: Annotated[str, typer.Argument(metavar="TASK|QUEUE", help="What was paused, by the same name.")],
    *,
    reason: Reason = "",
    actor: Actor = "",
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Let the fleet fetch again for a task or queue stopped by ergon pause.

    Exit codes: 0 resumed, 1 not paused or the database did not answer, 2 the command line or the configuration is
    invalid.

    Example: ergon resume charge
    """
    raise typer.Exit(resume_loops(name, actor=resolve_actor_name(actor), reason=reason, config=config, as_json=json))
