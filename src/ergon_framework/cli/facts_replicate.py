"""``ergon facts replicate``: load the replicators, run them, say how each of them is."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from signal import Signals
from typing import Annotated, Any

import typer

from ergon_framework.cli.facts_catchup import shown
from ergon_framework.cli.logs import configure
from ergon_framework.cli.run import LogLevel
from ergon_framework.errors import ConfigurationError, ErgonError, text
from ergon_framework.facts.replica import ReplicaState
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.health import STARTING, Health
from ergon_framework.runner.loading import load_replicators
from ergon_framework.runner.probes import probed
from ergon_framework.runner.replicating import Replicating
from ergon_framework.runner.settings import Settings, settings
from ergon_framework.telemetry.redaction import masked
from ergon_framework.telemetry.sums import Sums


def replicate(
    replicators: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="Where they are, or a function that makes them.")
    ],
    *,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
    ] = None,
    probe_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Answer /live, /ready and /metrics on this port; 0 takes any free one."),
    ] = None,
    probe_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write into this file, again and again, how it is.")
    ] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="The least that is logged. Default: info.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print how each was at the end, one line of JSON each.")] = False,
) -> None:
    """Copy the facts of other zones into this one, until a signal comes.

    SIGTERM and Ctrl-C let calls under way finish; a second one ends at once. What is missing is copied after the next
    start: nothing is kept here that the stores do not have.

    Example: ergon facts replicate app:replicators
    """
    raise typer.Exit(_run(replicators, _settings(config, probe_port, probe_file), log_level, as_json=json))


def _settings(config: Path | None, port: int | None, file: Path | None) -> Settings:
    try:
        found = settings(config)
    except ConfigurationError as error:
        typer.echo(f"ergon: {text(error)}", err=True)
        raise typer.Exit(Exit.USAGE) from error
    given: dict[str, Any] = {"port": port, "file": None if file is None else str(file)}
    probes = found.run.probes.model_copy(update={key: value for key, value in given.items() if value is not None})
    return found.model_copy(update={"run": found.run.model_copy(update={"probes": probes})})


def _run(name: str, found: Settings, log_level: LogLevel | None, *, as_json: bool) -> int:
    running: list[Replicating] = []

    def check() -> Health:
        return running[0].health() if running else STARTING

    try:
        configure((log_level or LogLevel.INFO).upper(), found.logging.format)
        with probed(found.run.probes, check, Sums().read) as port:
            if port is not None and found.run.probes.port == 0:
                typer.echo(f"ergon: probes on http://{found.run.probes.host}:{port}", err=True)
            running.append(Replicating(load_replicators(name), on_signal=_heard))
            with shown(running[0].states):
                code = running[0].run()
    except ConfigurationError as error:
        typer.echo(f"ergon: {text(error)}", err=True)
        return Exit.USAGE
    _tell(running[0].error, code)
    for state in running[0].states():
        typer.echo(json.dumps(as_data(state)) if as_json else _line(state))
    return code


def _heard(signal: Signals, times: int) -> None:
    said = "calls under way may finish; a second signal ends them" if times == 1 else "ending now"
    typer.echo(f"ergon: {signal.name}: {said}", err=True)


def _tell(error: BaseException | None, code: Exit) -> None:
    if isinstance(error, ErgonError):
        typer.echo(f"ergon: {text(error)}", err=True)
    elif error is not None:
        typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    elif code is Exit.FORCED:
        typer.echo("ergon: a call did not end within the drain; the process left without it, nothing is lost", err=True)


def as_data(state: ReplicaState) -> dict[str, Any]:
    """How a replicator is, as plain data."""
    lag, trouble = state.lag, state.trouble
    return {
        "replica": state.name,
        "from_zone": state.pair.from_zone,
        "to_zone": state.pair.to_zone,
        "status": state.status.value,
        "offset": state.offset,
        "confirmed": state.confirmed,
        "lag": None if lag is None else {"facts": lag.facts, "bytes": lag.bytes, "seconds": round(lag.seconds, 3)},
        "reason": None if trouble is None else masked(trouble.reason),
        "action": None if trouble is None else trouble.action,
    }


def _line(state: ReplicaState) -> str:
    lag = "unknown" if state.lag is None else f"{state.lag.facts} facts, {state.lag.seconds:.0f} s"
    why = "" if state.trouble is None else f"; {masked(state.trouble.reason)}"
    return f"{state.pair.from_zone} to {state.pair.to_zone}: at offset {state.offset}, behind by {lag}{why}"
