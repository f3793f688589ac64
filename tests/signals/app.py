"""The task of the matrix. The environment sets its state; a journal records that it is reached."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.postgres.queue import PostgresQueue
from tests.signals.file_queue import LEASE_SECONDS, FileQueue

FOLDER = Path(os.environ["SIGNALS_FOLDER"])
STATE = os.environ["SIGNALS_STATE"]
DRAIN_SECONDS = float(os.environ["SIGNALS_DRAIN"])


def write_journal(event: str, subject: str = "-", count: int = 0) -> None:
    """Write one line that outlives this process in any case."""
    line = f"{event} {os.getpid()} {subject} {count}\n".encode()
    file = os.open(FOLDER / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)


def wait_for_file(file_name: str) -> None:
    while not (FOLDER / file_name).exists():
        time.sleep(0.005)


async def wait_for_file_async(file_name: str) -> None:
    while not (FOLDER / file_name).exists():  # noqa: ASYNC110 - the sign comes from another process
        await asyncio.sleep(0.005)


async def block_forever() -> None:
    """Continue despite cancellation."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            write_journal("shrugged")


class JournalMixin:
    """Records each fetch and each settlement, in both variants."""

    def fetch_transactions(self, batch_size, **extra):
        if STATE == "fetching":
            write_journal("fetching")
        return _write_fetched(super().fetch_transactions(batch_size, **extra))

    async def fetch_transactions_async(self, batch_size, **extra):
        if STATE == "fetching":
            write_journal("fetching")
        return _write_fetched(await super().fetch_transactions_async(batch_size, **extra))

    def settle(self, requests):
        _write_settling(requests)
        if STATE == "settle":
            wait_for_file("go")
        try:
            results = super().settle(requests)
        except Exception:
            write_journal("unsettled")
            raise
        return _write_results(requests, results)

    async def settle_async(self, requests):
        _write_settling(requests)
        if STATE == "settle":
            await wait_for_file_async("go")
        try:
            results = await super().settle_async(requests)
        except Exception:
            write_journal("unsettled")
            raise
        return _write_results(requests, results)


def _write_fetched(deliveries):
    for delivery in deliveries:
        write_journal("fetched", delivery.transaction.id, delivery.deliveries)
    if not deliveries:
        write_journal("idle")
    return deliveries


def _write_settling(settlings):
    for delivery, _ in settlings:
        write_journal("settling", delivery.transaction.id)


def _write_results(settlings, results):
    for (delivery, settlement), result in zip(settlings, results, strict=True):
        write_journal(type(settlement).__name__, f"{delivery.transaction.id}:{result}")
    return results


class JournalFileQueue(JournalMixin, FileQueue):
    def fetch_transactions(self, batch_size, **extra):
        if STATE == "fetching":
            write_journal("fetching")
            threading.Event().wait()
        return super().fetch_transactions(batch_size)


class JournalPostgresQueue(JournalMixin, PostgresQueue): ...


def create_queue():
    if "SIGNALS_DSN" not in os.environ:
        return JournalFileQueue(FOLDER)
    return JournalPostgresQueue(os.environ["SIGNALS_QUEUE"], dsn=os.environ["SIGNALS_DSN"], lease=LEASE_SECONDS)


policy = ConsumerPolicy.load(
    {
        "loop": {
            "drain_timeout": DRAIN_SECONDS,
            "streaming": True,
            "concurrency": {"value": 1},
            "batch": {"size": 1},
            # Only a signal may wake an idle run. Killed runs are polled more often.
            "empty_queue": {"backoff": 0.2 if STATE == "killed" else 60.0, "cap": 0.0, "multiplier": 1.0},
        },
        "steps": {
            # The fetching state is a fetch that waits at the broker.
            "fetch": {"extra": {"wait": 25.0} if STATE == "fetching" else {}},
            "process": {"retry": {"backoff": 20.0, "timeout": None}},
            "settle": {"retry": {"max_attempts": 1000, "backoff": 0.05, "cap": 0.05}},
        },
    }
)

queue = create_queue()


@consumer(queue, policy=policy, name="handle")
def handle(order, transaction):
    write_journal("began", transaction.id)
    if STATE == "backoff":
        raise ConnectionError("no answer")
    if STATE == "never":
        threading.Event().wait()
    if STATE in {"handler", "killed"}:
        wait_for_file("go")
    if STATE in {"down", "settle"}:
        wait_for_file("on")
    write_journal("done", transaction.id)


@consumer(queue, policy=policy, name="handle_async")
async def handle_async(order, transaction):
    write_journal("began", transaction.id)
    if STATE == "backoff":
        raise ConnectionError("no answer")
    if STATE == "never":
        await block_forever()
    if STATE in {"handler", "killed"}:
        await wait_for_file_async("go")
    if STATE in {"down", "settle"}:
        await wait_for_file_async("on")
    write_journal("done", transaction.id)
