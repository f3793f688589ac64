"""``ergon facts replicate``: load the replicators, run them, and print the final state of each."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from signal import Signals
from typing import Annotated, Any

import typer

from ergon_framework.cli.facts_catchup import catchup_progress
from ergon_framework.cli.logs import configure_logging
from ergon_framework.cli.run import LogLevel
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.facts.replica import ReplicaState
from ergon_framework.runner.exits import RunExit
from ergon_framework.runner.health import STARTING, ProcessHealth
from ergon_framework.runner.loading import load_replicators
from ergon_framework.runner.probes import serve_probes
from ergon_framework.runner.replicating import ReplicationRunner
from ergon_framework.runner.settings import Settings, load_settings
from ergon_framework.telemetry.redaction import mask_credentials
from ergon_framework.telemetry.sums import MultiprocessMetrics


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
    """Copy the facts of other zones into this zone until a signal arrives.

    After SIGTERM or Ctrl-C running calls may finish; a second signal stops them immediately. Missing facts are copied
    after the next start: the replicator keeps no state outside the stores.

    Example: ergon facts replicate app:replicators
    """
    raise typer.Exit(_run(replicators, _resolve_settings(config, probe_port, probe_file), log_level, as_json=json))


def _resolve_settings(config: Path | None, port: int | None, file: Path | None) -> Settings:
    try:
        settings = load_settings(config)
    except ConfigurationError as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        raise typer.Exit(RunExit.USAGE) from error
    overrides: dict[str, Any] = {"port": port, "file": None if file is None else str(file)}
    probes = settings.run.probes.model_copy(
        update={key: value for key, value in overrides.items() if value is not None}
    )
    return settings.model_copy(update={"run": settings.run.model_copy(update={"probes": probes})})


def _run(name: str, settings: Settings, log_level: LogLevel | None, *, as_json: bool) -> int:
    runners: list[ReplicationRunner] = []

    def check_health() -> ProcessHealth:
        return runners[0].health() if runners else STARTING

    try:
        configure_logging((log_level or LogLevel.INFO).upper(), settings.logging.format)
        with serve_probes(settings.run.probes, check_health, MultiprocessMetrics().read) as port:
            if port is not None and settings.run.probes.port == 0:
                typer.echo(f"ergon: probes on http://{settings.run.probes.host}:{port}", err=True)
            runners.append(ReplicationRunner(load_replicators(name), on_signal=_print_signal))
            with catchup_progress(runners[0].states):
                code = runners[0].run()
    except ConfigurationError as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        return RunExit.USAGE
    _print_error(runners[0].error, code)
    for state in runners[0].states():
        typer.echo(json.dumps(state_to_dict(state)) if as_json else _format_state(state))
    return code


def _print_signal(signal: Signals, times: int) -> None:
    message = "calls under way may finish; a second signal ends them" if times == 1 else "ending now"
    typer.echo(f"ergon: {signal.name}: {message}", err=True)


def _print_error(error: BaseException | None, code: RunExit) -> None:
    if isinstance(error, ErgonError):
        typer.echo(f"ergon: {error_message(error)}", err=True)
    elif error is not None:
        typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    elif code is RunExit.FORCED:
        typer.echo("ergon: a call did not end within the drain; the process left without it, nothing is lost", err=True)


def state_to_dict(state: ReplicaState) -> dict[str, Any]:
    """Return the state of a replicator as plain data."""
    lag, problem = state.lag, state.problem
    return {
        "replica": state.name,
        "from_zone": state.pair.from_zone,
        "to_zone": state.pair.to_zone,
        "status": state.status.value,
        "offset": state.offset,
        "confirmed": state.confirmed,
        "lag": None if lag is None else {"facts": lag.facts, "bytes": lag.bytes, "seconds": round(lag.seconds, 3)},
        "reason": None if problem is None else mask_credentials(problem.reason),
        "action": None if problem is None else problem.action,
    }


def _format_state(state: ReplicaState) -> str:
    lag = "unknown" if state.lag is None else f"{state.lag.facts} facts, {state.lag.seconds:.0f} s"
    reason_text = "" if state.problem is None else f"; {mask_credentials(state.problem.reason)}"
    return f"{state.pair.from_zone} to {state.pair.to_zone}: at offset {state.offset}, behind by {lag}{reason_text}"
