"""Parse and format lines of one JSON value each, under limits that hold in both directions.

Lines come from third-party programs, so each limit is checked before the code that it protects: the length before
decoding, the depth before the recursive parser.

Long lines are parsed incrementally, so that other threads can run meanwhile. The parser of the standard library holds
the interpreter lock until it ends; for a line of 16 MiB that is seconds in which an event loop does nothing else, in
whatever thread the line is parsed. This parser holds the lock for one string or number at a time, or for a chunk of a
long array.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final

from ergon_framework._util.strict_json import (
    RepeatedKeyError,
    find_repeated_key,
    parse_finite,
    reject_constant,
    reject_repeated_keys,
)
from ergon_framework.errors import ErgonError

_BLANK: Final = re.compile(r"[ \t\n\r]*").match
_NUMBER: Final = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?").match
_LITERALS: Final = {"n": ("null", None), "t": ("true", True), "f": ("false", False)}
_CONSTANTS: Final = ("NaN", "Infinity", "-Infinity")
#: Characters of an array that are parsed in one call, and the number of single values after which that is tried.
_CHUNK_CHARS: Final = 32_768
_CHUNK_INTERVAL: Final = 256


class IncrementalJsonParser:
    """Parser of one JSON text; the hooks are those of ``json.JSONDecoder``, and one that receives every string.

    *parse_short* parses a short text up to a maximum depth, or raises ValueError. Nesting deeper than *max_depth*
    raises RecursionError.
    """

    def __init__(
        self,
        text: str,
        *,
        parse_short: Callable[[str, int], Any],
        max_depth: int,
        parse_int: Callable[[str], Any],
        parse_float: Callable[[str], Any],
        parse_constant: Callable[[str], Any],
        pairs: Callable[[list[tuple[str, Any]]], Any],
        check_text: Callable[[str], object] | None = None,
    ) -> None:
        self._text = text
        self._parse_short = parse_short
        self._max_depth = max_depth
        self._int = parse_int
        self._float = parse_float
        self._constant = parse_constant
        self._pairs = pairs
        self._check_text = check_text

    def parse(self) -> Any:
        """Return the value; raise JSONDecodeError for invalid JSON, or for data after the value."""
        value, end = self._parse_value(self._skip_blank(0), 0)
        end = self._skip_blank(end)
        if end != len(self._text):
            raise JSONDecodeError("Extra data", self._text, end)
        return value

    def _parse_value(self, position: int, depth: int) -> tuple[Any, int]:
        first = self._text[position : position + 1]
        if first == '"':
            return self._parse_string(position + 1)
        if first == "[":
            return self._parse_array(position + 1, depth + 1)
        if first == "{":
            return self._parse_object(position + 1, depth + 1)
        literal, value = _LITERALS.get(first, ("", None))
        if literal and self._text.startswith(literal, position):
            return value, position + len(literal)
        return self._parse_number(position)

    def _parse_string(self, position: int) -> tuple[str, int]:
        text, end = scanstring(self._text, position, True)  # noqa: FBT003 - the signature of scanstring
        if self._check_text is not None:
            self._check_text(text)
        return text, end

    def _parse_number(self, position: int) -> tuple[Any, int]:
        match = _NUMBER(self._text, position)
        if match is not None:
            _, fraction, exponent = match.groups()
            parse = self._int if fraction is None and exponent is None else self._float
            return parse(match.group()), match.end()
        for constant in _CONSTANTS:
            if self._text.startswith(constant, position):
                return self._constant(constant), position + len(constant)
        raise JSONDecodeError("Expecting value", self._text, position)

    def _parse_array(self, position: int, depth: int) -> tuple[list[Any], int]:
        self._check_depth(depth)
        items: list[Any] = []
        position = self._skip_blank(position)
        if self._text[position : position + 1] == "]":
            return items, position + 1
        interval, since = _CHUNK_INTERVAL, 0
        while True:
            chunk = self._parse_chunk(position, depth) if since >= interval else None
            if chunk is not None:
                values, position = chunk
                items += values
            else:
                # After a failed attempt to parse a run of short values, the interval to the next one doubles.
                interval, since = (interval, since + 1) if since < interval else (2 * interval, 0)
                value, position = self._parse_value(position, depth)
                items.append(value)
            position, last = self._skip_separator(position, "]")
            if last:
                return items, position

    def _parse_chunk(self, position: int, depth: int) -> tuple[list[Any], int] | None:
        """Return array values from *position* on, and the position of the comma after them; None if no guess fits.

        If the text up to a comma is a valid array once it is closed there, the comma separates values of the array:
        up to that position both parse the same.
        """
        # A chunk is parsed by *parse_short*, which does not pass its strings to the hook.
        if self._check_text is not None:
            return None
        for mark in ("},", "],", ","):
            comma = self._text.rfind(mark, position, position + _CHUNK_CHARS) + len(mark) - 1
            if comma > position:
                with suppress(ValueError):
                    values = self._parse_short(f"[{self._text[position:comma]}]", self._max_depth - depth + 1)
                    if values:
                        return values, comma
        return None

    def _parse_object(self, position: int, depth: int) -> tuple[Any, int]:
        self._check_depth(depth)
        pairs: list[tuple[str, Any]] = []
        position = self._skip_blank(position)
        if self._text[position : position + 1] == "}":
            return self._pairs(pairs), position + 1
        while True:
            if self._text[position : position + 1] != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", self._text, position)
            key, position = self._parse_string(position + 1)
            position = self._skip_blank(position)
            if self._text[position : position + 1] != ":":
                raise JSONDecodeError("Expecting ':' delimiter", self._text, position)
            value, position = self._parse_value(self._skip_blank(position + 1), depth)
            pairs.append((key, value))
            position, last = self._skip_separator(position, "}")
            if last:
                return self._pairs(pairs), position

    def _skip_separator(self, position: int, close: str) -> tuple[int, bool]:
        """Return the position of the next item, and whether *close* was found."""
        position = self._skip_blank(position)
        sign = self._text[position : position + 1]
        if sign == close:
            return position + 1, True
        if sign != ",":
            raise JSONDecodeError("Expecting ',' delimiter", self._text, position)
        return self._skip_blank(position + 1), False

    def _skip_blank(self, position: int) -> int:
        text = self._text
        # Nearly always there is no blank, and one comparison is faster than a match.
        if text[position : position + 1] > " ":
            return position
        match = _BLANK(text, position)
        return position if match is None else match.end()

    def _check_depth(self, depth: int) -> None:
        if depth > self._max_depth:
            raise RecursionError


#: Maximum line length in bytes, without the line feed that ends it.
MAX_LINE_BYTES: Final = 16 * 1024 * 1024
#: Maximum nesting of arrays and objects in a line, the message itself included.
MAX_DEPTH: Final = 64


class LineErrorReason(StrEnum):
    """Why a line cannot be parsed or a value cannot be written."""

    TOO_LONG = "too_long"
    NOT_UTF8 = "not_utf8"
    TOO_DEEP = "too_deep"
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    REPEATED_KEY = "repeated_key"
    LONE_SURROGATE = "lone_surrogate"
    UNSUPPORTED_VERSION = "unsupported_version"
    BAD_FIELD = "bad_field"


class LineError(ErgonError):
    """A line violates the protocol; *reason* is for programs, and the message repeats no value of the line.

    For a value that cannot be written, the message names the repeated key.
    """

    final = True
    code = "bad_line"

    def __init__(self, message: str, *, reason: LineErrorReason) -> None:
        super().__init__(message)
        self.reason = reason


# -- splitting a stream ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OverlongLine:
    """A line that exceeded the limit and was discarded; *size* is its length in bytes."""

    size: int


class LineSplitter:
    """Splits the bytes of a pipe into lines and buffers at most one line.

    Bytes without a line feed at the end of the stream are discarded.
    """

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        #: The length so far of a line that exceeds the limit; 0 while the line is buffered.
        self._dropped_bytes = 0

    def feed(self, data: bytes) -> Iterator[bytes | OverlongLine]:
        """Yield each line that is complete, without its line feed."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._keep(data[start:end])
            yield self._take_line()
            start = end + 1
        self._keep(data[start:])

    def _keep(self, data: bytes) -> None:
        if self._dropped_bytes or len(self._buffer) + len(data) > self._max_bytes:
            self._dropped_bytes += len(self._buffer) + len(data)
            self._buffer.clear()
        else:
            self._buffer += data

    def _take_line(self) -> bytes | OverlongLine:
        line = OverlongLine(self._dropped_bytes) if self._dropped_bytes else bytes(self._buffer)
        self._buffer.clear()
        self._dropped_bytes = 0
        return line


