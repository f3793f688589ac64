"""LogConsumerStore: the consumer state that a log cannot keep, kept outside the log.

A log stores one position per partition. The delivery counts, the deferred records and the dead letters of one consumer
group of one log are stored here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, paginate
from ergon_framework.transaction import Transaction


class LogPosition(NamedTuple):
    """The position of a record in a log."""

    partition: int
    offset: int


class DeferredRecord(NamedTuple):
    """A transaction that is redelivered at *due*, instead of the record at *position*."""

    due: float
    position: LogPosition
    transaction: Transaction


class LogConsumerStore(Protocol):
    """Delivery counts, deferred records and dead letters of one consumer group.

    The caller holds a lock; calls for a partition come only from the partition's owner. A durable store has written
    when the call returns.
    """

    def increment(self, position: LogPosition) -> int:
        """Count one more delivery, and return the new count."""

    def decrement(self, position: LogPosition) -> None:
        """Take one delivery off the count."""

    def defer(self, deferred: DeferredRecord) -> None:
        """Store a deferred transaction, replacing an earlier one of its position."""

    def deferred(self, partition: int) -> Sequence[DeferredRecord]:
        """Return the deferred records of *partition*; called when a consumer takes over the partition."""

    def delete(self, position: LogPosition) -> None:
        """Delete the count and the deferred record of a settled record."""

    def add_dead_letter(self, record: DeadLetterRecord) -> None:
        """Store a dead letter under a new handle, after all others."""

    def get_dead_letter(self, handle: str) -> DeadLetterRecord | None:
        """Return the dead letter with *handle*; None if it does not exist any more."""

    def remove_dead_letter(self, handle: str) -> bool:
        """Remove the dead letter with *handle*; return False if there was none."""

    def list_dead(self, query: DeadLetterQuery, *, after: str | None, limit: int) -> Sequence[DeadLetterRecord]:
        """Return one page of dead letters, as the connector's method does."""

    @property
    def dead_count(self) -> int:
        """The number of dead letters."""


class MemoryLogConsumerStore:
    """A consumer state store that lives as long as this process."""

    def __init__(self) -> None:
        self._counts: dict[LogPosition, int] = {}
        self._deferred: dict[LogPosition, DeferredRecord] = {}
        self._last_handle = 0
        self._dead: dict[str, DeadLetterRecord] = {}

    def increment(self, position: LogPosition) -> int:
        self._counts[position] = count = self._counts.get(position, 0) + 1
        return count

    def decrement(self, position: LogPosition) -> None:
        self._counts[position] -= 1

    def defer(self, deferred: DeferredRecord) -> None:
        self._deferred[deferred.position] = deferred

    def deferred(self, partition: int) -> Sequence[DeferredRecord]:
        return [deferred for deferred in self._deferred.values() if deferred.position.partition == partition]

    def delete(self, position: LogPosition) -> None:
        self._counts.pop(position, None)
        self._deferred.pop(position, None)

    def add_dead_letter(self, record: DeadLetterRecord) -> None:
        self._last_handle += 1
        handle = str(self._last_handle)
        self._dead[handle] = record.model_copy(update={"handle": handle})

    def get_dead_letter(self, handle: str) -> DeadLetterRecord | None:
        return self._dead.get(handle)

    def remove_dead_letter(self, handle: str) -> bool:
        return self._dead.pop(handle, None) is not None

    def list_dead(self, query: DeadLetterQuery, *, after: str | None, limit: int) -> Sequence[DeadLetterRecord]:
        return paginate(self._dead.values(), query, after=after, limit=limit)

    @property
    def dead_count(self) -> int:
        return len(self._dead)
