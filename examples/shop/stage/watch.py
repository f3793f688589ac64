"""Watch: how far the orders have come, asked of everybody again and again; who does not answer is asked later."""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg

from ergon_framework.connectors.base import Depth
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.facts.model import Side
from ergon_framework.facts.stores.postgres import PostgresBoundary
from stage.customers import Customers, Kind
from stage.sites import PAIR, Sites

#: Seconds between two looks.
PAUSE = 0.5
_DEAD = Depth(0, 0, 0, 0, None)


class Watch:
    """What the books say meanwhile, as numbers only."""

    def __init__(self, sites: Sites, customers: Customers) -> None:
        self._sites = sites
        self._customers = customers
        self._orders = RabbitMQQueue("orders", url=sites.rabbitmq.url)
        self._invoices = PostgresQueue("invoices", dsn=sites.dsn("shop"))
        self._facts = PostgresBoundary(sites.dsn("headquarters"), side=Side.OUTER)
        self._numbers = dict.fromkeys(("charged", "told", "booked"), 0)
        self._depths = {"orders": _DEAD, "invoices": _DEAD}
        self._answered = False
        self._began = time.monotonic()

    @property
    def words(self) -> str:
        numbers, depths = self._numbers, self._depths
        dead = sum(depth.dead or 0 for depth in depths.values())
        return (
            f"{time.monotonic() - self._began:5.0f} s: {len(self._customers.placed)} orders, "
            f"{numbers['charged']} charged, {numbers['told']} told to headquarters, {numbers['booked']} in the ledger, "
            f"{dead} dead letters"
        )

    @property
    def settled(self) -> bool:
        """Whether all queues are empty, and all orders that can be done are booked and all others dead.

        What waits for its time in RabbitMQ is not among what can be counted there.
        """
        depths = self._depths.values()
        waiting = sum((depth.ready or 0) + (depth.delayed or 0) + (depth.in_flight or 0) for depth in depths)
        good = sum(order.kind is Kind.GOOD for order in self._customers.placed)
        bad = len(self._customers.placed) - good
        dead = sum(depth.dead or 0 for depth in depths)
        return self._answered and not waiting and self._numbers["booked"] >= good and dead >= bad

    def look(self, *, faults: int | None = None) -> str:
        """Ask all, and say how it stands."""
        time.sleep(PAUSE)
        shop, headquarters = self._sites.dsn("shop"), self._sites.dsn("headquarters")
        self._answered = all(
            [
                self._asked(lambda: self._count(shop, "charged", "select count(*) from charge")),
                self._asked(lambda: self._count(headquarters, "booked", "select count(distinct order_id) from ledger")),
                self._asked(lambda: self._numbers.update(told=self._told())),
                self._asked(lambda: self._depths.update(orders=self._orders.depth())),
                self._asked(lambda: self._depths.update(invoices=self._invoices.depth())),
            ]
        )
        return self.words if faults is None else f"{self.words}; {faults} faults"

    def close(self) -> None:
        for line in (self._orders, self._invoices, self._facts):
            self._asked(line.close)

    def _told(self) -> int:
        end = self._facts.end_of(PAIR)
        return 0 if end is None else end.offset

    def _count(self, dsn: str, name: str, question: str) -> None:
        with psycopg.connect(dsn, connect_timeout=2, options="-c statement_timeout=2000") as connection:
            row = connection.execute(question).fetchone()
            self._numbers[name] = row[0] if row else 0

    @staticmethod
    def _asked(question: Callable[[], None]) -> bool:
        try:
            question()
        except Exception:  # noqa: BLE001 - in the trouble that is made here anybody may not answer
            return False
        return True
