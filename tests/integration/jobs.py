"""Shared parts of job tests: a database, clients of both variants with one interface, and running orchestrators."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import asynccontextmanager
from contextvars import copy_context
from pathlib import Path

import psycopg

from ergon_framework import ConsumerPolicy
from ergon_framework.connectors.postgres.claims import PostgresReceipt
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.jobs import store
from ergon_framework.jobs.client import AsyncJobClient, JobClient
from ergon_framework.jobs.orchestrator import ExecutorGroup, Orchestrator
from ergon_framework.jobs.queue import JobQueue
from ergon_framework.jobs.store import JobClaim
from ergon_framework.worker.running import running_loops

ROOT = Path(__file__).parents[2]
EXECUTOR_PROGRAM = str(ROOT / "tests" / "unit" / "executors" / "stubborn.py")
ENVIRONMENT = {"PATH": os.environ["PATH"]}
#: Starts immediately, and has handlers that echo, sleep, crash and spin.
COMMAND = ExecutorCommand(words=(sys.executable, "-S", EXECUTOR_PROGRAM), environment=ENVIRONMENT)
TIMEOUT_SECONDS = 20.0


def run_sql(dsn, sql, *values):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql, values)
        return cursor.fetchall() if cursor.description else []


class BlockingJobClient:
    """A client of either variant, called like the sync one."""

    def __init__(self, variant, dsn, **options):
        self.variant = variant
        self._runner = asyncio.Runner() if variant == "async" else None
        self.client = (AsyncJobClient if variant == "async" else JobClient)(dsn, **options)

    def __getattr__(self, name):
        method = getattr(self.client, name)
        if self._runner is None or name in {"parameters", "statement", "submitting"}:
            return method
        return lambda *args, **told: self._runner.run(method(*args, **told), context=copy_context())

    def end(self):
        self.close()
        if self._runner is not None:
            self._runner.close()


def make_policy(*, streaming=True, **retry):
    retry = {"max_attempts": 3, "timeout": 20.0, "backoff": 0.05, **retry}
    return ConsumerPolicy.load(
        {
            "loop": {"streaming": streaming, "drain_timeout": 5.0, "empty_queue": {"backoff": 0.05, "cap": 0.2}},
            "steps": {"process": {"retry": retry}},
        }
    )


def make_orchestrator(dsn, *, size=2, command=COMMAND, kinds=("python",), lease=30.0, rules=None, crons=(), **pool):
    executors = ExecutorGroup(command=command, pool=PoolPolicy(**{"size": size, "grace": 0.2, **pool}))
    return Orchestrator(
        dict.fromkeys(kinds, executors), dsn=dsn, lease=lease, policy=rules or make_policy(), crons=crons
    )


@asynccontextmanager
async def run_task(task):
    """Run the task's loop for the duration of the block."""
    loop = asyncio.create_task(task.run())
    try:
        # A stop before the loop runs would have no effect.
        await wait_until(lambda: loop.done() or running_loops(task).not_fetching_reasons is not None)
        yield loop
    finally:
        task.stop()
        await asyncio.wait_for(loop, TIMEOUT_SECONDS)


async def wait_until(condition, *args):
    """Wait until the condition is true and return its value."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        value = condition(*args)
        value = await value if asyncio.iscoroutine(value) else value
        if value:
            return value
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.02)


class ManualWorker:
    """A manual worker: it claims messages and reports what the orchestrator would report about their jobs."""

    def __init__(self, dsn, kind="python", *, lease=30.0):
        self.queue = JobQueue(kind, dsn=dsn, lease=lease)
        self.pool = ConnectionPool(dsn)
        self.queue.open()

    def fetch(self, count=1):
        deliveries, deadline = [], time.monotonic() + TIMEOUT_SECONDS
        while len(deliveries) < count:
            deliveries += self.queue.fetch_transactions(10, wait=0.2)
            assert time.monotonic() < deadline, deliveries
        return deliveries

    def claim(self, delivery):
        assert isinstance(delivery.receipt, PostgresReceipt)
        return JobClaim(delivery.transaction.id, delivery.receipt)

    def start(self, *deliveries, max_attempts=3, timeout=20.0):
        claims = [self.claim(delivery) for delivery in deliveries]
        return self.pool.run(store.start_attempts(claims, max_attempts=max_attempts, timeout=timeout))

    def finish(self, delivery, verdict):
        return self.pool.run(store.finish_attempts([store.AttemptEnd(self.claim(delivery), verdict)]))[0]

    def close(self):
        self.queue.close()
        self.pool.close()
