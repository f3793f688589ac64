"""FactAppender: appends or forwards a batch of facts with one statement and one commit.

A fact belongs to a log, the sequence of facts from one zone to another, and has an offset there. To forward is to store
facts of another zone with the offsets that they have there. A batch is regular if it has no artifact and no repeated
id, and if its forwarded facts are contiguous and of one epoch: a faster statement stores it.

A boundary has an inner and an outer side with one store each. A store has two buffers, one for the facts that its own
side appends and one for the facts that are forwarded from the other side. An epoch is the history in which the offsets
were assigned; the identity of a store is its epoch with a token, which changes when the server restarts or an epoch
begins, so that a statement for another store does nothing.

The conversions of facts to statement arguments, and of the database's answers to results, do no I/O. A regular batch is
encoded as one text per column: the server splits these texts faster than it parses JSON, and they are faster to write.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

from psycopg import errors as pg_errors

from ergon_framework.database.operation import Operation, PreparedTextQuery, Query
from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.boundary import AppendResult, NewFact
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import (
    MAX_JSON_INTEGER,
    BoundarySide,
    Envelope,
    Fact,
    FactConfirmation,
    StoredArtifact,
    StoredFact,
    ZonePair,
    fact_digest,
    is_contiguous,
)
from ergon_framework.facts.stores import errors
from ergon_framework.facts.stores.postgres.session import MAX_ATTEMPTS, DatabaseSession, StoreIdentity
from ergon_framework.facts.stores.postgres.sql import APPEND, APPEND_ONE, APPEND_REGULAR, GET_CONFIRMATION

#: An offset, or a list of a code and its details.
Answer: TypeAlias = int | list[Any]

_DIGEST_PREFIX: Final = "sha256:"
#: Hexadecimal digits of a digest.
_DIGEST_HEX_CHARS: Final = 64


class FactRow(NamedTuple):
    """One fact with the values that its statement and its result need."""

    envelope: Envelope
    fact: Fact
    pair: ZonePair
    digest: str
    bytes: int
    #: Whether the content of its artifact is missing in the content store.
    is_artifact_missing: bool = False
    #: The fact as another store has it, if it is forwarded; None for an append.
    origin: StoredFact | None = None

    @property
    def identity(self) -> tuple[str, str]:
        """The zone and id, which are unique."""
        return self.envelope.from_zone, self.envelope.message_id

    @property
    def digits(self) -> str:
        """The digest without the name of its algorithm."""
        return self.digest[len(_DIGEST_PREFIX) :]

    @property
    def is_append_without_artifact(self) -> bool:
        """Whether the fact is appended, not forwarded, and has no artifact."""
        return self.origin is None and self.fact.artifact is None


def rows_to_append(facts: Iterable[NewFact], absent: frozenset[str]) -> list[FactRow]:
    """Return rows for facts to append; *absent* are the digests of contents that are not stored."""
    return [_build_row(envelope, fact, fact_digest(envelope, fact), absent) for envelope, fact in facts]


def row_to_append(envelope: Envelope, fact: Fact) -> FactRow:
    """Return the row for one fact to append that has no artifact."""
    text = fact.object_json
    size = len(text) if text.isascii() else len(text.encode())
    return FactRow(envelope, fact, envelope.pair, fact_digest(envelope, fact), size)


def rows_to_forward(facts: Iterable[StoredFact], absent: frozenset[str]) -> list[FactRow]:
    """Return rows for facts to forward, with the values from their origin."""
    return [_row_to_forward(stored, absent) for stored in facts]


def _row_to_forward(stored: StoredFact, absent: frozenset[str]) -> FactRow:
    for name in ("offset", "stored_at_unix_ms"):
        if not 0 <= getattr(stored, name) <= MAX_JSON_INTEGER:
            raise InvalidFactError(
                f"fact {stored.envelope.message_id!r} has an invalid {name} {getattr(stored, name)!r:.40}: no "
                "store can have assigned it"
            )
    digest_hex(stored.digest)  # raises for a digest that no store can have computed
    return _build_row(stored.envelope, stored.fact, stored.digest, absent, origin=stored)


def _build_row(
    envelope: Envelope, fact: Fact, digest: str, absent: frozenset[str], origin: StoredFact | None = None
) -> FactRow:
    text = fact.object_json
    size = len(text) if text.isascii() else len(text.encode())
    reference = fact.artifact
    is_artifact_missing = reference is not None and reference.digest in absent
    return FactRow(envelope, fact, envelope.pair, digest, size, is_artifact_missing, origin)


def digest_hex(digest: str) -> str:
    """Return the digits of a digest; raise for a wrong prefix or length. The digits themselves are not checked."""
    digits = digest.removeprefix(_DIGEST_PREFIX)
    if len(digits) != _DIGEST_HEX_CHARS or len(digest) != _DIGEST_HEX_CHARS + len(_DIGEST_PREFIX):
        raise InvalidFactError(f"invalid digest {digest!r:.40}: expected 'sha256:' and 64 hexadecimal digits")
    return digits


def rows_as_json(items: Sequence[FactRow], seen: dict[ZonePair, int]) -> tuple[str, str]:
    """Return the pairs of *items*, in the order in which they are locked, and the facts; both as JSON.

    *seen* has the highest known offset of each pair: a lower one in the database shows that a backup was restored.
    """
    pairs = sorted({item.pair for item in items})
    pair_indexes = {pair: index for index, pair in enumerate(pairs, 1)}
    facts = [_to_column_values(pair_indexes[item.pair], item) for item in items]
    return _to_json([[*pair, seen.get(pair, 0)] for pair in pairs]), _to_json(facts)


def _to_column_values(index: int, item: FactRow) -> dict[str, Any]:
    """Return one fact by the column names of the database function; *index* is the index of its pair."""
    envelope, fact = item.envelope, item.fact
    columns: dict[str, Any] = {
        "p": index,
        "id": envelope.message_id,
        "digest": item.digits,
        "produced": envelope.produced_at_unix_ms,
        "subject": fact.subject,
        "predicate": fact.predicate,
        "object": fact.object_json,
        "size": item.bytes,
    }
    if envelope.correlation_id is not None:
        columns["correlation"] = envelope.correlation_id
    if envelope.causation_id is not None:
        columns["causation"] = envelope.causation_id
    if envelope.labels:
        columns["labels"] = labels_as_json(envelope)
    reference = fact.artifact
    if reference is not None:
        # An empty digest matches nothing: a missing artifact is rejected, unless the fact is known.
        content = "" if item.is_artifact_missing else digest_hex(reference.digest)
        columns.update(bucket=reference.bucket, key=reference.key, content=content, length=reference.size)
        columns["zone"] = envelope.from_zone
    stored = item.origin
    if stored is not None:
        columns.update(at=stored.offset, epoch=stored.epoch, stored=stored.stored_at_unix_ms)
    return columns


def labels_as_json(envelope: Envelope) -> str | None:
    """Return the labels of a fact as they are stored, or None if it has none."""
    return json.dumps(dict(envelope.labels), ensure_ascii=False) if envelope.labels else None


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class AnswerReader:
    """Converts the database's answers to confirmations and errors."""

    def __init__(self, side: BoundarySide, *, max_facts: int | None, max_bytes: int | None) -> None:
        self._side = side
        other = BoundarySide.OUTER if side is BoundarySide.INNER else BoundarySide.INNER
        self._store_buffer, self._origin_buffer = side.store_buffer, other.store_buffer
        self._max_facts = max_facts
        self._max_bytes = max_bytes

    def read(self, item: FactRow, answer: Answer, epoch: str) -> AppendResult:
        """Return the result for *item*; *epoch* is the store's."""
        if isinstance(answer, int):
            origin = item.origin
            return FactConfirmation(
                message_id=item.envelope.message_id,
                offset=answer,
                epoch=epoch if origin is None else origin.epoch,
                digest=item.digest,
                # A confirmation names the buffer that the fact was appended to; for a forwarded fact the other side's.
                buffer=self._store_buffer if origin is None else self._origin_buffer,
            )
        code, *details = answer
        return self._read_code(item, code, details)

    def _read_code(self, item: FactRow, code: str, details: list[Any]) -> AppendResult:
        readers: dict[str, Callable[..., AppendResult]] = {
            "known": self._read_known,
            "misplaced": self._wrong_buffer_error,
            # The forwarded fact is of another epoch than the log.
            "changed": _epoch_changed_error,
            # The forwarded fact does not follow the last one of the log.
            "ahead": _offset_gap_error,
            # The referenced artifact is missing or differs.
            "refused": _artifact_refused_error,
            "facts": self._max_facts_error,
            "bytes": self._max_bytes_error,
        }
        return readers[code](item, *details)

    def _read_known(self, item: FactRow, offset: int, epoch: str, digest: str, forwarded: bool) -> AppendResult:  # noqa: FBT001 - as it is answered
        existing = self.build_confirmation(item.envelope.message_id, offset, epoch, digest, forwarded=forwarded)
        return (
            existing
            if existing.digest == item.digest
            else errors.fact_conflict_error(item.envelope, existing, item.digest)
        )

    def _wrong_buffer_error(self, item: FactRow, forwarded: bool) -> AppendResult:  # noqa: FBT001 - as it is answered
        buffers = self._side.store_buffer, self._side.forward_buffer
        actual, expected = buffers[::-1] if forwarded else buffers
        return errors.wrong_buffer_error(item.pair, actual, expected)

    def _max_facts_error(self, _item: FactRow, retained: int) -> AppendResult:
        return errors.buffer_full_error("facts", retained, self._max_facts)

    def _max_bytes_error(self, _item: FactRow, used: int) -> AppendResult:
        return errors.buffer_full_error("bytes", used, self._max_bytes)

    def build_confirmation(
        self, message_id: str, offset: int, epoch: str, digest: str, *, forwarded: bool
    ) -> FactConfirmation:
        """Return the confirmation of a known id, marked as a duplicate."""
        return FactConfirmation(
            message_id=message_id,
            offset=offset,
            epoch=epoch,
            digest=f"{_DIGEST_PREFIX}{digest}",
            buffer=self._origin_buffer if forwarded else self._store_buffer,
            duplicate=True,
        )


