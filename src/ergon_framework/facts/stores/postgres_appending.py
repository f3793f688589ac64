"""Append or forward a batch of facts with one statement and one commit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from psycopg import errors

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.boundary import AppendResult
from ergon_framework.facts.model import BoundarySide, FactConfirmation, ZonePair
from ergon_framework.facts.stores.postgres_batch import Answer, AnswerReader, FactRow, labels_as_json, rows_as_json
from ergon_framework.facts.stores.postgres_columns import to_columns
from ergon_framework.facts.stores.postgres_statements import APPEND, APPEND_ONE, APPEND_PLAIN, GET_CONFIRMATION
from ergon_framework.facts.stores.postgres_store import MAX_ATTEMPTS, DatabaseSession, StoreIdentity
from ergon_framework.schema.operation import Operation, PreparedTextQuery, Query

_STALE_CODE: Final = "stale"
_BEHIND_CODE: Final = "behind"
#: Booleans as the statements take them.
_BOOLEAN_TEXT: Final = {True: "true", False: "false"}

#: One answer per fact, or one of the two codes above for the whole batch.
_BatchAnswer: TypeAlias = list[Any] | str


def _parse_batch_answer(text: str) -> _BatchAnswer:
    return text if text in (_STALE_CODE, _BEHIND_CODE) else list(json.loads(text))


def _get_highest_offsets(session: DatabaseSession, items: Sequence[FactRow]) -> dict[ZonePair, int]:
    return {pair: session.highest_offset(pair) for pair in {item.pair for item in items}}


class FactAppender:
    """Appends batches to one store, within its bounds."""

    def __init__(
        self,
        side: BoundarySide,
        *,
        max_facts: int | None = None,
        max_bytes: int | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._answer_reader = AnswerReader(side, max_facts=max_facts, max_bytes=max_bytes)
        self._bounds = tuple(None if bound is None else str(bound) for bound in (max_facts, max_bytes))
        self._wall = wall

    def commit(self, session: DatabaseSession, items: Sequence[FactRow]) -> Operation[list[AppendResult]]:
        """Return the results for *items*, all appended or all forwarded, once what they confirm is durable."""
        for _ in range(MAX_ATTEMPTS):
            identity = yield from session.ensure_open()
            try:
                answer = (yield from self._append_fast(session, identity, items)) or (
                    yield from self._append_general(session, identity, items)
                )
            except (errors.UniqueViolation, errors.DeadlockDetected, errors.CheckViolation):
                # A concurrent call has sent one of these ids, or created the partition; nothing was done, so retry.
                continue
            if answer == _STALE_CODE:
                yield from session.verify()
            elif isinstance(answer, str):
                yield from session.has_rolled_back(identity)
            else:
                return self._to_results(session, identity, items, answer)
        raise ConnectionLostError("the store became another one while facts were appended; append again")

    def _append_fast(
        self, session: DatabaseSession, identity: StoreIdentity, items: Sequence[FactRow]
    ) -> Operation[_BatchAnswer | None]:
        """Append with a fast statement; return None if the batch does not qualify, and nothing was done.

        Behind a pooler the statement for a single fact would be planned again for each call.
        """
        if len(items) == 1 and items[0].is_plain and self._bounds == (None, None) and session.pool.is_direct:
            return (yield from self._append_one(session, identity, items[0]))
        batch = to_columns(items, _get_highest_offsets(session, items))
        if batch is None:
            return None
        forwarded = _BOOLEAN_TEXT[items[0].origin is not None]
        options = self._now_ms_text(), *self._bounds, _BOOLEAN_TEXT[not session.accept_loss]
        ((text,),) = yield PreparedTextQuery(
            APPEND_PLAIN, (identity.token, batch.pairs, forwarded, *options, *batch.texts)
        )
        last_offsets = None if text is None else _parse_batch_answer(text)
        return batch.to_offsets(last_offsets) if isinstance(last_offsets, list) else last_offsets

    def _append_one(
        self, session: DatabaseSession, identity: StoreIdentity, item: FactRow
    ) -> Operation[_BatchAnswer | None]:
        ((offset,),) = yield PreparedTextQuery(
            APPEND_ONE,
            (
                identity.token,
                *item.pair,
                str(session.highest_offset(item.pair)),
                identity.epoch,
                item.envelope.message_id,
                item.digits,
                self._now_ms_text(),
                str(item.envelope.produced_at_unix_ms),
                item.fact.subject,
                item.fact.predicate,
                item.fact.object_json,
                str(item.bytes),
                _BOOLEAN_TEXT[not session.accept_loss],
                item.envelope.correlation_id,
                item.envelope.causation_id,
                labels_as_json(item.envelope),
            ),
        )
        return None if offset is None else [int(offset)]

    def _append_general(
        self, session: DatabaseSession, identity: StoreIdentity, items: Sequence[FactRow]
    ) -> Operation[_BatchAnswer]:
        pairs, facts = rows_as_json(items, _get_highest_offsets(session, items))
        has_duplicates = len({item.identity for item in items}) < len(items)
        options = _BOOLEAN_TEXT[not session.accept_loss], _BOOLEAN_TEXT[has_duplicates]
        forwarded = _BOOLEAN_TEXT[items[0].origin is not None]
        ((text,),) = yield PreparedTextQuery(
            APPEND, (identity.token, pairs, facts, forwarded, self._now_ms_text(), *self._bounds, *options)
        )
        return _parse_batch_answer(text)

    def _now_ms_text(self) -> str:
        return str(int(self._wall() * 1000))

    def _to_results(
        self, session: DatabaseSession, identity: StoreIdentity, items: Sequence[FactRow], answers: Sequence[Answer]
    ) -> list[AppendResult]:
        last_offsets = {
            item.pair: answer for item, answer in zip(items, answers, strict=True) if isinstance(answer, int)
        }
        for pair, offset in last_offsets.items():
            session.record_offset(pair, offset)
        read_answer = self._answer_reader.read
        return [read_answer(item, answer, identity.epoch) for item, answer in zip(items, answers, strict=True)]

    def get(self, session: DatabaseSession, from_zone: str, message_id: str) -> Operation[FactConfirmation | None]:
        """Return what was confirmed for an id, or None."""
        yield from session.ensure_open()
        rows = yield Query(GET_CONFIRMATION, {"zone": from_zone, "id": message_id})
        if not rows:
            return None
        offset, epoch, digest, forwarded = rows[0]
        return self._answer_reader.build_confirmation(message_id, offset, epoch, digest, forwarded=forwarded)
