"""Identity of facts: canonical JSON, digests, and ids that a second run generates again.

A fact is a statement (subject, predicate, object as JSON) that one zone, a site with its own store, sends to another.
Two facts are the same if the digests of their canonical JSON are equal. Canonical JSON is RFC 8785: keys ordered by
their UTF-16 code units, numbers formatted as in ECMAScript, nothing that two parsers could interpret differently.
docs/facts.md has test vectors for all of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, NoReturn

from ergon_framework._util.strict_json import RepeatedKeyError, reject_repeated_keys
from ergon_framework.facts.errors import InvalidFactError

#: Largest integer, positive or negative, that every JSON parser reads without loss of precision.
MAX_SAFE_INTEGER: Final = 2**53
_MAX_INTEGER_CHARS: Final = len(str(-MAX_SAFE_INTEGER))
#: Maximum nesting depth of values.
MAX_NESTING_DEPTH: Final = 64

#: Maximum characters of a value quoted in an error message.
_MAX_QUOTED_CHARS: Final = 40
#: Maximum characters of JSON per call of the standard library's encoder, which blocks all other threads meanwhile.
MAX_ENCODER_CHARS: Final = 64 * 1024
#: Positions of the decimal point between which ECMAScript writes all digits instead of an exponent.
_MAX_POINT, _MIN_POINT = 21, -6


# -- reading --------------------------------------------------------------------------------------------


def parse_strict_json(text: str) -> Any:
    """Parse a JSON text; raise InvalidFactError if it has no canonical form.

    >>> parse_strict_json('{"total": 12.50}')
    {'total': 12.5}
    """
    if not isinstance(text, str):
        raise InvalidFactError(f"JSON must be text, not {type(text).__name__}; use json.dumps")
    try:
        if text[:1] not in _WHITESPACE_OR_EMPTY:
            # Skips the search for surrounding whitespace, which most texts do not have.
            value, end = _DECODER.raw_decode(text)
            if end == len(text):
                return value
        return _DECODER.decode(text)
    except RecursionError:
        raise InvalidFactError(f"the JSON is nested more than {MAX_NESTING_DEPTH} levels deep; flatten it") from None
    except ValueError as error:
        raise InvalidFactError(f"invalid JSON: {error}") from error


def _quote_literal(literal: str) -> str:
    return literal if len(literal) <= _MAX_QUOTED_CHARS else f"{literal[:_MAX_QUOTED_CHARS]}…"


def _parse_integer(literal: str) -> int:
    # The length is checked before the conversion, which takes very long for a million digits.
    if len(literal) <= _MAX_INTEGER_CHARS and -MAX_SAFE_INTEGER <= (value := int(literal)) <= MAX_SAFE_INTEGER:
        return value
    raise InvalidFactError(
        f"integer {_quote_literal(literal)} is outside ±2^53, so JSON parsers may lose precision; send it as a string"
    )


def _format_integer(value: int) -> str:
    if abs(value) > MAX_SAFE_INTEGER:
        raise InvalidFactError(
            f"an integer of {value.bit_length()} bits is outside ±2^53, so JSON parsers may lose precision; "
            "send it as a string"
        )
    # The method of int itself, because enumerations and other subclasses have a different representation.
    return int.__repr__(value)


def _parse_float(literal: str) -> float:
    value = float(literal)
    if value in _INFINITIES:
        raise InvalidFactError(
            f"number {_quote_literal(literal)} is outside the range of JSON numbers (IEEE 754 double); "
            "send it as a string"
        )
    return value


def _reject_constant(literal: str) -> NoReturn:
    raise InvalidFactError(f"{literal} is not a JSON number; omit the field or send null")


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    try:
        return reject_repeated_keys(pairs)
    except RepeatedKeyError as error:
        raise InvalidFactError(
            f"the key {_quote_literal(error.key)!r} occurs twice in one object, so JSON parsers may disagree; "
            "remove one"
        ) from None


_INFINITIES: Final = (float("inf"), float("-inf"))
#: Whitespace that may precede a value, and the empty string, which a text without a value starts with.
_WHITESPACE_OR_EMPTY: Final = " \t\n\r"
_DECODER: Final = json.JSONDecoder(
    parse_int=_parse_integer, parse_float=_parse_float, parse_constant=_reject_constant, object_pairs_hook=_build_object
)


# -- writing --------------------------------------------------------------------------------------------


def canonical_json(value: Any) -> str:
    """Format *value* as RFC 8785 JSON: exactly one text for each value.

    >>> canonical_json({"b": 1e21, "a": [0.1, -0.0, "€"]})
    '{"a":[0.1,0,"€"],"b":1e+21}'
    """
    parts: list[str] = []
    _write(value, parts.append, 0)
    return "".join(parts)


def canonical_json_of_parsed(value: Any, *, size: int = 0) -> str:
    """Format a value that ``parse_strict_json`` has parsed, from a text with *size* characters, as canonical JSON.

    Such a value contains only plain values, which the standard library's faster encoder mostly formats as RFC 8785
    requires. The result is checked for deviations; if it may have one, the value is formatted again by this module.
    """
    if size > MAX_ENCODER_CHARS:
        return canonical_json(value)
    try:
        text = encode_json(value)
    except RecursionError:
        return canonical_json(value)
    return text if is_known_canonical(text) else canonical_json(value)


def is_known_canonical(text: str) -> bool:
    """Return whether *text*, an output of the encoder, is canonical; False also if the text cannot show it."""
    return is_within_depth(text) and is_plain_json(text)


def is_within_depth(text: str) -> bool:
    """Return whether *text* is within the maximum nesting depth; it must be valid JSON."""
    if len(text) <= MAX_NESTING_DEPTH or text.count("{") + text.count("[") <= MAX_NESTING_DEPTH:
        return True
    # Many brackets side by side are common, for example the lines of an order.
    brackets = _replace_strings("", text).encode(errors="replace").translate(None, _NO_BRACKETS)
    return max(accumulate(map(_BRACKET_DEPTHS.__getitem__, brackets)), default=0) <= MAX_NESTING_DEPTH


def is_plain_json(text: str) -> bool:
    """Return whether RFC 8785 formats all keys and numbers of *text*, an output of the encoder, in the same way."""
    if not text.isascii():
        # Python orders keys by characters, which equals the order by code units if each character is one unit.
        try:
            if len(text.encode("utf-16-le")) != 2 * len(text):
                return False
        except UnicodeEncodeError:
            return False
    # Numbers of common size are formatted alike, except those with a zero fraction.
    return not (".0" in text or "e+" in text or "e-" in text) or _find_irregular_number(text) is None


_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)


def _make_encoder() -> Callable[[Any], str]:
    """Return the C encoder without its Python wrapper, which takes as long as encoding a small value."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return _ENCODER.encode
    encode = make(
        markers=None,
        default=_ENCODER.default,
        encoder=json.encoder.encode_basestring,
        indent=None,
        key_separator=":",
        item_separator=",",
        sort_keys=True,
        skipkeys=False,
        allow_nan=False,
    )
    return lambda value: "".join(encode(value, 0))


