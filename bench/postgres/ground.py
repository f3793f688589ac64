"""The ground that all parts stand on: a private server, filled queues, and loops that are timed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.schema import migrate
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.postgres import PrivatePostgres

#: 200 bytes of JSON.
PAYLOAD = {"order": 4711, "text": "x" * 176}


class Async(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


class Threaded(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


@contextlib.contextmanager
def server():
    """A server of our own, synced as in production, with the schema in its database ``bench``."""
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        Path(folder).chmod(0o755)
        settings = {"shared_buffers": "512MB", "max_wal_size": "4GB", "max_connections": 200}
        postgres = PrivatePostgres(Path(folder) / "data", settings=settings)
        postgres.start()
        try:
            dsn = postgres.create_database("bench")
            migrate.upgrade(dsn)
            yield postgres, dsn
        finally:
            postgres.stop("fast")


def policy(concurrency, *, limit=None, prefetch=0, streaming=False, batch=100):
    loop = {"concurrency": {"value": concurrency}, "batch": {"size": batch}, "prefetch": prefetch}
    loop |= {"limit": limit, "streaming": streaming}
    return ConsumerPolicy.load({"loop": loop})


def filled(dsn, name, count):
    queue = PostgresQueue(name, dsn=dsn)
    for start in range(0, count, 1000):
        queue.dispatch([queue.transaction(PAYLOAD) for _ in range(min(1000, count - start))])
    queue.close()


def run(coroutine):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def consumed_async(dsn, name, count, concurrency, prefetch=100):
    """Seconds that one asyncio loop takes for *count* transactions."""

    async def consume():
        task = Async()
        task.connector = PostgresQueue(name, dsn=dsn)
        await task.connector.open_async()
        began = time.perf_counter()
        report = await task.consume_transactions(policy(concurrency, limit=count, prefetch=prefetch))
        took = time.perf_counter() - began
        await task.connector.close_async()
        assert report.settled.get("settled") == count, report.settled
        return took

    return run(consume())


def consumed_threads(dsn, name, count, concurrency, prefetch=100):
    task = Threaded()
    task.connector = PostgresQueue(name, dsn=dsn)
    task.connector.open()
    began = time.perf_counter()
    report = task.consume_transactions(policy(concurrency, limit=count, prefetch=prefetch))
    took = time.perf_counter() - began
    task.connector.close()
    assert report.settled.get("settled") == count, report.settled
    return took


def median(figures):
    return statistics.median(figures)


def quantile(figures, share):
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def say(text):
    print(text, file=sys.stderr, flush=True)


def part(name, *arguments):
    """One part in a process of its own; its last line is its JSON."""
    command = [sys.executable, str(Path(__file__).parent / f"{name}.py"), *map(str, arguments)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    return json.loads(ran.stdout.splitlines()[-1])
