"""What tests of jobs share: a database, clients of both variants with one face, and orchestrators that run."""

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
from ergon_framework.connectors.postgres.receipt import Receipt
from ergon_framework.executor.jobs import attempts
from ergon_framework.executor.jobs.attempts import Claim
from ergon_framework.executor.jobs.client import AsyncJobClient, JobClient
from ergon_framework.executor.jobs.orchestrator import Executors, Orchestrator
from ergon_framework.executor.jobs.queue import JobQueue
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.process import Command
from ergon_framework.schema.lines import Lines
from ergon_framework.task.loops import loops_of

ROOT = Path(__file__).parents[2]
STUBBORN = str(ROOT / "tests" / "unit" / "executor" / "stubborn.py")
PATH = {"PATH": os.environ["PATH"]}
#: Starts at once, and has handlers that echo, sleep, crash and spin.
COMMAND = Command(words=(sys.executable, "-S", STUBBORN), environment=PATH)
PATIENCE = 20.0


def rows(dsn, sql, *values):
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute(sql, values)
        return found.fetchall() if found.description else []


class Client:
    """A client of either variant, asked as one of threads."""

    def __init__(self, flavour, dsn, **options):
        self.flavour = flavour
        self._runner = asyncio.Runner() if flavour == "async" else None
        self.own = (AsyncJobClient if flavour == "async" else JobClient)(dsn, **options)

    def __getattr__(self, name):
        method = getattr(self.own, name)
        if self._runner is None or name in {"parameters", "statement", "submitting"}:
            return method
        return lambda *args, **told: self._runner.run(method(*args, **told), context=copy_context())

    def end(self):
        self.close()
        if self._runner is not None:
            self._runner.close()


def policy(*, streaming=True, **retry):
    retry = {"max_attempts": 3, "timeout": 20.0, "backoff": 0.05, **retry}
    return ConsumerPolicy.load(
        {
            "loop": {"streaming": streaming, "drain_timeout": 5.0, "empty_queue": {"backoff": 0.05, "cap": 0.2}},
            "steps": {"process": {"retry": retry}},
        }
    )


def orchestrator(dsn, *, size=2, command=COMMAND, kinds=("python",), lease=30.0, rules=None, crons=(), **pool):
    executors = Executors(command=command, pool=PoolPolicy(**{"size": size, "grace": 0.2, **pool}))
    return Orchestrator(dict.fromkeys(kinds, executors), dsn=dsn, lease=lease, policy=rules or policy(), crons=crons)


@asynccontextmanager
async def running(task):
    """The task's loop, for as long as this lasts."""
    loop = asyncio.create_task(task.run())
    try:
        # Whoever stops it before it runs stops nothing.
        await until(lambda: loop.done() or loops_of(task).troubles is not None)
        yield loop
    finally:
        task.stop()
        await asyncio.wait_for(loop, PATIENCE)


async def until(true, *args):
    """Wait for what is going to be so."""
    end = time.monotonic() + PATIENCE
    while True:
        found = true(*args)
        found = await found if asyncio.iscoroutine(found) else found
        if found:
            return found
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.02)


class Store:
    """A worker by hand: it claims messages and says what the orchestrator would say about their jobs."""

    def __init__(self, dsn, kind="python", *, lease=30.0):
        self.queue = JobQueue(kind, dsn=dsn, lease=lease)
        self.lines = Lines(dsn)
        self.queue.open()

    def fetched(self, count=1):
        found, end = [], time.monotonic() + PATIENCE
        while len(found) < count:
            found += self.queue.fetch_transactions(10, wait=0.2)
            assert time.monotonic() < end, found
        return found

    def claim(self, delivery):
        assert isinstance(delivery.receipt, Receipt)
        return Claim(delivery.transaction.id, delivery.receipt)

    def start(self, *deliveries, max_attempts=3, timeout=20.0):
        claims = [self.claim(delivery) for delivery in deliveries]
        return self.lines.run(attempts.start(claims, max_attempts=max_attempts, timeout=timeout))

    def finish(self, delivery, verdict):
        return self.lines.run(attempts.finish([attempts.End(self.claim(delivery), verdict)]))[0]

    def close(self):
        self.queue.close()
        self.lines.close()
