"""The jobs of the chaos run: what each does and how it must end, drawn from a seed, and the one who submits them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from ergon_framework.executor.jobs.client import JobClient
from tests.chaos.job_orchestrator import MAX_ATTEMPTS

BATCH = 20
#: Of a thousand; the rest echoes.
SHARES = {"fail": 70, "retry": 40, "print": 20, "crash": 10, "hang": 8}
#: One of so many ends its orchestrator every time, and at least one does.
KILLER = 1_600
#: Of a thousand, those for executors with bad manners.
STUBBORN = 30
#: A bad attempt after which there is no good one.
NEVER = 1_000


@dataclass(frozen=True)
class Order:
    """One job that is to be submitted."""

    id: str
    kind: str
    mode: str
    #: The last attempt that is to go wrong.
    until: int
    takes: float
    max_attempts: int
    timeout: float | None

    @property
    def succeeds(self) -> bool:
        return self.until < NEVER

    def submit(self, client: JobClient, connection: psycopg.Connection) -> bool:
        """Whether it is new."""
        return client.submit_on(
            connection,
            f"{self.kind}#chaos.work",
            {"mode": self.mode, "until": self.until, "takes": self.takes},
            id=self.id,
            max_attempts=None if self.max_attempts == MAX_ATTEMPTS else self.max_attempts,
            timeout=self.timeout,
        ).created


def drawn(count: int, languages: Sequence[str], dice: random.Random, *, deadly: int) -> list[Order]:
    """*count* jobs in a random order; killers, with *deadly* attempts, are spread over the first half."""
    orders = [_order(f"job-{number}", languages, dice) for number in range(count)]
    killers = max(1, count // KILLER)
    for number in range(killers):
        place = int(count * 0.5 * (number + dice.random()) / killers)
        kind = languages[number % len(languages)]
        orders[place] = Order(orders[place].id, kind, "kill", NEVER, 0.0, deadly, None)
    return orders


def _order(job_id: str, languages: Sequence[str], dice: random.Random) -> Order:
    kind = "stubborn" if dice.random() * 1000 < STUBBORN else dice.choice(languages)
    # Some are still at it when the lease of an orchestrator that was stopped is over.
    takes = dice.uniform(*dice.choices([(0.0, 0.03), (0.2, 1.0), (1.5, 4.0)], [83, 14, 3])[0])
    (mode,) = dice.choices(["echo", *SHARES], [1000 - sum(SHARES.values()), *SHARES.values()])
    if mode in {"echo", "print"}:
        return Order(job_id, kind, mode, 0, takes, MAX_ATTEMPTS, None)
    timeout = 1.5 if mode == "hang" else None
    # Most get through in the end, which takes as many attempts as were bad, and those that the chaos costs.
    if dice.random() < 0.7:
        return Order(job_id, kind, mode, dice.randint(1, 2), min(takes, 0.3), MAX_ATTEMPTS, timeout)
    return Order(job_id, kind, mode, NEVER, min(takes, 0.3), dice.randint(2, 4), timeout)


class Sender:
    """Submits all of them, evenly over some seconds; what was not confirmed is submitted again."""

    def __init__(self, dsn: str, orders: list[Order]) -> None:
        self.orders = orders
        self.sent = 0
        self.outages = 0
        #: How many were there when they were submitted again.
        self.unconfirmed = 0
        self._dsn = dsn

    def run(self, seconds: float) -> None:
        began, client = time.monotonic(), JobClient(self._dsn)
        for first in range(0, len(self.orders), BATCH):
            time.sleep(max(0.0, began + seconds * first / len(self.orders) - time.monotonic()))
            group = self.orders[first : first + BATCH]
            while True:
                try:
                    with psycopg.connect(self._dsn, connect_timeout=5) as connection:
                        new: list[Any] = [order.submit(client, connection) for order in group]
                    break
                except psycopg.Error:
                    self.outages += 1
                    time.sleep(0.2)
            self.sent += len(group)
            self.unconfirmed += new.count(False)
