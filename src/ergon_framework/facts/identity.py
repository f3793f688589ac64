"""Identity: when two facts are the same one. Canonical JSON, digests, and ids that a second run makes again.

Canonical JSON is RFC 8785: keys ordered by their UTF-16 code units, numbers written as ECMAScript
does, nothing that two readers could understand differently. docs/facts.md has vectors of all of it.
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

from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.strict_json import RepeatedKeyError, refuse_repeated_keys

#: The whole numbers that every reader of JSON understands alike are those up to this one, on both sides of zero.
WHOLE: Final = 2**53
_LITERAL: Final = len(str(-WHOLE))
#: How deep values may be nested.
DEPTH: Final = 64

#: No more of a value than this is repeated in a message.
_SHOWN: Final = 40
#: Characters of JSON that one call of the library's encoder writes: it keeps all other threads waiting for so long.
MAX_AT_ONCE: Final = 64 * 1024
#: Below this power of ten ECMAScript writes all the digits of a large number, and from the other one those of a small.
_LARGE, _SMALL = 21, -6


# -- reading --------------------------------------------------------------------------------------------


def parse(text: str) -> Any:
    """The value of a JSON text; whatever has no canonical form is refused.

    >>> parse('{"total": 12.50}')
    {'total': 12.5}
    """
    if not isinstance(text, str):
        raise InvalidFactError(f"JSON is given as text, not as {type(text).__name__}; use json.dumps")
    try:
        if text[:1] not in _BLANK:
            # Without looking for blanks around it, of which there are none in most texts.
            value, end = _DECODER.raw_decode(text)
            if end == len(text):
                return value
        return _DECODER.decode(text)
    except RecursionError:
        raise InvalidFactError(f"the JSON is nested deeper than {DEPTH} levels; make it flatter") from None
    except ValueError as error:
        raise InvalidFactError(f"this is no JSON: {error}") from error


def _whole(literal: str) -> int:
    # Looked at before it is converted: converting a million digits takes for ever.
    if len(literal) <= _LITERAL and -WHOLE <= (value := int(literal)) <= WHOLE:
        return value
    raise InvalidFactError(
        f"{literal[:_SHOWN]} is a whole number beyond ±2^53, which readers of JSON understand differently; "
        "send it as text"
    )


def _exact(value: int) -> str:
    if abs(value) > WHOLE:
        raise InvalidFactError(
            f"a whole number of {value.bit_length()} bits is beyond ±2^53, which readers of JSON understand "
            "differently; send it as text"
        )
    # Of the number itself: enumerations and other subclasses write themselves differently.
    return int.__repr__(value)


def _finite(literal: str) -> float:
    number = float(literal)
    if number in _ENDLESS:
        raise InvalidFactError(f"{literal[:_SHOWN]} is beyond the numbers of JSON (IEEE 754 double); send it as text")
    return number


def _constant(literal: str) -> NoReturn:
    raise InvalidFactError(f"{literal} is no number of JSON; leave the field out, or send null")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    try:
        return refuse_repeated_keys(pairs)
    except RepeatedKeyError as error:
        raise InvalidFactError(
            f"the key {error.key[:_SHOWN]!r} stands twice in one object; readers would disagree on it"
        ) from None


_ENDLESS: Final = (float("inf"), float("-inf"))
#: What may stand before a value; and nothing at all, which stands before none.
_BLANK: Final = " \t\n\r"
_DECODER: Final = json.JSONDecoder(
    parse_int=_whole, parse_float=_finite, parse_constant=_constant, object_pairs_hook=_object
)


# -- writing --------------------------------------------------------------------------------------------


def canonical(value: Any) -> str:
    """*value* as RFC 8785 writes it: one text for one value, whoever writes it.

    >>> canonical({"b": 1e21, "a": [0.1, -0.0, "€"]})
    '{"a":[0.1,0,"€"],"b":1e+21}'
    """
    parts: list[str] = []
    _write(value, parts.append, 0)
    return "".join(parts)


def canonical_parsed(value: Any, *, size: int = 0) -> str:
    """The same for a value that ``parse`` has made, of a text with *size* characters.

    Such a one holds nothing but plain values, and the library's encoder, which is faster, mostly writes them as RFC
    8785 has them. Whether it has is seen by what it has written; where that is in doubt, it is written anew.
    """
    if size > MAX_AT_ONCE:
        return canonical(value)
    try:
        written = encoded(value)
    except RecursionError:
        return canonical(value)
    return written if is_beyond_doubt(written) else canonical(value)


def is_beyond_doubt(written: str) -> bool:
    """Whether *written* is canonical for certain: all that the encoder does differently leaves a trace in it."""
    return is_shallow(written) and is_common(written)


def is_shallow(written: str) -> bool:
    """Whether it is nested no deeper than it may be, for certain."""
    if len(written) <= DEPTH or written.count("{") + written.count("[") <= DEPTH:
        return True
    # Many side by side are common, such as the lines of an order.
    brackets = _STRING("", written).encode(errors="replace").translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) <= DEPTH


def is_common(written: str) -> bool:
    """Whether nothing in it is written otherwise by RFC 8785."""
    if not written.isascii():
        # Keys are ordered by characters here, which are code units as long as each of them is one.
        try:
            if len(written.encode("utf-16-le")) != 2 * len(written):
                return False
        except UnicodeEncodeError:
            return False
    # Numbers of common size are written alike, except those whose fraction is nothing.
    return not (".0" in written or "e+" in written or "e-" in written) or _ODD(written) is None


_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)


def _encoding() -> Callable[[Any], str]:
    """The encoder without the way to it, which takes as long as a small value does."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return _ENCODER.encode
    pieces = make(
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
    return lambda value: "".join(pieces(value, 0))


#: A value that holds nothing but plain values, as the library writes it.
encoded: Final = _encoding()
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"').sub
_STEPS: Final = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in _STEPS)
_ODD: Final = re.compile(r"\.0(?![0-9])|[0-9]e[+-]").search

