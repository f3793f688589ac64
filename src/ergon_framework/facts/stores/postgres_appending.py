"""Appending: one batch, one statement, one commit; the same for facts that are forwarded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from psycopg import errors

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.boundary import Appended
from ergon_framework.facts.model import FactConfirmation, Pair, Side
from ergon_framework.facts.stores.postgres_batch import Answer, Answers, Item, labels_written, written
from ergon_framework.facts.stores.postgres_columns import columns
from ergon_framework.facts.stores.postgres_statements import APPEND, APPEND_ONE, APPEND_PLAIN, GET
from ergon_framework.facts.stores.postgres_store import TRIES, Known, Store
from ergon_framework.schema.operation import Operation, Query, Text

_STALE: Final = "stale"
_BEHIND: Final = "behind"
#: How a statement is told yes and no.
_WORD: Final = {True: "true", False: "false"}

#: An answer for each, or one of the two words above.
_Found: TypeAlias = list[Any] | str


def _read(found: str) -> _Found:
    return found if found in (_STALE, _BEHIND) else list(json.loads(found))


def _seen(store: Store, items: Sequence[Item]) -> dict[Pair, int]:
    return {pair: store.seen(pair) for pair in {item.pair for item in items}}


class Appending:
    """Puts batches into one store, under its bounds."""

    def __init__(
        self,
        side: Side,
        *,
        max_facts: int | None = None,
        max_bytes: int | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._answers = Answers(side, max_facts=max_facts, max_bytes=max_bytes)
        self._bounds = tuple(None if most is None else str(most) for most in (max_facts, max_bytes))
        self._wall = wall

    def commit(self, store: Store, items: Sequence[Item]) -> Operation[list[Appended]]:
        """The answers for *items*, all appended or all forwarded, when what they confirm is durable."""
        for _ in range(TRIES):
            known = yield from store.opened()
            try:
                found = (yield from self._everyday(store, known, items)) or (yield from self._all(store, known, items))
            except (errors.UniqueViolation, errors.DeadlockDetected, errors.CheckViolation):
                # At the same moment somebody has sent one of these ids, or made the partition; nothing was done.
                continue
            if found == _STALE:
                yield from store.recognised()
            elif isinstance(found, str):
                yield from store.went_back(known)
            else:
                return self._told(store, known, items, found)
        raise ConnectionLost("the store became another one while facts were appended; append again")

    def _everyday(self, store: Store, known: Known, items: Sequence[Item]) -> Operation[_Found | None]:
        """A short way; None if it is not for these, and nothing was done.

        Behind a pooler that of a single fact would be planned anew for each.
        """
        if len(items) == 1 and items[0].is_plain and self._bounds == (None, None) and store.lines.direct:
            return (yield from self._one(store, known, items[0]))
        batch = columns(items, _seen(store, items))
        if batch is None:
            return None
        forwarding = _WORD[items[0].origin is not None]
        how = self._now(), *self._bounds, _WORD[not store.accept_loss]
        ((found,),) = yield Text(APPEND_PLAIN, (known.token, batch.pairs, forwarding, *how, *batch.texts))
        lasts = None if found is None else _read(found)
        return batch.offsets(lasts) if isinstance(lasts, list) else lasts

    def _one(self, store: Store, known: Known, item: Item) -> Operation[_Found | None]:
        ((found,),) = yield Text(
            APPEND_ONE,
            (
                known.token,
                *item.pair,
                str(store.seen(item.pair)),
                known.epoch,
                item.envelope.message_id,
                item.digits,
                self._now(),
                str(item.envelope.produced_at_unix_ms),
                item.fact.subject,
                item.fact.predicate,
                item.fact.object_json,
                str(item.bytes),
                _WORD[not store.accept_loss],
                item.envelope.correlation_id,
                item.envelope.causation_id,
                labels_written(item.envelope),
            ),
        )
        return None if found is None else [int(found)]

    def _all(self, store: Store, known: Known, items: Sequence[Item]) -> Operation[_Found]:
        pairs, facts = written(items, _seen(store, items))
        careful = len({item.identity for item in items}) < len(items)
        how = _WORD[not store.accept_loss], _WORD[careful]
        forwarding = _WORD[items[0].origin is not None]
        ((found,),) = yield Text(APPEND, (known.token, pairs, facts, forwarding, self._now(), *self._bounds, *how))
        return _read(found)

    def _now(self) -> str:
        return str(int(self._wall() * 1000))

    def _told(self, store: Store, known: Known, items: Sequence[Item], answers: Sequence[Answer]) -> list[Appended]:
        last = {item.pair: answer for item, answer in zip(items, answers, strict=True) if isinstance(answer, int)}
        for pair, offset in last.items():
            store.see(pair, offset)
        told = self._answers.told
        return [told(item, answer, known.epoch) for item, answer in zip(items, answers, strict=True)]

    def get(self, store: Store, from_zone: str, message_id: str) -> Operation[FactConfirmation | None]:
        """What was confirmed for an id."""
        yield from store.opened()
        found = yield Query(GET, {"zone": from_zone, "id": message_id})
        if not found:
            return None
        offset, epoch, digest, forwarded = found[0]
        return self._answers.confirmation(message_id, offset, epoch, digest, forwarded=forwarded)
