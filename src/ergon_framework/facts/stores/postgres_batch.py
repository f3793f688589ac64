"""A batch of facts on its way into PostgreSQL, and what is made of the answers; nothing here asks anybody."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ergon_framework.facts.boundary import Appended, Appending
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import (
    SIZE,
    Envelope,
    Fact,
    FactConfirmation,
    Pair,
    Side,
    Stored,
    StoredFact,
    digest_of,
)
from ergon_framework.facts.stores import refusals

#: An offset, or a word and what there is to say.
Answer: TypeAlias = int | list[Any]

_ALGORITHM: Final = "sha256:"
#: Digits of a digest.
_DIGITS: Final = 64


class Item(NamedTuple):
    """One fact as it is sent, and what its answer is told with."""

    envelope: Envelope
    fact: Fact
    pair: Pair
    digest: str
    bytes: int
    #: Whether the bytes of the artifact that it names are not here.
    is_lacking: bool = False
    #: As it came from another store; None of one that is appended.
    origin: StoredFact | None = None

    @property
    def identity(self) -> tuple[str, str]:
        """By what it is told from all others."""
        return self.envelope.from_zone, self.envelope.message_id

    @property
    def digits(self) -> str:
        """The digest without the name of its algorithm."""
        return self.digest[len(_ALGORITHM) :]

    @property
    def is_plain(self) -> bool:
        """Whether it is appended, and about no artifact."""
        return self.origin is None and self.fact.artifact is None


def appending(facts: Iterable[Appending], absent: frozenset[str]) -> list[Item]:
    """Facts to be appended; *absent* are the digests of contents that are not here."""
    return [_item(envelope, fact, digest_of(envelope, fact), absent) for envelope, fact in facts]


def plain(envelope: Envelope, fact: Fact) -> Item:
    """One fact to be appended, which is about no artifact."""
    text = fact.object_json
    size = len(text) if text.isascii() else len(text.encode())
    return Item(envelope, fact, envelope.pair, digest_of(envelope, fact), size)


def forwarding(facts: Iterable[StoredFact], absent: frozenset[str]) -> list[Item]:
    """Facts to be forwarded, with what they have from their origin."""
    return [_forwarded(stored, absent) for stored in facts]


def _forwarded(stored: StoredFact, absent: frozenset[str]) -> Item:
    for name in ("offset", "stored_at_unix_ms"):
        if not 0 <= getattr(stored, name) <= SIZE:
            raise InvalidFactError(
                f"the fact {stored.envelope.message_id!r} comes with {name} {getattr(stored, name)!r:.40}, which no "
                "store can have given"
            )
    hexadecimal(stored.digest)
    return _item(stored.envelope, stored.fact, stored.digest, absent, origin=stored)


def _item(
    envelope: Envelope, fact: Fact, digest: str, absent: frozenset[str], origin: StoredFact | None = None
) -> Item:
    text = fact.object_json
    size = len(text) if text.isascii() else len(text.encode())
    reference = fact.artifact
    lacking = reference is not None and reference.digest in absent
    return Item(envelope, fact, envelope.pair, digest, size, lacking, origin)


def hexadecimal(digest: str) -> str:
    """The digits of a digest."""
    digits = digest.removeprefix(_ALGORITHM)
    if len(digits) != _DIGITS or len(digest) != _DIGITS + len(_ALGORITHM):
        raise InvalidFactError(f"a digest is 'sha256:' and 64 hexadecimal digits, not {digest!r:.40}")
    return digits


def written(items: Sequence[Item], seen: dict[Pair, int]) -> tuple[str, str]:
    """The pairs of *items*, in the order in which they are locked, and the facts; both as JSON."""
    pairs = sorted({item.pair for item in items})
    places = {pair: place for place, pair in enumerate(pairs, 1)}
    facts = [_columns(places[item.pair], item) for item in items]
    return _json([[*pair, seen.get(pair, 0)] for pair in pairs]), _json(facts)


def _columns(place: int, item: Item) -> dict[str, Any]:
    """One fact, by the names that the function gives its columns; *place* is that of its pair."""
    envelope, fact = item.envelope, item.fact
    columns: dict[str, Any] = {
        "p": place,
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
        columns["labels"] = labels_written(envelope)
    reference = fact.artifact
    if reference is not None:
        # Nothing has an empty digest: what is not here is refused, unless the fact is known.
        content = "" if item.is_lacking else hexadecimal(reference.digest)
        columns.update(bucket=reference.bucket, key=reference.key, content=content, length=reference.size)
        columns["zone"] = envelope.from_zone
    stored = item.origin
    if stored is not None:
        columns.update(at=stored.offset, epoch=stored.epoch, stored=stored.stored_at_unix_ms)
    return columns


def labels_written(envelope: Envelope) -> str | None:
    """The labels of a fact as they are kept; None if it has none."""
    return json.dumps(dict(envelope.labels), ensure_ascii=False) if envelope.labels else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Answers:
    """Makes confirmations and errors of what the database answers."""

    def __init__(self, side: Side, *, max_facts: int | None, max_bytes: int | None) -> None:
        self._side = side
        other = Side.OUTER if side is Side.INNER else Side.INNER
        self._appended, self._arrived = side.store_buffer, other.store_buffer
        self._max_facts = max_facts
        self._max_bytes = max_bytes

    def told(self, item: Item, answer: Answer, epoch: str) -> Appended:
        """What the caller is told of *item*; *epoch* is the store's."""
        if isinstance(answer, int):
            origin = item.origin
            return FactConfirmation(
                message_id=item.envelope.message_id,
                offset=answer,
                epoch=epoch if origin is None else origin.epoch,
                digest=item.digest,
                # Where it was appended: a confirmation is about a store buffer, of a forwarded fact the other side's.
                buffer=self._appended if origin is None else self._arrived,
            )
        word, *rest = answer
        return self._otherwise(item, word, rest)

    def _otherwise(self, item: Item, word: str, rest: list[Any]) -> Appended:
        tell: dict[str, Callable[..., Appended]] = {
            "known": self._known,
            "misplaced": self._misplaced,
            "changed": _changed,
            "ahead": _ahead,
            "refused": _refused,
            "facts": self._too_many,
            "bytes": self._too_large,
        }
        return tell[word](item, *rest)

    def _known(self, item: Item, offset: int, epoch: str, digest: str, forwarded: bool) -> Appended:  # noqa: FBT001 - as it is answered
        known = self.confirmation(item.envelope.message_id, offset, epoch, digest, forwarded=forwarded)
        return known if known.digest == item.digest else refusals.conflict(item.envelope, known, item.digest)

    def _misplaced(self, item: Item, forwarded: bool) -> Appended:  # noqa: FBT001 - as above
        buffers = self._side.store_buffer, self._side.forward_buffer
        found, wanted = buffers[::-1] if forwarded else buffers
        return refusals.misplaced(item.pair, found, wanted)

    def _too_many(self, _item: Item, retained: int) -> Appended:
        return refusals.full("facts", retained, self._max_facts)

    def _too_large(self, _item: Item, used: int) -> Appended:
        return refusals.full("bytes", used, self._max_bytes)

    def confirmation(
        self, message_id: str, offset: int, epoch: str, digest: str, *, forwarded: bool
    ) -> FactConfirmation:
        """What is known of an id."""
        return FactConfirmation(
            message_id=message_id,
            offset=offset,
            epoch=epoch,
            digest=f"{_ALGORITHM}{digest}",
            buffer=self._arrived if forwarded else self._appended,
            duplicate=True,
        )


def _changed(item: Item, epoch: str) -> Appended:
    return refusals.changed("" if item.origin is None else item.origin.epoch, epoch)


def _ahead(item: Item, end: int) -> Appended:
    return refusals.gap(item.envelope.message_id, 0 if item.origin is None else item.origin.offset, end)


def _refused(item: Item, digest: str | None, size: int | None) -> Appended:
    reference = item.fact.artifact
    if reference is None:
        raise AssertionError("a fact without an artifact was refused for its artifact")
    known = None if digest is None or size is None else Stored(f"{_ALGORITHM}{digest}", size)
    if known is None or known == (reference.digest, reference.size):
        return refusals.not_stored(reference)
    return refusals.another(reference, known)
