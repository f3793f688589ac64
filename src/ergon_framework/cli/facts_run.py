"""``ergon facts serve`` and ``ergon facts replicate``: processes that run until a signal stops them.

``serve`` opens the store of facts of a zone (a site), serves it, and stops cleanly. A replicator copies the facts that
another zone sends into the local store. ``replicate`` loads the replicators, runs them, and prints the final state of
each.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from signal import Signals
from threading import Event
from typing import Annotated, Any

import typer

from ergon_framework.cli.options import Config, ProbeFile, ProbePort
from ergon_framework.cli.output import catchup_progress, configure_logging
from ergon_framework.cli.run import LogLevel, LogLevelOption
from ergon_framework.database.extras import require_psycopg
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.facts.capacity import CapacityMonitor, disk_usage, store_usage
from ergon_framework.facts.model import BoundarySide
from ergon_framework.facts.policy import RetentionPolicy
from ergon_framework.facts.replica_state import ReplicaState
from ergon_framework.facts.retention import FactRetention, clean_up_uploads
from ergon_framework.facts.service import extras
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.runner.exit import ExitCode, RunExit
from ergon_framework.runner.loading import load_replicators
from ergon_framework.runner.probes import STARTING, ProcessHealth, serve_probes
from ergon_framework.runner.replication import ReplicationRunner
from ergon_framework.runner.settings import ProbeSettings, Settings, database_dsn, load_settings
from ergon_framework.telemetry.multiprocess import MultiprocessMetrics
from ergon_framework.telemetry.redaction import mask_credentials


def replicate(
    replicators: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="Replicators, or a function that creates them.")
    ],
    *,
    config: Config = None,
    probe_port: ProbePort = None,
    probe_file: ProbeFile = None,
    log_level: LogLevelOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the final state of each replicator as one line of JSON.")
    ] = False,
) -> None:
    """Copy the facts of other zones into this zone until a signal arrives.

    After SIGTERM or Ctrl-C, running calls may finish; a second signal stops them immediately. Missing facts are copied
    after the next start: the replicator keeps no state outside the stores.

    Exit codes: 0 stopped cleanly, 1 a replicator failed, 2 invalid option, configuration or replicators, 70 calls did
    not end in time; the process exited anyway.

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
    # A list, because the probes call check_health() before the replicators are loaded.
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
    message = "running calls may finish; a second signal stops them" if times == 1 else "stopping now"
    typer.echo(f"ergon: {signal.name}: {message}", err=True)


def _print_error(error: BaseException | None, code: RunExit) -> None:
    if isinstance(error, ErgonError):
        typer.echo(f"ergon: {error_message(error)}", err=True)
    elif error is not None:
        typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    elif code is RunExit.FORCED:
        typer.echo("ergon: a call outlasted the drain; the process exited without it, no data is lost", err=True)


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
    return f"{state.pair.from_zone} to {state.pair.to_zone}: at offset {state.offset}, lag: {lag}{reason_text}"


# -- serve ------------------------------------------------------------------------------------------

#: The health of the process while the server accepts calls.
SERVING_HEALTH = ProcessHealth(live=True, ready=True)
#: Time after which a thread that parses a large request yields to other calls; Python's default is ten times as long.
SWITCH_INTERVAL_SECONDS = 0.0005


class ServeExit(ExitCode):
    """Exit codes of ``ergon facts serve`` and their meanings."""

    OK = 0, "stopped cleanly by a signal"
    FAILED = 2, "startup failed: an option, a file or the store is invalid, or the address is in use"


