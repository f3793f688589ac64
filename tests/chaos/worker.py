"""One worker process of the chaos run: a real consumer, on threads or asyncio, that keeps a journal.

What a handler does is told by its payload. Its effect is a row, written with the inbox's mark in one
database transaction; its start is on the disk before that, and its end after.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework import (
    AsyncConsumerMixin,
    AsyncTask,
    ConsumerMixin,
    ConsumerPolicy,
    Delivery,
    Later,
    Task,
    Transaction,
    TransactionException,
)
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.scope import current
from tests.chaos.journal import Journal

QUEUE = "chaos"
#: The exit code of a process that a poisoned transaction took with it.
POISONED = 66
EFFECT = "insert into chaos.effect (id, worker) values (%s, %s)"
#: A handler's own connections notice a silent line sooner than the queue's.
SILENCE = {
    "connect_timeout": 4,
    "tcp_user_timeout": 4_000,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 2,
}
CONNECTIONS = 8


def policy(*, concurrency: int, max_deliveries: int) -> ConsumerPolicy:
    return ConsumerPolicy.load(
        {
            "loop": {
                "streaming": True,
                "concurrency": {"value": concurrency},
                "batch": {"size": concurrency},
                "empty_queue": {"backoff": 0.05, "cap": 0.3},
                "drain_timeout": 20.0,
                "max_deliveries": max_deliveries,
            },
            "steps": {
                # An outage is not the transaction's fault, so there are attempts enough for all of them.
                "process": {
                    "retry": {"max_attempts": 200, "backoff": 0.2, "cap": 1.0, "jitter": 0.5, "hold": 2.0}
                    | {"timeout": 60.0}
                },
                "fetch": {"retry": {"backoff": 0.1, "cap": 0.5}},
            },
        }
    )


class JournalledQueue(PostgresQueue):
    """Notes each claim that it hands out, and what each settlement was answered with."""

    def __init__(self, name: str, journal: Journal, **options: Any) -> None:
        super().__init__(name, **options)
        self._journal = journal

    def fetch_transactions(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return self._claims(super().fetch_transactions(batch_size, **extra))

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return self._claims(await super().fetch_transactions_async(batch_size, **extra))

    def settle(self, settlings: Any) -> Any:
        began = time.time()
        return self._settlements(settlings, super().settle(settlings), began)

    async def settle_async(self, settlings: Any) -> Any:
        began = time.time()
        return self._settlements(settlings, await super().settle_async(settlings), began)

    def _claims(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        for delivery in deliveries:
            claim = list(delivery.receipt[:3])
            self._journal.note("claim", *claim, delivery.transaction.id, delivery.deliveries)
            # The only way to the handler that a transaction has for something that is not the user's.
            carried = {**delivery.transaction.trace, "claim": "-".join(map(str, claim))}
            delivery.transaction = delivery.transaction.replace(trace=carried)
        return deliveries

    def _settlements(self, settlings: Any, results: Any, began: float) -> Any:
        for (delivery, how), result in zip(settlings, results, strict=True):
            self._journal.note("settle", *delivery.receipt[:3], type(how).__name__, result.value, began)
        return results


class Purse:
    """A few connections for the handlers of one process, in both flavours; one that failed is thrown away."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._idle: list[psycopg.Connection[Any]] = []
        self._room_async = asyncio.Semaphore(CONNECTIONS)
        self._idle_async: list[psycopg.AsyncConnection[Any]] = []

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        with self._room:
            connection = self._idle.pop() if self._idle else psycopg.connect(self._dsn, **SILENCE)
            try:
                with connection.transaction():
                    yield connection
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)

    @asynccontextmanager
    async def transaction_async(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with self._room_async:
            if self._idle_async:
                connection = self._idle_async.pop()
            else:
                connection = await psycopg.AsyncConnection.connect(self._dsn, **SILENCE)
            try:
                async with connection.transaction():
                    yield connection
            except BaseException:
                await connection.close()
                raise
            self._idle_async.append(connection)


class Chore:
    """What both flavours of the handler know."""

    numbers = itertools.count(1)

    def begin(self, transaction: Transaction) -> tuple[int, tuple[Any, ...]]:
        number = next(self.numbers)
        return number, ("start", number, transaction.id, transaction.trace["claim"], transaction.key)

    def answer(self, transaction: Transaction) -> Later | None:
        """What the payload asks for other than work."""
        wanted = transaction.payload
        if wanted["kind"] == "poison":
            os._exit(POISONED)
        if wanted["kind"] == "delayed" and (early := wanted["due"] - time.time()) > 0:
            return Later(early)
        scope = current()
        if wanted["kind"] == "deferred" and scope is not None and scope.attempt < wanted["tries"]:
            # Longer than retry.hold: the queue keeps it meanwhile.
            raise TransactionException("not yet", retry_after=2.5)
        return None


class ThreadsWorker(Chore, ConsumerMixin, Task):
    def process_transaction(self, transaction: Transaction) -> Any:
        journal: Journal = self.services.journal
        number, words = self.begin(transaction)
        journal.write(*words)
        how = "raised"
        try:
            later = self.answer(transaction)
            if later is None:
                time.sleep(transaction.payload["seconds"])
                with self.services.purse.transaction() as connection:
                    if self.services.queue.mark_on(connection):
                        connection.execute(EFFECT, (transaction.id, self.services.who))
            how = "done" if later is None else "later"
            return later
        finally:
            journal.write("end", number, how)


class AsyncWorker(Chore, AsyncConsumerMixin, AsyncTask):
    async def process_transaction(self, transaction: Transaction) -> Any:
        journal: Journal = self.services.journal
        number, words = self.begin(transaction)
        await journal.write_async(*words)
        how = "raised"
        try:
            later = self.answer(transaction)
            if later is None:
                await asyncio.sleep(transaction.payload["seconds"])
                async with self.services.purse.transaction_async() as connection:
                    if await self.services.queue.mark_on_async(connection):
                        await connection.execute(EFFECT, (transaction.id, self.services.who))
            how = "done" if later is None else "later"
            return later
        finally:
            # Not awaited: a handler that was told to leave leaves.
            journal.note("end", number, how)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flavour", choices=["threads", "async"])
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--who", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--lease", type=float, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--max-deliveries", type=int, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    journal = Journal(given.journal)
    queue = JournalledQueue(QUEUE, journal, dsn=given.dsn, lease=given.lease, inbox=True)
    services = {"journal": journal, "queue": queue, "who": given.who, "purse": Purse(given.dsn)}
    rules = policy(concurrency=given.concurrency, max_deliveries=given.max_deliveries)
    kind: Any = ThreadsWorker if given.flavour == "threads" else AsyncWorker
    task = kind(queue, policy=rules, **services)
    signal.signal(signal.SIGTERM, lambda *_: task.stop())
    journal.write("begin", given.who, os.getpid())
    report = task.run() if given.flavour == "threads" else asyncio.run(task.run())
    journal.write("over", str(report.end), dict(report.settled), dict(report.refused))
    return 0


if __name__ == "__main__":
    sys.exit(main())
