"""Orchestrator: executors of several kinds, each with a queue, a pool and a claim limit of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from pydantic import Field

from ergon_framework.engine.drivers.aio import Asyncio
from ergon_framework.errors import ConfigurationError
from ergon_framework.executor.guard import Guard
from ergon_framework.executor.jobs.clockwork import clockwork
from ergon_framework.executor.jobs.cron import Cron, columns
from ergon_framework.executor.jobs.queue import JobQueue
from ergon_framework.executor.jobs.registrations import registration
from ergon_framework.executor.jobs.request import DEFAULT
from ergon_framework.executor.jobs.rules import streams_by_default
from ergon_framework.executor.jobs.task import JobTask
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.process import Command
from ergon_framework.executor.routing import MARK
from ergon_framework.policy import Policy
from ergon_framework.task.base import AsyncTask
from ergon_framework.task.gates import Gate
from ergon_framework.task.loops import share_loops
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, OnOutcome
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.report import Report
from ergon_framework.transaction import Transaction


class Executors(Policy):
    """The executors of one kind: how they are started, and how many there are."""

    command: Command
    pool: PoolPolicy = Field(default=PoolPolicy(), description="How many run, and for how long.")


class Orchestrator(AsyncConsumerMixin, AsyncTask):
    """Runs jobs: a task for ``ergon run``, with a loop of its own for each kind of executors.

    The address of the database is *dsn*, or the environment's ``ERGON_POSTGRES__DSN``. The policy's
    ``steps.process.retry`` says how jobs are tried again, where they do not say it themselves. It goes on
    when its queues are empty, unless ``loop.streaming`` of the policy is false. *crons*
    are declared when it starts; while it runs it fires all entries that are due, whoever declared them.
    """

    connector: JobQueue

    def __init__(
        self,
        kinds: Mapping[str, Executors],
        *,
        dsn: str | None = None,
        lease: float = 30.0,
        policy: ConsumerPolicy | None = None,
        gates: Sequence[Gate] | None = None,
        crons: Sequence[Cron] = (),
        name: str = "jobs",
    ) -> None:
        if not kinds or any(not kind or MARK in kind for kind in kinds):
            raise ConfigurationError(f"an orchestrator has at least one kind of executors, and no name has a {MARK!r}")
        self._name = name
        self._crons = [columns(cron, default=DEFAULT, executors=kinds) for cron in crons]
        if len({cron.name for cron in crons}) < len(crons):
            raise ConfigurationError("two cron entries have the same name; an entry is known by its name alone")
        self._guard: Guard | None = None
        self._lease = lease
        #: By kind; ``ergon dlq`` takes the queue of one of them: ``jobs.tasks["rust"].connector``.
        self.tasks = {
            kind: JobTask(
                kind, given.command, pool=given.pool, dsn=dsn, lease=lease, gates=gates, guard=self._shared_guard
            )
            for kind, given in kinds.items()
        }
        super().__init__(next(iter(self.tasks.values())).connector, policy=streams_by_default(policy), gates=gates)
        for task in self.tasks.values():
            # Probes and signals mean all of them.
            share_loops(task, self)

    @property
    def name(self) -> str:
        return self._name

    def _shared_guard(self) -> Guard:
        if self._guard is None:
            raise ConfigurationError("the orchestrator is not open; run it with run(), or within opened()")
        return self._guard

    async def process_transaction(self, transaction: Transaction) -> Any:
        """Not here: each kind has a task of its own."""
        raise ConfigurationError(f"{self.name} runs {transaction.id!r} in the task of its kind")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """One guard, all kinds open and registered, and a clockwork for all entries."""
        guard = self._guard = await asyncio.to_thread(Guard)
        try:
            async with AsyncExitStack() as stack:
                for task in self.tasks.values():
                    await stack.enter_async_context(task.opened())
                address = self.connector.address
                await stack.enter_async_context(
                    registration(address, self.tasks.keys(), lease=self._lease, task=self.name)
                )
                await stack.enter_async_context(clockwork(address, self._crons, task=self.name))
                yield
        finally:
            self._guard = None
            await asyncio.to_thread(guard.close)

    async def consume_transactions(
        self,
        policy: ConsumerPolicy | None = None,
        *,
        gates: Sequence[Gate] | None = None,
        on_outcome: OnOutcome | None = None,
        driver: Callable[[], Asyncio] = Asyncio,
    ) -> Report:
        """Consume for all kinds at once; when one of them fails the others are stopped. One report for all."""
        rules = streams_by_default(policy or self._own)
        running = [
            asyncio.create_task(
                task.consume_transactions(rules, gates=gates, on_outcome=on_outcome, driver=driver),
                name=task.name,
            )
            for task in self.tasks.values()
        ]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            if any(one.done() and one.exception() for one in running):
                self.stop()
            reports = await asyncio.gather(*running, return_exceptions=True)
        except asyncio.CancelledError:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise
        for report in reports:
            if isinstance(report, BaseException):
                raise report
        return _summed([report for report in reports if isinstance(report, Report)])

    @property
    def _own(self) -> ConsumerPolicy | None:
        return self.policy if isinstance(self.policy, ConsumerPolicy) else None


def _summed(reports: Sequence[Report]) -> Report:
    """What all loops did together; it ended as the last of them did."""
    whole = Report(end=reports[-1].end)
    for report in reports:
        for total in ("started", "fetches", "empty_fetches", "abandoned", "fenced", "released_started"):
            setattr(whole, total, getattr(whole, total) + getattr(report, total))
        for part in ("counts", "refused", "settled"):
            into = getattr(whole, part)
            for key, count in getattr(report, part).items():
                into[key] = into.get(key, 0) + count
        whole.failures.extend(report.failures)
    return whole
