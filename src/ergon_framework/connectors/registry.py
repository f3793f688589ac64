"""Registry of URL schemes: the connector of a broker's address, built-in or from an installed package.

The scheme of an address, such as ``amqp`` in ``amqp://localhost``, selects the connector.
"""

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
from ergon_framework.errors import ConfigurationError, MissingExtraError, error_message
from ergon_framework.redaction import hide_known_password

#: The entry point group of third-party connectors: the name is the scheme, the object a ConnectorFactory.
ENTRY_POINT_GROUP: Final = "ergon.connectors"


class ConnectorFactory(Protocol):
    """A class or function that creates the connector of one queue; *options* come from the settings."""

    def __call__(self, name: str, /, *, url: str, **options: Any) -> Connector | AsyncConnector: ...


@dataclass(frozen=True, slots=True)
class _BuiltinConnector:
    """A built-in connector, imported on first use: its client may not be installed."""

    module: str
    attribute: str
    extra: str
    #: The name of its address parameter.
    address_parameter: str = "url"


_POSTGRES: Final = _BuiltinConnector("ergon_framework.connectors.postgres", "PostgresQueue", "postgres", "dsn")
_RABBITMQ: Final = _BuiltinConnector("ergon_framework.connectors.rabbitmq", "RabbitMQQueue", "rabbitmq")
_NATS: Final = _BuiltinConnector("ergon_framework.connectors.nats", "NatsQueue", "nats")
_REDIS: Final = _BuiltinConnector("ergon_framework.connectors.redis", "RedisQueue", "redis")
_BUILTIN: Final[Mapping[str, _BuiltinConnector]] = {
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "amqp": _RABBITMQ,
    "amqps": _RABBITMQ,
    "nats": _NATS,
    "tls": _NATS,
    "redis": _REDIS,
    "rediss": _REDIS,
    "redis+sentinel": _REDIS,
    "rediss+sentinel": _REDIS,
}
_MEMORY: Final = "memory"

_memory_queues: dict[tuple[str, str], tuple[MemoryConnector, dict[str, Any]]] = {}
_create_lock = Lock()


def url_scheme(url: str) -> str:
    """Return the scheme of *url* in lower case; empty if there is none."""
    scheme, colon, _ = url.partition("://")
    return scheme.strip().lower() if colon else ""


def create_connector(name: str, url: str, options: Mapping[str, Any]) -> Connector | AsyncConnector:
    """Return the connector of the queue *name* at *url*, not yet opened.

    Errors name the scheme and never the address, which may contain a password.
    """
    scheme = url_scheme(url)
    if scheme == _MEMORY:
        return _get_memory_queue(name, url, options)
    if scheme in _BUILTIN:
        builtin = _BUILTIN[scheme]
        return _create(_import_builtin(builtin, name=name), name, {builtin.address_parameter: url}, options)
    entry_point = _list_entry_points().get(scheme)
    if entry_point is None:
        raise _unknown_scheme_error(name, scheme)
    return _create(_load_entry_point(entry_point, name=name), name, {"url": url}, options)


def _list_entry_points() -> dict[str, EntryPoint]:
    return {entry_point.name.lower(): entry_point for entry_point in entry_points(group=ENTRY_POINT_GROUP)}


def _import_builtin(builtin: _BuiltinConnector, *, name: str) -> Any:
    try:
        return getattr(import_module(builtin.module), builtin.attribute)
    except MissingExtraError as error:
        raise MissingExtraError(f"the queue {name!r} needs the extra {builtin.extra!r}: {error}") from error


def _load_entry_point(entry_point: EntryPoint, *, name: str) -> Any:
    try:
        return entry_point.load()
    except Exception as error:
        raise ConfigurationError(
            f"the connector {entry_point.value!r} of the queue {name!r} cannot be imported: {type(error).__name__}: "
            f"{error_message(error)}; it was registered for {entry_point.name}:// under {ENTRY_POINT_GROUP!r}"
        ) from error


def _unknown_scheme_error(name: str, scheme: str) -> ConfigurationError:
    schemes = sorted({*_BUILTIN, _MEMORY, *_list_entry_points()})
    matches = get_close_matches(scheme, schemes, n=1)
    hint = f"did you mean {matches[0]}://? " if matches else ""
    problem = f"begins with {scheme}://, which no connector is known for" if scheme else "has no scheme"
    return ConfigurationError(
        f"the address of the queue {name!r} {problem}; {hint}Known are {', '.join(f'{one}://' for one in schemes)}; "
        f"others are registered by packages under {ENTRY_POINT_GROUP!r}"
    )


def _create(
    factory: Any, name: str, address: Mapping[str, str], options: Mapping[str, Any]
) -> Connector | AsyncConnector:
    """Create the connector with *factory*; an error names the queue, without the password of its address."""
    _check_options(factory, name, reserved={*address}, options=options)
    try:
        connector = factory(name, **address, **options)
    except (TypeError, ValueError) as error:
        (url,) = address.values()
        raise ConfigurationError(
            f"queue {name!r} cannot be created: {hide_known_password(error_message(error), url)}"
        ) from error
    if isinstance(connector, Connector | AsyncConnector):
        return connector
    raise ConfigurationError(
        f"the factory of queue {name!r} returned a {type(connector).__name__}, which is not a connector; it is called "
        "with the name and url=…, and must return a Connector or an AsyncConnector"
    )


def _check_options(factory: Any, name: str, *, reserved: set[str], options: Mapping[str, Any]) -> None:
    """Reject an option that the connector does not have: it belongs to another broker, or is misspelled."""
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    allowed = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in reserved]
    for option in options:
        if option not in allowed:
            matches = get_close_matches(option, allowed, n=1)
            hint = f"did you mean {matches[0]!r}?" if matches else f"it has {', '.join(allowed) or 'none'}"
            raise ConfigurationError(
                f"the connector of the queue {name!r}, {getattr(factory, '__name__', factory)}, has no option "
                f"{option!r}; {hint}"
            )


def _get_memory_queue(name: str, url: str, options: Mapping[str, Any]) -> MemoryConnector:
    """Return the shared in-memory queue of this name: producer and consumer are usually created separately."""
    with _create_lock:
        entry = _memory_queues.get((url, name))
        if entry is None:
            _check_options(MemoryConnector, name, reserved=set(), options=options)
            try:
                entry = MemoryConnector(name, **options), dict(options)
            except (TypeError, ValueError) as error:
                raise ConfigurationError(f"queue {name!r} cannot be created: {error_message(error)}") from error
            _memory_queues[url, name] = entry
        connector, existing_options = entry
        if existing_options != dict(options):
            raise ConfigurationError(
                f"in-memory queue {name!r} already exists with the options {sorted(existing_options)}; pass the same "
                "to all users"
            )
        return connector