#: Encodes a value that contains only plain values, as the standard library does.
encode_json: Final = _make_encoder()
_replace_strings: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"').sub
_BRACKET_DEPTHS: Final = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in _BRACKET_DEPTHS)
_find_irregular_number: Final = re.compile(r"\.0(?![0-9])|[0-9]e[+-]").search

_LITERALS: Final = {None: "null", True: "true", False: "false"}


def _write(value: Any, put: Callable[[str], None], depth: int) -> None:
    if depth > MAX_NESTING_DEPTH:
        raise InvalidFactError(f"the value is nested more than {MAX_NESTING_DEPTH} levels deep; flatten it")
    if isinstance(value, str):
        put(_quote_text(value))
    elif value is None or value is True or value is False:
        put(_LITERALS[value])
    elif isinstance(value, int):
        put(_format_integer(value))
    elif isinstance(value, float):
        put(format_float_es(value))
    elif isinstance(value, dict):
        _write_object(value, put, depth)
    elif isinstance(value, list | tuple):
        _write_list(value, put, depth)
    else:
        raise InvalidFactError(f"JSON has no {type(value).__name__}; write it as text, a number, a list or an object")


def _write_list(value: list[Any] | tuple[Any, ...], put: Callable[[str], None], depth: int) -> None:
    put("[")
    for index, item in enumerate(value):
        if index:
            put(",")
        _write(item, put, depth + 1)
    put("]")


def _write_object(value: dict[Any, Any], put: Callable[[str], None], depth: int) -> None:
    put("{")
    for index, key in enumerate(_sort_keys(value)):
        if index:
            put(",")
        put(_quote_text(key))
        put(":")
        _write(value[key], put, depth + 1)
    put("}")


def _sort_keys(keys: Iterable[Any]) -> list[str]:
    is_ascii = True
    for key in keys:
        if not isinstance(key, str):
            raise InvalidFactError(f"the keys of a JSON object must be text, and {key!r:.40} is a {type(key).__name__}")
        is_ascii = is_ascii and key.isascii()
    # By code units, not by characters: U+1F600 is a pair that begins with D83D, and therefore precedes U+FB33.
    return sorted(keys) if is_ascii else sorted(keys, key=_encode_utf16)


def _encode_utf16(text: str) -> bytes:
    try:
        return text.encode("utf-16-be")
    except UnicodeEncodeError:
        raise _surrogate_error(text) from None


def _quote_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _surrogate_error(text) from None
    return _quote(text)


#: Cached variant for zones and predicates: few values that occur in many facts.
_quote_name: Final = lru_cache(1024)(_quote_text)


def _surrogate_error(text: str) -> InvalidFactError:
    return InvalidFactError(f"{text!r:.40} contains half of a surrogate pair, not a character; correct the text")


# The function that JSONEncoder uses for strings when ensure_ascii is off: it escapes exactly what RFC 8785 requires.
_quote: Final = json.encoder.encode_basestring


