"""Targets of ``ergon doctor``: those in the settings, those on the command line, and this program itself.

A target may be a boundary, the interface to the facts of a zone (a site), or an executor, a process that runs handlers.
"""

from __future__ import annotations

import asyncio
import importlib
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Final

from ergon_framework.connectors import registry
from ergon_framework.connectors.base import AsyncConnector, Connector, ConnectorError
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.database import extras
from ergon_framework.diagnostics import (
    Diagnosable,
    Diagnostic,
    DocPage,
    Severity,
    WallClock,
    check_durability,
)
from ergon_framework.errors import ConfigurationError, MissingExtraError, error_message
from ergon_framework.executors.pool import ExecutorPool, PoolPolicy
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.executors.startup import ExecutorNotStarted
from ergon_framework.facts.boundary import Boundary
from ergon_framework.runner import settings_sources
from ergon_framework.runner.loading import load_target
from ergon_framework.runner.queues import NamedQueue
from ergon_framework.runner.settings import Settings
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.context import choose_policy
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.worst_case import check_fits_broker_deadline

#: Queue name used when only a server is configured; the queue is never created.
_PLACEHOLDER_QUEUE: Final = "ergon-doctor"
_BROKERS: Final = ("rabbitmq", "nats", "redis")
#: Held during imports. Targets are checked concurrently, and of two threads that import a package and its submodule
#: at the same time one may see a partially initialized module.
_IMPORT_LOCK: Final = Lock()


@dataclass(frozen=True, slots=True)
class Target:
    """One target: its name, the setting that names it, and the function that checks it."""

    name: str
    setting: str
    diagnose: Callable[[WallClock], Sequence[Diagnostic]]
    #: Server address that identifies queues of one server; it is never shown unredacted.
    address: str = ""
    #: Whether only diagnostics about the server matter.
    server_only: bool = False


def program_target(settings: Settings, config: Path | None) -> Target:
    """Return the target for this program: its version, its Python, and its settings."""
    file = config or Path(settings_sources.FILE_NAME)

    def diagnose(_wall: WallClock) -> Sequence[Diagnostic]:
        source_text = f"{file} and the environment" if file.exists() else f"the environment, without {file}"
        names = [
            *(f"queue {name!r}" for name in settings.queues),
            *(f"task {name!r}" for name in settings.tasks),
        ]
        return [
            Diagnostic(
                "version", Severity.OK, f"ergon {version('ergon-framework')}, Python {platform.python_version()}"
            ),
            Diagnostic(
                "settings",
                Severity.OK,
                f"read from {source_text}; {', '.join(names) or 'no queue and no task'} configured",
            ),
        ]

    return Target("this program", settings_sources.FILE_NAME, diagnose)


def targets_from_settings(settings: Settings, timeout: float) -> Iterator[Target]:
    """Yield the database, the queues, and the servers without a queue that the settings name."""
    dsn = settings.postgres.dsn
    if dsn:
        yield Target(
            "database", _describe_setting("postgres", "dsn"), lambda wall: _diagnose_database(dsn, timeout, wall), dsn
        )
    known_urls = {queue_settings.url for queue_settings in settings.queues.values()}
    for name, queue_settings in settings.queues.items():
        if queue_settings.url:
            yield Target(
                f"queue {name}",
                _describe_setting("queues", name, "url"),
                lambda wall, name=name: _diagnose_queue(name, settings, wall),  # type: ignore[misc] # bound per iteration
                queue_settings.url,
            )
    for broker in _BROKERS:
        url = getattr(settings, broker).url
        if url and url not in known_urls:
            yield Target(
                broker,
                _describe_setting(broker, "url"),
                lambda wall, url=url: _diagnose_server(url, wall),  # type: ignore[misc] # bound per iteration
                url,
                server_only=True,
            )


def target_from_name(name: str, settings: Settings, timeout: float) -> Iterator[Target]:
    """Yield the targets for *name* on the command line; raise ConfigurationError if it names nothing."""
    target = load_target(name)
    if isinstance(target, Boundary):
        yield Target(f"facts {name}", name, lambda _: _diagnose_boundary(target))
        return
    if isinstance(target, Connector | AsyncConnector):
        yield Target(f"queue {target.name}", name, lambda wall: _diagnose_connector(target, wall))
        return
    yield Target(f"task {target.name}", name, lambda _: _diagnose_policy(target, settings))
    yield Target(f"queue {target.connector.name}", name, lambda wall: _diagnose_connector(target.connector, wall))
    for kind, command in _iter_commands(target):
        yield Target(
            f"executor {kind}",
            name,
            lambda _, command=command: _diagnose_executor(command, timeout),  # type: ignore[misc] # bound per iteration
        )


# -- checks of each kind of target ----------------------------------------------------------------------


def _diagnose_database(dsn: str, timeout: float, wall: WallClock) -> Sequence[Diagnostic]:
    # Imported on demand: the libraries are an optional extra.
    with _IMPORT_LOCK:
        extras.require_psycopg()
        diagnostics_module = importlib.import_module("ergon_framework.connectors.postgres.inspect")
        pool = importlib.import_module("ergon_framework.database.pool").ConnectionPool(dsn, error_type=ConnectorError)
    try:
        diagnostics: Sequence[Diagnostic] = pool.run(
            diagnostics_module.diagnose(pool, None, wall), timeout_seconds=timeout
        )
    finally:
        pool.close()
    return diagnostics


