"""Messages for brokers: the same orders, sent over the connection that is cut, until each one is confirmed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ergon_framework import ErgonError, Transaction
from ergon_framework.connectors import registry
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.codec import JsonCodec
from tests.chaos.mix import BATCH_SIZE, Order, make_unreadable_body
from tests.chaos.worker import QUEUE


class ThirdPartyCodec(JsonCodec):
    """Encodes messages as a third-party producer would: the id only next to the body, or a body that is not JSON."""

    def encode(self, transaction: Transaction) -> Any:
        body, headers = super().encode(transaction)
        if transaction.payload["kind"] == "undecodable":
            body = make_unreadable_body(transaction.id)
        return body, {name: value for name, value in headers.items() if name == "ergon-id"}


@dataclass
class BrokerSender:
    """Sends *orders* evenly over some seconds; unconfirmed ones are sent again, so some may arrive twice."""

    url: str
    options: dict[str, Any]
    orders: list[Order]
    confirmed: set[str] = field(default_factory=set)
    resent: set[str] = field(default_factory=set)
    outages: int = 0
    errors: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        started_at = time.monotonic()
        own_queue = as_sync(registry.create_connector(QUEUE, self.url, self.options))
        third_party_queue = as_sync(
            registry.create_connector(QUEUE, self.url, {**self.options, "codec": ThirdPartyCodec()})
        )
        batches = [self.orders[start : start + BATCH_SIZE] for start in range(0, len(self.orders), BATCH_SIZE)]
        try:
            for number, batch in enumerate(batches):
                time.sleep(max(0.0, started_at + seconds * number / len(batches) - time.monotonic()))
                self._send_until_confirmed(own_queue, [order for order in batch if not order.is_third_party])
                self._send_until_confirmed(third_party_queue, [order for order in batch if order.is_third_party])
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            own_queue.close()
            third_party_queue.close()

    def _send_until_confirmed(self, queue: Any, batch: list[Order]) -> None:
        ids = [order.id for order in batch]
        while ids:
            try:
                queue.dispatch([order.transaction() for order in batch])
            except ErgonError as error:
                if error.final:
                    raise
                self.outages += 1
                self.resent.update(ids)
                time.sleep(0.1)
            else:
                self.confirmed.update(ids)
                return
