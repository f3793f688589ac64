"""ForeignCodec: decodes messages of third-party producers, and derives a stable id from their content.

The framework's own messages have their id in a header. Here a rule, such as a JSON pointer or a header name, names
where each field of a message is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ergon_framework.connectors.base import UndecodableError
from ergon_framework.connectors.codec import MAX_BYTES, WIRE, HeaderFormat, JsonCodec, read_headers
from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction

#: Extracts a value from the payload or the headers of a message; None if there is none.
FieldExtractor: TypeAlias = Callable[[Any, Mapping[str, Any]], Any]

_ID: Final = "ergon-id"
#: Python converts larger integers to text slowly, and above its own limit not at all.
_MAX_INTEGER: Final = 10**100
_ESCAPED = re.compile(r"~([01])")
_BAD_ESCAPE = re.compile(r"~(?![01])").search
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}").fullmatch


def from_header(name: str) -> FieldExtractor:
    """Return a rule that extracts the header called *name*; the case must match."""
    if not _is_text(name) or not name:
        raise ConfigurationError(f"from_header() takes the name of a header, not {name!r}")
    return _HeaderExtractor(name)


def from_json_pointer(path: str) -> FieldExtractor:
    """Return a rule that extracts the value at *path* in the payload.

    *path* is a JSON pointer (RFC 6901), such as ``/order/id``.
    """
    if not _is_text(path) or (path and not path.startswith("/")) or _BAD_ESCAPE(path):
        raise ConfigurationError(
            f"invalid JSON pointer {path!r}: expected something like /order/id, with ~1 for / and ~0 for ~ in a name"
        )
    return _PointerExtractor(path)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


class _HeaderExtractor:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, payload: Any, headers: Mapping[str, Any]) -> Any:  # noqa: ARG002 - the signature of all rules
        return headers.get(self._name)

    def __repr__(self) -> str:
        return f"from_header({self._name!r})"


class _PointerExtractor:
    def __init__(self, path: str) -> None:
        self._path = path
        self._steps = [_ESCAPED.sub(lambda match: "~/"[int(match[1])], step) for step in path.split("/")[1:]]

    def __call__(self, payload: Any, headers: Mapping[str, Any]) -> Any:  # noqa: ARG002 - the signature of all rules
        for step in self._steps:
            if isinstance(payload, dict):
                payload = payload.get(step)
            elif isinstance(payload, list) and _INDEX(step) and int(step) < len(payload):
                payload = payload[int(step)]
            else:
                return None
        return payload

    def __repr__(self) -> str:
        return f"from_json_pointer({self._path!r})"


class ForeignCodec(JsonCodec):
    """Plain JSON of a third-party producer; the rules say where its envelope is.

    A rule is ``from_header("x-order")``, ``from_json_pointer("/order/id")`` or a function of payload and headers.
    *id* must return the same id for every delivery of a message, and a different one for every other message: it
    distinguishes a redelivery from new work, so it is required. A message without an id cannot be decoded. The other
    rules may find nothing; a plain text as *type* applies to every message. A message with an ``ergon-id`` is decoded
    as JsonCodec does, and messages are always encoded as JsonCodec does.
    """

    def __init__(
        self,
        *,
        id: FieldExtractor | None = None,  # noqa: A002 - the name of the envelope's field
        key: FieldExtractor | None = None,
        type: FieldExtractor | str | None = None,  # noqa: A002 - the name of the envelope's field
        tenant: FieldExtractor | None = None,
        correlation: FieldExtractor | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(max_bytes=max_bytes)
        if id is None:
            raise ConfigurationError(
                "third-party messages need a rule for their id, which tells a redelivery from new work: "
                'id=from_header("x-order"), id=from_json_pointer("/order/id") or a function of payload and headers'
            )
        self._id = _check_rule("id", id)
        if isinstance(type, str) and not _is_valid_text("type", type):
            raise ConfigurationError(
                f"the type of third-party messages must be {_describe_format('type')}, not {type!r:.60}"
            )
        self._type = type if isinstance(type, str) else None
        rules = {"key": key, "type": None if isinstance(type, str) else type}
        rules |= {"tenant": tenant, "correlation": correlation}
        self._rules = {name: _check_rule(name, rule) for name, rule in rules.items() if rule is not None}

    def decode(self, body: bytes, headers: Mapping[str, str], *, source: str = "") -> Transaction:
        if _ID in headers:
            return super().decode(body, headers, source=source)
        payload = self._decode_body(body)
        transaction_id = _extract_text("id", self._id, payload, headers=headers)
        if transaction_id is None:
            raise UndecodableError(f"the rule {_describe_rule(self._id)} finds no id in a message of {len(body)} bytes")
        # Other envelope headers of the message, its trace for example, are accepted as they are.
        fields = {"source": source} | read_headers({**headers, _ID: transaction_id})
        if self._type:
            fields["type"] = self._type
        for name, rule in self._rules.items():
            value = _extract_text(name, rule, payload, headers=headers)
            if value is not None:
                fields[name] = value
        return Transaction(payload=payload, **fields)


def _check_rule(name: str, rule: Any) -> FieldExtractor:
    if not callable(rule) or inspect.isclass(rule) or inspect.iscoroutinefunction(rule):
        raise ConfigurationError(
            f'{name} must be from_header("…"), from_json_pointer("…") or a plain function of payload and headers, '
            f"not {_describe_rule(rule) if callable(rule) else repr(rule)}"
        )
    extractor: FieldExtractor = rule
    return extractor


def _describe_rule(rule: Any) -> str:
    return getattr(rule, "__qualname__", None) or repr(rule)


def _extract_text(name: str, rule: FieldExtractor, payload: Any, *, headers: Mapping[str, Any]) -> str | None:
    """Return the value of *rule* as the text that the wire carries; None if it finds nothing."""
    problem = ""
    try:
        value = rule(payload, headers)
    except Exception as error:  # noqa: BLE001 - the boundary to a user's function
        problem = f"fails with {type(error).__name__}"
    # Raised outside the handler and without the value: either might quote the message.
    if problem:
        raise UndecodableError(f"the rule {_describe_rule(rule)} for the {name} of a message {problem}")
    if value is None or value == "":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INTEGER:
        value = str(value)
    if not isinstance(value, str) or not _is_valid_text(name, value):
        kind = f"a text of {len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
        raise UndecodableError(
            f"the rule {_describe_rule(rule)} for the {name} of a message finds {kind}; it must be a whole number or "
            f"{_describe_format(name)}"
        )
    return value


def _is_valid_text(name: str, text: str) -> bool:
    """Return whether the header of the field *name* could carry *text*; every message needs an id, here a dash."""
    try:
        read_headers({_ID: "-", f"ergon-{name}": text})
    except UndecodableError:
        return False
    return True


def _describe_format(name: str) -> str:
    row = next(row for row in WIRE if row.field == name)
    suffix = (
        " visible ASCII characters"
        if row.format is HeaderFormat.ID
        else " characters, without control characters or outer blanks"
    )
    return f"a text of 1 to {row.max_chars}{suffix}"