# -- reading --------------------------------------------------------------------------------------

# Every part is possessive and the closing quote optional: no input makes the pattern backtrack.
_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE_MESSAGE: Final = "half of a surrogate pair is not a character"
_NON_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_TO_SQUARE_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")


_DECODER: Final = json.JSONDecoder(
    parse_float=parse_finite, parse_constant=reject_constant, object_pairs_hook=reject_repeated_keys
)


def parse_line(line: bytes, *, yielding: bool = False) -> dict[str, Any]:
    """Return the object in *line* or raise LineError; *yielding* takes longer and lets other threads run meanwhile."""
    if len(line) > MAX_LINE_BYTES:
        raise LineError(
            f"a line of {len(line)} bytes exceeds the limit of {MAX_LINE_BYTES}", reason=LineErrorReason.TOO_LONG
        )
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise LineError(f"byte {error.start} is not UTF-8", reason=LineErrorReason.NOT_UTF8) from None
    value = _parse_value(line, text, yielding=yielding)
    if not isinstance(value, dict):
        raise LineError(f"expected an object, not a {type(value).__name__}", reason=LineErrorReason.NOT_AN_OBJECT)
    if not yielding and _ESCAPED_SURROGATE.search(text) and not _is_encodable(value):
        raise LineError(_LONE_SURROGATE_MESSAGE, reason=LineErrorReason.LONE_SURROGATE)
    return value


