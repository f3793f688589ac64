"""One worker process of the chaos run: a real consumer, on threads or asyncio, that keeps a journal.

The payload says what the handler does. Its effect is a row, written with the inbox's mark in one
database transaction; its start is on disk before that, and its end after.
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
    Defer,
    Delivery,
    Task,
    Transaction,
    TransactionException,
)
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.scope import current
from tests.chaos.journal import Journal

QUEUE = "chaos"
#: The exit code of a process that a poisoned transaction killed.
POISONED_EXIT_CODE = 66
INSERT_EFFECT = "insert into chaos.effect (id, worker) values (%s, %s)"
#: A handler's own connections detect a dead connection sooner than the queue's.
KEEPALIVE_OPTIONS = {
    "connect_timeout": 4,
    "tcp_user_timeout": 4_000,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 2,
}
MAX_CONNECTIONS = 8


def make_policy(*, concurrency: int, max_deliveries: int) -> ConsumerPolicy:
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
                # An outage is not the transaction's fault, so the attempts suffice for all outages.
                "process": {
                    "retry": {"max_attempts": 200, "backoff": 0.2, "cap": 1.0, "jitter": 0.5, "max_inline_delay": 2.0}
                    | {"timeout": 60.0}
                },
                "fetch": {"retry": {"backoff": 0.1, "cap": 0.5}},
            },
        }
    )


class JournalingQueue(PostgresQueue):
    """Records each claim and the result of each settlement."""

    def __init__(self, name: str, journal: Journal, **options: Any) -> None:
        super().__init__(name, **options)
        self._journal = journal

    def fetch_transactions(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return self._record_claims(super().fetch_transactions(batch_size, **extra))

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return self._record_claims(await super().fetch_transactions_async(batch_size, **extra))

    def settle(self, requests: Any) -> Any:
        started_at = time.time()
        return self._record_settlements(requests, super().settle(requests), started_at)

    async def settle_async(self, requests: Any) -> Any:
        started_at = time.time()
        return self._record_settlements(requests, await super().settle_async(requests), started_at)

    def _record_claims(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        for delivery in deliveries:
            claim = list(delivery.receipt[:3])
            self._journal.write_soon("claim", *claim, delivery.transaction.id, delivery.deliveries)
            # The trace is the only field of a transaction that reaches the handler and does not belong to the user.
            trace = {**delivery.transaction.trace, "claim": "-".join(map(str, claim))}
            delivery.transaction = delivery.transaction.replace(trace=trace)
        return deliveries

    def _record_settlements(self, settlings: Any, results: Any, started_at: float) -> Any:
        for (delivery, settlement), result in zip(settlings, results, strict=True):
            self._journal.write_soon(
                "settle", *delivery.receipt[:3], type(settlement).__name__, result.value, started_at
            )
        return results


class HandlerConnections:
    """A few connections for the handlers of one process, sync and async; a failed one is discarded."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._idle: list[psycopg.Connection[Any]] = []
        self._slots_async = asyncio.Semaphore(MAX_CONNECTIONS)
        self._idle_async: list[psycopg.AsyncConnection[Any]] = []

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        with self._slots:
            connection = self._idle.pop() if self._idle else psycopg.connect(self._dsn, **KEEPALIVE_OPTIONS)
            try:
                with connection.transaction():
                    yield connection
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)

    @asynccontextmanager
    async def transaction_async(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with self._slots_async:
            if self._idle_async:
                connection = self._idle_async.pop()
            else:
                connection = await psycopg.AsyncConnection.connect(self._dsn, **KEEPALIVE_OPTIONS)
            try:
                async with connection.transaction():
                    yield connection
            except BaseException:
                await connection.close()
                raise
            self._idle_async.append(connection)


class HandlerBase:
    """What both variants of the handler share."""

    numbers = itertools.count(1)

    def make_start_record(self, transaction: Transaction) -> tuple[int, tuple[Any, ...]]:
        number = next(self.numbers)
        return number, ("start", number, transaction.id, transaction.trace["claim"], transaction.key)

    def get_deferral(self, transaction: Transaction) -> Defer | None:
        """Return what the payload requests other than work."""
        payload = transaction.payload
        if payload["kind"] == "poison":
            os._exit(POISONED_EXIT_CODE)
        if payload["kind"] == "delayed" and (delay := payload["due"] - time.time()) > 0:
            return Defer(delay)
        scope = current()
        if payload["kind"] == "deferred" and scope is not None and scope.attempt < payload["tries"]:
            # Longer than retry.max_inline_delay, so the queue keeps it meanwhile.
            raise TransactionException("not yet", retry_after=2.5)
        return None


class ThreadsWorker(HandlerBase, ConsumerMixin, Task):
    def process_transaction(self, transaction: Transaction) -> Any:
        journal: Journal = self.services.journal
        number, values = self.make_start_record(transaction)
        journal.write(*values)
        outcome = "raised"
        try:
            deferral = self.get_deferral(transaction)
            if deferral is None:
                time.sleep(transaction.payload["seconds"])
                with self.services.purse.transaction() as connection:
                    if self.services.queue.record_processed_on(connection):
                        connection.execute(INSERT_EFFECT, (transaction.id, self.services.who))
            outcome = "done" if deferral is None else "later"
            return deferral
        finally:
            journal.write("end", number, outcome)


class AsyncWorker(HandlerBase, AsyncConsumerMixin, AsyncTask):
    async def process_transaction(self, transaction: Transaction) -> Any:
        journal: Journal = self.services.journal
        number, values = self.make_start_record(transaction)
        await journal.write_async(*values)
        outcome = "raised"
        try:
            deferral = self.get_deferral(transaction)
            if deferral is None:
                await asyncio.sleep(transaction.payload["seconds"])
                async with self.services.purse.transaction_async() as connection:
                    if await self.services.queue.record_processed_on_async(connection):
                        await connection.execute(INSERT_EFFECT, (transaction.id, self.services.who))
            outcome = "done" if deferral is None else "later"
            return deferral
        finally:
            # Not awaited: a cancelled handler exits.
            journal.write_soon("end", number, outcome)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flavour", choices=["threads", "async"])
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--who", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--lease", type=float, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--max-deliveries", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    journal = Journal(options.journal)
    queue = JournalingQueue(QUEUE, journal, dsn=options.dsn, lease=options.lease, inbox=True)
    services = {"journal": journal, "queue": queue, "who": options.who, "purse": HandlerConnections(options.dsn)}
    consumer_policy = make_policy(concurrency=options.concurrency, max_deliveries=options.max_deliveries)
    worker_class: Any = ThreadsWorker if options.flavour == "threads" else AsyncWorker
    task = worker_class(queue, policy=consumer_policy, **services)
    signal.signal(signal.SIGTERM, lambda *_: task.stop())
    journal.write("begin", options.who, os.getpid())
    report = task.run() if options.flavour == "threads" else asyncio.run(task.run())
    journal.write("over", str(report.stop_reason), dict(report.settled), dict(report.rejected))
    return 0


if __name__ == "__main__":
    sys.exit(main())
