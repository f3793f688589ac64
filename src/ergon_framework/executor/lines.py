"""Lines: one JSON value each, read and written under limits that hold in both directions.

Lines come from programs of strangers, so every limit is checked before the reader that it
protects: the length before decoding, the depth before the recursive reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ergon_framework.errors import ErgonError
from ergon_framework.executor.pieces import Pieces
from ergon_framework.strict_json import (
    RepeatedKeyError,
    find_repeated,
    parse_finite,
    refuse_constant,
    refuse_repeated_keys,
)

#: Longest line in bytes, without the line feed that ends it.
MAX_LINE: Final = 16 * 1024 * 1024
#: Deepest nesting of arrays and objects in a line, the message itself included.
MAX_DEPTH: Final = 64


class Reason(StrEnum):
    """Why a line cannot be read, or a value not be written."""

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
    """A line is not what the protocol allows; *reason* is for machines, and no value of the line is repeated.

    What cannot be written is told with the key that it has twice.
    """

    final = True
    code = "bad_line"

    def __init__(self, message: str, *, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


# -- taking a stream apart ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overlong:
    """A line that was too long to be kept; *size* is what came of it, in bytes."""

    size: int


class Splitter:
    """Makes lines of what comes through a pipe, and holds no more of it than one line may have.

    What is not ended by a line feed is no line: at the end of the stream it is forgotten.
    """

    def __init__(self, longest: int = MAX_LINE) -> None:
        self._longest = longest
        self._held = bytearray()
        self._dropped = 0

    def feed(self, data: bytes) -> Iterator[bytes | Overlong]:
        """Every line that is whole now; without its line feed."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._keep(data[start:end])
            yield self._taken()
            start = end + 1
        self._keep(data[start:])

    def _keep(self, data: bytes) -> None:
        if self._dropped or len(self._held) + len(data) > self._longest:
            self._dropped += len(self._held) + len(data)
            self._held.clear()
        else:
            self._held += data

    def _taken(self) -> bytes | Overlong:
        line = Overlong(self._dropped) if self._dropped else bytes(self._held)
        self._held.clear()
        self._dropped = 0
        return line


# -- reading --------------------------------------------------------------------------------------

# Every part is possessive and the closing quote optional: no input makes it look twice at the same place.
_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_HALF: Final = "half of a surrogate pair is no character"
_NO_BRACKET: Final = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")


_READER: Final = json.JSONDecoder(
    parse_float=parse_finite, parse_constant=refuse_constant, object_pairs_hook=refuse_repeated_keys
)


def read(line: bytes, *, yielding: bool = False) -> dict[str, Any]:
    """The object in *line*, or LineError; *yielding* takes longer, and lets other threads run meanwhile."""
    if len(line) > MAX_LINE:
        raise LineError(f"a line of {len(line)} bytes, and {MAX_LINE} are allowed", reason=Reason.TOO_LONG)
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise LineError(f"byte {error.start} is not UTF-8", reason=Reason.NOT_UTF8) from None
    found = _value(line, text, yielding=yielding)
    if not isinstance(found, dict):
        raise LineError(f"a {type(found).__name__} where an object belongs", reason=Reason.NOT_AN_OBJECT)
    if not yielding and _ESCAPED_SURROGATE.search(text) and not _encodable(found):
        raise LineError(_HALF, reason=Reason.LONE_SURROGATE)
    return found


def _value(line: bytes, text: str, *, yielding: bool) -> Any:
    try:
        if yielding:
            return _in_pieces(text)
        _check_depth(line)
        return _READER.decode(text)
    except RecursionError:
        raise LineError(f"nested deeper than {MAX_DEPTH}", reason=Reason.TOO_DEEP) from None
    except UnicodeEncodeError:
        raise LineError(_HALF, reason=Reason.LONE_SURROGATE) from None
    except RepeatedKeyError:
        # Two readers could take different ones of them, and so different jobs.
        raise LineError("an object names one key twice", reason=Reason.REPEATED_KEY) from None
    except json.JSONDecodeError as error:
        raise LineError(f"no JSON: {error.msg} at character {error.pos}", reason=Reason.NOT_JSON) from None
    except ValueError as error:
        # NaN, a number beyond a float, or more digits than Python reads.
        raise LineError(f"no JSON: {str(error)[:100]}", reason=Reason.NOT_JSON) from None


def _in_pieces(text: str) -> Any:
    surrogates = _ESCAPED_SURROGATE.search(text) is not None
    return Pieces(
        text,
        at_once=_at_once,
        deepest=MAX_DEPTH,
        parse_int=int,
        parse_float=parse_finite,
        parse_constant=refuse_constant,
        pairs=refuse_repeated_keys,
        check_text=str.encode if surrogates else None,
    ).read()


def _at_once(text: str, deepest: int) -> Any:
    try:
        _check_depth(text.encode(), deepest)
    except LineError as error:
        raise ValueError from error
    return _READER.decode(text)


