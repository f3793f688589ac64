"""Pieces: JSON read value by value, so that other threads can run meanwhile.

The reader of the standard library holds the interpreter until it is through. For a line of 16 MiB
from a stranger that is seconds, in which an event loop does nothing else, in whatever thread the
line is read. This one holds it for one text or number at a time, or for a piece of a long array.
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
#: How much of an array is read at once, in characters, and after how many values that is tried.
_PIECE: Final = 32_768
_WAIT: Final = 256


class Pieces:
    """One text of JSON; the hooks are those of ``json.JSONDecoder``, and one that sees every text in it.

    *at_once* reads a short text that may nest so deeply, or raises ValueError. RecursionError for what
    is nested deeper than *deepest*.
    """

    def __init__(
        self,
        text: str,
        *,
        at_once: Callable[[str, int], Any],
        deepest: int,
        parse_int: Callable[[str], Any],
        parse_float: Callable[[str], Any],
        parse_constant: Callable[[str], Any],
        pairs: Callable[[list[tuple[str, Any]]], Any],
        check_text: Callable[[str], object] | None = None,
    ) -> None:
        self._text = text
        self._at_once = at_once
        self._deepest = deepest
        self._int = parse_int
        self._float = parse_float
        self._constant = parse_constant
        self._pairs = pairs
        self._check_text = check_text

    def read(self) -> Any:
        """The value; JSONDecodeError for what is none, or has something behind it."""
        found, end = self._value(self._blank(0), 0)
        end = self._blank(end)
        if end != len(self._text):
            raise JSONDecodeError("Extra data", self._text, end)
        return found

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        first = self._text[at : at + 1]
        if first == '"':
            return self._string(at + 1)
        if first == "[":
            return self._array(at + 1, depth + 1)
        if first == "{":
            return self._object(at + 1, depth + 1)
        literal, value = _LITERALS.get(first, ("", None))
        if literal and self._text.startswith(literal, at):
            return value, at + len(literal)
        return self._number(at)

    def _string(self, at: int) -> tuple[str, int]:
        found, end = scanstring(self._text, at, True)  # noqa: FBT003 - its own signature
        if self._check_text is not None:
            self._check_text(found)
        return found, end

    def _number(self, at: int) -> tuple[Any, int]:
        match = _NUMBER(self._text, at)
        if match is not None:
            _, fraction, exponent = match.groups()
            parse = self._int if fraction is None and exponent is None else self._float
            return parse(match.group()), match.end()
        for constant in _CONSTANTS:
            if self._text.startswith(constant, at):
                return self._constant(constant), at + len(constant)
        raise JSONDecodeError("Expecting value", self._text, at)

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        self._check(depth)
        found: list[Any] = []
        at = self._blank(at)
        if self._text[at : at + 1] == "]":
            return found, at + 1
        wait, since = _WAIT, 0
        while True:
            run = self._run(at, depth) if since >= wait else None
            if run is not None:
                values, at = run
                found += values
            else:
                # What is no run of short values is looked at again, and more seldom each time.
                wait, since = (wait, since + 1) if since < wait else (2 * wait, 0)
                value, at = self._value(at, depth)
                found.append(value)
            at, last = self._next(at, "]")
            if last:
                return found, at

    def _run(self, at: int, depth: int) -> tuple[list[Any], int] | None:
        """Values of an array from *at* on, and where the comma behind them is; None if no comma was guessed right.

        What is a whole array once it is closed at a comma has that comma between its values: up to
        there both are read alike.
        """
        if self._check_text is not None:
            return None
        for mark in ("},", "],", ","):
            comma = self._text.rfind(mark, at, at + _PIECE) + len(mark) - 1
            if comma > at:
                with suppress(ValueError):
                    values = self._at_once(f"[{self._text[at:comma]}]", self._deepest - depth + 1)
                    if values:
                        return values, comma
        return None

    def _object(self, at: int, depth: int) -> tuple[Any, int]:
        self._check(depth)
        found: list[tuple[str, Any]] = []
        at = self._blank(at)
        if self._text[at : at + 1] == "}":
            return self._pairs(found), at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            key, at = self._string(at + 1)
            at = self._blank(at)
            if self._text[at : at + 1] != ":":
                raise JSONDecodeError("Expecting ':' delimiter", self._text, at)
            value, at = self._value(self._blank(at + 1), depth)
            found.append((key, value))
            at, last = self._next(at, "}")
            if last:
                return self._pairs(found), at

    def _next(self, at: int, close: str) -> tuple[int, bool]:
        """Where to go on, and whether *close* was there."""
        at = self._blank(at)
        sign = self._text[at : at + 1]
        if sign == close:
            return at + 1, True
        if sign != ",":
            raise JSONDecodeError("Expecting ',' delimiter", self._text, at)
        return self._blank(at + 1), False

    def _blank(self, at: int) -> int:
        text = self._text
        # Nearly always there is none, and one look is cheaper than a match.
        if text[at : at + 1] > " ":
            return at
        match = _BLANK(text, at)
        return at if match is None else match.end()

    def _check(self, depth: int) -> None:
        if depth > self._deepest:
            raise RecursionError