_WORDS: Final = {None: "null", True: "true", False: "false"}


def _write(value: Any, put: Callable[[str], None], depth: int) -> None:
    if depth > DEPTH:
        raise InvalidFactError(f"the value is nested deeper than {DEPTH} levels; make it flatter")
    if isinstance(value, str):
        put(_quoted(value))
    elif value is None or value is True or value is False:
        put(_WORDS[value])
    elif isinstance(value, int):
        put(_exact(value))
    elif isinstance(value, float):
        put(number(value))
    elif isinstance(value, dict):
        _write_object(value, put, depth)
    elif isinstance(value, list | tuple):
        _write_list(value, put, depth)
    else:
        raise InvalidFactError(f"JSON has no {type(value).__name__}; write it as text, a number, a list or an object")


def _write_list(value: list[Any] | tuple[Any, ...], put: Callable[[str], None], depth: int) -> None:
    put("[")
    for place, item in enumerate(value):
        if place:
            put(",")
        _write(item, put, depth + 1)
    put("]")


def _write_object(value: dict[Any, Any], put: Callable[[str], None], depth: int) -> None:
    put("{")
    for place, key in enumerate(_ordered(value)):
        if place:
            put(",")
        put(_quoted(key))
        put(":")
        _write(value[key], put, depth + 1)
    put("}")


def _ordered(keys: Iterable[Any]) -> list[str]:
    plain = True
    for key in keys:
        if not isinstance(key, str):
            raise InvalidFactError(f"the keys of a JSON object are texts, and {key!r:.40} is a {type(key).__name__}")
        plain = plain and key.isascii()
    # By code units, not by characters: U+1F600 is a pair that begins with D83D, and so comes before U+FB33.
    return sorted(keys) if plain else sorted(keys, key=_units)


def _units(text: str) -> bytes:
    try:
        return text.encode("utf-16-be")
    except UnicodeEncodeError:
        raise _half(text) from None


