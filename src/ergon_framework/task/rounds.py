"""Rounds: the root spans of a loop, one for the whole call or one per batch of a streaming loop."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ergon_framework.connectors.base import Delivery
from ergon_framework.task.outline import Outline
from ergon_framework.telemetry.names import Attribute
from ergon_framework.telemetry.spans import Node, Tracing
from ergon_framework.transaction import Transaction


class Round:
    """One root span, and how many of its transactions have not ended."""

    __slots__ = ("node", "waiting")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.waiting = 0


class Rounds:
    """Knows which root a transaction belongs to.

    A streaming loop would never end a span that covered all of it, so there each fetch begins a
    root that ends when the last transaction it brought has ended, however many are fetched meanwhile.
    """

    def __init__(self, tracing: Tracing, outline: Outline, *, streaming: bool) -> None:
        self._tracing = tracing
        self._outline = outline
        self._streaming = streaming
        self._lock = threading.Lock()
        self._present: Round | None = None
        self._open: set[Round] = set()
        #: By the identity of the object: ids may come twice, and the second is deferred at once.
        self._of: dict[int, Round] = {}

    def begin(self, size: int) -> None:
        if self._present is not None and not self._streaming:
            return
        more = {Attribute.BATCH_ASKED: size} if self._streaming else {}
        self._present = Round(self._tracing.root(self._outline.root, {**self._outline.attributes, **more}))
        self._open.add(self._present)

    @property
    def present(self) -> Node | None:
        return None if self._present is None else self._present.node

    def of(self, transaction: Transaction) -> Node | None:
        """The root of *transaction*; None outside any loop."""
        found = self._of.get(id(transaction)) or self._present
        return None if found is None else found.node

    def brought(self, deliveries: Sequence[Delivery]) -> None:
        """The present round has these transactions, and no others."""
        present = self._present
        if not self._streaming or present is None:
            return
        present.node.tell({Attribute.BATCH_FETCHED: len(deliveries)})
        with self._lock:
            for delivery in deliveries:
                if self._of.setdefault(id(delivery.transaction), present) is present:
                    present.waiting += 1
            over = present.waiting == 0
        if over:
            self._end(present)

    def ended(self, transaction: Transaction) -> None:
        if not self._streaming:
            return
        with self._lock:
            found = self._of.pop(id(transaction), None)
            if found is None:
                return
            found.waiting -= 1
            over = found.waiting == 0
        if over:
            self._end(found)

    def close(self, attributes: Mapping[str, Any]) -> None:
        """The loop has ended, and with it whatever root is still open."""
        if self._present in self._open:
            self._present.node.tell(attributes)
        for found in list(self._open):
            self._end(found)
        self._of.clear()

    def _end(self, found: Round) -> None:
        self._open.discard(found)
        found.node.end()
