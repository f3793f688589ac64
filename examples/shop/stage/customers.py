"""Customers: a web shop in another language, as far as Ergon can tell. It publishes plain JSON to a queue.

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


class Kind(StrEnum):
    GOOD = "good"
    DECLINED = "declined"
    UNDECODABLE = "undecodable"
    UNBILLABLE = "unbillable"


#: One of twenty orders each; all others are good.
BAD = {7: Kind.DECLINED, 12: Kind.UNDECODABLE, 17: Kind.UNBILLABLE}


@dataclass(frozen=True)
class Order:
    id: str
    kind: Kind
    cents: int
    country: str

    @classmethod
    def numbered(cls, number: int) -> Order:
        dice = random.Random(number)  # noqa: S311 - the same order whenever it is asked for
        kind = BAD.get(number % 20, Kind.GOOD)
        country = "XX" if kind is Kind.UNBILLABLE else dice.choice(("AT", "DE", "FR", "SE"))
        return cls(f"order-{number:05}", kind, dice.randint(100, 50_000), country)

    def body(self) -> bytes:
        card = "empty" if self.kind is Kind.DECLINED else "good"
        placed = f"2026-03-06T08:{int(self.id[-4:-2]) % 60:02}:{int(self.id[-2:]) % 60:02}Z"
        said = {"id": self.id, "cents": self.cents, "card": card, "country": self.country, "placed": placed}
        body = json.dumps(said).encode()
        return body[: len(body) // 2] if self.kind is Kind.UNDECODABLE else body


class Customers:
    """Sends orders, so many a second, until there were enough or it is told to stop."""

    def __init__(self, url: str, *, count: int | None, rate: float) -> None:
        self._url = url
        self._count = count
        self._rate = rate
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="customers", daemon=True)
        self._line: pika.BlockingConnection | None = None
        self._channel: Any = None
        #: Those that the broker has confirmed.
        self.placed: list[Order] = []
        #: How often each was sent, confirmed or not.
        self.sent: Counter[str] = Counter()
        #: When each was sent first.
        self.began: dict[str, float] = {}

    def start(self) -> None:
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """No order after this one; it is sent until it is confirmed."""
        self._over.set()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        number, began = 0, time.monotonic()
        while not self._over.is_set() and (self._count is None or number < self._count):
            number += 1
            order = Order.numbered(number)
            self.began[order.id] = time.time()
            self._place(order)
            self.placed.append(order)
            self._over.wait(max(0.0, began + number / self._rate - time.monotonic()))
        with contextlib.suppress(Exception):
            if self._line is not None:
                self._line.close()

    def _place(self, order: Order) -> None:
        while True:
            try:
                if self._line is None or not self._line.is_open:
                    # Short: a line that is cut is to be noticed, and left.
                    limits = "heartbeat=8&blocked_connection_timeout=8&socket_timeout=5"
                    where = f"{self._url.rstrip('/')}/%2F?{limits}"
                    self._line = pika.BlockingConnection(pika.URLParameters(where))
                    self._channel = self._line.channel()
                    self._channel.confirm_delivery()
                self.sent[order.id] += 1
                self._channel.basic_publish(
                    "", "orders", order.body(), pika.BasicProperties(delivery_mode=2), mandatory=True
                )
            except (pika.exceptions.AMQPError, OSError):
                with contextlib.suppress(Exception):
                    if self._line is not None:
                        self._line.close()
                self._line = None
                time.sleep(0.5)
            else:
                return
