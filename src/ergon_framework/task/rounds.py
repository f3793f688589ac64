"""The root spans of a loop: one for the whole call, or one per batch of a streaming loop."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ergon_framework.connectors.base import Delivery
from ergon_framework.task.outline import SpanNames
from ergon_framework.telemetry.names import Attribute
from ergon_framework.telemetry.spans import SpanNode, Tracing
from ergon_framework.transaction import Transaction


class BatchSpan:
    """One root span, and the number of its transactions that have not ended."""

    __slots__ = ("node", "unfinished")

    def __init__(self, node: SpanNode) -> None:
        self.node = node
        self.unfinished = 0


class BatchSpans:
    """Maps each transaction to its root span.

    A streaming loop would never end a span of the whole loop, so there each fetch starts a root span, which ends when
    the last transaction of that fetch has ended, however many are fetched in the meantime.
    """

    def __init__(self, tracing: Tracing, span_names: SpanNames, *, streaming: bool) -> None:
        self._tracing = tracing
        self._span_names = span_names
        self._streaming = streaming
        self._lock = threading.Lock()
        self._current: BatchSpan | None = None
        self._open: set[BatchSpan] = set()
        #: By the identity of the object: one id may be delivered twice, and the second is deferred immediately.
        self._by_transaction: dict[int, BatchSpan] = {}

    def begin(self, size: int) -> None:
        if self._current is not None and not self._streaming:
            return
        extra_attributes = {Attribute.BATCH_ASKED: size} if self._streaming else {}
        self._current = BatchSpan(
            self._tracing.start_root(self._span_names.root, {**self._span_names.attributes, **extra_attributes})
        )
        self._open.add(self._current)

    @property
    def current(self) -> SpanNode | None:
        return None if self._current is None else self._current.node

    def for_transaction(self, transaction: Transaction) -> SpanNode | None:
        """Return the root span of *transaction*; None outside any loop."""
        batch_span = self._by_transaction.get(id(transaction)) or self._current
        return None if batch_span is None else batch_span.node

    def assign(self, deliveries: Sequence[Delivery]) -> None:
        """Assign the transactions of *deliveries*, and no others, to the current root span."""
        current = self._current
        if not self._streaming or current is None:
            return
        current.node.set_attributes({Attribute.BATCH_FETCHED: len(deliveries)})
        with self._lock:
            for delivery in deliveries:
                if self._by_transaction.setdefault(id(delivery.transaction), current) is current:
                    current.unfinished += 1
            is_complete = current.unfinished == 0
        if is_complete:
            self._end(current)

    def end_transaction(self, transaction: Transaction) -> None:
        if not self._streaming:
            return
        with self._lock:
            batch_span = self._by_transaction.pop(id(transaction), None)
            if batch_span is None:
                return
            batch_span.unfinished -= 1
            is_complete = batch_span.unfinished == 0
        if is_complete:
            self._end(batch_span)

    def close(self, attributes: Mapping[str, Any]) -> None:
        """End all root spans that are still open, at the end of the loop."""
        if self._current in self._open:
            self._current.node.set_attributes(attributes)
        for batch_span in list(self._open):
            self._end(batch_span)
        self._by_transaction.clear()

    def _end(self, batch_span: BatchSpan) -> None:
        self._open.discard(batch_span)
        batch_span.node.end()