def _check_depth(line: bytes, deepest: int = MAX_DEPTH) -> None:
    """Refuse what nests too deeply, at the speed of C: this is asked before a recursive reader is."""
    if line.count(b"[") + line.count(b"{") <= deepest:
        return
    left = _brackets(line)
    for _ in range(deepest):
        # Each round takes the innermost pairs away, so what is 64 deep is gone after 64 rounds.
        before, left = left, left.replace(b"[]", b"")
        if not left:
            return
        if len(left) == len(before):
            raise LineError("no JSON: brackets without their partners", reason=Reason.NOT_JSON)
    raise LineError(f"nested deeper than {MAX_DEPTH}", reason=Reason.TOO_DEEP)


def _brackets(line: bytes) -> bytes:
    """The brackets of *line* that are in no string, all of one kind."""
    return _STRINGS.sub(b"", line).translate(_ONE_KIND, _NO_BRACKET)


def _encodable(value: Any) -> bool:
    try:
        _WRITER.encode(value).encode()
    except UnicodeEncodeError:
        return False
    return True


class _Pairs(list[tuple[str, Any]]):
    """An object with all of its keys, repeated ones too."""


def _nothing(_: str) -> None:
    """A number that nobody asks for; so it may be one that could not be read."""


_LENIENT: Final = json.JSONDecoder(
    parse_int=_nothing, parse_float=_nothing, parse_constant=_nothing, object_pairs_hook=_Pairs
)


#: How deep a line may be that is refused, and still read for whose it is.
_DEEPEST: Final = 4 * MAX_DEPTH


def job_id_of(line: bytes, *, yielding: bool = False) -> str | None:
    """The job that *line* speaks of, where the line itself is refused; None if that is not certain.

    Only a whole object counts, and only one that names its job once: half a line, or two that were
    written into each other, belong to nobody. *yielding* as for ``read``.
    """
    if len(line) > MAX_LINE:
        return None
    try:
        text = line.decode(errors="surrogateescape")
        found = _leniently(text) if yielding else _LENIENT.decode(text)
        named = [value for key, value in found if key == "job_id"] if isinstance(found, _Pairs) else []
        if len(named) != 1 or not isinstance(named[0], str):
            return None
        named[0].encode()
    except (ValueError, RecursionError):  # an encoding error is a ValueError too: half of a surrogate pair
        return None
    return named[0]


def _leniently(text: str) -> Any:
    return Pieces(
        text,
        at_once=_lenient_at_once,
        deepest=_DEEPEST,
        parse_int=_nothing,
        parse_float=_nothing,
        parse_constant=_nothing,
        pairs=_Pairs,
    ).read()


def _lenient_at_once(text: str, _: int) -> Any:
    try:
        return _LENIENT.decode(text)
    except RecursionError as error:
        raise ValueError from error


# -- writing --------------------------------------------------------------------------------------

_WRITER: Final = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
#: Line ends to some readers of text, though none to JSON: Node's readline and Python's splitlines among them.
_LINE_ENDS: Final = (("\u2028", "\\u2028"), ("\u2029", "\\u2029"), ("\x85", "\\u0085"))


def write(value: dict[str, Any], *, default: Callable[[Any], Any] | None = None) -> bytes:
    """*value* as a line, line feed included, or LineError; *default* translates what JSON does not know."""
    writer = _WRITER if default is None else _writer(default)
    try:
        text = writer.encode(value)
        for character, escape in _LINE_ENDS:
            text = text.replace(character, escape)
        line = text.encode()
    except UnicodeEncodeError:
        raise LineError(_HALF, reason=Reason.LONE_SURROGATE) from None
    except RecursionError:
        raise LineError(f"nested deeper than {MAX_DEPTH}", reason=Reason.TOO_DEEP) from None
    except (TypeError, ValueError) as error:
        raise LineError(f"not to be written as JSON: {str(error)[:200]}", reason=Reason.NOT_JSON) from error
    if len(line) > MAX_LINE:
        raise LineError(f"{len(line)} bytes, and a line has at most {MAX_LINE}", reason=Reason.TOO_LONG)
    _check_depth(line)
    if _OTHER_KEYS.search(line):
        _check_keys(value)
    return line + b"\n"


#: What a key that is no text is written as; texts that look like it are met too.
_OTHER_KEYS: Final = re.compile(rb'"(?:-?[0-9][-+.0-9e]*+|true|false|null)":')
#: How much of a key is told.
_TOLD: Final = 100


def _check_keys(value: Any) -> None:
    """Refuse an object of which two keys are written alike, such as 1 and "1", before whoever reads it does.

    It was written, so it has an end and is not deep.
    """
    if isinstance(value, dict):
        spelled = [_spelled(key) for key in value]
        if len(set(spelled)) != len(spelled):
            raise _repeated(find_repeated(spelled))
        value = value.values()
    for inner in value:
        if isinstance(inner, (dict, list, tuple)):
            _check_keys(inner)


def _spelled(key: Any) -> str:
    """*key* as JSON writes it."""
    return str.__str__(key) if isinstance(key, str) else _WRITER.encode(key)


def _repeated(key: str) -> LineError:
    return LineError(f"two keys of one object are both written as {key[:_TOLD]!r}", reason=Reason.REPEATED_KEY)


def parsed(data: bytes) -> Any:
    """The value in *data*, which another writer of JSON has made; LineError for a key that it wrote twice."""
    try:
        return _READER.decode(data.decode())
    except RepeatedKeyError as error:
        raise _repeated(error.key) from None


def _writer(default: Callable[[Any], Any]) -> json.JSONEncoder:
    return json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=default)
