"""Customers: a web shop in another language, from Ergon's point of view. It publishes plain JSON to a queue.

An order is sent again until the broker has confirmed it, so it may be there twice.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pika
import pika.exceptions


class OrderKind(StrEnum):
    GOOD = "good"
    DECLINED = "declined"
    UNDECODABLE = "undecodable"
    UNBILLABLE = "unbillable"


#: One of twenty orders each; all others are good.
BAD_KINDS = {7: OrderKind.DECLINED, 12: OrderKind.UNDECODABLE, 17: OrderKind.UNBILLABLE}


@dataclass(frozen=True)
class Order:
    id: str
    kind: OrderKind
    cents: int
    country: str

    @classmethod
    def from_number(cls, number: int) -> Order:
        rng = random.Random(number)  # noqa: S311 - the same order whenever it is asked for
        kind = BAD_KINDS.get(number % 20, OrderKind.GOOD)
        country = "XX" if kind is OrderKind.UNBILLABLE else rng.choice(("AT", "DE", "FR", "SE"))
        return cls(f"order-{number:05}", kind, rng.randint(100, 50_000), country)

    def encode(self) -> bytes:
        card = "empty" if self.kind is OrderKind.DECLINED else "good"
        placed = f"2026-03-06T08:{int(self.id[-4:-2]) % 60:02}:{int(self.id[-2:]) % 60:02}Z"
        fields = {"id": self.id, "cents": self.cents, "card": card, "country": self.country, "placed": placed}
        body = json.dumps(fields).encode()
        return body[: len(body) // 2] if self.kind is OrderKind.UNDECODABLE else body


class Customers:
    """Sends orders at a rate until the count is reached or it is stopped."""

    def __init__(self, url: str, *, count: int | None, rate: float) -> None:
        self._url = url
        self._count = count
        self._rate = rate
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="customers", daemon=True)
        self._connection: pika.BlockingConnection | None = None
        self._channel: Any = None
        #: Orders that the broker has confirmed.
        self.placed: list[Order] = []
        #: How often each was sent, confirmed or not.
        self.sent: Counter[str] = Counter()
        #: The time of the first send of each.
        self.began: dict[str, float] = {}

    def start(self) -> None:
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Send no further order; the current one is sent until it is confirmed."""
        self._stopped.set()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        number, began = 0, time.monotonic()
        while not self._stopped.is_set() and (self._count is None or number < self._count):
            number += 1
            order = Order.from_number(number)
            self.began[order.id] = time.time()
            self._place(order)
            self.placed.append(order)
            self._stopped.wait(max(0.0, began + number / self._rate - time.monotonic()))
        with contextlib.suppress(Exception):
            if self._connection is not None:
                self._connection.close()

    def _place(self, order: Order) -> None:
        while True:
            try:
                if self._connection is None or not self._connection.is_open:
                    # Short: a lost connection must be detected and closed.
                    parameters = "heartbeat=8&blocked_connection_timeout=8&socket_timeout=5"
                    address = f"{self._url.rstrip('/')}/%2F?{parameters}"
                    self._connection = pika.BlockingConnection(pika.URLParameters(address))
                    self._channel = self._connection.channel()
                    self._channel.confirm_delivery()
                self.sent[order.id] += 1
                self._channel.basic_publish(
                    "", "orders", order.encode(), pika.BasicProperties(delivery_mode=2), mandatory=True
                )
            except (pika.exceptions.AMQPError, OSError):
                with contextlib.suppress(Exception):
                    if self._connection is not None:
                        self._connection.close()
                self._connection = None
                time.sleep(0.5)
            else:
                return