def _diagnose_queue(name: str, settings: Settings, wall: WallClock) -> Sequence[Diagnostic]:
    url, options = settings.queue(name)
    with _IMPORT_LOCK:
        connector = registry.create_connector(name, url, options)
    return _diagnose_connector(connector, wall)


def _diagnose_server(url: str, wall: WallClock) -> Sequence[Diagnostic]:
    with _IMPORT_LOCK:
        connector = registry.create_connector(_PLACEHOLDER_QUEUE, url, {})
    return _diagnose_connector(connector, wall)


def _diagnose_connector(connector: Connector | AsyncConnector, wall: WallClock) -> Sequence[Diagnostic]:
    """Let the connector diagnose itself; of one that cannot, check only that it opens."""
    with _IMPORT_LOCK:  # a NamedQueue creates its connector at the first access, which imports the connector's module
        inner = connector.connector if isinstance(connector, NamedQueue) else connector
    capabilities = inner.capabilities
    if isinstance(inner, Diagnosable):
        try:
            return inner.diagnose(wall)
        finally:
            as_sync(inner).close()
    if capabilities.mode == "log":
        # Opening a log connector takes its partitions over from running consumers.
        return [Diagnostic("connection", Severity.OK, f"{inner.name!r} is a log and is not opened here", shared=False)]
    sync_connector = as_sync(inner)
    sync_connector.open()
    try:
        depth = sync_connector.depth()
        depth_text = "" if depth is None else f": {depth.ready} ready, {depth.dead} dead"
        durable = inner.capabilities.durable
    finally:
        sync_connector.close()
    return [
        Diagnostic("connection", Severity.OK, f"{inner.name!r} opened{depth_text}", shared=False),
        check_durability(
            f"its connector reports durable={durable}", durable=durable, remedy="check the documentation of its broker"
        ),
    ]


def _diagnose_policy(task: Task | AsyncTask, settings: Settings) -> Sequence[Diagnostic]:
    """Check whether the broker would redeliver a delivery before the policy's lifecycle has ended."""
    is_consumer = isinstance(task, ConsumerMixin | AsyncConsumerMixin)
    if not is_consumer:
        return [Diagnostic("policy", Severity.OK, "producer only, no broker deadline applies", shared=False)]
    policy = settings.policy(task.name, choose_policy(task, None, ConsumerPolicy))
    with _IMPORT_LOCK:
        capabilities = task.connector.capabilities
    try:
        check_fits_broker_deadline(policy, capabilities, queue=task.connector.name)
    except ConfigurationError as error:
        message, _, remedy = error_message(error).partition("; ")
        return [Diagnostic("policy", Severity.ERROR, message, remedy or "run: ergon policy explain", shared=False)]
    return [Diagnostic("policy", Severity.OK, "the policy fits the broker's deadline", shared=False)]


def _diagnose_boundary(boundary: Boundary) -> Sequence[Diagnostic]:
    epoch, capabilities = boundary.epoch, boundary.capabilities
    durability_text = (
        "confirmed facts survive a power loss"
        if capabilities.durable
        else f"its store reports durable={capabilities.durable}"
    )
    return [
        Diagnostic("connection", Severity.OK, f"the boundary responds; it is in epoch {epoch}", shared=False),
        check_durability(
            durability_text,
            durable=capabilities.durable,
            remedy=f"see {DocPage.SERVE_FACTS.label} for the requirements of its store",
        ),
    ]


def _diagnose_executor(command: ExecutorCommand, timeout: float) -> Sequence[Diagnostic]:
    """Check whether an executor starts and responds to the readiness probe of the pool."""

    async def start_executor() -> None:
        # The pool reports the first failed start. The grace is short, so that a kill ends before the doctor's timeout.
        policy = PoolPolicy(size=1, start_timeout=timeout, grace=min(1.0, 0.1 * timeout))
        async with ExecutorPool(command, policy=policy, name="doctor") as pool:
            with await pool.reserve():
                pass

    try:
        asyncio.run(start_executor())
    except ExecutorNotStarted as error:
        return [Diagnostic("start", Severity.ERROR, error.problem, error.remedy, shared=False)]
    return [Diagnostic("start", Severity.OK, f"{command.words[0]!r} starts and responds", shared=False)]


def _iter_commands(task: Task | AsyncTask) -> Iterator[tuple[str, ExecutorCommand]]:
    """Yield the executor commands that *task* starts, by kind.

    A task whose process step runs in an executor has ``isolation``; an orchestrator of jobs has ``tasks``, one per
    kind.
    """
    isolation = getattr(task, "isolation", None)
    command = getattr(isolation, "command", None)
    if isinstance(command, ExecutorCommand):
        yield task.name, command
    for kind, subtask in getattr(task, "tasks", {}).items():
        command = getattr(subtask, "command", None)
        if isinstance(command, ExecutorCommand):
            yield str(kind), command


def _describe_setting(*keys: str) -> str:
    variable = settings_sources.env_variable_name(tuple(key.replace("-", "_") for key in keys))
    return f"{'.'.join(keys)} of {settings_sources.FILE_NAME}, or {variable}"


def missing_extra_diagnostic(error: MissingExtraError) -> Diagnostic:
    """Return the diagnostic for a library that this program lacks."""
    message, _, remedy = error_message(error).partition("; ")
    return Diagnostic("library", Severity.ERROR, message, remedy or "install the extra that it names", shared=False)
