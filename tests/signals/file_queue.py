"""A queue in one file, shared by processes: claims with leases and tokens, as a real broker has them."""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ergon_framework.connectors.base import (
    Ack,
    Capabilities,
    Confirmation,
    Connector,
    DeadLetter,
    Defer,
    Delivery,
    Depth,
    SettleResult,
)
from ergon_framework.errors import ConnectionLostError
from ergon_framework.transaction import Transaction

LEASE_SECONDS = 2.0

CREATE_TABLE = """
create table if not exists items (
    id text primary key, state text not null default 'ready', due real not null default 0,
    deliveries integer not null default 0, token text
)
"""


class FileQueue(Connector):
    """It is unavailable while a file called ``down`` exists next to it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "queue"
        self._down = folder / "down"

    @property
    def name(self) -> str:
        return "signals"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            mode="queue",
            renewable=True,
            lease=LEASE_SECONDS,
            release_uncounted=True,
            delays=True,
            dead_letters=False,
            fenced_by="token",
            durable=True,
        )

    def open(self) -> None:
        with self._connection() as connection:
            connection.execute(CREATE_TABLE)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if self._down.exists():
            raise ConnectionLostError("the queue is away")
        connection = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        try:
            connection.execute("begin immediate")
            yield connection
            connection.execute("commit")
        finally:
            connection.close()

    def fetch_transactions(self, batch_size, **extra):
        claimed = []
        with self._connection() as connection:
            rows = connection.execute(
                "select id, deliveries from items where state in ('ready', 'claimed') and due <= ? order by id limit ?",
                (time.time(), batch_size),
            ).fetchall()
            for name, deliveries in rows:
                token = uuid.uuid4().hex
                connection.execute(
                    "update items set state = 'claimed', due = ?, deliveries = ?, token = ? where id = ?",
                    (time.time() + LEASE_SECONDS, deliveries + 1, token, name),
                )
                transaction = Transaction({}, id=name, source=self.name)
                claimed.append(Delivery(transaction, (name, token), deliveries + 1, time.monotonic() + LEASE_SECONDS))
        return claimed

    def settle(self, requests):
        with self._connection() as connection:
            return [self._settle(connection, delivery, settlement) for delivery, settlement in requests]

    def _settle(self, connection, delivery, settlement):
        name, token = delivery.receipt
        condition = "where id = ? and token = ? and state = 'claimed' and due > ?"
        arguments = (name, token, time.time())
        if isinstance(settlement, Ack):
            cursor = connection.execute(f"delete from items {condition}", arguments)
        elif isinstance(settlement, DeadLetter):
            cursor = connection.execute(f"update items set state = 'dead' {condition}", arguments)
        else:
            due = time.time() + settlement.delay if isinstance(settlement, Defer) else 0.0
            release = "update items set state = 'ready', token = null, deliveries = deliveries - 1, due = ?"
            cursor = connection.execute(f"{release} {condition}", (due, *arguments))
        return SettleResult.SETTLED if cursor.rowcount else SettleResult.LOST

    def extend(self, deliveries):
        with self._connection() as connection:
            return [self._extend(connection, delivery) for delivery in deliveries]

    def _extend(self, connection, delivery):
        name, token = delivery.receipt
        cursor = connection.execute(
            "update items set due = ? where id = ? and token = ? and state = 'claimed' and due > ?",
            (time.time() + LEASE_SECONDS, name, token, time.time()),
        )
        return time.monotonic() + LEASE_SECONDS if cursor.rowcount else None

    def dispatch(self, transactions):
        with self._connection() as connection:
            for transaction in transactions:
                connection.execute("insert or ignore into items (id) values (?)", (transaction.id,))
        return [Confirmation(transaction.id) for transaction in transactions]

    def find_queued(self, ids):
        with self._connection() as connection:
            rows = connection.execute("select id from items where state in ('ready', 'claimed')").fetchall()
        return {name for (name,) in rows} & set(ids)

    def depth(self):
        with self._connection() as connection:
            counts = dict(connection.execute("select state, count(*) from items group by state").fetchall())
        return Depth(counts.get("ready", 0), in_flight=counts.get("claimed", 0), dead=counts.get("dead", 0))
