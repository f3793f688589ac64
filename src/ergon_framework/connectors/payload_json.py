"""Canonical JSON of payloads: every value has one encoding, the same on every broker.

The JSON encoder writes plain values itself. It calls ``_convert`` for every other value, and encodes what that returns.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections import deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

from pydantic import AnyUrl, BaseModel, RootModel, TypeAdapter
from pydantic.dataclasses import is_pydantic_dataclass

from ergon_framework.errors import ErgonError

#: Maximum nesting depth of arrays and objects in a body.
MAX_DEPTH: Final = 64
#: Characters of a key, and names of a path, that an error shows.
_MAX_KEY_CHARS, _MAX_PATH_NAMES = 40, 12
_PLAIN_TYPES: Final = (str, int, float, type(None))
_MINUTE, _DAY = timedelta(minutes=1), timedelta(days=1)
_MIDNIGHT = datetime(2000, 1, 1)  # noqa: DTZ001 - only times are computed with it

#: Names of fields, keys and positions, from the outside to the inside.
_Path = tuple[str | int, ...]


class PayloadError(ErgonError):
    """A payload cannot be written as JSON; the message has the path and the type of the value, never the value."""

    final = True
    code = "unencodable"


class _ValueError(ErgonError):
    """One value cannot be written as JSON; the message continues the sentence that begins with its path."""


# -- plain JSON -----------------------------------------------------------------------------------


def _create_json_writer(default: Callable[[Any], Any] | None) -> Callable[[Any], str]:
    """Return a JSON writer: JSONEncoder without its setup per body, which is done once here."""
    encoder = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=default)
    make_encoder = getattr(json.encoder, "c_make_encoder", None)
    if make_encoder is None:  # an interpreter without the C encoder
        return encoder.encode
    # Its arguments: markers, default, encoder, indent, two separators, sort_keys, skipkeys, allow_nan.
    encode = make_encoder(None, encoder.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)  # noqa: FBT003
    return lambda value: "".join(encode(value, 0))


#: Write strict JSON without blanks; accepts only the types of JSON.
to_json: Final = _create_json_writer(None)


# -- other values: each converter returns a value that is closer to JSON, or raises _ValueError ----------


def _write_decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise _ValueError("is not a finite number")
    # The context of the thread decides whether str() writes e or E.
    return str(value).upper()


def _write_datetime(value: datetime) -> str:
    if value.utcoffset() is None:
        return value.isoformat()
    try:
        moment = value.astimezone(UTC)
    except OverflowError:
        moment = None
    if moment is None:
        raise _ValueError("is outside the years 1 to 9999 in UTC")
    return moment.replace(tzinfo=None).isoformat() + "Z"


def _write_time(value: time) -> str:
    """Write a time; if it has an offset, in UTC, or with the smallest offset that keeps it within the day.

    Times of different offsets are equal in Python if they are the same distance from midnight in UTC, even if that
    distance is negative or more than a day.
    """
    offset = value.utcoffset()
    if offset is None:
        return value.isoformat()
    if offset % _MINUTE:
        raise _ValueError("has an offset that is not a whole number of minutes")
    wall = timedelta(hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond)
    distance = wall - offset
    # Floor division rounds down, so this is the smallest number of minutes that moves the time into the day.
    last_moment = _DAY - timedelta.resolution
    shift = -(distance // _MINUTE) if distance < timedelta() else min(0, (last_moment - distance) // _MINUTE)
    text = (_MIDNIGHT + distance + shift * _MINUTE).time().isoformat()
    hours, minutes = divmod(abs(shift), 60)
    return f"{text}{'-' if shift < 0 else '+'}{hours:02}:{minutes:02}" if shift else f"{text}Z"


def _write_timedelta(value: timedelta) -> str:
    """Write a duration as ISO 8601 with days, hours, minutes and seconds; years and months have no fixed length."""
    size = abs(value)
    minutes, seconds = divmod(size.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{size.microseconds:06}".rstrip("0") if size.microseconds else ""
    clock = f"{hours}H" * bool(hours) + f"{minutes}M" * bool(minutes)
    if seconds or fraction or not (clock or size.days):
        clock += f"{seconds}{fraction}S"
    days = f"{size.days}D" * bool(size.days)
    return f"{'-' if value < size else ''}P{days}{'T' if clock else ''}{clock}"


def _write_bytes(value: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(value).decode()


def _get_enum_value(value: Enum) -> Any:
    return value.value


def _sort_set(value: set[Any] | frozenset[Any]) -> list[Any]:
    return sorted(value, key=encode_payload)


def _dump_dataclass(value: Any) -> dict[str, Any]:
    # A field that the constructor does not take is computed from the others when the payload is read.
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def _dump_model(value: BaseModel) -> Any:
    """Return the fields of a model, with its own serializers and aliases, and with the values of Python.

    Not in JSON mode, which masks secrets, writes bytes as text, and orders sets as they come.
    """
    try:
        return value.model_dump(mode="python", by_alias=True, round_trip=True, warnings=False)
    except TypeError:
        # A set of models becomes a set of dictionaries, which cannot be created; then the fields are dumped one by one.
        return _dump_fields(value)


def _dump_fields(value: BaseModel) -> Any:
    if isinstance(value, RootModel):
        return value.root
    fields = {
        field.serialization_alias or field.alias or name: getattr(value, name)
        for name, field in type(value).model_fields.items()
        if not field.exclude
    }
    return fields | (value.model_extra or {})


def _dump_pydantic_dataclass(value: Any) -> Any:
    try:
        kind: Any = type(value)  # mypy does not take a type for hashable
        return _create_adapter(kind).dump_python(value, mode="python", by_alias=True, round_trip=True, warnings=False)
    except TypeError:
        return _dump_dataclass(value)


@lru_cache(256)
def _create_adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


#: In this order: a datetime is a date, and an enumeration may be any type too.
_CONVERTERS: Final[tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...]] = (
    (Enum, _get_enum_value),
    (BaseModel, _dump_model),
    (Decimal, _write_decimal),
    (datetime, _write_datetime),
    (date, date.isoformat),
    (time, _write_time),
    (timedelta, _write_timedelta),
    (UUID, str),
    ((bytes, bytearray, memoryview), _write_bytes),
    ((set, frozenset), _sort_set),
    (deque, list),
    ((IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network, PurePath, AnyUrl), str),
)


@lru_cache(1024)
def _find_converter(kind: type) -> Callable[[Any], Any] | None:
    for types, converter in _CONVERTERS:
        if issubclass(kind, types):
            return converter
    if dataclasses.is_dataclass(kind):
        return _dump_pydantic_dataclass if is_pydantic_dataclass(kind) else _dump_dataclass
    return None


def _convert(value: Any) -> Any:
    kind: Any = type(value)  # mypy does not take a type for hashable
    converter = _find_converter(kind)
    if converter is None:
        raise _ValueError(
            f"is a {kind.__name__}, which has no JSON form; convert it to one of the types that a payload can hold"
        )
    problem = ""
    try:
        return converter(value)
    except _ValueError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary to a user's class, such as a serializer of a model
        problem = type(error).__name__
    # Raised outside the handler: the error may quote the value.
    raise _ValueError(
        f"is a {kind.__name__} that cannot be converted ({problem}); correct its serializers or its fields"
    )


_write_payload: Final = _create_json_writer(_convert)


def encode_payload(value: Any) -> bytes:
    """Return the canonical JSON of *value*; raise PayloadError, which names the path and the type, if it has none."""
    try:
        return _write_payload(value).encode()
    except (TypeError, ValueError, RecursionError, ErgonError):
        pass  # the slow way below finds the place, or converts keys, for which the encoder has no hook
    return to_json(_to_plain(value, ())).encode()


# -- the slow way -----------------------------------------------------------------------------------


def _to_plain(value: Any, path: _Path) -> Any:
    """Return *value* as plain JSON values, converted step by step."""
    if len(path) > MAX_DEPTH:
        raise PayloadError(f"{_format_path(path)} is nested more than {MAX_DEPTH} levels deep")
    problem = ""
    try:
        if isinstance(value, _PLAIN_TYPES):
            _check_plain(value)
            return value
        if isinstance(value, dict):
            return _to_plain_dict(value, path)
        if isinstance(value, set | frozenset):
            return sorted((_to_plain(item, (*path, "*")) for item in value), key=encode_payload)
        if isinstance(value, list | tuple):
            return [_to_plain(item, (*path, index)) for index, item in enumerate(value)]
        converted = _convert(value)
    except _ValueError as error:
        problem = str(error)
    if problem:
        raise PayloadError(f"{_format_path(path)} {problem}")
    return _to_plain(converted, path if isinstance(converted, list | dict) else (*path, ""))


def _to_plain_dict(value: dict[Any, Any], path: _Path) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items():
        name = _write_key(key)
        if name in plain:
            raise _ValueError("has two keys that are the same text in JSON")
        plain[name] = _to_plain(item, (*path, name))
    return plain


def _write_key(key: Any) -> str:
    """Return *key* as the text that the encoder writes for it."""
    plain = key.value if isinstance(key, Enum) else key
    kind: Any = type(plain)
    if not isinstance(plain, _PLAIN_TYPES) and _find_converter(kind) is not None:
        plain = _convert(plain)
    if not isinstance(plain, _PLAIN_TYPES):
        raise _ValueError(f"has a key of type {type(key).__name__}, which is not a single text in JSON")
    _check_plain(plain)
    return str.__str__(plain) if isinstance(plain, str) else to_json(plain)


def _check_plain(value: Any) -> None:
    reason = ""
    try:
        to_json(value).encode()
    except UnicodeError:
        reason = "is a text with half a surrogate pair, which UTF-8 cannot encode"
    except ValueError:
        reason = "is a number that JSON cannot represent"
    if reason:
        raise _ValueError(reason)


def _format_path(path: _Path) -> str:
    names = [str(name)[:_MAX_KEY_CHARS] for name in path if name != ""]
    if len(names) > _MAX_PATH_NAMES:
        names[_MAX_PATH_NAMES:] = ["…"]
    return ".".join(names) or "it"