def _quoted(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _half(text) from None
    return _quote(text)


#: The same for zones and predicates, of which there are few, and each of them in many facts.
_name: Final = lru_cache(1024)(_quoted)


def _half(text: str) -> InvalidFactError:
    return InvalidFactError(f"{text!r:.40} holds half of a surrogate pair, which is no character; repair the text")


# What JSONEncoder writes texts with when ensure_ascii is off: it escapes what RFC 8785 has escaped, as it has it
# escaped, and nothing else.
_quote: Final = json.encoder.encode_basestring


def number(value: float) -> str:
    """A float as ECMAScript writes it.

    >>> [number(value) for value in (4.50, 1e30, 2e-3, 1e-7, 1e20, -0.0)]
    ['4.5', '1e+30', '0.002', '1e-7', '100000000000000000000', '0']
    """
    if value == 0:
        return "0"
    # Both write the fewest digits that mean this very number; they only place the point differently, and for numbers
    # of common size not even that.
    written = float.__repr__(value)
    if written[-1].isdigit() and "e" not in written:
        return written.removesuffix(".0")
    digits, point = _digits(float.__repr__(abs(value)))
    return ("-" if value < 0 else "") + _placed(digits, point)


def _digits(written: str) -> tuple[str, int]:
    """The digits that count, and before which of them the point is: 0.012 is ("12", -1)."""
    mantissa, _, power = written.partition("e")
    whole, _, fraction = mantissa.partition(".")
    if not whole.isdigit():
        raise InvalidFactError(f"{written} is no number of JSON; leave the field out, or send null")
    digits = whole + fraction
    bare = digits.lstrip("0")
    point = len(whole) + int(power or 0) - (len(digits) - len(bare))
    return bare.rstrip("0"), point


def _placed(digits: str, point: int) -> str:
    if len(digits) <= point <= _LARGE:
        return digits.ljust(point, "0")
    if 0 < point <= _LARGE:
        return f"{digits[:point]}.{digits[point:]}"
    if _SMALL < point <= 0:
        return "0." + "0" * -point + digits
    tail = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{tail}e{point - 1:+d}"


# -- digests --------------------------------------------------------------------------------------------


def digest(*, from_zone: str, to_zone: str, subject: str, predicate: str, object_json: str) -> str:
    """The digest of a fact: what two appends with one id must have in common.

    When it was produced, its labels and its correlation are no part of it: they may differ when a
    handler runs again.
    """
    return digest_written(
        from_zone=from_zone,
        to_zone=to_zone,
        subject=subject,
        predicate=predicate,
        written=canonical_parsed(parse(object_json), size=len(object_json)),
    )


def digest_written(*, from_zone: str, to_zone: str, subject: str, predicate: str, written: str) -> str:
    """The same for an object that is in canonical form already, which is most of the work."""
    stated = (
        f'{{"from_zone":{_name(from_zone)},"object":{written},"predicate":{_name(predicate)},'
        f'"subject":{_quote(subject) if subject.isascii() else _quoted(subject)},"to_zone":{_name(to_zone)}}}'
    )
    return f"sha256:{hashlib.sha256(stated.encode()).hexdigest()}"


# -- ids ------------------------------------------------------------------------------------------------


def business_id(*fields: str) -> str:
    """The sha256 of the business fields that name an event, each with its length before it.

    >>> business_id("work_order_created", "WO", "12345")
    'dfc93e93947ca1b3f99fa2bdedd61ece51a04b6c19e33f4b6cb5412e4e2efd8b'
    """
    if not fields:
        raise InvalidFactError("an id is made of at least one field; give those that name the event")
    made = hashlib.sha256()
    for field in fields:
        text = _field(field)
        # The length in front keeps ("ab", "c") and ("a", "bc") apart.
        made.update(len(text).to_bytes(8, "big") + text)
    return made.hexdigest()


def named_id(namespace: str | uuid.UUID, name: str) -> str:
    """The uuid5 of *name* within *namespace*; a namespace given as text is the uuid5 of that text as a DNS name.

    >>> named_id("plant-a", "WO:12345:created")
    '3f2ef916-eda7-5dfb-865d-0d2c7e310258'
    """
    if not isinstance(namespace, uuid.UUID):
        namespace = uuid.uuid5(uuid.NAMESPACE_DNS, _field(namespace).decode())
    return str(uuid.uuid5(namespace, _field(name).decode()))


def event_id(kind: str, id: str, event_type: str, business_time: datetime | date) -> str:  # noqa: A002 - its own word
    """The id of what happened to one thing at one business time: the moment that the business knows, not the clock's.

    >>> event_id("WO", "12345", "created", datetime(2026, 3, 6, 8, 10, tzinfo=UTC))
    '144cc8321b9b4afc3d436a46e596cef95911d2fa762fccf95be9bad1946af417'
    """
    return business_id(kind, id, event_type, _moment(business_time))


def _moment(when: datetime | date) -> str:
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise InvalidFactError(f"{when} has no time zone, and means another moment on each machine; give it one")
        return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if isinstance(when, date):
        return when.isoformat()
    raise InvalidFactError(f"a business time is a datetime or a date, not {type(when).__name__}")


def _field(field: str) -> bytes:
    if not isinstance(field, str):
        raise InvalidFactError(
            f"the fields of an id are texts, and {field!r:.40} is a {type(field).__name__}: write it in one way, "
            "for instance with str()"
        )
    try:
        return field.encode()
    except UnicodeEncodeError:
        raise _half(field) from None