def _parse_value(line: bytes, text: str, *, yielding: bool) -> Any:
    try:
        if yielding:
            return _parse_incrementally(text)
        _check_depth(line)
        return _DECODER.decode(text)
    except RecursionError:
        raise LineError(f"nested deeper than {MAX_DEPTH}", reason=LineErrorReason.TOO_DEEP) from None
    except UnicodeEncodeError:
        raise LineError(_LONE_SURROGATE_MESSAGE, reason=LineErrorReason.LONE_SURROGATE) from None
    except RepeatedKeyError:
        # Two parsers could keep different values of the key, and so run different jobs.
        raise LineError("an object names one key twice", reason=LineErrorReason.REPEATED_KEY) from None
    except json.JSONDecodeError as error:
        raise LineError(f"not JSON: {error.msg} at character {error.pos}", reason=LineErrorReason.NOT_JSON) from None
    except ValueError as error:
        # NaN, a number beyond a float, or more digits than Python parses.
        raise LineError(f"not JSON: {str(error)[:100]}", reason=LineErrorReason.NOT_JSON) from None


def _parse_incrementally(text: str) -> Any:
    has_surrogates = _ESCAPED_SURROGATE.search(text) is not None
    return IncrementalJsonParser(
        text,
        parse_short=_parse_short,
        max_depth=MAX_DEPTH,
        parse_int=int,
        parse_float=parse_finite,
        parse_constant=reject_constant,
        pairs=reject_repeated_keys,
        check_text=str.encode if has_surrogates else None,
    ).parse()


def _parse_short(text: str, max_depth: int) -> Any:
    try:
        _check_depth(text.encode(), max_depth)
    except LineError as error:
        raise ValueError from error
    return _DECODER.decode(text)


def _check_depth(line: bytes, max_depth: int = MAX_DEPTH) -> None:
    """Reject too deep nesting at the speed of C, before a recursive parser runs."""
    if line.count(b"[") + line.count(b"{") <= max_depth:
        return
    remaining = _extract_brackets(line)
    for _ in range(max_depth):
        # Each iteration removes the innermost pairs, so 64 levels are removed after 64 iterations.
        before, remaining = remaining, remaining.replace(b"[]", b"")
        if not remaining:
            return
        if len(remaining) == len(before):
            raise LineError("not JSON: unbalanced brackets", reason=LineErrorReason.NOT_JSON)
    raise LineError(f"nested deeper than {MAX_DEPTH}", reason=LineErrorReason.TOO_DEEP)


def _extract_brackets(line: bytes) -> bytes:
    """Return the brackets of *line* outside strings, all converted to square brackets."""
    return _STRINGS.sub(b"", line).translate(_TO_SQUARE_BRACKETS, _NON_BRACKETS)


def _is_encodable(value: Any) -> bool:
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return False
    return True


class _ObjectPairs(list[tuple[str, Any]]):
    """An object with all of its keys, repeated keys included."""


def _discard(_: str) -> None:
    """Discard a number that is not needed; it may be one that cannot be parsed."""


_LENIENT_DECODER: Final = json.JSONDecoder(
    parse_int=_discard, parse_float=_discard, parse_constant=_discard, object_pairs_hook=_ObjectPairs
)


#: Maximum depth of a rejected line that is still parsed for its job id: more than MAX_DEPTH, because it may have been
#: rejected for its depth.
_MAX_LENIENT_DEPTH: Final = 4 * MAX_DEPTH


