"""Work of ``ergon facts serve``: open the store, serve it, and stop cleanly."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Event
from typing import Any

import typer

from ergon_framework.cli.logs import configure_logging
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.facts.model import BoundarySide
from ergon_framework.facts.policy import RetentionPolicy
from ergon_framework.facts.retention import FactRetention, clean_up_uploads
from ergon_framework.facts.room import CapacityMonitor, disk_usage, store_usage
from ergon_framework.facts.service import libraries
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.health import STARTING, ProcessHealth
from ergon_framework.runner.probes import serve_probes
from ergon_framework.runner.settings import ProbeSettings, database_dsn, load_settings
from ergon_framework.telemetry.sums import MultiprocessMetrics

SERVING_HEALTH = ProcessHealth(live=True, ready=True)
#: Time after which a thread that parses a large request yields to other calls; Python's default is ten times as long.
SWITCH_INTERVAL_SECONDS = 0.0005


class ServeExit(ExitCode):
    """Exit codes of ``ergon facts serve`` and their meanings."""

    OK = 0, "a signal came, and it ended in order"
    FAILED = 2, "it could not begin: the command line, a file or the store is wrong, or the address is taken"


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
        libraries.require_grpc()
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
    # Imported on demand: the libraries are an optional extra.
    files = importlib.import_module("ergon_framework.facts.service.files")
    servers = importlib.import_module("ergon_framework.facts.service.server")
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    async with _open_store(options) as store:
        if not store.capabilities.is_strict and not options.accept_loss:
            raise ConfigurationError(
                "this store may lose what it has confirmed when the power fails; use one that is durable, or say "
                "--accept-loss"
            )
        server = servers.BoundaryServer(
            store=store,
            zones=options.zones,
            files=files.TlsFiles(options.certificate, options.key, options.authorities),
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
            typer.echo(f"stopping; calls that run have {options.grace:g} s to finish", err=True)
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
    if options.store is StoreKind.MEMORY:
        yield MemoryBoundary(side=options.side, max_facts=options.max_facts, max_bytes=options.max_bytes)
        return
    dsn = database_dsn(options.config)
    contents, stack = None, ExitStack()
    if options.contents is not None:
        contents = importlib.import_module("ergon_framework.facts.stores.files").FileContentStore(options.contents)
        stack.enter_context(clean_up_uploads(contents, keep=options.keep_uploads))
    postgres = importlib.import_module("ergon_framework.facts.stores.postgres")
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
