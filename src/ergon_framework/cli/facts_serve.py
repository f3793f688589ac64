"""What ``ergon facts serve`` does: open the store, serve it, and end in order."""

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

from ergon_framework.cli.logs import configure
from ergon_framework.errors import ConfigurationError, ErgonError, text
from ergon_framework.facts.model import Side
from ergon_framework.facts.policy import RetentionPolicy
from ergon_framework.facts.retention import Retention, sweep_uploads
from ergon_framework.facts.room import Room, of_disk, of_store
from ergon_framework.facts.service import libraries
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.health import STARTING, Health
from ergon_framework.runner.probes import probed
from ergon_framework.runner.settings import ProbeSettings, database, settings
from ergon_framework.telemetry.sums import Sums

SERVING = Health(live=True, ready=True)
#: How soon a thread that reads a large request makes way for other calls; by default it takes ten times as long.
SWITCH_INTERVAL_SECONDS = 0.0005


class ServeExit(ExitCode):
    """Every exit code of ``ergon facts serve`` with what it means."""

    OK = 0, "a signal came, and it ended in order"
    FAILED = 2, "it could not begin: the command line, a file or the store is wrong, or the address is taken"


class StoreKind(StrEnum):
    """Where facts are kept."""

    MEMORY = "memory"
    POSTGRES = "postgres"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be served, as the command line has it."""

    zones: tuple[str, ...]
    listen: str
    certificate: Path
    key: Path
    authorities: Path
    store: StoreKind
    side: Side
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
    #: Seconds for which an upload that broke off can be gone on with.
    keep_uploads: float = 3600.0
    #: None keeps all for ever.
    retention: RetentionPolicy | None = None
    #: None leaves it to the configuration.
    probe_port: int | None = None
    #: Fields of the service's Limits that are not as by default.
    limits: Mapping[str, int | float | bool] = field(default_factory=dict)


def served(order: Order) -> ServeExit:
    """Serve until a signal comes."""
    try:
        found = settings(order.config)
        configure(found.logging.level.upper(), found.logging.format)
        # Before gRPC is imported: it writes a line to stderr for each failed handshake, as many as a caller likes.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        libraries.needed()
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        probes = found.run.probes
        if order.probe_port is not None:
            probes = probes.model_copy(update={"port": order.probe_port})
        asyncio.run(_serve(order, probes))
    except ErgonError as error:
        typer.echo(f"ergon: {text(error)}", err=True)
        return ServeExit.FAILED
    return ServeExit.OK


async def _serve(order: Order, probes: ProbeSettings) -> None:
    # Loaded when it is needed: not everybody has its libraries.
    files = importlib.import_module("ergon_framework.facts.service.files")
    servers = importlib.import_module("ergon_framework.facts.service.server")
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with _store(order) as store:
        if not store.capabilities.strict and not order.accept_loss:
            raise ConfigurationError(
                "this store may lose what it has confirmed when the power fails; use one that is durable, or say "
                "--accept-loss"
            )
        server = servers.BoundaryServer(
            store=store,
            zones=order.zones,
            files=files.TlsFiles(order.certificate, order.key, order.authorities),
            listen=order.listen,
            revoked=order.revoked,
            crl=order.crl,
            limits=servers.Limits(readers=order.max_readers, uploads=order.max_uploads, **order.limits),
        )
        with ExitStack() as beside:
            serving = Event()
            asked = beside.enter_context(probed(probes, lambda: SERVING if serving.is_set() else STARTING, Sums().read))
            _look_after(store, order, beside)
            port = await server.start()
            serving.set()
            if asked is not None and probes.port == 0:
                typer.echo(f"ergon: probes on http://{probes.host}:{asked}", err=True)
            host = order.listen.rpartition(":")[0]
            typer.echo(f"listening at {host}:{port} for {', '.join(order.zones)}")
            await stopped.wait()
            serving.clear()
            typer.echo(f"stopping; calls that run have {order.grace:g} s to finish", err=True)
            await server.drain(order.grace)


def _look_after(store: Any, order: Order, beside: ExitStack) -> None:
    """Threads that watch how much room is left and let go of what is old, for as long as *beside* is open."""
    measures = []
    if order.max_facts is not None or order.max_bytes is not None:
        measures.append(of_store(store, max_facts=order.max_facts, max_bytes=order.max_bytes))
    if order.contents is not None:
        measures.append(of_disk(order.contents))
    if measures:
        beside.enter_context(Room(*measures, buffer=order.side.store_buffer).watched())
    if order.retention is not None:
        beside.enter_context(Retention(store, order.retention).running())


@asynccontextmanager
async def _store(order: Order) -> AsyncIterator[Any]:
    if order.store is StoreKind.MEMORY:
        yield MemoryBoundary(side=order.side, max_facts=order.max_facts, max_bytes=order.max_bytes)
        return
    dsn = database(order.config)
    contents, beside = None, ExitStack()
    if order.contents is not None:
        contents = importlib.import_module("ergon_framework.facts.stores.files").FileContents(order.contents)
        beside.enter_context(sweep_uploads(contents, keep=order.keep_uploads))
    postgres = importlib.import_module("ergon_framework.facts.stores.postgres")
    store = postgres.PostgresBoundary(
        dsn,
        side=order.side,
        contents=contents,
        max_facts=order.max_facts,
        max_bytes=order.max_bytes,
        accept_loss=order.accept_loss,
    )
    with beside:
        async with store:
            yield store
