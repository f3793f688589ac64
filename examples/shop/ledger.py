"""Headquarters book every invoice that the shop has reported, once."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg_pool import ConnectionPool

from ergon_framework import consumer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.facts import BoundarySide, FactConnector, FileContentStore, PostgresBoundary

boundary = PostgresBoundary(side=BoundarySide.OUTER, contents=FileContentStore(os.environ["CONTENTS"]))
facts = FactConnector(boundary, from_zone="shop", to_zone="headquarters", reader="ledger")
# No transaction is sent to this queue: its inbox remembers which facts were booked.
inbox = PostgresQueue("booked", inbox=True)


@contextmanager
def database() -> Iterator[dict[str, ConnectionPool]]:
    with ConnectionPool(os.environ["ERGON_POSTGRES__DSN"], min_size=1, check=ConnectionPool.check_connection) as pool:
        yield {"pool": pool}


@consumer(facts, lifespan=database)
def book(fact: dict[str, Any], pool: ConnectionPool) -> None:
    artifact = fact["object"]
    invoice = json.loads(b"".join(boundary.get_object(artifact["bucket"], artifact["key"], zone="shop")))
    with pool.connection() as connection:  # one database transaction: the mark and the entry, both or neither
        if inbox.record_processed_on(connection):
            connection.execute(
                "insert into ledger (order_id, invoice, cents) values (%s, %s, %s)",
                [invoice["order"], invoice["number"], invoice["cents"]],
            )
