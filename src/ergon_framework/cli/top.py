"""``ergon top``: the command with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.top_work import run_top

top = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@top.command("top")
def top_(
    *,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Where a run answers its probes, for example http://localhost:9100; may be repeated. "
            "Default: run.probes of the configuration, if it has a port.",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, metavar="SECONDS", help="How long one frame is shown.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, after one interval, and end.")] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one frame as one line of JSON.")] = False,
) -> None:
    """Show the activity of the fleet: throughput, outcomes, retries, slots, queues, breakers, replicas, processes.

    Counters come from /metrics of the runs; queue depths, pauses and open breakers come from the database, if one is
    configured. Sources that do not answer are listed. If stdout is not a terminal, one frame is printed.

    Exit codes: 0 shown, 1 no source answered, 2 the command line or the configuration is invalid.

    Example: ergon top --url http://localhost:9100 --url http://localhost:9101
    """
    raise typer.Exit(run_top(url or (), interval=interval, once=once, config=config, as_json=json))