def _epoch_changed_error(item: FactRow, epoch: str) -> AppendResult:
    return errors.epoch_changed_error("" if item.origin is None else item.origin.epoch, epoch)


def _offset_gap_error(item: FactRow, end: int) -> AppendResult:
    return errors.offset_gap_error(item.envelope.message_id, 0 if item.origin is None else item.origin.offset, end)


def _artifact_refused_error(item: FactRow, digest: str | None, size: int | None) -> AppendResult:
    reference = item.fact.artifact
    if reference is None:
        raise AssertionError("a fact without an artifact was rejected for its artifact")
    stored = None if digest is None or size is None else StoredArtifact(f"{_DIGEST_PREFIX}{digest}", size)
    # With the expected digest the name exists, and the content store has lost the bytes.
    if stored is None or stored == (reference.digest, reference.size):
        return errors.artifact_missing_error(reference)
    return errors.artifact_differs_error(reference, stored)


# -- regular batches as columns ---------------------------------------------------------------------

#: The separator of values: the ASCII unit separator, which no text of a fact may contain.
_SEPARATOR: Final = "\x1f"

_ColumnText: TypeAlias = str | None


class ColumnArguments(NamedTuple):
    """The arguments of the database function, and the positions of each pair's facts."""

    pairs: str
    #: In the order of the function's parameters.
    texts: tuple[_ColumnText, ...]
    #: For each pair, the positions of its facts in the batch.
    positions: Sequence[Sequence[int]]

    def to_offsets(self, last_offsets: Sequence[int]) -> list[int]:
        """Return the offset of each fact in batch order; *last_offsets* are the previous offsets of each pair."""
        if len(last_offsets) == 1:
            return list(range(last_offsets[0] + 1, last_offsets[0] + 1 + len(self.positions[0])))
        offsets = {
            position: offset
            for last_offset, positions in zip(last_offsets, self.positions, strict=True)
            for offset, position in enumerate(positions, last_offset + 1)
        }
        return [offsets[position] for position in range(len(offsets))]


