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
    Delivery,
    Depth,
    Later,
    SettleResult,
)
from ergon_framework.errors import ConnectionLost
from ergon_framework.transaction import Transaction

LEASE = 2.0

TABLE = """
create table if not exists items (
    id text primary key, state text not null default 'ready', due real not null default 0,
    deliveries integer not null default 0, token text
)
"""


class FileQueue(Connector):
    """It is away for as long as there is a file called ``down`` beside it."""

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
            lease=LEASE,
            release_is_free=True,
            delays=True,
            dead_letters=False,
            fenced_by="token",
            durable=True,
        )

    def open(self) -> None:
        with self._line() as line:
            line.execute(TABLE)

    @contextmanager
    def _line(self) -> Iterator[sqlite3.Connection]:
        if self._down.exists():
            raise ConnectionLost("the queue is away")
        line = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        try:
            line.execute("begin immediate")
            yield line
            line.execute("commit")
        finally:
            line.close()

    def fetch_transactions(self, batch_size, **extra):
        found = []
        with self._line() as line:
            rows = line.execute(
                "select id, deliveries from items where state in ('ready', 'claimed') and due <= ? order by id limit ?",
                (time.time(), batch_size),
            ).fetchall()
            for name, deliveries in rows:
                token = uuid.uuid4().hex
                line.execute(
                    "update items set state = 'claimed', due = ?, deliveries = ?, token = ? where id = ?",
                    (time.time() + LEASE, deliveries + 1, token, name),
                )
                transaction = Transaction(name, {}, source=self.name)
                found.append(Delivery(transaction, (name, token), deliveries + 1, time.monotonic() + LEASE))
        return found

    def settle(self, settlings):
        with self._line() as line:
            return [self._settle(line, delivery, settlement) for delivery, settlement in settlings]

    def _settle(self, line, delivery, settlement):
        name, token = delivery.receipt
        mine = "where id = ? and token = ? and state = 'claimed' and due > ?"
        given = (name, token, time.time())
        if isinstance(settlement, Ack):
            done = line.execute(f"delete from items {mine}", given)
        elif isinstance(settlement, DeadLetter):
            done = line.execute(f"update items set state = 'dead' {mine}", given)
        else:
            due = time.time() + settlement.delay if isinstance(settlement, Later) else 0.0
            back = "update items set state = 'ready', token = null, deliveries = deliveries - 1, due = ?"
            done = line.execute(f"{back} {mine}", (due, *given))
        return SettleResult.SETTLED if done.rowcount else SettleResult.LOST

    def extend(self, deliveries):
        with self._line() as line:
            return [self._extend(line, delivery) for delivery in deliveries]

    def _extend(self, line, delivery):
        name, token = delivery.receipt
        done = line.execute(
            "update items set due = ? where id = ? and token = ? and state = 'claimed' and due > ?",
            (time.time() + LEASE, name, token, time.time()),
        )
        return time.monotonic() + LEASE if done.rowcount else None

    def dispatch(self, transactions):
        with self._line() as line:
            for transaction in transactions:
                line.execute("insert or ignore into items (id) values (?)", (transaction.id,))
        return [Confirmation(transaction.id) for transaction in transactions]

    def queued(self, ids):
        with self._line() as line:
            rows = line.execute("select id from items where state in ('ready', 'claimed')").fetchall()
        return {name for (name,) in rows} & set(ids)

    def depth(self):
        with self._line() as line:
            counts = dict(line.execute("select state, count(*) from items group by state").fetchall())
        return Depth(counts.get("ready", 0), in_flight=counts.get("claimed", 0), dead=counts.get("dead", 0))
