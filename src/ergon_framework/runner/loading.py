"""Loading: from ``MODULE:NAME`` to a task or a connector, from a file to a policy, with errors that help."""

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
from ergon_framework.executor.registry import Registry
from ergon_framework.facts.boundary import Boundary
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.room import Room
from ergon_framework.runner.process import Runnable
from ergon_framework.runner.queues import queue
from ergon_framework.runner.settings import UnknownQueue
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log = logging.getLogger(f"{LIBRARY}.runner")

P = TypeVar("P", ConsumerPolicy, ProducerPolicy)

#: What has a connector, or is one.
_CONNECTED = (Connector, AsyncConnector, Task, AsyncTask)
_REPLICATING = (Replicator, AsyncReplicator, Room)
_EXAMPLES = {
    "task": "app:charge",
    "connector": "app:orders",
    "registry": "app:registry",
    "replicator": "app:replicators",
}
_READERS: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}


def load_task(name: str) -> Runnable:
    """The consumer that *name*, written ``module:task``, stands for."""
    return _checked(_found(name, "task", wanted=is_consumer), name=name)


def load_runnable(name: str) -> Runnable:
    """Return the consumer or producer *name*, written ``module:task``."""
    found = _found(name, "task", wanted=lambda value: is_consumer(value) or is_producer(value))
    return found if is_producer(found) else _checked(found, name=name)


def is_producer(value: object) -> bool:
    """Whether *value* is a task that produces."""
    return isinstance(value, Task | AsyncTask) and isinstance(value, ProducerMixin | AsyncProducerMixin)


def is_consumer(value: object) -> bool:
    """Whether *value* is a task that consumes."""
    return isinstance(value, Task | AsyncTask) and isinstance(value, ConsumerMixin | AsyncConsumerMixin)


def load_connector(name: str) -> Connector | AsyncConnector:
    """The connector that *name* stands for: ``module:name``, itself or that of a task, or a queue of the settings."""
    if ":" not in name:
        try:
            return queue(name).connector
        except UnknownQueue as error:
            raise UnknownQueue(f"{error} -- or write MODULE:CONNECTOR, for example app:orders") from error
    found = _found(name, "connector", wanted=lambda value: isinstance(value, _CONNECTED))
    connector = found.connector if isinstance(found, Task | AsyncTask) else found
    if isinstance(connector, Connector | AsyncConnector):
        return connector
    hint = "make an instance of it" if isinstance(found, type) else "name a connector, or a task that has one"
    raise ConfigurationError(f"{name!r} is no connector but a {type(found).__name__}; {hint}")


def load_anything(name: str) -> Connector | AsyncConnector | Task | AsyncTask | Boundary:
    """What can be looked at under the name *name*: a task, a connector, a queue of the settings, a boundary."""
    if ":" not in name:
        return load_connector(name)
    found = _found(name, "connector", wanted=lambda value: isinstance(value, (*_CONNECTED, Boundary)))
    if isinstance(found, (*_CONNECTED, Boundary)):
        thing: Connector | AsyncConnector | Task | AsyncTask | Boundary = found
        return thing
    raise ConfigurationError(
        f"{name!r} is a {type(found).__name__}; what can be looked at is a task, a connector or a Boundary of facts"
    )


def load_registry(name: str) -> Registry:
    """The handlers that *name*, written ``module:registry``, stands for."""
    found = _found(name, "registry", wanted=lambda value: isinstance(value, Registry))
    if isinstance(found, Registry):
        return found
    raise ConfigurationError(
        f"{name!r} is no registry but a {type(found).__name__}; handlers are registered with registry = Registry() "
        "and @registry.handler"
    )


def load_replicators(name: str) -> Sequence[Replicator | AsyncReplicator | Room]:
    """The replicators that *name*, written ``module:name``, stands for: one, several, or a function that makes them."""
    found = _found(name, "replicator", wanted=lambda value: isinstance(value, _REPLICATING))
    if callable(found) and not isinstance(found, type):
        found = found()
    parts = [found] if isinstance(found, _REPLICATING) else found
    if not isinstance(parts, list | tuple) or not all(isinstance(part, _REPLICATING) for part in parts):
        raise ConfigurationError(
            f"{name!r} is no replicator but a {type(found).__name__}; it is a Replicator or AsyncReplicator, a list of "
            "them, perhaps with a Room, or a function without arguments that makes one of these"
        )
    if not any(isinstance(part, Replicator | AsyncReplicator) for part in parts):
        raise ConfigurationError(f"{name!r} holds no replicator; make one with Replicator(source, destination, pair)")
    return parts


