"""SimpleConnector: a working connector with one method to implement, for a read-only source.

Such a source (a list, an API, a file) does not know which transactions are being processed: this process keeps track of
them, and redeliveries wait in its memory.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Final, cast

from ergon_framework.connectors.base import (
    Capabilities,
    Confirmation,
    Connector,
    DeadLetter,
    Defer,
    Delivery,
    Release,
    Settlement,
    SettlementRequest,
    SettleResult,
)
from ergon_framework.errors import ConfigurationError
from ergon_framework.telemetry import logs
from ergon_framework.transaction import Transaction

_log = logging.getLogger(__name__)

_CAPABILITIES: Final = Capabilities(
    mode="queue",
    renewable=False,
    lease=None,
    release_uncounted=True,
    delays=False,
    dead_letters=False,
    fenced_by="token",
    durable=False,
)


class SimpleConnector(Connector):
    """A connector that needs only one method: ``fetch`` returns the next transactions of a source.

    The connector does not report success or failure to the source. Released and deferred transactions wait in the
    memory of the process and are redelivered from there; they are lost if the process ends. Dead letters are logged
    and not kept. ``dispatch`` is rejected. Safe to use from several threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._receipts = count()
        self._claimed: set[int] = set()
        #: Due time on the monotonic clock, order of arrival, transaction, deliveries.
        self._waiting: list[tuple[float, int, Transaction, int]] = []

    @abstractmethod
    def fetch(self, batch_size: int, **extra: Any) -> Iterable[Transaction]:
        """Return at most *batch_size* transactions that were not returned before; nothing if there is none.

        A generator is read up to *batch_size*. Raise ``ConnectionLostError`` if the source cannot be reached.
        """

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def fetch_transactions(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        due = self._take_due(batch_size)
        if due:
            return due
        items: Any = self.fetch(batch_size, **extra)
        if isinstance(items, Iterator):
            items = list(islice(items, batch_size))
        if not isinstance(items, Sequence) or isinstance(items, str | bytes):
            return cast("Sequence[Delivery]", items)  # the loop reports the wrong type
        # An item that is not a transaction is passed on, so that the loop reports it and releases the rest.
        return [self._deliver(each, 1) if isinstance(each, Transaction) else each for each in items]

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        return [self._settle(delivery, settlement) for delivery, settlement in requests]

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:  # noqa: ARG002 - rejected
        raise ConfigurationError(f"connector {self.name!r} is read-only; implement dispatch() to produce to its source")

    def _deliver(self, transaction: Transaction, deliveries: int) -> Delivery:
        if not transaction.source:
            transaction = transaction.replace(source=self.name)
        with self._lock:
            receipt = next(self._receipts)
            self._claimed.add(receipt)
        return Delivery(transaction, receipt, deliveries)

    def _take_due(self, batch_size: int) -> list[Delivery]:
        due: list[tuple[float, int, Transaction, int]] = []
        with self._lock:
            while self._waiting and len(due) < batch_size and self._waiting[0][0] <= time.monotonic():
                due.append(heapq.heappop(self._waiting))
        return [self._deliver(transaction, deliveries) for _, _, transaction, deliveries in due]

    def _settle(self, delivery: Delivery, settlement: Settlement) -> SettleResult:
        transaction, delay = delivery.transaction, 0.0
        with self._lock:
            if delivery.receipt not in self._claimed:
                return SettleResult.LOST
            self._claimed.remove(delivery.receipt)
            if isinstance(settlement, Defer):
                delay = settlement.delay
                transaction = settlement.apply(transaction)
            if isinstance(settlement, Defer | Release):
                # The delivery is not counted, as the capabilities promise.
                entry = (time.monotonic() + delay, next(self._receipts), transaction, delivery.deliveries)
                heapq.heappush(self._waiting, entry)
        if isinstance(settlement, DeadLetter):
            fields = {"queue": self.name, "transaction_id": transaction.id, "reason": settlement.reason}
            logs.log_event(logging.WARNING, "dead letter discarded", fields, to=_log)
        return SettleResult.SETTLED
