"""Parse the JSON objects of many facts together.

``identity`` parses and formats a single text with checks for every value. Here a faster parser with fewer checks reads
the texts, and what it may have missed is searched for in all texts together; if there is a trace of it, they are
parsed one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from pydantic_core import from_json

from ergon_framework.facts.identity import (
    MAX_ENCODER_CHARS,
    canonical_json,
    canonical_json_of_parsed,
    encode_json,
    is_plain_json,
    is_surely_canonical,
    is_within_depth,
    parse_strict_json,
)

#: The separator between texts: a character that no JSON text contains, and its encoding as a JSON value.
_SEPARATOR: Final = "\x1f"
_ENCODED_SEPARATOR: Final = ',"\\u001f",'
#: Finds integers that may be too long: maps every digit to a zero and every other byte to a blank.
_DIGITS_TO_ZEROS: Final = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_LONG_INTEGER: Final = b"0" * 16


class ParsedObjects(NamedTuple):
    """The parsed values of texts, in their order."""

    values: Sequence[Any]
    #: The same values in canonical form.
    canonical_texts: Sequence[str]


def parse_objects(texts: Sequence[str]) -> ParsedObjects:
    """Parse *texts*; raise InvalidFactError if one of them has no canonical form."""
    if sum(map(len, texts)) <= MAX_ENCODER_CHARS:
        return _parse_together(texts)
    parts = [_parse_together(part) for part in _split(texts)]
    return ParsedObjects(
        [value for part in parts for value in part.values], [text for part in parts for text in part.canonical_texts]
    )


def _split(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split *texts* into groups that fit into one encoder call; a longer text is a group by itself."""
    begin = size = 0
    for index, text in enumerate(texts):
        if index > begin and size + len(text) > MAX_ENCODER_CHARS:
            yield texts[begin:index]
            begin, size = index, 0
        size += len(text)
    yield texts[begin:]


def _parse_together(texts: Sequence[str]) -> ParsedObjects:
    parsed = _parse_all(texts) if max(map(len, texts), default=0) <= MAX_ENCODER_CHARS else None
    if parsed is None:
        values = [parse_strict_json(text) for text in texts]
        canonical_texts = [
            canonical_json_of_parsed(value, size=len(text)) for value, text in zip(values, texts, strict=True)
        ]
        parsed = ParsedObjects(values, canonical_texts)
    return parsed


def _parse_all(texts: Sequence[str]) -> ParsedObjects | None:
    """Parse texts that are certainly valid; return None if that is uncertain."""
    joined = _SEPARATOR.join(texts)
    # A quote escaped as \u0022 would not be counted below; all other escapes hide nothing.
    if "\\u" in joined:
        return None
    try:
        # Integers beyond 2^53 have at least this many digits.
        if _LONG_INTEGER in joined.encode().translate(_DIGITS_TO_ZEROS):
            return None
        values = [from_json(text) for text in texts]
        interleaved: list[Any] = [_SEPARATOR] * (2 * len(values) - 1)
        interleaved[::2] = values
        # The encoder rejects numbers that are not finite.
        output = encode_json(interleaved)
    except (ValueError, RecursionError):
        return None
    outputs = output[1:-1].split(_ENCODED_SEPARATOR)
    # Of a repeated key the parser keeps one, so quotes are missing; only the separators add quotes.
    if len(outputs) != len(values) or output.count('"') - 2 * (len(values) - 1) != joined.count('"'):
        return None
    if not (is_plain_json(output) and all(map(is_within_depth, outputs))):
        outputs = [
            item if is_surely_canonical(item) else canonical_json(value)
            for item, value in zip(outputs, values, strict=True)
        ]
    return ParsedObjects(values, outputs)
