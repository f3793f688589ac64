"""The task of the matrix. The environment says which state it is to be found in; a journal says that it is there."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.postgres.queue import PostgresQueue
from tests.signals.file_queue import LEASE, FileQueue

FOLDER = Path(os.environ["SIGNALS_FOLDER"])
STATE = os.environ["SIGNALS_STATE"]
DRAIN = float(os.environ["SIGNALS_DRAIN"])


def note(word: str, what: str = "-", count: int = 0) -> None:
    """One line that outlives this process, whatever becomes of it."""
    line = f"{word} {os.getpid()} {what} {count}\n".encode()
    file = os.open(FOLDER / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)


def wait_for(sign: str) -> None:
    while not (FOLDER / sign).exists():
        time.sleep(0.005)


async def wait_for_async(sign: str) -> None:
    while not (FOLDER / sign).exists():  # noqa: ASYNC110 - the sign comes from another process
        await asyncio.sleep(0.005)


async def never() -> None:
    """Goes on, whatever it is told."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            note("shrugged")


class Noted:
    """Writes each fetch and each settlement down, in both flavours."""

    def fetch_transactions(self, batch_size, **extra):
        if STATE == "fetching":
            note("fetching")
        return _noted(super().fetch_transactions(batch_size, **extra))

    async def fetch_transactions_async(self, batch_size, **extra):
        if STATE == "fetching":
            note("fetching")
        return _noted(await super().fetch_transactions_async(batch_size, **extra))

    def settle(self, settlings):
        _begin(settlings)
        if STATE == "settle":
            wait_for("go")
        try:
            results = super().settle(settlings)
        except Exception:
            note("unsettled")
            raise
        return _end(settlings, results)

    async def settle_async(self, settlings):
        _begin(settlings)
        if STATE == "settle":
            await wait_for_async("go")
        try:
            results = await super().settle_async(settlings)
        except Exception:
            note("unsettled")
            raise
        return _end(settlings, results)


def _noted(found):
    for delivery in found:
        note("fetched", delivery.transaction.id, delivery.deliveries)
    if not found:
        note("idle")
    return found


def _begin(settlings):
    for delivery, _ in settlings:
        note("settling", delivery.transaction.id)


def _end(settlings, results):
    for (delivery, settlement), result in zip(settlings, results, strict=True):
        note(type(settlement).__name__, f"{delivery.transaction.id}:{result}")
    return results


class NotedFile(Noted, FileQueue):
    def fetch_transactions(self, batch_size, **extra):
        if STATE == "fetching":
            note("fetching")
            threading.Event().wait()
        return super().fetch_transactions(batch_size)


class NotedPostgres(Noted, PostgresQueue): ...


def made():
    if "SIGNALS_DSN" not in os.environ:
        return NotedFile(FOLDER)
    return NotedPostgres(os.environ["SIGNALS_QUEUE"], dsn=os.environ["SIGNALS_DSN"], lease=LEASE)


policy = ConsumerPolicy.load(
    {
        "loop": {
            "drain_timeout": DRAIN,
            "streaming": True,
            "concurrency": {"value": 1},
            "batch": {"size": 1},
            # Idle is idle: who waits here is woken by a signal only. The killed are waited for more often.
            "empty_queue": {"backoff": 0.2 if STATE == "killed" else 60.0, "cap": 0.0, "multiplier": 1.0},
        },
        "steps": {
            # A fetch that waits at the broker is the state that is asked for.
            "fetch": {"extra": {"wait": 25.0} if STATE == "fetching" else {}},
            "process": {"retry": {"backoff": 20.0, "timeout": None}},
            "settle": {"retry": {"max_attempts": 1000, "backoff": 0.05, "cap": 0.05}},
        },
    }
)

queue = made()


@consumer(queue, policy=policy, name="handle")
def handle(order, transaction):
    note("began", transaction.id)
    if STATE == "backoff":
        raise ConnectionError("no answer")
    if STATE == "never":
        threading.Event().wait()
    if STATE in {"handler", "killed"}:
        wait_for("go")
    if STATE in {"down", "settle"}:
        wait_for("on")
    note("done", transaction.id)


@consumer(queue, policy=policy, name="handle_async")
async def handle_async(order, transaction):
    note("began", transaction.id)
    if STATE == "backoff":
        raise ConnectionError("no answer")
    if STATE == "never":
        await never()
    if STATE in {"handler", "killed"}:
        await wait_for_async("go")
    if STATE in {"down", "settle"}:
        await wait_for_async("on")
    note("done", transaction.id)
