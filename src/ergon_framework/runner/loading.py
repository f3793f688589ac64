"""Load a task or a connector from ``MODULE:NAME``, and a policy from a file, with helpful errors.

Other objects that a command can name: a registry (the handlers of an executor process), a replicator (it copies facts
from one site, called a zone, to another) and a boundary (the interface to the facts of one zone).
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.errors import ConfigurationError
from ergon_framework.executors.registry import HandlerRegistry
from ergon_framework.facts.boundary import Boundary
from ergon_framework.facts.capacity import CapacityMonitor
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.runner.queues import queue
from ergon_framework.runner.settings import UnknownQueueError
from ergon_framework.runner.task_runner import Runnable
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.task.routing import AsyncRouteHandler, RouteHandler
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy

log = logging.getLogger(f"{LIBRARY}.runner")

P = TypeVar("P", ConsumerPolicy, ProducerPolicy)

#: Types that have a connector, or are one.
_CONNECTED_TYPES = (Connector, AsyncConnector, Task, AsyncTask)
_REPLICATION_TYPES = (Replicator, AsyncReplicator, CapacityMonitor)
_EXAMPLES = {
    "task": "app:charge",
    "connector": "app:orders",
    "registry": "app:registry",
    "replicator": "app:replicators",
}
_PARSERS: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}


def load_task(name: str) -> Runnable:
    """Return the consumer *name*, written ``module:task``."""
    return _require_consumer(_load_attribute(name, "task", is_match=is_consumer), name=name)


def load_tasks(names: Sequence[str]) -> list[Runnable]:
    """Return the tasks *names*: consumers or one producer ``module:task``, or a ``module`` with all its consumers.

    Raises ConfigurationError for tasks that cannot share a process.
    """
    named: dict[int, tuple[str, Runnable]] = {}
    for name in names:
        loaded = [(name, load_runnable(name))] if ":" in name else _load_module_tasks(name)
        # A task that is named twice, by itself and by its module, runs once.
        named |= {id(task): (source, task) for source, task in loaded if id(task) not in named}
    if len(named) > 1:
        for source, task in named.values():
            _require_consumer(task, name=source)
        _check_unique(list(named.values()))
    return [task for _, task in named.values()]


def _load_module_tasks(name: str) -> list[tuple[str, Runnable]]:
    """Return all consumers of the module *name*, except those that it has imported from elsewhere."""
    _check_module_name(name, "TASK")
    module = _import_module(name)
    found = {id(value): (f"{name}:{key}", value) for key, value in vars(module).items() if is_consumer(value)}
    tasks = [(source, task) for source, task in found.values() if not _is_imported(task, name)]
    if not tasks:
        raise ConfigurationError(
            f"{name!r} has no consumer of its own; add one with @consumer(connector), or name a task: {name}:task"
        )
    return tasks


def _is_imported(task: Any, module_name: str) -> bool:
    """Return whether *task* belongs to a module other than *module_name* and its submodules.

    A module may import the task of another one to send to it; that task does not run here.
    """
    home_name = task.__module__
    if f"{home_name}.".startswith(f"{module_name}."):
        return False
    home = sys.modules.get(home_name)
    return home is not None and any(value is task for value in vars(home).values())


def _check_unique(named: Sequence[tuple[str, Runnable]]) -> None:
    """Raise ConfigurationError if two tasks have one name, or one connector."""
    names: dict[str, str] = {}
    connectors: dict[int, str] = {}
    for source, task in named:
        if task.name in names:
            raise ConfigurationError(
                f"{names[task.name]!r} and {source!r} are both called {task.name!r}: settings, metrics and logs could "
                "not tell them apart; name one of them with @consumer(name=…), or run them in two processes"
            )
        if id(task.connector) in connectors:
            raise ConfigurationError(
                f"{connectors[id(task.connector)]!r} and {source!r} consume the same queue, {task.connector.name!r}: "
                "each message would reach one of them at random; give each task a queue of its own"
            )
        names[task.name] = connectors[id(task.connector)] = source


def load_runnable(name: str) -> Runnable:
    """Return the consumer or producer *name*, written ``module:task``."""
    loaded = _load_attribute(name, "task", is_match=lambda value: is_consumer(value) or is_producer(value))
    return loaded if is_producer(loaded) else _require_consumer(loaded, name=name)


def is_producer(value: object) -> bool:
    """Return whether *value* is a task that produces."""
    return isinstance(value, Task | AsyncTask) and isinstance(value, ProducerMixin | AsyncProducerMixin)


def is_consumer(value: object) -> bool:
    """Return whether *value* is a task that consumes."""
    return isinstance(value, Task | AsyncTask) and isinstance(value, ConsumerMixin | AsyncConsumerMixin)


def load_connector(name: str) -> Connector | AsyncConnector:
    """Return the connector *name*: ``module:name`` of a connector or of its task, or a queue of the settings."""
    if ":" not in name:
        try:
            return queue(name).connector
        except UnknownQueueError as error:
            raise UnknownQueueError(f"{error} -- or write MODULE:CONNECTOR, for example app:orders") from error
    loaded = _load_attribute(name, "connector", is_match=lambda value: isinstance(value, _CONNECTED_TYPES))
    connector = loaded.connector if isinstance(loaded, Task | AsyncTask) else loaded
    if isinstance(connector, Connector | AsyncConnector):
        return connector
    hint = "create an instance of it" if isinstance(loaded, type) else "name a connector, or a task that has one"
    raise ConfigurationError(f"{name!r} is not a connector but a {type(loaded).__name__}; {hint}")


def load_target(name: str) -> Connector | AsyncConnector | Task | AsyncTask | Boundary:
    """Return the task, connector, queue of the settings or boundary *name*."""
    if ":" not in name:
        return load_connector(name)
    loaded = _load_attribute(name, "connector", is_match=lambda value: isinstance(value, (*_CONNECTED_TYPES, Boundary)))
    if isinstance(loaded, (*_CONNECTED_TYPES, Boundary)):
        target: Connector | AsyncConnector | Task | AsyncTask | Boundary = loaded
        return target
    raise ConfigurationError(
        f"{name!r} is a {type(loaded).__name__}; expected a task, a connector or a Boundary of facts"
    )


def load_registry(name: str) -> HandlerRegistry:
    """Return the handlers *name*, written ``module:registry``."""
    loaded = _load_attribute(name, "registry", is_match=lambda value: isinstance(value, HandlerRegistry))
    if isinstance(loaded, HandlerRegistry):
        return loaded
    raise ConfigurationError(
        f"{name!r} is not a registry but a {type(loaded).__name__}; "
        "register handlers with registry = HandlerRegistry() and @registry.handler"
    )


def load_replicators(name: str) -> Sequence[Replicator | AsyncReplicator | CapacityMonitor]:
    """Return the replicators *name*, written ``module:name``: one, several, or a function that creates them."""
    loaded = _load_attribute(name, "replicator", is_match=lambda value: isinstance(value, _REPLICATION_TYPES))
    if callable(loaded) and not isinstance(loaded, type):
        loaded = loaded()
    parts = [loaded] if isinstance(loaded, _REPLICATION_TYPES) else loaded
    if not isinstance(parts, list | tuple) or not all(isinstance(part, _REPLICATION_TYPES) for part in parts):
        raise ConfigurationError(
            f"{name!r} is a {type(loaded).__name__}, not a Replicator or AsyncReplicator, a list of "
            "them, optionally with a CapacityMonitor, or a function without arguments that returns one of these"
        )
    if not any(isinstance(part, Replicator | AsyncReplicator) for part in parts):
        raise ConfigurationError(f"{name!r} has no replicator; create one with Replicator(source, destination, pair)")
    return parts


def _load_attribute(name: str, kind: str, *, is_match: Callable[[object], bool]) -> Any:
    """Return the object that *name* names; *kind* and *is_match* serve the suggestions in errors."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        example = _EXAMPLES[kind]
        raise ConfigurationError(f"{name!r} names no {kind}; write MODULE:{kind.upper()}, for example {example}")
    _check_module_name(module_name, attribute)
    module = _import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        suggestion = _describe_nearest(module, attribute, kind=kind, is_match=is_match)
        shadow = _find_shadow(module_name)
        if shadow is None:
            raise ConfigurationError(f"{module_name!r} has no {attribute!r}; {suggestion}") from None
        raise ConfigurationError(
            f"{module_name!r} has no {attribute!r} in {shadow.loaded}; installed modules come before {shadow.ignored}; "
            "rename it"
        ) from None


