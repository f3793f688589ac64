"""Columns: a batch about which nothing is odd, as far as can be seen from here, on its way into PostgreSQL.

The server splits one text for each column faster than it takes JSON apart, and it is written faster.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from ergon_framework.facts.model import Pair, contiguous
from ergon_framework.facts.stores.postgres_batch import Item, labels_written

#: Between two values: the character that separates units, which no text of a fact may hold.
_BETWEEN: Final = "\x1f"

_Column: TypeAlias = str | None


class Columns(NamedTuple):
    """What the function is given, and whose facts are where."""

    pairs: str
    #: In the order in which the function has them.
    texts: tuple[_Column, ...]
    #: Of each pair, the places that its facts have in the batch.
    places: Sequence[Sequence[int]]

    def offsets(self, lasts: Sequence[int]) -> list[int]:
        """The offset of each fact in the order of the batch; *lasts* are those before, of each pair."""
        if len(lasts) == 1:
            return list(range(lasts[0] + 1, lasts[0] + 1 + len(self.places[0])))
        found = {
            place: offset
            for last, places in zip(lasts, self.places, strict=True)
            for offset, place in enumerate(places, last + 1)
        }
        return [found[place] for place in range(len(found))]


def columns(items: Sequence[Item], seen: dict[Pair, int]) -> Columns | None:
    """*items* by columns; None if something is odd about them. *seen* has the highest known offset of each pair."""
    if len({item.identity for item in items}) < len(items) or any(item.fact.artifact is not None for item in items):
        return None
    parts = _by_pair(items)
    told = [_told(pair, seen.get(pair, 0), [items[place] for place in places]) for pair, places in parts]
    if None in told:
        return None
    ordered = items if len(parts) == 1 else [items[place] for _, places in parts for place in places]
    envelopes = [item.envelope for item in ordered]
    facts = [item.fact for item in ordered]
    texts = (
        _joined([envelope.message_id for envelope in envelopes]),
        _joined([item.digits for item in ordered]),
        _joined([str(envelope.produced_at_unix_ms) for envelope in envelopes]),
        _joined_if_any([envelope.correlation_id for envelope in envelopes]),
        _joined_if_any([envelope.causation_id for envelope in envelopes]),
        _joined_if_any([labels_written(envelope) for envelope in envelopes]),
        _joined([fact.subject for fact in facts]),
        _joined([fact.predicate for fact in facts]),
        _joined([fact.object_json for fact in facts]),
        _joined([str(size) for _, places in parts for size in accumulate(items[place].bytes for place in places)]),
        _joined_if_any([None if item.origin is None else str(item.origin.stored_at_unix_ms) for item in ordered]),
    )
    # Nothing that a model has let through holds the separator. Should it ever, values would stand in wrong rows.
    if any(text is not None and text.count(_BETWEEN) != len(items) - 1 for text in texts):
        return None
    pairs = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
    return Columns(pairs, texts, [places for _, places in parts])


def _by_pair(items: Sequence[Item]) -> list[tuple[Pair, Sequence[int]]]:
    """The places of the facts of each pair, in the order in which pairs are locked."""
    first = items[0].pair
    if all(item.pair == first for item in items):
        return [(first, range(len(items)))]
    found: dict[Pair, list[int]] = {}
    for place, item in enumerate(items):
        found.setdefault(item.pair, []).append(place)
    return sorted(found.items())


def _told(pair: Pair, seen: int, items: Sequence[Item]) -> list[str | int] | None:
    """What the function is told of a pair; None if its facts do not follow each other."""
    told: list[str | int] = [*pair, seen, len(items)]
    first = items[0].origin
    if first is None:
        return told
    arrived = [item.origin for item in items if item.origin is not None]
    if not contiguous(arrived, first.offset - 1) or any(each.epoch != first.epoch for each in arrived):
        return None
    return [*told, first.offset, first.epoch]


def _joined(values: Iterable[str]) -> str:
    return _BETWEEN.join(values)


def _joined_if_any(values: Sequence[str | None]) -> _Column:
    """Where there is none, nothing stands: no value is an empty text."""
    return _joined([value or "" for value in values]) if any(values) else None
