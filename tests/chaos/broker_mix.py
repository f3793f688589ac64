"""Mix for brokers: the same orders, sent over the line that is cut, until each was confirmed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ergon_framework import ErgonError, Transaction
from ergon_framework.connectors import schemes
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.codec import JsonCodec
from tests.chaos.mix import BATCH, Order, unreadable
from tests.chaos.worker import QUEUE


class Strange(JsonCodec):
    """Writes what somebody else's producer would: only an id above the body, or a body that is none."""

    def encode(self, transaction: Transaction) -> Any:
        body, headers = super().encode(transaction)
        if transaction.payload["kind"] == "undecodable":
            body = unreadable(transaction.id)
        return body, {name: value for name, value in headers.items() if name == "ergon-id"}


@dataclass
class BrokerSender:
    """Sends *orders* evenly over some seconds; what nobody confirmed is sent again, perhaps twice."""

    url: str
    options: dict[str, Any]
    orders: list[Order]
    confirmed: set[str] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)
    outages: int = 0
    errors: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        ours = as_sync(schemes.connect(QUEUE, self.url, self.options))
        strange = as_sync(schemes.connect(QUEUE, self.url, {**self.options, "codec": Strange()}))
        batches = [self.orders[start : start + BATCH] for start in range(0, len(self.orders), BATCH)]
        try:
            for number, batch in enumerate(batches):
                time.sleep(max(0.0, began + seconds * number / len(batches) - time.monotonic()))
                self._surely(ours, [order for order in batch if not order.is_strange])
                self._surely(strange, [order for order in batch if order.is_strange])
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            ours.close()
            strange.close()

    def _surely(self, queue: Any, batch: list[Order]) -> None:
        ids = [order.id for order in batch]
        while ids:
            try:
                queue.dispatch([order.transaction() for order in batch])
            except ErgonError as error:
                if error.final:
                    raise
                self.outages += 1
                self.repeated.update(ids)
                time.sleep(0.1)
            else:
                self.confirmed.update(ids)
                return
