"""Takes orders from RabbitMQ, has the bank charge them, and requests an invoice for each paid order."""

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from psycopg_pool import ConnectionPool

from ergon_framework import BusinessError, Defer, Transaction, consumer
from ergon_framework.connectors import ForeignCodec, from_json_pointer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.providers import BreakerPolicy, Provider, ProviderError, ProviderPolicy, operation

# The web shop that writes them does not use Ergon: plain JSON, and the order's own number is the id.
orders = RabbitMQQueue("orders", codec=ForeignCodec(id=from_json_pointer("/id"), type="order"))
invoices = PostgresQueue("invoices", inbox=True)


@dataclass
class Order:
    id: str
    cents: int
    card: str
    country: str
    placed: str


# One call at a time probes the bank. If its process is killed the others wait for the end of its lease.
BREAKER = BreakerPolicy(open_cooldown_seconds=3, probe_lease_seconds=20)


@dataclass
class ChargeRequest:
    order: str
    cents: int
    card: str


@dataclass
class ChargeResult:
    status: str
    receipt: str = ""


class Bank(Provider):
    provider_name = "bank"
    capability = "charging"
    policy = ProviderPolicy(timeout=12, breaker=BREAKER)

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(**options)
        self._url = url

    @operation
    def charge(self, request: ChargeRequest) -> ChargeResult:
        headers = {"Idempotency-Key": self.attempt.idempotency_key or ""}
        post = urllib.request.Request(f"{self._url}/charge", json.dumps(asdict(request)).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(post, timeout=min(self.attempt.timeout, 4)) as response:  # noqa: S310 - our own settings
            return ChargeResult(**json.load(response))


bank = Bank(os.environ["BANK_URL"])


@contextmanager
def database() -> Iterator[dict[str, ConnectionPool]]:
    with ConnectionPool(os.environ["ERGON_POSTGRES__DSN"], min_size=1, check=ConnectionPool.check_connection) as pool:
        yield {"pool": pool}


@consumer(orders, lifespan=database, uses=[bank])
def charge(order: Order, pool: ConnectionPool) -> Defer | None:
    try:
        paid = bank.charge(ChargeRequest(order.id, order.cents, order.card))
    except ProviderError as error:
        if error.retryable:
            return Defer(3)  # an outage does not fail the order: it is redelivered later with the same key
        raise
    if paid.status == "declined":
        raise BusinessError(f"the bank declined order {order.id}", code="declined")
    with pool.connection() as connection:  # one database transaction: the charge is noted and its invoice asked for
        inserted = connection.execute(
            "insert into charge (order_id, cents, receipt) values (%s, %s, %s) on conflict do nothing",
            [order.id, order.cents, paid.receipt],
        )
        if inserted.rowcount:
            invoice_request = {
                "order": order.id,
                "cents": order.cents,
                "country": order.country,
                "placed": order.placed,
            }
            invoices.dispatch_on(connection, [Transaction(invoice_request, id=f"invoice-{order.id}", type="invoice")])
    return None
