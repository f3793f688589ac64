"""The shop's HTTP API: an order is in its table and in the queue, or in neither."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from fastapi import FastAPI, HTTPException
from psycopg.errors import UniqueViolation
from psycopg_pool import ConnectionPool
from shop import Order, charges

from ergon_framework import Transaction


@asynccontextmanager
async def database(app: FastAPI) -> AsyncIterator[None]:
    with ConnectionPool(os.environ["ERGON_POSTGRES__DSN"]) as app.state.pool:
        yield


app = FastAPI(lifespan=database)


@app.post("/orders", status_code=202)
def place(order: Order) -> dict[str, str]:
    """Accept an order; the worker charges it."""
    try:
        with app.state.pool.connection() as connection:  # one database transaction
            connection.execute(
                "insert into purchase (id, cents, currency) values (%s, %s, %s)",
                [order.id, order.cents, order.currency],
            )
            charges.dispatch_on(connection, [Transaction(asdict(order), id=f"charge-{order.id}", type="charge")])
    except UniqueViolation:
        raise HTTPException(409, f"order {order.id} is known already") from None
    return {"order": order.id}
