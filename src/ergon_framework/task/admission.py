"""Admission: what becomes of a delivery between being fetched and being started."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ergon_framework.connectors.base import Delivery


class Admission:
    """Those that were fetched and have no slot yet, with the rules of who must not run beside whom.

    One id is in flight once. Of one key, one runs; the others wait in fetch order, without a
    slot, and no more of them than there are slots: one hot key must not fill the process with
    what cannot run.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ready: deque[Delivery] = deque()
        #: Takes out the next one to be started.
        self.next = self._ready.popleft
        self._keys: dict[str, deque[Delivery]] = {}
        self._keyed = 0
        self._ids: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        """How many wait, for a slot or for their key."""
        return len(self._ready) + self._keyed

    def __iter__(self) -> Iterator[Delivery]:
        """Those who wait: first those for a slot, then those for their keys."""
        yield from self._ready
        for queue in self._keys.values():
            yield from queue

    @property
    def ready(self) -> int:
        """How many wait for nothing but a slot."""
        return len(self._ready)

    def admit(self, delivery: Delivery) -> str | None:
        """Give *delivery* its place, or say what stands against it: its identity or its key."""
        transaction = delivery.transaction
        name = (transaction.source, transaction.id)
        if name in self._ids:
            return "identity"
        waiting = None if transaction.key is None else self._keys.get(transaction.key)
        if waiting is not None:
            if self._keyed >= self._most:
                return "key"
            self._keyed += 1
            waiting.append(delivery)
        else:
            if transaction.key is not None:
                self._keys[transaction.key] = deque()
            self._ready.append(delivery)
        self._ids.add(name)
        return None

    @property
    def head(self) -> Delivery | None:
        """The one that is next, if there is one."""
        return self._ready[0] if self._ready else None

    def left(self, delivery: Delivery) -> None:
        """*delivery* is no longer in flight; the next of its key may go."""
        transaction = delivery.transaction
        self._ids.discard((transaction.source, transaction.id))
        if transaction.key is None:
            return
        waiting = self._keys[transaction.key]
        if waiting:
            self._keyed -= 1
            self._ready.append(waiting.popleft())
        else:
            del self._keys[transaction.key]

    def behind(self) -> list[Delivery]:
        """Take out everybody who waits but the head, as if they had never come."""
        head = self._ready.popleft()
        # The first of a key waits for a slot; whoever waits for a key of somebody else leaves that key taken.
        firsts = [delivery.transaction.key for delivery in self._ready if delivery.transaction.key is not None]
        waiting = self.clear()
        for delivery in waiting:
            self._ids.discard((delivery.transaction.source, delivery.transaction.id))
        for key in firsts:
            del self._keys[key]
        self._ready.append(head)
        return waiting

    def clear(self) -> list[Delivery]:
        """Take out everybody who waits."""
        waiting = list(self)
        self._ready.clear()
        self._keyed = 0
        for queue in self._keys.values():
            queue.clear()
        return waiting
