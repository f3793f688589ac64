"""Table: many facts by columns, as they cross a line or come from a database, and the facts that these are.

Most of what comes is sound, and of a whole column this is seen sooner than of one value after the other. Where a column
is not sound for certain, the model makes the facts one by one, and says of each what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ergon_framework.facts.boundary import Appending
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import (
    CORRELATION,
    MESSAGE_ID,
    OBJECT_JSON,
    PREDICATE,
    SIZE,
    SUBJECT,
    Envelope,
    Fact,
    check_zone,
    reference,
)
from ergon_framework.facts.texts import understood

#: What the object of a fact holds that refers to an artifact.
_REFERRING: Final = '"bucket"'


class Table(NamedTuple):
    """The n-th value of each belongs to the n-th fact; texts and whole numbers, and nothing is known of them yet."""

    message_ids: Sequence[str]
    from_zones: Sequence[str]
    to_zones: Sequence[str]
    produced: Sequence[int]
    correlations: Sequence[str | None]
    causations: Sequence[str | None]
    subjects: Sequence[str]
    predicates: Sequence[str]
    objects: Sequence[str]
    #: By the place of the fact; of most there are none.
    labels: Mapping[int, Mapping[str, str]]


def read(table: Table) -> Sequence[Appending]:
    """The facts; the first that is malformed is raised."""
    return _at_once(table) or [_one(table, place) for place in range(len(table.message_ids))]


def read_each(table: Table) -> Sequence[Appending | InvalidFactError]:
    """The facts; one that is malformed is an error of its own, and its neighbours are not."""
    try:
        return read(table)
    except InvalidFactError:
        return [_or_error(table, place) for place in range(len(table.message_ids))]


def _or_error(table: Table, place: int) -> Appending | InvalidFactError:
    try:
        return _one(table, place)
    except InvalidFactError as error:
        return error


def _one(table: Table, place: int) -> Appending:
    envelope = Envelope(
        message_id=table.message_ids[place],
        from_zone=table.from_zones[place],
        to_zone=table.to_zones[place],
        produced_at_unix_ms=table.produced[place],
        correlation_id=table.correlations[place],
        causation_id=table.causations[place],
        labels=table.labels.get(place, {}),
    )
    fact = Fact(subject=table.subjects[place], predicate=table.predicates[place], object_json=table.objects[place])
    return envelope, fact


def _at_once(table: Table) -> list[Appending] | None:
    """The facts, if all of them are sound for certain; else None, or one of what is wrong with them is raised."""
    if not (table.message_ids and _are_sound(table)):
        return None
    values, written = understood(table.objects)
    named = [reference(value) if _REFERRING in text else None for value, text in zip(values, written, strict=True)]
    make = Fact._sound  # noqa: SLF001 - nobody else may skip what is checked here
    facts = map(make, table.subjects, table.predicates, table.objects, written, named)
    return list(zip(_envelopes(table), facts, strict=True))


def _envelopes(table: Table) -> list[Envelope]:
    find = table.labels.get
    make = Envelope._sound  # noqa: SLF001 - as above
    return [
        make(
            message_id=message_id,
            from_zone=from_zone,
            to_zone=to_zone,
            produced_at_unix_ms=produced,
            correlation_id=correlation,
            causation_id=causation,
            labels=find(place),
        )
        for place, message_id, from_zone, to_zone, produced, correlation, causation in zip(
            range(len(table.message_ids)),
            table.message_ids,
            table.from_zones,
            table.to_zones,
            table.produced,
            table.correlations,
            table.causations,
            strict=True,
        )
    ]


def _are_sound(table: Table) -> bool:
    """Whether all texts but the objects, and all moments, are as the model wants them."""
    for name, zones in (("from_zone", table.from_zones), ("to_zone", table.to_zones)):
        for zone in set(zones):
            check_zone(name, zone)
    ids = "".join(table.message_ids)
    return (
        _are_printable(table.message_ids, MESSAGE_ID)
        and ids.isascii()
        and " " not in ids
        and min(table.produced) >= 0
        and max(table.produced) <= SIZE
        and _are_printable(table.subjects, SUBJECT)
        and _are_printable(table.predicates, PREDICATE)
        and _are_printable([each for each in table.correlations if each is not None], CORRELATION)
        and _are_printable([each for each in table.causations if each is not None], CORRELATION)
        # A character has at most four bytes.
        and 4 * max(map(len, table.objects)) <= OBJECT_JSON
    )


def _are_printable(texts: Sequence[str], longest: int) -> bool:
    return not texts or (all(texts) and max(map(len, texts)) <= longest and "".join(texts).isprintable())