def to_columns(items: Sequence[FactRow], seen: dict[ZonePair, int]) -> ColumnArguments | None:
    """Return *items* by columns, or None if the batch is irregular; *seen* has the highest known offsets by pair."""
    if len({item.identity for item in items}) < len(items) or any(item.fact.artifact is not None for item in items):
        return None
    groups = _group_by_pair(items)
    pair_arguments = [
        _to_pair_arguments(pair, seen.get(pair, 0), [items[position] for position in positions])
        for pair, positions in groups
    ]
    if None in pair_arguments:
        return None
    ordered = items if len(groups) == 1 else [items[position] for _, positions in groups for position in positions]
    envelopes = [item.envelope for item in ordered]
    facts = [item.fact for item in ordered]
    texts = (
        _join([envelope.message_id for envelope in envelopes]),
        _join([item.digits for item in ordered]),
        _join([str(envelope.produced_at_unix_ms) for envelope in envelopes]),
        _join_if_any([envelope.correlation_id for envelope in envelopes]),
        _join_if_any([envelope.causation_id for envelope in envelopes]),
        _join_if_any([labels_as_json(envelope) for envelope in envelopes]),
        _join([fact.subject for fact in facts]),
        _join([fact.predicate for fact in facts]),
        _join([fact.object_json for fact in facts]),
        # Running sums for each pair: the database stores with each fact the total bytes of its log up to it.
        _join(
            [
                str(size)
                for _, positions in groups
                for size in accumulate(items[position].bytes for position in positions)
            ]
        ),
        _join_if_any([None if item.origin is None else str(item.origin.stored_at_unix_ms) for item in ordered]),
    )
    # Validated models never contain the separator; if one did, values would be in the wrong rows.
    if any(text is not None and text.count(_SEPARATOR) != len(items) - 1 for text in texts):
        return None
    pairs = json.dumps(pair_arguments, ensure_ascii=False, separators=(",", ":"))
    return ColumnArguments(pairs, texts, [positions for _, positions in groups])


