"""ForeignCodec: reads what somebody else's producer wrote, and finds an id in it that stays the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ergon_framework.connectors.base import UndecodableError
from ergon_framework.connectors.codec import MAX_BYTES, WIRE, Form, JsonCodec, read_headers
from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction

#: Finds a value in the payload or the headers of a message; None where there is none.
Rule: TypeAlias = Callable[[Any, Mapping[str, Any]], Any]

_ID: Final = "ergon-id"
#: Python takes long to write larger numbers, and then refuses to.
_LARGE: Final = 10**100
_ESCAPED = re.compile(r"~([01])")
_BAD_ESCAPE = re.compile(r"~(?![01])").search
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}").fullmatch


def header(name: str) -> Rule:
    """The header called *name*, exactly so."""
    if not _is_text(name) or not name:
        raise ConfigurationError(f"header() takes the name of a header, not {name!r}")
    return _Header(name)


def pointer(path: str) -> Rule:
    """The value at *path* in the payload; *path* is a JSON pointer (RFC 6901), such as ``/order/id``."""
    if not _is_text(path) or (path and not path.startswith("/")) or _BAD_ESCAPE(path):
        raise ConfigurationError(
            f"{path!r} is no JSON pointer; one looks like /order/id, with ~1 for a slash in a name and ~0 for a tilde"
        )
    return _Pointer(path)


def _is_text(given: object) -> bool:
    return isinstance(given, str)


class _Header:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, payload: Any, headers: Mapping[str, Any]) -> Any:  # noqa: ARG002 - as every rule
        return headers.get(self._name)

    def __repr__(self) -> str:
        return f"header({self._name!r})"


class _Pointer:
    def __init__(self, path: str) -> None:
        self._path = path
        self._steps = [_ESCAPED.sub(lambda found: "~/"[int(found[1])], step) for step in path.split("/")[1:]]

    def __call__(self, payload: Any, headers: Mapping[str, Any]) -> Any:  # noqa: ARG002 - as every rule
        for step in self._steps:
            if isinstance(payload, dict):
                payload = payload.get(step)
            elif isinstance(payload, list) and _INDEX(step) and int(step) < len(payload):
                payload = payload[int(step)]
            else:
                return None
        return payload

    def __repr__(self) -> str:
        return f"pointer({self._path!r})"


class ForeignCodec(JsonCodec):
    """Plain JSON of a producer that knows nothing of us; the rules say where its envelope is.

    A rule is ``header("x-order")``, ``pointer("/order/id")`` or a function of payload and headers.
    *id* must find the same id whenever the same message comes, and another one for every other
    message: it is what tells a redelivery from new work, so there is none without it. A message
    without an id cannot be decoded. The other rules may find nothing; a plain text as *type* is
    every message's. What carries an ``ergon-id`` is read as ours, and ours is what is written.
    """

    def __init__(
        self,
        *,
        id: Rule | None = None,  # noqa: A002 - the envelope's own word
        key: Rule | None = None,
        type: Rule | str | None = None,  # noqa: A002 - the envelope's own word
        tenant: Rule | None = None,
        correlation: Rule | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(max_bytes=max_bytes)
        if id is None:
            raise ConfigurationError(
                "foreign messages need a rule for their id, or a redelivery could not be told from new work: "
                'id=header("x-order"), id=pointer("/order/id") or a function of payload and headers'
            )
        self._id = _checked("id", id)
        if isinstance(type, str) and not _fits("type", type):
            raise ConfigurationError(f"the type of foreign messages must be {_form('type')}, not {type!r:.60}")
        self._type = type if isinstance(type, str) else None
        rules = {"key": key, "type": None if isinstance(type, str) else type}
        rules |= {"tenant": tenant, "correlation": correlation}
        self._rules = {name: _checked(name, rule) for name, rule in rules.items() if rule is not None}

    def decode(self, body: bytes, headers: Mapping[str, str], *, source: str = "") -> Transaction:
        if _ID in headers:
            return super().decode(body, headers, source=source)
        payload = self._payload(body)
        found = _found("id", self._id, payload, headers=headers)
        if found is None:
            raise UndecodableError(f"the rule {_named(self._id)} finds no id in a foreign message of {len(body)} bytes")
        # What else of an envelope the message carries, its trace for instance, is taken as it is.
        fields = {"source": source} | read_headers({**headers, _ID: found})
        if self._type:
            fields["type"] = self._type
        for name, rule in self._rules.items():
            value = _found(name, rule, payload, headers=headers)
            if value is not None:
                fields[name] = value
        return Transaction(payload=payload, **fields)


def _checked(name: str, rule: Any) -> Rule:
    if not callable(rule) or inspect.isclass(rule) or inspect.iscoroutinefunction(rule):
        raise ConfigurationError(
            f'{name} must be header("…"), pointer("…") or a plain function of payload and headers, '
            f"not {_named(rule) if callable(rule) else repr(rule)}"
        )
    found: Rule = rule
    return found


def _named(rule: Any) -> str:
    return getattr(rule, "__qualname__", None) or repr(rule)


def _found(name: str, rule: Rule, payload: Any, *, headers: Mapping[str, Any]) -> str | None:
    """What *rule* finds, as the text that the wire carries; None for nothing."""
    problem = ""
    try:
        value = rule(payload, headers)
    except Exception as error:  # noqa: BLE001 - the boundary to a function that is not ours
        problem = f"fails with {type(error).__name__}"
    # Raised outside the handler and without the value: either might quote the message.
    if problem:
        raise UndecodableError(f"the rule {_named(rule)} for the {name} of a foreign message {problem}")
    if value is None or value == "":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGE:
        value = str(value)
    if not isinstance(value, str) or not _fits(name, value):
        kind = f"a text of {len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
        raise UndecodableError(
            f"the rule {_named(rule)} for the {name} of a foreign message finds {kind}; it must be a whole number or "
            f"{_form(name)}"
        )
    return value


def _fits(name: str, text: str) -> bool:
    try:
        read_headers({_ID: "-", f"ergon-{name}": text})
    except UndecodableError:
        return False
    return True


def _form(name: str) -> str:
    row = next(row for row in WIRE if row.field == name)
    visible = (
        " visible ASCII characters"
        if row.form is Form.ID
        else " characters, without control characters or outer blanks"
    )
    return f"a text of 1 to {row.longest}{visible}"
