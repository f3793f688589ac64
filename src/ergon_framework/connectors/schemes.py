"""Schemes: which connector the address of a broker stands for, ours and those that others have installed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from threading import Lock
from typing import Any, Final, Protocol

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConfigurationError, MissingExtraError, text
from ergon_framework.redaction import hide_known

#: Where a package of somebody else's registers its schemes: the name is the scheme, the object a Maker.
GROUP: Final = "ergon.connectors"


class Maker(Protocol):
    """Makes the connector of one queue: a class or a function; *options* are what the settings say besides."""

    def __call__(self, name: str, /, *, url: str, **options: Any) -> Connector | AsyncConnector: ...


@dataclass(frozen=True, slots=True)
class _Own:
    """A connector of ours, imported when it is asked for: its client may not be installed."""

    module: str
    attribute: str
    extra: str
    #: What it calls its address.
    address: str = "url"


_POSTGRES: Final = _Own("ergon_framework.connectors.postgres", "PostgresQueue", "postgres", "dsn")
_RABBITMQ: Final = _Own("ergon_framework.connectors.rabbitmq", "RabbitMQQueue", "rabbitmq")
_NATS: Final = _Own("ergon_framework.connectors.nats", "NatsQueue", "nats")
_REDIS: Final = _Own("ergon_framework.connectors.redis", "RedisQueue", "redis")
_OWN: Final[Mapping[str, _Own]] = {
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "amqp": _RABBITMQ,
    "amqps": _RABBITMQ,
    "nats": _NATS,
    "tls": _NATS,
    "redis": _REDIS,
    "rediss": _REDIS,
}
_MEMORY: Final = "memory"

_in_memory: dict[tuple[str, str], tuple[MemoryConnector, dict[str, Any]]] = {}
_making = Lock()


def scheme_of(url: str) -> str:
    """What stands before the colon, in small letters; empty where there is none."""
    scheme, colon, _ = url.partition("://")
    return scheme.strip().lower() if colon else ""


def connect(name: str, url: str, options: Mapping[str, Any]) -> Connector | AsyncConnector:
    """The connector of the queue *name* at *url*; nothing is opened yet.

    Errors name the scheme and never the address: it may hold a password.
    """
    scheme = scheme_of(url)
    if scheme == _MEMORY:
        return _remembered(name, url, options)
    if scheme in _OWN:
        own = _OWN[scheme]
        return _made(_imported(own, name=name), name, {own.address: url}, options)
    foreign = _registered().get(scheme)
    if foreign is None:
        raise _unknown(name, scheme)
    return _made(_loaded(foreign, name=name), name, {"url": url}, options)


def _registered() -> dict[str, EntryPoint]:
    return {found.name.lower(): found for found in entry_points(group=GROUP)}


def _imported(own: _Own, *, name: str) -> Any:
    try:
        return getattr(import_module(own.module), own.attribute)
    except MissingExtraError as error:
        raise MissingExtraError(f"the queue {name!r} needs the extra {own.extra!r}: {error}") from error


def _loaded(found: EntryPoint, *, name: str) -> Any:
    try:
        return found.load()
    except Exception as error:
        raise ConfigurationError(
            f"the connector {found.value!r} of the queue {name!r} cannot be imported: {type(error).__name__}: "
            f"{text(error)}; it was registered for {found.name}:// under {GROUP!r}"
        ) from error


def _unknown(name: str, scheme: str) -> ConfigurationError:
    known = sorted({*_OWN, _MEMORY, *_registered()})
    near = get_close_matches(scheme, known, n=1)
    hint = f"did you mean {near[0]}://? " if near else ""
    said = f"begins with {scheme}://, which no connector is known for" if scheme else "is none: it has no scheme"
    return ConfigurationError(
        f"the address of the queue {name!r} {said}; {hint}Known are {', '.join(f'{one}://' for one in known)}; "
        f"others are registered by packages under {GROUP!r}"
    )


def _made(maker: Any, name: str, address: Mapping[str, str], options: Mapping[str, Any]) -> Connector | AsyncConnector:
    _check(maker, name, taken={*address}, options=options)
    try:
        made = maker(name, **address, **options)
    except (TypeError, ValueError) as error:
        (url,) = address.values()
        raise ConfigurationError(f"the queue {name!r} cannot be made: {hide_known(text(error), url)}") from error
    if isinstance(made, Connector | AsyncConnector):
        return made
    raise ConfigurationError(
        f"what is registered for the queue {name!r} made a {type(made).__name__}, which is no connector; it is called "
        "with the name and url=…, and returns a Connector or an AsyncConnector"
    )


def _check(maker: Any, name: str, *, taken: set[str], options: Mapping[str, Any]) -> None:
    """Refuse an option that the connector does not have: it was written for another broker, or it is a slip."""
    parameters = inspect.signature(maker).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in taken]
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise ConfigurationError(
                f"the connector of the queue {name!r}, {getattr(maker, '__name__', maker)}, has no option {option!r}; "
                f"{hint}"
            )


def _remembered(name: str, url: str, options: Mapping[str, Any]) -> MemoryConnector:
    """One queue for everybody in this process who names the same: whoever sends is seldom who consumes."""
    with _making:
        known = _in_memory.get((url, name))
        if known is None:
            _check(MemoryConnector, name, taken=set(), options=options)
            try:
                known = MemoryConnector(name, **options), dict(options)
            except (TypeError, ValueError) as error:
                raise ConfigurationError(f"the queue {name!r} cannot be made: {text(error)}") from error
            _in_memory[url, name] = known
        made, given = known
        if given != dict(options):
            raise ConfigurationError(
                f"the queue {name!r} in memory is there already, with the options {sorted(given)}; give the same to all"
            )
        return made
