"""The shop's queue, and the worker that charges what was bought, in euros."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg_pool import ConnectionPool

from ergon_framework import BusinessError, consumer
from ergon_framework.connectors.postgres import PostgresQueue

charges = PostgresQueue("charges", inbox=True)


@dataclass
class Order:
    id: str
    cents: int
    currency: str


@contextmanager
def database() -> Iterator[dict[str, ConnectionPool]]:
    with ConnectionPool(os.environ["ERGON_POSTGRES__DSN"]) as pool:
        yield {"pool": pool}


@consumer(charges, lifespan=database)
def charge(order: Order, pool: ConnectionPool) -> None:
    with pool.connection() as connection:  # one database transaction: the mark and the effect, both or neither
        if not charges.record_processed_on(connection):
            return  # charged before
        rate = connection.execute("select euros from rate where currency = %s", [order.currency]).fetchone()
        if rate is None:
            raise BusinessError(f"there is no rate for {order.currency}", code="no_rate")
        connection.execute("update purchase set euro_cents = cents * %s where id = %s", [rate[0], order.id])
