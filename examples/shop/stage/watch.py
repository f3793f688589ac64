"""Watch: the progress of the orders, polled from every server; a server that does not answer is polled again later."""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg

from ergon_framework.connectors import Depth
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.facts import BoundarySide, PostgresBoundary
from stage.customers import Customers, OrderKind
from stage.sites import PAIR, Sites

#: Seconds between two polls.
POLL_INTERVAL_SECONDS = 0.5
_EMPTY_DEPTH = Depth(0, 0, 0, 0, None)


class Watch:
    """The current state of the records, as numbers only."""

    def __init__(self, sites: Sites, customers: Customers) -> None:
        self._sites = sites
        self._customers = customers
        self._orders = RabbitMQQueue("orders", url=sites.rabbitmq.url)
        self._invoices = PostgresQueue("invoices", dsn=sites.dsn("shop"))
        self._facts = PostgresBoundary(sites.dsn("headquarters"), side=BoundarySide.OUTER)
        self._numbers = dict.fromkeys(("charged", "told", "booked"), 0)
        self._depths = {"orders": _EMPTY_DEPTH, "invoices": _EMPTY_DEPTH}
        self._all_answered = False
        self._began = time.monotonic()

    @property
    def status_line(self) -> str:
        numbers, depths = self._numbers, self._depths
        dead = sum(depth.dead or 0 for depth in depths.values())
        return (
            f"{time.monotonic() - self._began:5.0f} s: {len(self._customers.placed)} orders, "
            f"{numbers['charged']} charged, {numbers['told']} told to headquarters, {numbers['booked']} in the ledger, "
            f"{dead} dead letters"
        )

    @property
    def is_settled(self) -> bool:
        """Whether all queues are empty, all valid orders are booked and all others are dead-lettered.

        Delayed transactions in RabbitMQ cannot be counted here.
        """
        depths = self._depths.values()
        waiting = sum((depth.ready or 0) + (depth.delayed or 0) + (depth.in_flight or 0) for depth in depths)
        good = sum(order.kind is OrderKind.GOOD for order in self._customers.placed)
        bad = len(self._customers.placed) - good
        dead = sum(depth.dead or 0 for depth in depths)
        return self._all_answered and not waiting and self._numbers["booked"] >= good and dead >= bad

    def poll(self, *, faults: int | None = None) -> str:
        """Poll every source, and return the status line."""
        time.sleep(POLL_INTERVAL_SECONDS)
        shop, headquarters = self._sites.dsn("shop"), self._sites.dsn("headquarters")
        self._all_answered = all(
            [
                self._try_call(lambda: self._count(shop, "charged", "select count(*) from charge")),
                self._try_call(
                    lambda: self._count(headquarters, "booked", "select count(distinct order_id) from ledger")
                ),
                self._try_call(lambda: self._numbers.update(told=self._count_replicated())),
                self._try_call(lambda: self._depths.update(orders=self._orders.depth())),
                self._try_call(lambda: self._depths.update(invoices=self._invoices.depth())),
            ]
        )
        return self.status_line if faults is None else f"{self.status_line}; {faults} faults"

    def close(self) -> None:
        for source in (self._orders, self._invoices, self._facts):
            self._try_call(source.close)

    def _count_replicated(self) -> int:
        end = self._facts.last_offset(PAIR)
        return 0 if end is None else end.offset

    def _count(self, dsn: str, name: str, statement: str) -> None:
        with psycopg.connect(dsn, connect_timeout=2, options="-c statement_timeout=2000") as connection:
            row = connection.execute(statement).fetchone()
            self._numbers[name] = row[0] if row else 0

    @staticmethod
    def _try_call(call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception:  # noqa: BLE001 - in the trouble that is made here anybody may not answer
            return False
        return True
