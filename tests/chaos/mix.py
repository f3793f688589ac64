"""Mix: what is sent, drawn from a seed, and the one who sends it and knows what was confirmed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from ergon_framework import ConnectionLost, Transaction
from ergon_framework.connectors.postgres import PostgresQueue
from tests.chaos import ledger
from tests.chaos.worker import QUEUE

BATCH = 50
KEYS = 60
#: Of a thousand; the rest is plain.
SHARES = {"delayed": 30, "deferred": 30, "keyed": 50, "foreign": 50, "undecodable": 5}
#: One of so many is poisoned.
POISON = 8_000


@dataclass
class Order:
    """One message that is to be sent."""

    id: str
    kind: str
    seconds: float
    luck: float

    def payload(self) -> dict[str, Any]:
        extra = {"delayed": {"due": time.time() + 1.0 + 6.0 * self.luck}, "deferred": {"tries": 2}}
        return {"kind": self.kind, "seconds": self.seconds} | extra.get(self.kind, {})

    def transaction(self) -> Transaction:
        key = f"key-{int(self.luck * KEYS)}" if self.kind == "keyed" else None
        return Transaction(self.id, self.payload(), source=QUEUE, key=key)

    @property
    def is_strange(self) -> bool:
        """Sent by somebody who knows no more than the function in the database."""
        return self.kind in ("foreign", "undecodable")

    @property
    def dies(self) -> bool:
        """Whether it is to end among the dead letters."""
        return self.kind in ("poison", "undecodable")


def drawn(count: int, dice: random.Random) -> list[Order]:
    kinds = [kind for kind, share in SHARES.items() for _ in range(count * share // 1000)]
    poison = max(1, round(count / POISON))
    kinds += ["plain"] * (count - len(kinds) - poison)
    dice.shuffle(kinds)
    for _ in range(poison):
        # Not late: each needs a lease per delivery, and a short run would wait for nothing else.
        kinds.insert(dice.randrange(1 + len(kinds) // 2), "poison")
    return [Order(f"{kind}-{n}", kind, dice.uniform(0, 0.2), dice.random()) for n, kind in enumerate(kinds)]


@dataclass
class Sender:
    """Sends *orders* evenly over some seconds; what the server did not confirm is looked up before it is sent again."""

    dsn: str
    orders: list[Order]
    confirmed: set[str] = field(default_factory=set)
    #: Found in the database although nobody had confirmed them.
    unconfirmed: set[str] = field(default_factory=set)
    #: Batches of which only a part had arrived.
    torn: int = 0
    outages: int = 0

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        queue = PostgresQueue(QUEUE, dsn=self.dsn)
        batches = [self.orders[start : start + BATCH] for start in range(0, len(self.orders), BATCH)]
        for number, batch in enumerate(batches):
            time.sleep(max(0.0, began + seconds * number / len(batches) - time.monotonic()))
            ours = [order for order in batch if not order.is_strange]
            self._surely(ours, lambda ours=ours: queue.dispatch([order.transaction() for order in ours]))
            strange = [order for order in batch if order.is_strange]
            self._surely(strange, lambda strange=strange: self._send(strange))
        queue.close()

    def _surely(self, batch: list[Order], send: Callable[[], object]) -> None:
        ids = [order.id for order in batch]
        while ids:
            try:
                send()
            except (ConnectionLost, psycopg.OperationalError):
                self.outages += 1
                found = self._found(ids)
                if found:
                    self.torn += len(found) < len(ids)
                    self.unconfirmed |= found
                    return
            else:
                self.confirmed.update(ids)
                return

    def _found(self, ids: list[str]) -> set[str]:
        while True:
            try:
                with psycopg.connect(self.dsn, autocommit=True) as connection:
                    return ledger.arrived(connection, ids)
            except psycopg.OperationalError:
                time.sleep(0.05)

    def _send(self, batch: list[Order]) -> None:
        with psycopg.connect(self.dsn) as connection:
            for order in batch:
                if order.kind == "foreign":
                    body, headers = psycopg.types.json.Jsonb(order.payload()), {"ergon-id": order.id}
                    text = "select ergon.send(%s, convert_to(%s::jsonb::text, 'UTF8'), %s)"
                    connection.execute(text, (QUEUE, body, Jsonb(headers)))
                else:
                    # With a sound id and without one; the ledger knows it either way.
                    headers = {"ergon-id": order.id} if order.luck < 0.5 else {}
                    text = "select ergon.send(%s, %s, %s, null, %s)"
                    connection.execute(text, (QUEUE, unreadable(order.id), Jsonb(headers), order.id))

    @property
    def kinds(self) -> Counter[str]:
        return Counter(order.kind for order in self.orders)


def unreadable(name: str) -> bytes:
    return b"\xff{not json " + name.encode()
