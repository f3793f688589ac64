"""Texts: the JSON of many facts, understood at once.

One text after the other, ``identity`` reads and writes them with rules that are asked for every value. Here a faster
reader that knows fewer rules reads them, and what may have slipped past it is looked for in all texts together; where
there is a trace of it, they are read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from pydantic_core import from_json

from ergon_framework.facts.identity import (
    MAX_AT_ONCE,
    canonical,
    canonical_parsed,
    encoded,
    is_beyond_doubt,
    is_common,
    is_shallow,
    parse,
)

#: Between two texts: a character that stands in no JSON text, and how it is written as a value of its own.
_BETWEEN: Final = "\x1f"
_WRITTEN: Final = ',"\\u001f",'
#: For finding numbers that may be too long: every digit becomes a nought, and everything else a blank.
_NOUGHTS: Final = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_LONG: Final = b"0" * 16


class Understood(NamedTuple):
    """What texts mean, in their order."""

    values: Sequence[Any]
    #: In canonical form.
    written: Sequence[str]


def understood(texts: Sequence[str]) -> Understood:
    """What *texts* mean; if one of them has no canonical form, it is refused."""
    if sum(map(len, texts)) <= MAX_AT_ONCE:
        return _together(texts)
    parts = [_together(part) for part in _split(texts)]
    return Understood(
        [value for part in parts for value in part.values], [written for part in parts for written in part.written]
    )


def _split(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split *texts* into parts that are written at once; a text that is longer than that is a part of its own."""
    begin = size = 0
    for place, text in enumerate(texts):
        if place > begin and size + len(text) > MAX_AT_ONCE:
            yield texts[begin:place]
            begin, size = place, 0
        size += len(text)
    yield texts[begin:]


def _together(texts: Sequence[str]) -> Understood:
    found = _at_once(texts) if max(map(len, texts), default=0) <= MAX_AT_ONCE else None
    if found is None:
        values = [parse(text) for text in texts]
        written = [canonical_parsed(value, size=len(text)) for value, text in zip(values, texts, strict=True)]
        found = Understood(values, written)
    return found


def _at_once(texts: Sequence[str]) -> Understood | None:
    """The same for texts about which nothing is in doubt, else None."""
    joined = _BETWEEN.join(texts)
    # A quote that is written as its number would not be counted below; all other escapes hide nothing.
    if "\\u" in joined:
        return None
    try:
        # Whole numbers beyond 2^53 have so many digits.
        if _LONG in joined.encode().translate(_NOUGHTS):
            return None
        values = [from_json(text) for text in texts]
        between: list[Any] = [_BETWEEN] * (2 * len(values) - 1)
        between[::2] = values
        # What is no finite number is refused here.
        written = encoded(between)
    except (ValueError, RecursionError):
        return None
    pieces = written[1:-1].split(_WRITTEN)
    # Of a key that stands twice the reader keeps one, and its quotes are missing; nothing adds any but what is between.
    if len(pieces) != len(values) or written.count('"') - 2 * (len(values) - 1) != joined.count('"'):
        return None
    if not (is_common(written) and all(map(is_shallow, pieces))):
        pieces = [
            piece if is_beyond_doubt(piece) else canonical(value) for piece, value in zip(pieces, values, strict=True)
        ]
    return Understood(values, pieces)