def format_float_es(value: float) -> str:
    """Format a float as ECMAScript does.

    >>> [format_float_es(value) for value in (4.50, 1e30, 2e-3, 1e-7, 1e20, -0.0)]
    ['4.5', '1e+30', '0.002', '1e-7', '100000000000000000000', '0']
    """
    if value == 0:
        return "0"
    # Python and ECMAScript both write the fewest digits that identify the number; only the position of the point
    # differs, and for numbers of common size not even that.
    text = float.__repr__(value)
    if text[-1].isdigit() and "e" not in text:
        return text.removesuffix(".0")
    digits, point = _split_float(float.__repr__(abs(value)))
    return ("-" if value < 0 else "") + _place_point(digits, point)


def _split_float(text: str) -> tuple[str, int]:
    """Return the significant digits and the position of the decimal point: 0.012 is ("12", -1)."""
    mantissa, _, power = text.partition("e")
    whole, _, fraction = mantissa.partition(".")
    if not whole.isdigit():
        raise InvalidFactError(f"{text} is not a JSON number; omit the field or send null")
    digits = whole + fraction
    significant = digits.lstrip("0")
    point = len(whole) + int(power or 0) - (len(digits) - len(significant))
    return significant.rstrip("0"), point


def _place_point(digits: str, point: int) -> str:
    if len(digits) <= point <= _MAX_POINT:
        return digits.ljust(point, "0")
    if 0 < point <= _MAX_POINT:
        return f"{digits[:point]}.{digits[point:]}"
    if _MIN_POINT < point <= 0:
        return "0." + "0" * -point + digits
    tail = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{tail}e{point - 1:+d}"


# -- digests --------------------------------------------------------------------------------------------


def digest_parts(*, from_zone: str, to_zone: str, subject: str, predicate: str, object_json: str) -> str:
    """Return the digest of a fact, which two appends with the same id must share.

    The production time, the labels and the correlation are not part of it: they may differ when a handler runs again.
    """
    return digest_of_canonical(
        from_zone=from_zone,
        to_zone=to_zone,
        subject=subject,
        predicate=predicate,
        canonical_text=canonical_json_of_parsed(parse_strict_json(object_json), size=len(object_json)),
    )


def digest_of_canonical(*, from_zone: str, to_zone: str, subject: str, predicate: str, canonical_text: str) -> str:
    """Return the digest for an object already in canonical form, which saves most of the work."""
    identity_text = (
        f'{{"from_zone":{_quote_name(from_zone)},"object":{canonical_text},"predicate":{_quote_name(predicate)},'
        f'"subject":{_quote(subject) if subject.isascii() else _quote_text(subject)},"to_zone":{_quote_name(to_zone)}}}'
    )
    return f"sha256:{hashlib.sha256(identity_text.encode()).hexdigest()}"


# -- ids ------------------------------------------------------------------------------------------------


def business_id(*fields: str) -> str:
    """Return the sha256 of the business fields that identify an event, each prefixed with its length.

    >>> business_id("work_order_created", "WO", "12345")
    'dfc93e93947ca1b3f99fa2bdedd61ece51a04b6c19e33f4b6cb5412e4e2efd8b'
    """
    if not fields:
        raise InvalidFactError("an id needs at least one field; pass those that identify the event")
    hasher = hashlib.sha256()
    for field in fields:
        data = _encode_field(field)
        # The length prefix distinguishes ("ab", "c") from ("a", "bc").
        hasher.update(len(data).to_bytes(8, "big") + data)
    return hasher.hexdigest()


def uuid5_id(namespace: str | uuid.UUID, name: str) -> str:
    """Return the uuid5 of *name* within *namespace*; a text namespace is the uuid5 of that text as a DNS name.

    >>> uuid5_id("plant-a", "WO:12345:created")
    '3f2ef916-eda7-5dfb-865d-0d2c7e310258'
    """
    if not isinstance(namespace, uuid.UUID):
        namespace = uuid.uuid5(uuid.NAMESPACE_DNS, _encode_field(namespace).decode())
    return str(uuid.uuid5(namespace, _encode_field(name).decode()))


def event_id(kind: str, id: str, event_type: str, business_time: datetime | date) -> str:  # noqa: A002 - plain term
    """Return the id of an event of one object at its business time, which is not the time of the system clock.

    >>> event_id("WO", "12345", "created", datetime(2026, 3, 6, 8, 10, tzinfo=UTC))
    '144cc8321b9b4afc3d436a46e596cef95911d2fa762fccf95be9bad1946af417'
    """
    return business_id(kind, id, event_type, _format_time(business_time))


def _format_time(time: datetime | date) -> str:
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise InvalidFactError(f"{time} has no time zone, so its meaning depends on the machine; add one")
        return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if isinstance(time, date):
        return time.isoformat()
    raise InvalidFactError(f"a business time is a datetime or a date, not {type(time).__name__}")


def _encode_field(field: str) -> bytes:
    if not isinstance(field, str):
        raise InvalidFactError(
            f"id field must be str, not {type(field).__name__}: {field!r:.40}; convert it, always in the same way, "
            "for example with str()"
        )
    try:
        return field.encode()
    except UnicodeEncodeError:
        raise _surrogate_error(field) from None
