"""Admission: deliveries between their fetch and their start."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ergon_framework.connectors.base import Delivery


class DeliveryAdmission:
    """The deliveries that were fetched and have no slot yet, and the rules of what may run concurrently.

    One id is in flight at most once. Of one key, one transaction runs; the others wait in fetch order, without a
    slot, and at most as many as there are slots: one hot key must not fill the process with deliveries that cannot
    run.
    """

    def __init__(self, max_waiting_for_key: int) -> None:
        self._max_waiting_for_key = max_waiting_for_key
        self._ready: deque[Delivery] = deque()
        #: Removes and returns the next delivery to start.
        self.pop_next = self._ready.popleft
        self._waiting_by_key: dict[str, deque[Delivery]] = {}
        self._waiting_for_key = 0
        self._ids: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        """Return the number of deliveries that wait for a slot or for their key."""
        return len(self._ready) + self._waiting_for_key

    def __iter__(self) -> Iterator[Delivery]:
        """Yield the waiting deliveries: first those that wait for a slot, then those that wait for their key."""
        yield from self._ready
        for queue in self._waiting_by_key.values():
            yield from queue

    @property
    def ready_count(self) -> int:
        """The number of deliveries that wait only for a slot."""
        return len(self._ready)

    def admit(self, delivery: Delivery) -> str | None:
        """Queue *delivery*, or return what prevents it: its identity or its key."""
        transaction = delivery.transaction
        identity = (transaction.source, transaction.id)
        if identity in self._ids:
            return "identity"
        waiting = None if transaction.key is None else self._waiting_by_key.get(transaction.key)
        if waiting is not None:
            if self._waiting_for_key >= self._max_waiting_for_key:
                return "key"
            self._waiting_for_key += 1
            waiting.append(delivery)
        else:
            if transaction.key is not None:
                self._waiting_by_key[transaction.key] = deque()
            self._ready.append(delivery)
        self._ids.add(identity)
        return None

    @property
    def head(self) -> Delivery | None:
        """The next delivery to start, or None."""
        return self._ready[0] if self._ready else None

    def forget(self, delivery: Delivery) -> None:
        """Forget *delivery*, which is no longer in flight; the next one of its key may start."""
        transaction = delivery.transaction
        self._ids.discard((transaction.source, transaction.id))
        if transaction.key is None:
            return
        waiting = self._waiting_by_key[transaction.key]
        if waiting:
            self._waiting_for_key -= 1
            self._ready.append(waiting.popleft())
        else:
            del self._waiting_by_key[transaction.key]

    def take_all_but_next(self) -> list[Delivery]:
        """Remove and return all waiting deliveries but the next one, and forget them."""
        head = self._ready.popleft()
        # The first delivery of a key waits for a slot; removing one that waits for its key leaves the key taken.
        ready_keys = [delivery.transaction.key for delivery in self._ready if delivery.transaction.key is not None]
        waiting = self.take_all()
        for delivery in waiting:
            self._ids.discard((delivery.transaction.source, delivery.transaction.id))
        for key in ready_keys:
            del self._waiting_by_key[key]
        self._ready.append(head)
        return waiting

    def take_all(self) -> list[Delivery]:
        """Remove and return all waiting deliveries."""
        waiting = list(self)
        self._ready.clear()
        self._waiting_for_key = 0
        for queue in self._waiting_by_key.values():
            queue.clear()
        return waiting
