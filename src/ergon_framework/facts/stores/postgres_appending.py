"""Appending: one batch, one statement, one commit; the same for facts that are forwarded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Final

from psycopg import errors

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.boundary import Appended
from ergon_framework.facts.model import FactConfirmation, Pair, Side
from ergon_framework.facts.stores.postgres_batch import Answer, Answers, Item, written
from ergon_framework.facts.stores.postgres_statements import APPEND, APPEND_ONE, GET
from ergon_framework.facts.stores.postgres_store import TRIES, Known, Store
from ergon_framework.schema.operation import Operation, Query, Text

_STALE: Final = "stale"
_BEHIND: Final = "behind"
#: How a statement is told yes and no.
_WORD: Final = {True: "true", False: "false"}


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
                found = (yield from self._one(store, known, items)) or (yield from self._all(store, known, items))
            except (errors.UniqueViolation, errors.DeadlockDetected, errors.CheckViolation):
                # At the same moment somebody has sent one of these ids, or made the partition; nothing was done.
                continue
            if found == _STALE:
                yield from store.recognised()
            elif found == _BEHIND:
                yield from store.went_back(known)
            else:
                return self._told(store, known, items, json.loads(found))
        raise ConnectionLost("the store became another one while facts were appended; append again")

    def _one(self, store: Store, known: Known, items: Sequence[Item]) -> Operation[str | None]:
        """The short way; None if it is not for these. Behind a pooler it would be planned anew for each."""
        item = items[0]
        if len(items) > 1 or not item.is_plain or self._bounds != (None, None) or not store.lines.direct:
            return None
        ((found,),) = yield Text(
            APPEND_ONE,
            (
                known.token,
                *item.pair,
                str(store.seen(item.pair)),
                known.epoch,
                item.envelope.message_id,
                item.columns["digest"],
                self._now(),
                str(item.envelope.produced_at_unix_ms),
                item.fact.subject,
                item.fact.predicate,
                item.fact.object_json,
                str(item.bytes),
                _WORD[not store.accept_loss],
                item.envelope.correlation_id,
                item.envelope.causation_id,
                item.columns.get("labels"),
            ),
        )
        return None if found is None else f"[{found}]"

    def _all(self, store: Store, known: Known, items: Sequence[Item]) -> Operation[str]:
        pairs, facts = written(items, {pair: store.seen(pair) for pair in {item.pair for item in items}})
        careful = len({item.identity for item in items}) < len(items)
        how = _WORD[not store.accept_loss], _WORD[careful]
        forwarding = _WORD[items[0].origin is not None]
        ((found,),) = yield Text(APPEND, (known.token, pairs, facts, forwarding, self._now(), *self._bounds, *how))
        answer: str = found
        return answer

    def _now(self) -> str:
        return str(int(self._wall() * 1000))

    def _told(self, store: Store, known: Known, items: Sequence[Item], answers: Sequence[Answer]) -> list[Appended]:
        last: dict[Pair, int] = {}
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, int):
                last[item.pair] = answer
        for pair, offset in last.items():
            store.see(pair, offset)
        return [self._answers.told(item, answer, known.epoch) for item, answer in zip(items, answers, strict=True)]

    def get(self, store: Store, from_zone: str, message_id: str) -> Operation[FactConfirmation | None]:
        """What was confirmed for an id."""
        yield from store.opened()
        found = yield Query(GET, {"zone": from_zone, "id": message_id})
        if not found:
            return None
        offset, epoch, digest, forwarded = found[0]
        return self._answers.confirmation(message_id, offset, epoch, digest, forwarded=forwarded)
