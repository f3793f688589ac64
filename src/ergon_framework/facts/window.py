"""Window: the facts that a consumer has loaded and not yet settled, as the transactions they are handled as."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.codec import decode as decoded
from ergon_framework.facts.labels import trace_of
from ergon_framework.facts.model import Envelope, Fact, Pair, StoredFact
from ergon_framework.transaction import Transaction

#: The predicate of a transaction that has no type.
UNTYPED = "transaction"


class Window(Sequence[tuple[Transaction, float]]):
    """Looked up by offset; its length is one more than the last offset that was loaded."""

    def __init__(self, begin: int) -> None:
        self._end = begin
        self._loaded: dict[int, tuple[Transaction, float]] = {}

    @property
    def last(self) -> int:
        """The last offset that was loaded, or before which loading begins."""
        return self._end - 1

    def add(self, facts: Iterable[tuple[StoredFact, Transaction]]) -> None:
        """Take in what was loaded; what another load has brought meanwhile is passed over."""
        for stored, transaction in facts:
            if stored.offset == self._end:
                self._loaded[stored.offset] = transaction, stored.stored_at_unix_ms / 1000
                self._end += 1

    def forget(self, offset: int) -> None:
        """It is settled."""
        self._loaded.pop(offset, None)

    def since(self, offset: int) -> float | None:
        """When a fact was stored, if it is loaded."""
        found = self._loaded.get(offset)
        return None if found is None else found[1]

    def __len__(self) -> int:
        return self._end

    @overload
    def __getitem__(self, offset: int) -> tuple[Transaction, float]: ...

    @overload
    def __getitem__(self, offset: slice) -> Sequence[tuple[Transaction, float]]: ...

    def __getitem__(self, offset: int | slice) -> tuple[Transaction, float] | Sequence[tuple[Transaction, float]]:
        if isinstance(offset, slice):
            return [self._loaded[place] for place in range(*offset.indices(self._end)) if place in self._loaded]
        return self._loaded[offset]


def to_fact(transaction: Transaction, pair: Pair, codec: Codec, *, now: float) -> tuple[Envelope, Fact]:
    """*transaction* as a fact: its payload is the object, its envelope travels in the labels."""
    body, headers = codec.encode(transaction)
    created = now if transaction.created_at is None else transaction.created_at
    envelope = Envelope(
        message_id=transaction.id,
        from_zone=pair.from_zone,
        to_zone=pair.to_zone,
        produced_at_unix_ms=int(created * 1000),
        correlation_id=transaction.correlation,
        causation_id=transaction.causation,
        labels=headers,
    )
    subject = transaction.id if transaction.key is None else transaction.key
    return envelope, Fact(subject=subject, predicate=transaction.type or UNTYPED, object_json=body.decode())


def to_transaction(stored: StoredFact, codec: Codec) -> Transaction:
    """A fact as a transaction: one that was dispatched as it was, any other with subject, predicate and object.

    Ids are unique within the zone that a fact comes from, so that zone is its source. Facts of one
    subject are handled in order.
    """
    envelope, fact = stored.envelope, stored.fact
    if envelope.labels.get("ergon-id") == envelope.message_id:
        read = decoded(codec, fact.object_json.encode(), envelope.labels, source=envelope.from_zone)
        if read.error is None:
            return read.transaction
    return Transaction(
        envelope.message_id,
        {"subject": fact.subject, "predicate": fact.predicate, "object": fact.object},
        source=envelope.from_zone,
        type=fact.predicate,
        key=fact.subject,
        correlation=envelope.correlation_id,
        causation=envelope.causation_id,
        created_at=envelope.produced_at_unix_ms / 1000,
        trace=trace_of(envelope.labels),
    )
