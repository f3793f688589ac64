"""FactColumns: many facts as columns, as they arrive over the network or from a database, and their conversion.

Most input is valid, and checking a whole column is faster than checking each value. If a check of a column fails, the
facts are built one by one, so that each has its own error.

The object of a fact is JSON text. It is stored as it arrived, and digested in canonical form (RFC 8785: sorted keys,
one format for each number). ``identity`` parses and formats one text and checks every value. This module parses many
texts with a faster parser that accepts duplicate keys and integers beyond 2^53, and then searches all texts together
for both; if one may contain either, all texts are parsed by ``identity``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic_core import from_json

from ergon_framework.facts.boundary import NewFact
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.identity import (
    MAX_ENCODER_CHARS,
    canonical_json,
    canonical_json_of_parsed,
    encode_json,
    is_known_canonical,
    is_plain_json,
    is_within_depth,
    parse_strict_json,
)
from ergon_framework.facts.model import (
    MAX_CORRELATION_CHARS,
    MAX_JSON_INTEGER,
    MAX_MESSAGE_ID_CHARS,
    MAX_OBJECT_BYTES,
    MAX_PREDICATE_CHARS,
    MAX_SUBJECT_CHARS,
    Envelope,
    Fact,
    check_zone,
    parse_reference,
)

#: The separator between texts: a character that no JSON text contains, and its encoding as a JSON value.
_SEPARATOR: Final = "\x1f"
_ENCODED_SEPARATOR: Final = ',"\\u001f",'
#: Finds integers that may be too long: maps every digit to a zero and every other byte to a blank.
_DIGITS_TO_ZEROS: Final = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_LONG_INTEGER: Final = b"0" * 16


class ParsedObjects(NamedTuple):
    """The parsed values of JSON texts, in the order of the texts."""

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
    """Parse *texts* with the fast parser; return None if one may be invalid or may differ from the strict parser."""
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
    # The parser keeps one of several duplicate keys, so quotes disappear; only the separators, two quotes each, add
    # some. A text that contains an encoded separator changes the number of outputs.
    if len(outputs) != len(values) or output.count('"') - 2 * (len(values) - 1) != joined.count('"'):
        return None
    if not (is_plain_json(output) and all(map(is_within_depth, outputs))):
        outputs = [
            item if is_known_canonical(item) else canonical_json(value)
            for item, value in zip(outputs, values, strict=True)
        ]
    return ParsedObjects(values, outputs)


# -- columns ----------------------------------------------------------------------------------------

#: Text that the object of a fact contains if it refers to an artifact.
_REFERENCE_MARK: Final = '"bucket"'


class FactColumns(NamedTuple):
    """The n-th value of each column belongs to the n-th fact; types are correct, values are not checked yet.

    The columns are the fields of ``Envelope`` (who sent the fact, where and when) and of ``Fact`` (the statement).
    """

    message_ids: Sequence[str]
    from_zones: Sequence[str]
    to_zones: Sequence[str]
    produced_at_unix_ms: Sequence[int]
    correlations: Sequence[str | None]
    causations: Sequence[str | None]
    subjects: Sequence[str]
    predicates: Sequence[str]
    objects: Sequence[str]
    #: By the index of the fact; most facts have none.
    labels: Mapping[int, Mapping[str, str]]


def columns_to_facts(columns: FactColumns) -> Sequence[NewFact]:
    """Return the facts; raise the error of the first invalid one."""
    return _build_together(columns) or [_build_one(columns, index) for index in range(len(columns.message_ids))]


def columns_to_results(columns: FactColumns) -> Sequence[NewFact | InvalidFactError]:
    """Return each fact or its error; an invalid fact does not affect the others."""
    return _build_together(columns) or [_build_or_error(columns, index) for index in range(len(columns.message_ids))]


def _build_or_error(columns: FactColumns, index: int) -> NewFact | InvalidFactError:
    try:
        return _build_one(columns, index)
    except InvalidFactError as error:
        return error


def _build_one(columns: FactColumns, index: int) -> NewFact:
    envelope = Envelope(
        message_id=columns.message_ids[index],
        from_zone=columns.from_zones[index],
        to_zone=columns.to_zones[index],
        produced_at_unix_ms=columns.produced_at_unix_ms[index],
        correlation_id=columns.correlations[index],
        causation_id=columns.causations[index],
        labels=columns.labels.get(index, {}),
    )
    fact = Fact(
        subject=columns.subjects[index], predicate=columns.predicates[index], object_json=columns.objects[index]
    )
    return envelope, fact


def _build_together(columns: FactColumns) -> list[NewFact] | None:
    """Return the facts as pairs of envelope and fact; None if there are none, or if one may be invalid."""
    if not columns.message_ids:
        return None
    try:
        return _build_checked(columns) if _are_valid(columns) else None
    except InvalidFactError:
        # Columns are checked one after the other, so this may not be the error of the first invalid fact.
        return None


def _build_checked(columns: FactColumns) -> list[NewFact]:
    """Build the facts of checked columns; raise InvalidFactError if an object or a label is invalid."""
    values, canonical_texts = parse_objects(columns.objects)
    references = [
        parse_reference(value) if _REFERENCE_MARK in text else None
        for value, text in zip(values, canonical_texts, strict=True)
    ]
    make = Fact._from_checked  # noqa: SLF001 - only this module may skip the checks that it has made itself
    facts = map(make, columns.subjects, columns.predicates, columns.objects, canonical_texts, references)
    return list(zip(_build_envelopes(columns), facts, strict=True))


def _build_envelopes(columns: FactColumns) -> list[Envelope]:
    get_labels = columns.labels.get
    # Checks only the labels, which few facts have; _are_valid has checked the other columns.
    make = Envelope._from_checked  # noqa: SLF001 - as in _build_checked
    return [
        make(
            message_id=message_id,
            from_zone=from_zone,
            to_zone=to_zone,
            produced_at_unix_ms=produced,
            correlation_id=correlation,
            causation_id=causation,
            labels=get_labels(index),
        )
        for index, message_id, from_zone, to_zone, produced, correlation, causation in zip(
            range(len(columns.message_ids)),
            columns.message_ids,
            columns.from_zones,
            columns.to_zones,
            columns.produced_at_unix_ms,
            columns.correlations,
            columns.causations,
            strict=True,
        )
    ]


def _are_valid(columns: FactColumns) -> bool:
    """Check all columns but objects and labels; return False, or raise InvalidFactError, if one is invalid."""
    for name, zones in (("from_zone", columns.from_zones), ("to_zone", columns.to_zones)):
        for zone in set(zones):
            check_zone(name, zone)
    ids = "".join(columns.message_ids)
    return (
        _are_printable(columns.message_ids, MAX_MESSAGE_ID_CHARS)
        and ids.isascii()
        and " " not in ids
        and min(columns.produced_at_unix_ms) >= 0
        and max(columns.produced_at_unix_ms) <= MAX_JSON_INTEGER
        and _are_printable(columns.subjects, MAX_SUBJECT_CHARS)
        and _are_printable(columns.predicates, MAX_PREDICATE_CHARS)
        and _are_printable([each for each in columns.correlations if each is not None], MAX_CORRELATION_CHARS)
        and _are_printable([each for each in columns.causations if each is not None], MAX_CORRELATION_CHARS)
        # A character has at most four bytes.
        and 4 * max(map(len, columns.objects)) <= MAX_OBJECT_BYTES
    )


def _are_printable(texts: Sequence[str], max_chars: int) -> bool:
    return not texts or (all(texts) and max(map(len, texts)) <= max_chars and "".join(texts).isprintable())
