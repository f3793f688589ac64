"""Whom ``ergon doctor`` looks at: what the settings name, what the command line names, and this program itself."""

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

from ergon_framework.connectors import schemes
from ergon_framework.connectors.base import AsyncConnector, Connector, ConnectorError
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.errors import ConfigurationError, MissingExtraError, text
from ergon_framework.executor.pool import ExecutorPool, PoolPolicy
from ergon_framework.executor.process import Command
from ergon_framework.executor.start import ExecutorNotStarted
from ergon_framework.facts.boundary import Boundary
from ergon_framework.finding import Examinable, Finding, Page, Wall, Weight, of_durability
from ergon_framework.runner import sources
from ergon_framework.runner.loading import load_anything
from ergon_framework.runner.queues import NamedQueue
from ergon_framework.runner.settings import Settings
from ergon_framework.schema import libraries
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.defaults import choose_policy
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.worst import refuse_too_long

#: What stands for a queue where only a server is named; it is never made.
_NOBODY: Final = "ergon-doctor"
_BROKERS: Final = ("rabbitmq", "nats", "redis")
#: Held while something is imported. All are looked at at once, and of two threads that import a package and a part of
#: it at the same moment one may be given what is only half made.
_IMPORTS: Final = Lock()


@dataclass(frozen=True, slots=True)
class Patient:
    """One thing to look at: what it is called, which setting names it, and how it is looked at."""

    name: str
    setting: str
    examine: Callable[[Wall], Sequence[Finding]]
    #: Its server's address, by which two queues of one server are known; it is never shown as it is.
    address: str = ""
    #: Whether only what is the server's is of interest.
    server_only: bool = False


def program(found: Settings, config: Path | None) -> Patient:
    """The program that looks: what runs it, and what it was told."""
    file = config or Path(sources.NAME)

    def examine(_wall: Wall) -> Sequence[Finding]:
        read = f"{file} and the environment" if file.exists() else f"the environment; there is no {file}"
        names = [*(f"the queue {name!r}" for name in found.queues), *(f"the task {name!r}" for name in found.tasks)]
        return [
            Finding("version", Weight.FINE, f"ergon {version('ergon-framework')}, Python {platform.python_version()}"),
            Finding(
                "settings", Weight.FINE, f"read from {read}; they name {', '.join(names) or 'no queue and no task'}"
            ),
        ]

    return Patient("this program", sources.NAME, examine)


def named_by(found: Settings, timeout: float) -> Iterator[Patient]:
    """The database, the queues, and the servers without a queue that the settings name."""
    dsn = found.postgres.dsn
    if dsn:
        yield Patient("database", _setting("postgres", "dsn"), lambda wall: _database(dsn, timeout, wall), dsn)
    known = {said.url for said in found.queues.values()}
    for name, said in found.queues.items():
        if said.url:
            yield Patient(
                f"queue {name}",
                _setting("queues", name, "url"),
                lambda wall, name=name: _queue(name, found, wall),  # type: ignore[misc] # bound while it loops
                said.url,
            )
    for broker in _BROKERS:
        url = getattr(found, broker).url
        if url and url not in known:
            yield Patient(
                broker,
                _setting(broker, "url"),
                lambda wall, url=url: _server(url, wall),  # type: ignore[misc] # as above
                url,
                server_only=True,
            )


def named(name: str, found: Settings, timeout: float) -> Iterator[Patient]:
    """What *name* on the command line stands for; ConfigurationError where it stands for nothing."""
    thing = load_anything(name)
    if isinstance(thing, Boundary):
        yield Patient(f"facts {name}", name, lambda _: _boundary(thing))
        return
    if isinstance(thing, Connector | AsyncConnector):
        yield Patient(f"queue {thing.name}", name, lambda wall: _connector(thing, wall))
        return
    yield Patient(f"task {thing.name}", name, lambda _: _policy(thing, found))
    yield Patient(f"queue {thing.connector.name}", name, lambda wall: _connector(thing.connector, wall))
    for kind, command in _commands(thing):
        yield Patient(
            f"executor {kind}",
            name,
            lambda _, command=command: _executor(command, timeout),  # type: ignore[misc] # as above
        )


# -- how each is looked at ------------------------------------------------------------------------------


def _database(dsn: str, timeout: float, wall: Wall) -> Sequence[Finding]:
    # Loaded when it is needed: not everybody has its libraries.
    with _IMPORTS:
        libraries.needed()
        examining = importlib.import_module("ergon_framework.connectors.postgres.examining")
        lines = importlib.import_module("ergon_framework.schema.lines").Lines(dsn, other=ConnectorError)
    try:
        found: Sequence[Finding] = lines.run(examining.examined(lines, None, wall), within=timeout)
    finally:
        lines.close()
    return found