class StoreKind(StrEnum):
    """Storage backend of the facts."""

    MEMORY = "memory"
    POSTGRES = "postgres"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of ``ergon facts serve`` from the command line."""

    zones: tuple[str, ...]
    listen: str
    certificate: Path
    key: Path
    authorities: Path
    store: StoreKind
    side: BoundarySide
    contents: Path | None
    accept_loss: bool
    revoked: Path | None
    crl: Path | None
    grace: float
    config: Path | None
    max_facts: int | None = None
    max_bytes: int | None = None
    max_readers: int = 100
    max_uploads: int = 16
    #: Seconds for which an interrupted upload can be resumed.
    keep_uploads: float = 3600.0
    #: None keeps facts without limit.
    retention: RetentionPolicy | None = None
    #: None leaves the port to the configuration.
    probe_port: int | None = None
    #: Fields of the service's Limits that differ from the defaults.
    limits: Mapping[str, int | float | bool] = field(default_factory=dict)


def serve(options: ServeOptions) -> ServeExit:
    """Serve until a signal arrives."""
    try:
        settings = load_settings(options.config)
        configure_logging(settings.logging.level.upper(), settings.logging.format)
        # Set before gRPC is imported: it writes a line to stderr for each failed handshake, which callers can trigger.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        extras.require_grpc()
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        probes = settings.run.probes
        if options.probe_port is not None:
            probes = probes.model_copy(update={"port": options.probe_port})
        asyncio.run(_serve(options, probes))
    except ErgonError as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        return ServeExit.FAILED
    return ServeExit.OK


async def _serve(options: ServeOptions, probes: ProbeSettings) -> None:
    """Open the store, serve it until a signal arrives, and stop gracefully."""
    # Imported on demand: the libraries are an optional extra.
    tls = importlib.import_module("ergon_framework.facts.service.tls")
    servers = importlib.import_module("ergon_framework.facts.service.server")
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    async with _open_store(options) as store:
        # A store is strict if what it has confirmed certainly survives a power loss.
        if not store.capabilities.is_strict and not options.accept_loss:
            raise ConfigurationError(
                "this store may lose confirmed facts after a power loss; use a durable store, or pass --accept-loss"
            )
        server = servers.BoundaryServer(
            store=store,
            zones=options.zones,
            files=tls.TlsFiles(options.certificate, options.key, options.authorities),
            listen=options.listen,
            revoked=options.revoked,
            crl=options.crl,
            limits=servers.Limits(readers=options.max_readers, uploads=options.max_uploads, **options.limits),
        )
        with ExitStack() as stack:
            serving = Event()
            bound_port = stack.enter_context(
                serve_probes(
                    probes, lambda: SERVING_HEALTH if serving.is_set() else STARTING, MultiprocessMetrics().read
                )
            )
            _start_maintenance(store, options, stack)
            port = await server.start()
            serving.set()
            if bound_port is not None and probes.port == 0:
                typer.echo(f"ergon: probes on http://{probes.host}:{bound_port}", err=True)
            host = options.listen.rpartition(":")[0]
            typer.echo(f"listening at {host}:{port} for {', '.join(options.zones)}")
            await stopped.wait()
            serving.clear()
            typer.echo(f"stopping; running calls have {options.grace:g} s to finish", err=True)
            await server.stop_gracefully(options.grace)


def _start_maintenance(store: Any, options: ServeOptions, stack: ExitStack) -> None:
    """Start threads that monitor the capacity and apply retention while *stack* is open."""
    usages = []
    if options.max_facts is not None or options.max_bytes is not None:
        usages.append(store_usage(store, max_facts=options.max_facts, max_bytes=options.max_bytes))
    if options.contents is not None:
        usages.append(disk_usage(options.contents))
    if usages:
        stack.enter_context(CapacityMonitor(*usages, buffer=options.side.store_buffer).run_in_background())
    if options.retention is not None:
        stack.enter_context(FactRetention(store, options.retention).run_in_background())


@asynccontextmanager
async def _open_store(options: ServeOptions) -> AsyncIterator[Any]:
    """Yield the store that the options name; with an artifact folder, stale uploads in it are deleted meanwhile."""
    if options.store is StoreKind.MEMORY:
        yield MemoryBoundary(side=options.side, max_facts=options.max_facts, max_bytes=options.max_bytes)
        return
    dsn = database_dsn(options.config)
    contents, stack = None, ExitStack()
    if options.contents is not None:
        contents = importlib.import_module("ergon_framework.facts.stores.files").FileContentStore(options.contents)
        stack.enter_context(clean_up_uploads(contents, keep=options.keep_uploads))
    require_psycopg()
    postgres = importlib.import_module("ergon_framework.facts.stores.postgres.store")
    store = postgres.PostgresBoundary(
        dsn,
        side=options.side,
        contents=contents,
        max_facts=options.max_facts,
        max_bytes=options.max_bytes,
        accept_loss=options.accept_loss,
    )
    with stack:
        async with store:
            yield store
