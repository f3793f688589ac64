"""Shared by all parts: a private server, filled queues, and timed loops."""

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
from ergon_framework.database import migrate
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.worker.policies import ConsumerPolicy

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.postgres import PrivatePostgres

#: 200 bytes of JSON.
PAYLOAD = {"order": 4711, "text": "x" * 176}


class AsyncNoopTask(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


class ThreadedNoopTask(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


@contextlib.contextmanager
def server():
    """Start a private server, synced as in production, with the schema in its database ``bench``."""
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


def build_policy(concurrency, *, limit=None, prefetch=0, streaming=False, batch=100):
    loop = {"concurrency": {"value": concurrency}, "batch": {"size": batch}, "prefetch": prefetch}
    loop |= {"limit": limit, "streaming": streaming}
    return ConsumerPolicy.load({"loop": loop})


def fill_queue(dsn, name, count):
    queue = PostgresQueue(name, dsn=dsn)
    for start in range(0, count, 1000):
        queue.dispatch([queue.transaction(PAYLOAD) for _ in range(min(1000, count - start))])
    queue.close()


def run(coroutine):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def consume_async(dsn, name, count, concurrency, prefetch=100):
    """Return the seconds that one asyncio loop takes for *count* transactions."""

    async def consume():
        task = AsyncNoopTask()
        task.connector = PostgresQueue(name, dsn=dsn)
        await task.connector.open_async()
        began = time.perf_counter()
        report = await task.consume_transactions(build_policy(concurrency, limit=count, prefetch=prefetch))
        seconds = time.perf_counter() - began
        await task.connector.close_async()
        assert report.settled.get("settled") == count, report.settled
        return seconds

    return run(consume())


def consume_threads(dsn, name, count, concurrency, prefetch=100):
    task = ThreadedNoopTask()
    task.connector = PostgresQueue(name, dsn=dsn)
    task.connector.open()
    began = time.perf_counter()
    report = task.consume_transactions(build_policy(concurrency, limit=count, prefetch=prefetch))
    seconds = time.perf_counter() - began
    task.connector.close()
    assert report.settled.get("settled") == count, report.settled
    return seconds


def median(values):
    return statistics.median(values)


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def say(text):
    print(text, file=sys.stderr, flush=True)


def run_part(name, *arguments):
    """Run one part in its own process; return its last line, parsed as JSON."""
    command = [sys.executable, str(Path(__file__).parent / f"{name}.py"), *map(str, arguments)]
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    return json.loads(completed.stdout.splitlines()[-1])