def _queue(name: str, found: Settings, wall: Wall) -> Sequence[Finding]:
    url, options = found.queue(name)
    with _IMPORTS:
        connector = schemes.connect(name, url, options)
    return _connector(connector, wall)


def _server(url: str, wall: Wall) -> Sequence[Finding]:
    with _IMPORTS:
        connector = schemes.connect(_NOBODY, url, {})
    return _connector(connector, wall)


def _connector(connector: Connector | AsyncConnector, wall: Wall) -> Sequence[Finding]:
    with _IMPORTS:
        behind = connector.connector if isinstance(connector, NamedQueue) else connector
    can = behind.capabilities
    if isinstance(behind, Examinable):
        try:
            return behind.examine(wall)
        finally:
            as_sync(behind).close()
    if can.mode == "log":
        # Opening one takes its partitions over from the consumers that run.
        return [Finding("connection", Weight.FINE, f"{behind.name!r} is a log, which is not opened here", shared=False)]
    reached = as_sync(behind)
    reached.open()
    try:
        depth = reached.depth()
        words = "" if depth is None else f": {depth.ready} ready, {depth.dead} dead"
        durable = behind.capabilities.durable
    finally:
        reached.close()
    return [
        Finding("connection", Weight.FINE, f"{behind.name!r} opened{words}", shared=False),
        of_durability(
            f"its connector says durable={durable}", durable=durable, do="see what its broker's documentation says"
        ),
    ]


def _policy(task: Task | AsyncTask, found: Settings) -> Sequence[Finding]:
    """Whether the broker would take a delivery back before the policy is through with it."""
    consumes = isinstance(task, ConsumerMixin | AsyncConsumerMixin)
    if not consumes:
        return [Finding("policy", Weight.FINE, "it only produces; no broker waits for it", shared=False)]
    policy = found.policy(task.name, choose_policy(task, None, ConsumerPolicy))
    with _IMPORTS:
        can = task.connector.capabilities
    try:
        refuse_too_long(policy, can, queue=task.connector.name)
    except ConfigurationError as error:
        words, _, do = text(error).partition("; ")
        return [Finding("policy", Weight.BROKEN, words, do or "run: ergon policy explain", shared=False)]
    return [Finding("policy", Weight.FINE, "it fits the deadline of its broker", shared=False)]


def _boundary(boundary: Boundary) -> Sequence[Finding]:
    epoch, can = boundary.epoch, boundary.capabilities
    words = "what it confirmed survives a loss of power" if can.durable else f"its store says durable={can.durable}"
    return [
        Finding("connection", Weight.FINE, f"the boundary answers, in epoch {epoch}", shared=False),
        of_durability(words, durable=can.durable, do=f"see {Page.SERVE_FACTS.named} on what its store must be"),
    ]


def _executor(command: Command, timeout: float) -> Sequence[Finding]:
    """Whether an executor starts and answers the question that a pool asks each."""

    async def answers() -> None:
        # The first start that fails is told. One that has to be killed ends before whoever looks has lost his patience.
        policy = PoolPolicy(size=1, start_timeout=timeout, grace=min(1.0, 0.1 * timeout))
        async with ExecutorPool(command, policy=policy, name="doctor") as pool:
            with await pool.reserve():
                pass

    try:
        asyncio.run(answers())
    except ExecutorNotStarted as error:
        return [Finding("start", Weight.BROKEN, error.seen, error.do, shared=False)]
    return [Finding("start", Weight.FINE, f"{command.words[0]!r} starts and answers", shared=False)]


def _commands(task: Task | AsyncTask) -> Iterator[tuple[str, Command]]:
    """The executors that *task* starts, by kind."""
    isolation = getattr(task, "isolation", None)
    command = getattr(isolation, "command", None)
    if isinstance(command, Command):
        yield task.name, command
    for kind, part in getattr(task, "tasks", {}).items():
        command = getattr(part, "command", None)
        if isinstance(command, Command):
            yield str(kind), command


def _setting(*keys: str) -> str:
    return f"{'.'.join(keys)} of {sources.NAME}, or {sources.variable(tuple(key.replace('-', '_') for key in keys))}"


def unavailable(error: MissingExtraError) -> Finding:
    """What is missing of this program itself."""
    words, _, do = text(error).partition("; ")
    return Finding("library", Weight.BROKEN, words, do or "install the extra that it names", shared=False)