def _check_module_name(name: str, attribute: str) -> None:
    if name.endswith(".py"):
        dotted = name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigurationError(f"{name!r} is a file; name the module: {dotted}:{attribute}")


def load_policy(path: Path, kind: type[P]) -> P:
    """Load the policy of *kind* from a TOML or JSON file; the error for an unknown key suggests the nearest one."""
    parse = _PARSERS.get(path.suffix)
    if parse is None:
        raise ConfigurationError(f"{path} is not a policy file; its name must end in {' or '.join(_PARSERS)}")
    try:
        settings = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"the policy file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"the policy file {path} cannot be parsed: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"the policy file {path} must hold a table, not a {type(settings).__name__}")
    try:
        return kind.load(settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class _ShadowedModule:
    """A module of the current folder that was not loaded, because an installed one has the same name."""

    loaded: str
    ignored: str


def _find_shadow(name: str) -> _ShadowedModule | None:
    top = name.partition(".")[0]
    local_spec = PathFinder.find_spec(top, [str(Path.cwd())])
    loaded = getattr(sys.modules.get(top), "__spec__", None)
    if local_spec is None or local_spec.origin is None or loaded is None or loaded.origin is None:
        return None
    if Path(loaded.origin).resolve() == Path(local_spec.origin).resolve():
        return None
    return _ShadowedModule(loaded.origin, local_spec.origin)


def _import_module(name: str) -> ModuleType:
    """Import a module of the user; the current folder is searched only here, after everything installed."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and f"{name}.".startswith(f"{missing}."):
            shadow = _find_shadow(name)
            hint = (
                "run ergon in the folder that holds it"
                if shadow is None
                else f"{shadow.loaded} was loaded, and installed modules come before {shadow.ignored}; rename it"
            )
            raise ConfigurationError(f"there is no module {missing!r} here or installed; {hint}") from error
        raise _import_failed_error(name, error) from error
    except Exception as error:
        raise _import_failed_error(name, error) from error
    shadow = _find_shadow(name)
    if shadow is not None:
        fields = {Field.LOADED: shadow.loaded, Field.IGNORED: shadow.ignored}
        logs.log_event(logging.WARNING, Event.MODULE_SHADOWED, fields, to=log)
    return module


def _import_failed_error(name: str, error: Exception) -> ConfigurationError:
    """Return the error for a module whose import fails, with the location of the failure."""
    last_frame = traceback.extract_tb(error.__traceback__)[-1]
    # A failure inside importlib, for example for a missing module, has no location in the user's code.
    location = f" ({last_frame.filename}, line {last_frame.lineno})" if "importlib" not in last_frame.filename else ""
    return ConfigurationError(f"{name!r} cannot be imported: {type(error).__name__}: {error}{location}")


def _describe_nearest(module: ModuleType, attribute: str, *, kind: str, is_match: Callable[[object], bool]) -> str:
    candidates = [name for name, value in vars(module).items() if is_match(value)]
    near = get_close_matches(attribute, candidates, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if kind == "task":
        return (
            f"its tasks are: {', '.join(candidates)}"
            if candidates
            else "it has no task; add one with @consumer(connector)"
        )
    if kind == "registry":
        return f"its registries are: {', '.join(candidates)}" if candidates else "it has no HandlerRegistry()"
    if kind == "replicator":
        return f"its replicators are: {', '.join(candidates)}" if candidates else "it has no Replicator"
    return (
        f"its connectors and tasks are: {', '.join(candidates)}"
        if candidates
        else "it has neither a connector nor a task"
    )


def _require_consumer(loaded: Any, *, name: str) -> Runnable:
    if is_consumer(loaded):
        task: Runnable = loaded
        return task
    if isinstance(loaded, type):
        hint = f"a class; create an instance of it: {loaded.__name__.lower()} = {loaded.__name__}(connector)"
    elif isinstance(loaded, Task | AsyncTask):
        hint = "a task that only produces; name a consumer"
    elif isinstance(loaded, RouteHandler | AsyncRouteHandler):
        hint = f"a handler of the router {loaded.router.name!r}; name the router"
    elif callable(loaded):
        hint = "a plain function; decorate it with @consumer(connector)"
    else:
        hint = (
            f"of type {type(loaded).__name__}; a task is made with @consumer(connector) or a class with ConsumerMixin"
        )
    raise ConfigurationError(f"{name!r} is {hint}")
