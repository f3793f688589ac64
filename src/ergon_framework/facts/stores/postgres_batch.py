"""Convert a batch of facts to statement arguments, and the database's answers to results; without I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

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
)
from ergon_framework.facts.stores import refusals

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
    def is_plain(self) -> bool:
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
                f"the fact {stored.envelope.message_id!r} comes with {name} {getattr(stored, name)!r:.40}, which no "
                "store can have given"
            )
    digest_hex(stored.digest)
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
    """Return the hexadecimal digits of a digest."""
    digits = digest.removeprefix(_DIGEST_PREFIX)
    if len(digits) != _DIGEST_HEX_CHARS or len(digest) != _DIGEST_HEX_CHARS + len(_DIGEST_PREFIX):
        raise InvalidFactError(f"a digest is 'sha256:' and 64 hexadecimal digits, not {digest!r:.40}")
    return digits


def rows_as_json(items: Sequence[FactRow], seen: dict[ZonePair, int]) -> tuple[str, str]:
    """Return the pairs of *items*, in the order in which they are locked, and the facts; both as JSON."""
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
            "changed": _epoch_changed_error,
            "ahead": _offset_gap_error,
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
            else refusals.fact_conflict_error(item.envelope, existing, item.digest)
        )

    def _wrong_buffer_error(self, item: FactRow, forwarded: bool) -> AppendResult:  # noqa: FBT001 - as above
        buffers = self._side.store_buffer, self._side.forward_buffer
        actual, expected = buffers[::-1] if forwarded else buffers
        return refusals.wrong_buffer_error(item.pair, actual, expected)

    def _max_facts_error(self, _item: FactRow, retained: int) -> AppendResult:
        return refusals.buffer_full_error("facts", retained, self._max_facts)

    def _max_bytes_error(self, _item: FactRow, used: int) -> AppendResult:
        return refusals.buffer_full_error("bytes", used, self._max_bytes)

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
    return refusals.epoch_changed_error("" if item.origin is None else item.origin.epoch, epoch)


def _offset_gap_error(item: FactRow, end: int) -> AppendResult:
    return refusals.offset_gap_error(item.envelope.message_id, 0 if item.origin is None else item.origin.offset, end)


def _artifact_refused_error(item: FactRow, digest: str | None, size: int | None) -> AppendResult:
    reference = item.fact.artifact
    if reference is None:
        raise AssertionError("a fact without an artifact was refused for its artifact")
    stored = None if digest is None or size is None else StoredArtifact(f"{_DIGEST_PREFIX}{digest}", size)
    if stored is None or stored == (reference.digest, reference.size):
        return refusals.artifact_missing_error(reference)
    return refusals.artifact_differs_error(reference, stored)