def _group_by_pair(items: Sequence[FactRow]) -> list[tuple[ZonePair, Sequence[int]]]:
    """Return the positions of each pair's facts, in the order in which pairs are locked."""
    first = items[0].pair
    if all(item.pair == first for item in items):
        return [(first, range(len(items)))]
    positions: dict[ZonePair, list[int]] = {}
    for position, item in enumerate(items):
        positions.setdefault(item.pair, []).append(position)
    return sorted(positions.items())


def _to_pair_arguments(pair: ZonePair, seen: int, items: Sequence[FactRow]) -> list[str | int] | None:
    """Return the arguments for one pair, or None if its facts are not contiguous."""
    arguments: list[str | int] = [*pair, seen, len(items)]
    first = items[0].origin
    if first is None:
        return arguments
    origins = [item.origin for item in items if item.origin is not None]
    if not is_contiguous(origins, first.offset - 1) or any(each.epoch != first.epoch for each in origins):
        return None
    return [*arguments, first.offset, first.epoch]


def _join(values: Iterable[str]) -> str:
    return _SEPARATOR.join(values)


def _join_if_any(values: Sequence[str | None]) -> _ColumnText:
    """Join the values, or return None if all are empty: no value is an empty text."""
    return _join([value or "" for value in values]) if any(values) else None


# -- append -----------------------------------------------------------------------------------------

#: The identity of the store has changed since this process verified it; it is verified before the next attempt.
_STALE_CODE: Final = "stale"
#: The store has assigned fewer offsets than this process has seen, because an older state was restored; the next
#: attempt appends in a new epoch.
_BEHIND_CODE: Final = "behind"
#: Booleans as the statements take them.
_BOOLEAN_TEXT: Final = {True: "true", False: "false"}

#: One answer per fact, or one of the two codes above for the whole batch.
_BatchAnswer: TypeAlias = list[Any] | str


def _parse_batch_answer(text: str) -> _BatchAnswer:
    return text if text in (_STALE_CODE, _BEHIND_CODE) else list(json.loads(text))


def _require_durable_text(session: DatabaseSession) -> str:
    """Return whether the statement must wait until its commit is durable, as statements take it."""
    return _BOOLEAN_TEXT[not session.accept_loss]


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

    def append(self, session: DatabaseSession, items: Sequence[FactRow]) -> Operation[list[AppendResult]]:
        """Append or forward all *items* in one commit; return their results once what they confirm is durable."""
        for _ in range(MAX_ATTEMPTS):
            identity = yield from session.ensure_open()
            try:
                answer = (yield from self._append_fast(session, identity, items)) or (
                    yield from self._append_general(session, identity, items)
                )
            except (pg_errors.UniqueViolation, pg_errors.DeadlockDetected, pg_errors.CheckViolation):
                # A concurrent call has stored one of these ids (UniqueViolation), locked rows in another order, or
                # created the week's partition (CheckViolation of the default one). Nothing was done, so retry.
                continue
            if answer == _STALE_CODE:
                yield from session.verify()
            elif isinstance(answer, str):
                yield from session.begin_epoch_after_restore(identity)
            else:
                return self._to_results(session, identity, items, answer)
        raise ConnectionLostError(
            f"append did not succeed in {MAX_ATTEMPTS} attempts because of concurrent changes; append again"
        )

    def _append_fast(
        self, session: DatabaseSession, identity: StoreIdentity, items: Sequence[FactRow]
    ) -> Operation[_BatchAnswer | None]:
        """Append with a fast statement; return None if the batch does not qualify, and nothing was done.

        Behind a pooler the statement for a single fact would be planned again for each call.
        """
        is_unbounded = self._bounds == (None, None)
        if len(items) == 1 and items[0].is_append_without_artifact and is_unbounded and session.pool.is_direct:
            return (yield from self._append_one(session, identity, items[0]))
        batch = to_columns(items, _get_highest_offsets(session, items))
        if batch is None:
            return None
        forwarded = _BOOLEAN_TEXT[items[0].origin is not None]
        options = self._now_ms_text(), *self._bounds, _require_durable_text(session)
        ((text,),) = yield PreparedTextQuery(
            APPEND_REGULAR, (identity.token, batch.pairs, forwarded, *options, *batch.texts)
        )
        last_offsets = None if text is None else _parse_batch_answer(text)
        return batch.to_offsets(last_offsets) if isinstance(last_offsets, list) else last_offsets

    def _append_one(
        self, session: DatabaseSession, identity: StoreIdentity, item: FactRow
    ) -> Operation[_BatchAnswer | None]:
        """Append one fact; return None if the statement did nothing, and the general one has to decide."""
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
                _require_durable_text(session),
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
        options = _require_durable_text(session), _BOOLEAN_TEXT[has_duplicates]
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