def extract_job_id(line: bytes, *, yielding: bool = False) -> str | None:
    """Return the job id of a rejected *line*; None if it is not certain.

    Only a complete object that names its job exactly once counts: half a line, or two lines that were written into
    each other, have no job. *yielding* is the same as for ``parse_line``.
    """
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        text = line.decode(errors="surrogateescape")
        pairs = _parse_leniently(text) if yielding else _LENIENT_DECODER.decode(text)
        job_ids = [value for key, value in pairs if key == "job_id"] if isinstance(pairs, _ObjectPairs) else []
        if len(job_ids) != 1 or not isinstance(job_ids[0], str):
            return None
        job_ids[0].encode()
    except (ValueError, RecursionError):  # an encoding error is a ValueError too: a lone surrogate
        return None
    return job_ids[0]


def _parse_leniently(text: str) -> Any:
    return IncrementalJsonParser(
        text,
        parse_short=_parse_short_leniently,
        max_depth=_MAX_LENIENT_DEPTH,
        parse_int=_discard,
        parse_float=_discard,
        parse_constant=_discard,
        pairs=_ObjectPairs,
    ).parse()


def _parse_short_leniently(text: str, _: int) -> Any:
    try:
        return _LENIENT_DECODER.decode(text)
    except RecursionError as error:
        raise ValueError from error


# -- writing --------------------------------------------------------------------------------------

_ENCODER: Final = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
#: Line ends for some text readers, though not for JSON: Node's readline and Python's splitlines among them.
_LINE_ENDS: Final = (("\u2028", "\\u2028"), ("\u2029", "\\u2029"), ("\x85", "\\u0085"))


def format_line(value: dict[str, Any], *, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return *value* as a line with its line feed, or raise LineError; *default* converts types that JSON lacks."""
    encoder = _ENCODER if default is None else _create_encoder(default)
    try:
        text = encoder.encode(value)
        for character, escape in _LINE_ENDS:
            text = text.replace(character, escape)
        line = text.encode()
    except UnicodeEncodeError:
        raise LineError(_LONE_SURROGATE_MESSAGE, reason=LineErrorReason.LONE_SURROGATE) from None
    except RecursionError:
        raise LineError(f"nested deeper than {MAX_DEPTH}", reason=LineErrorReason.TOO_DEEP) from None
    except (TypeError, ValueError) as error:
        raise LineError(f"cannot be written as JSON: {str(error)[:200]}", reason=LineErrorReason.NOT_JSON) from error
    if len(line) > MAX_LINE_BYTES:
        raise LineError(
            f"a line of {len(line)} bytes exceeds the limit of {MAX_LINE_BYTES}", reason=LineErrorReason.TOO_LONG
        )
    _check_depth(line)
    if _NON_STRING_KEYS.search(line):
        _check_keys(value)
    return line + b"\n"


#: The JSON form of keys that are not strings; strings of the same form match too.
_NON_STRING_KEYS: Final = re.compile(rb'"(?:-?[0-9][-+.0-9e]*+|true|false|null)":')
#: Maximum number of characters of a key in an error message.
_MAX_SHOWN_KEY_CHARS: Final = 100


def _check_keys(value: Any) -> None:
    """Reject an object of which two keys have the same JSON form, such as 1 and "1", before the receiver does.

    The value was serialized already, so it is finite and not deep.
    """
    if isinstance(value, dict):
        json_keys = [_to_json_key(key) for key in value]
        if len(set(json_keys)) != len(json_keys):
            raise _repeated_key_error(find_repeated_key(json_keys))
        value = value.values()
    for inner in value:
        if isinstance(inner, (dict, list, tuple)):
            _check_keys(inner)


def _to_json_key(key: Any) -> str:
    """Return *key* in its JSON form."""
    return str.__str__(key) if isinstance(key, str) else _ENCODER.encode(key)


def _repeated_key_error(key: str) -> LineError:
    return LineError(
        f"two keys of one object are both written as {key[:_MAX_SHOWN_KEY_CHARS]!r}",
        reason=LineErrorReason.REPEATED_KEY,
    )


def parse_json(data: bytes) -> Any:
    """Return the value in *data*, the output of another JSON writer; raise LineError for a repeated key."""
    try:
        return _DECODER.decode(data.decode())
    except RepeatedKeyError as error:
        raise _repeated_key_error(error.key) from None


def _create_encoder(default: Callable[[Any], Any]) -> json.JSONEncoder:
    return json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=default)
