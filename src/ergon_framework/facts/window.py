"""LoadedFacts: the facts that a consumer has loaded and not yet settled, as transactions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.codec import decode as decoded
from ergon_framework.facts.labels import get_trace
from ergon_framework.facts.model import Envelope, Fact, StoredFact, ZonePair
from ergon_framework.transaction import Transaction

#: The predicate of a transaction without a type.
DEFAULT_PREDICATE = "transaction"


class LoadedFacts(Sequence[tuple[Transaction, float]]):
    """Transactions by offset; the length is the last loaded offset plus one."""

    def __init__(self, begin: int) -> None:
        self._end = begin
        self._loaded: dict[int, tuple[Transaction, float]] = {}

    @property
    def last(self) -> int:
        """The last loaded offset, or the offset before the first one to load."""
        return self._end - 1

    def add(self, facts: Iterable[tuple[StoredFact, Transaction]]) -> None:
        """Add loaded facts; skip those that a concurrent load has already added."""
        for stored, transaction in facts:
            if stored.offset == self._end:
                self._loaded[stored.offset] = transaction, stored.stored_at_unix_ms / 1000
                self._end += 1

    def forget(self, offset: int) -> None:
        """Remove a settled fact."""
        self._loaded.pop(offset, None)

    def stored_at(self, offset: int) -> float | None:
        """Return when a fact was stored; None if it is not loaded."""
        entry = self._loaded.get(offset)
        return None if entry is None else entry[1]

    def __len__(self) -> int:
        return self._end

    @overload
    def __getitem__(self, offset: int) -> tuple[Transaction, float]: ...

    @overload
    def __getitem__(self, offset: slice) -> Sequence[tuple[Transaction, float]]: ...

    def __getitem__(self, offset: int | slice) -> tuple[Transaction, float] | Sequence[tuple[Transaction, float]]:
        if isinstance(offset, slice):
            return [self._loaded[index] for index in range(*offset.indices(self._end)) if index in self._loaded]
        return self._loaded[offset]


def to_fact(transaction: Transaction, pair: ZonePair, codec: Codec, *, now: float) -> tuple[Envelope, Fact]:
    """Convert *transaction* to a fact: the payload becomes the object, the transaction's envelope the labels."""
    body, headers = codec.encode(transaction)
    created_at = now if transaction.created_at is None else transaction.created_at
    envelope = Envelope(
        message_id=transaction.id,
        from_zone=pair.from_zone,
        to_zone=pair.to_zone,
        produced_at_unix_ms=int(created_at * 1000),
        correlation_id=transaction.correlation,
        causation_id=transaction.causation,
        labels=headers,
    )
    subject = transaction.id if transaction.key is None else transaction.key
    return envelope, Fact(subject=subject, predicate=transaction.type or DEFAULT_PREDICATE, object_json=body.decode())


def to_transaction(stored: StoredFact, codec: Codec) -> Transaction:
    """Convert a fact to a transaction: a dispatched one to the original, any other to subject, predicate and object.

    Ids are unique within the zone that a fact comes from, so that zone becomes the source. Facts with the same subject
    are handled in order.
    """
    envelope, fact = stored.envelope, stored.fact
    if envelope.labels.get("ergon-id") == envelope.message_id:
        result = decoded(codec, fact.object_json.encode(), envelope.labels, source=envelope.from_zone)
        if result.error is None:
            return result.transaction
    return Transaction(
        envelope.message_id,
        {"subject": fact.subject, "predicate": fact.predicate, "object": fact.object},
        source=envelope.from_zone,
        type=fact.predicate,
        key=fact.subject,
        correlation=envelope.correlation_id,
        causation=envelope.causation_id,
        created_at=envelope.produced_at_unix_ms / 1000,
        trace=get_trace(envelope.labels),
    )