def _found(name: str, kind: str, *, wanted: Callable[[object], bool]) -> Any:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        example = _EXAMPLES[kind]
        raise ConfigurationError(f"{name!r} names no {kind}; write MODULE:{kind.upper()}, for example {example}")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigurationError(f"{module_name!r} is a file; name the module: {dotted}:{attribute}")
    module = _module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = _nearest(module, attribute, kind=kind, wanted=wanted)
        shadow = _find_shadow(module_name)
        if shadow is None:
            raise ConfigurationError(f"{module_name!r} has no {attribute!r}; {near}") from None
        raise ConfigurationError(
            f"{module_name!r} has no {attribute!r} in {shadow.loaded}; installed modules come before {shadow.ignored}; "
            "rename it"
        ) from None


def load_policy(path: Path, kind: type[P]) -> P:
    """The policy of *kind* in a TOML or JSON file; an unknown key is an error that names the nearest known one."""
    read = _READERS.get(path.suffix)
    if read is None:
        raise ConfigurationError(f"{path} is no policy file; its name must end in {' or '.join(_READERS)}")
    try:
        settings = read(path.read_text(encoding="utf-8"))
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
class _Shadow:
    """A module of the current folder that was not loaded, because an installed one has its name."""

    loaded: str
    ignored: str


def _find_shadow(name: str) -> _Shadow | None:
    top = name.partition(".")[0]
    here = PathFinder.find_spec(top, [str(Path.cwd())])
    loaded = getattr(sys.modules.get(top), "__spec__", None)
    if here is None or here.origin is None or loaded is None or loaded.origin is None:
        return None
    if Path(loaded.origin).resolve() == Path(here.origin).resolve():
        return None
    return _Shadow(loaded.origin, here.origin)


def _module(name: str) -> ModuleType:
    """Import a module of the user: only here the current folder is searched, and after all that is installed."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
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
        raise _broken(name, error) from error
    except Exception as error:
        raise _broken(name, error) from error
    shadow = _find_shadow(name)
    if shadow is not None:
        fields = {Field.LOADED: shadow.loaded, Field.IGNORED: shadow.ignored}
        logs.say(logging.WARNING, Event.MODULE_SHADOWED, fields, to=log)
    return module


def _broken(name: str, error: Exception) -> ConfigurationError:
    """The module is there and fails by itself: say where, because that is what has to be mended."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f" ({last.filename}, line {last.lineno})" if "importlib" not in last.filename else ""
    return ConfigurationError(f"{name!r} cannot be imported: {type(error).__name__}: {error}{where}")


def _nearest(module: ModuleType, attribute: str, *, kind: str, wanted: Callable[[object], bool]) -> str:
    there = [name for name, value in vars(module).items() if wanted(value)]
    near = get_close_matches(attribute, there, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if kind == "task":
        return f"its tasks are: {', '.join(there)}" if there else "it holds no task; make one with @consumer(connector)"
    if kind == "registry":
        return f"its registries are: {', '.join(there)}" if there else "it holds no Registry()"
    if kind == "replicator":
        return f"its replicators are: {', '.join(there)}" if there else "it holds no Replicator"
    return f"its connectors and tasks are: {', '.join(there)}" if there else "it holds neither a connector nor a task"


def _checked(found: Any, *, name: str) -> Runnable:
    if is_consumer(found):
        task: Runnable = found
        return task
    if isinstance(found, type):
        hint = f"a class; make an instance of it: {found.__name__.lower()} = {found.__name__}(connector)"
    elif isinstance(found, Task | AsyncTask):
        hint = "a task that only produces; name a consumer"
    elif callable(found):
        hint = "a plain function; decorate it with @consumer(connector)"
    else:
        hint = f"of type {type(found).__name__}; a task is made with @consumer(connector) or a class with ConsumerMixin"
    raise ConfigurationError(f"{name!r} is {hint}")
