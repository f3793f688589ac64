"""FactColumns: many facts as columns, as they arrive over the network or from a database, and their conversion.

Most input is valid, and checking a whole column is faster than checking each value. If a column is not certainly
valid, the model builds the facts one by one and reports the error of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ergon_framework.facts.boundary import NewFact
from ergon_framework.facts.errors import InvalidFactError
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
from ergon_framework.facts.texts import parse_objects

#: Text that the object of a fact contains if it refers to an artifact.
_REFERENCE_MARK: Final = '"bucket"'


class FactColumns(NamedTuple):
    """The n-th value of each column belongs to the n-th fact; types are correct, values are not checked yet."""

    message_ids: Sequence[str]
    from_zones: Sequence[str]
    to_zones: Sequence[str]
    produced: Sequence[int]
    correlations: Sequence[str | None]
    causations: Sequence[str | None]
    subjects: Sequence[str]
    predicates: Sequence[str]
    objects: Sequence[str]
    #: By the index of the fact; most facts have none.
    labels: Mapping[int, Mapping[str, str]]


def columns_to_facts(columns: FactColumns) -> Sequence[NewFact]:
    """Return the facts; raise the error of the first invalid one."""
    return _build_all(columns) or [_build_one(columns, index) for index in range(len(columns.message_ids))]


def columns_to_results(columns: FactColumns) -> Sequence[NewFact | InvalidFactError]:
    """Return each fact or its error; an invalid fact does not affect the others."""
    try:
        return columns_to_facts(columns)
    except InvalidFactError:
        return [_build_or_error(columns, index) for index in range(len(columns.message_ids))]


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
        produced_at_unix_ms=columns.produced[index],
        correlation_id=columns.correlations[index],
        causation_id=columns.causations[index],
        labels=columns.labels.get(index, {}),
    )
    fact = Fact(
        subject=columns.subjects[index], predicate=columns.predicates[index], object_json=columns.objects[index]
    )
    return envelope, fact


def _build_all(columns: FactColumns) -> list[NewFact] | None:
    """Return the facts if all are certainly valid; else None, or raise one of their errors."""
    if not (columns.message_ids and _are_valid(columns)):
        return None
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
    make = Envelope._from_checked  # noqa: SLF001 - as above
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
            columns.produced,
            columns.correlations,
            columns.causations,
            strict=True,
        )
    ]


def _are_valid(columns: FactColumns) -> bool:
    """Return whether all texts except the objects, and all times, satisfy the model."""
    for name, zones in (("from_zone", columns.from_zones), ("to_zone", columns.to_zones)):
        for zone in set(zones):
            check_zone(name, zone)
    ids = "".join(columns.message_ids)
    return (
        _are_printable(columns.message_ids, MAX_MESSAGE_ID_CHARS)
        and ids.isascii()
        and " " not in ids
        and min(columns.produced) >= 0
        and max(columns.produced) <= MAX_JSON_INTEGER
        and _are_printable(columns.subjects, MAX_SUBJECT_CHARS)
        and _are_printable(columns.predicates, MAX_PREDICATE_CHARS)
        and _are_printable([each for each in columns.correlations if each is not None], MAX_CORRELATION_CHARS)
        and _are_printable([each for each in columns.causations if each is not None], MAX_CORRELATION_CHARS)
        # A character has at most four bytes.
        and 4 * max(map(len, columns.objects)) <= MAX_OBJECT_BYTES
    )


def _are_printable(texts: Sequence[str], max_chars: int) -> bool:
    return not texts or (all(texts) and max(map(len, texts)) <= max_chars and "".join(texts).isprintable())
