"""Parse JSON incrementally, so that other threads can run meanwhile.

The parser of the standard library holds the interpreter lock until it ends. For a line of 16 MiB from a third party
that is seconds in which an event loop does nothing else, in whatever thread the line is parsed. This parser holds the
lock for one string or number at a time, or for a chunk of a long array.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final

_BLANK: Final = re.compile(r"[ \t\n\r]*").match
_NUMBER: Final = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?").match
_LITERALS: Final = {"n": ("null", None), "t": ("true", True), "f": ("false", False)}
_CONSTANTS: Final = ("NaN", "Infinity", "-Infinity")
#: Characters of an array that are parsed in one call, and the number of values after which that is tried.
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
        """Return array values from *at* on and the position of the comma after them; None if no guessed comma fits.

        If the text up to a comma is a valid array once it is closed there, the comma separates values of the array:
        up to that position both parse the same.
        """
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
