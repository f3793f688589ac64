"""Mix: the messages of a run, drawn from a seed, and their sender, which knows the confirmed ones."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from ergon_framework import ConnectionLostError, Transaction
from ergon_framework.connectors.postgres import PostgresQueue
from tests.chaos import ledger
from tests.chaos.worker import QUEUE

BATCH_SIZE = 50
KEY_COUNT = 60
#: Per thousand; the rest is plain.
KIND_SHARES = {"delayed": 30, "deferred": 30, "keyed": 50, "foreign": 50, "undecodable": 5}
#: One in this number is poisoned.
MESSAGES_PER_POISON = 8_000


@dataclass
class Order:
    """One message to send."""

    id: str
    kind: str
    seconds: float
    draw: float

    def payload(self) -> dict[str, Any]:
        extra = {"delayed": {"due": time.time() + 1.0 + 6.0 * self.draw}, "deferred": {"tries": 2}}
        return {"kind": self.kind, "seconds": self.seconds} | extra.get(self.kind, {})

    def transaction(self) -> Transaction:
        key = f"key-{int(self.draw * KEY_COUNT)}" if self.kind == "keyed" else None
        return Transaction(self.payload(), id=self.id, source=QUEUE, key=key)

    @property
    def is_third_party(self) -> bool:
        """Whether a third-party producer sends it that knows only the function in the database."""
        return self.kind in ("foreign", "undecodable")

    @property
    def must_be_dead_lettered(self) -> bool:
        """Whether it must be dead-lettered."""
        return self.kind in ("poison", "undecodable")


def draw_orders(count: int, rng: random.Random) -> list[Order]:
    kinds = [kind for kind, share in KIND_SHARES.items() for _ in range(count * share // 1000)]
    poison_count = max(1, round(count / MESSAGES_PER_POISON))
    kinds += ["plain"] * (count - len(kinds) - poison_count)
    rng.shuffle(kinds)
    for _ in range(poison_count):
        # Not late: each needs a lease per delivery, and a short run would wait for nothing else.
        kinds.insert(rng.randrange(1 + len(kinds) // 2), "poison")
    return [Order(f"{kind}-{n}", kind, rng.uniform(0, 0.2), rng.random()) for n, kind in enumerate(kinds)]


@dataclass
class Sender:
    """Sends *orders* evenly over some seconds; unconfirmed ones are looked up before they are sent again."""

    dsn: str
    orders: list[Order]
    confirmed: set[str] = field(default_factory=set)
    #: In the database although their send was not confirmed.
    unconfirmed: set[str] = field(default_factory=set)
    #: Batches of which only a part had arrived.
    partial_batches: int = 0
    outages: int = 0

    def run(self, seconds: float) -> None:
        started_at = time.monotonic()
        queue = PostgresQueue(QUEUE, dsn=self.dsn)
        batches = [self.orders[start : start + BATCH_SIZE] for start in range(0, len(self.orders), BATCH_SIZE)]
        for number, batch in enumerate(batches):
            time.sleep(max(0.0, started_at + seconds * number / len(batches) - time.monotonic()))
            own_orders = [order for order in batch if not order.is_third_party]
            self._send_until_confirmed(
                own_orders, lambda own_orders=own_orders: queue.dispatch([order.transaction() for order in own_orders])
            )
            third_party_orders = [order for order in batch if order.is_third_party]
            self._send_until_confirmed(
                third_party_orders, lambda third_party_orders=third_party_orders: self._send(third_party_orders)
            )
        queue.close()

    def _send_until_confirmed(self, batch: list[Order], send: Callable[[], object]) -> None:
        ids = [order.id for order in batch]
        while ids:
            try:
                send()
            except (ConnectionLostError, psycopg.OperationalError):
                self.outages += 1
                sent_ids = self._find_sent(ids)
                if sent_ids:
                    self.partial_batches += len(sent_ids) < len(ids)
                    self.unconfirmed |= sent_ids
                    return
            else:
                self.confirmed.update(ids)
                return

    def _find_sent(self, ids: list[str]) -> set[str]:
        while True:
            try:
                with psycopg.connect(self.dsn, autocommit=True) as connection:
                    return ledger.find_sent(connection, ids)
            except psycopg.OperationalError:
                time.sleep(0.05)

    def _send(self, batch: list[Order]) -> None:
        with psycopg.connect(self.dsn) as connection:
            for order in batch:
                if order.kind == "foreign":
                    body, headers = psycopg.types.json.Jsonb(order.payload()), {"ergon-id": order.id}
                    query = "select ergon.send(%s, convert_to(%s::jsonb::text, 'UTF8'), %s)"
                    connection.execute(query, (QUEUE, body, Jsonb(headers)))
                else:
                    # With a valid id and without one; the ledger knows it either way.
                    headers = {"ergon-id": order.id} if order.draw < 0.5 else {}
                    query = "select ergon.send(%s, %s, %s, null, %s)"
                    connection.execute(query, (QUEUE, make_unreadable_body(order.id), Jsonb(headers), order.id))

    @property
    def kinds(self) -> Counter[str]:
        return Counter(order.kind for order in self.orders)


def make_unreadable_body(name: str) -> bytes:
    return b"\xff{not json " + name.encode()
