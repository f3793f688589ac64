"""The orchestrator: executors of several kinds, each with its own queue, pool and claim limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from pydantic import Field

from ergon_framework.engine.drivers.aio import AsyncioDriver
from ergon_framework.errors import ConfigurationError
from ergon_framework.executor.guard import ProcessReaper
from ergon_framework.executor.jobs.clockwork import run_cron
from ergon_framework.executor.jobs.cron import Cron, cron_columns
from ergon_framework.executor.jobs.queue import JobQueue
from ergon_framework.executor.jobs.registrations import registration
from ergon_framework.executor.jobs.request import DEFAULT_KIND
from ergon_framework.executor.jobs.rules import with_default_streaming
from ergon_framework.executor.jobs.task import JobWorker
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.process import ExecutorCommand
from ergon_framework.executor.routing import EXECUTOR_SEPARATOR
from ergon_framework.policy import Policy
from ergon_framework.task.base import AsyncTask
from ergon_framework.task.gates import Gate
from ergon_framework.task.loops import share_running_loops
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, OnOutcome
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.report import Report
from ergon_framework.transaction import Transaction


class ExecutorGroup(Policy):
    """The executors of one kind: the command that starts them, and their pool."""

    command: ExecutorCommand
    pool: PoolPolicy = Field(default=PoolPolicy(), description="How many run, and for how long.")


class Orchestrator(AsyncConsumerMixin, AsyncTask):
    """Runs jobs: a task for ``ergon run``, with a separate loop for each kind of executors.

    The address of the database is *dsn*, or ``ERGON_POSTGRES__DSN`` of the environment. The policy's
    ``steps.process.retry`` applies to jobs that do not set their own retries. It continues when its queues are empty,
    unless ``loop.streaming`` of the policy is false. *crons* are declared at its start; while it runs, it fires all due
    entries, whatever declared them.
    """

    connector: JobQueue

    def __init__(
        self,
        kinds: Mapping[str, ExecutorGroup],
        *,
        dsn: str | None = None,
        lease: float = 30.0,
        policy: ConsumerPolicy | None = None,
        gates: Sequence[Gate] | None = None,
        crons: Sequence[Cron] = (),
        name: str = "jobs",
    ) -> None:
        if not kinds or any(not kind or EXECUTOR_SEPARATOR in kind for kind in kinds):
            raise ConfigurationError(
                f"an orchestrator has at least one kind of executors, and no name has a {EXECUTOR_SEPARATOR!r}"
            )
        self._name = name
        self._cron_rows = [cron_columns(cron, default=DEFAULT_KIND, executors=kinds) for cron in crons]
        if len({cron.name for cron in crons}) < len(crons):
            raise ConfigurationError("two cron entries have the same name; an entry is known by its name alone")
        self._reaper: ProcessReaper | None = None
        self._lease = lease
        #: By kind; ``ergon dlq`` gets the queue of one of them: ``jobs.tasks["rust"].connector``.
        self.tasks = {
            kind: JobWorker(
                kind, group.command, pool=group.pool, dsn=dsn, lease=lease, gates=gates, get_reaper=self._shared_reaper
            )
            for kind, group in kinds.items()
        }
        super().__init__(next(iter(self.tasks.values())).connector, policy=with_default_streaming(policy), gates=gates)
        for task in self.tasks.values():
            # Probes and signals apply to all of them.
            share_running_loops(task, self)

    @property
    def name(self) -> str:
        return self._name

    def _shared_reaper(self) -> ProcessReaper:
        if self._reaper is None:
            raise ConfigurationError("the orchestrator is not open; run it with run(), or within open()")
        return self._reaper

    async def process_transaction(self, transaction: Transaction) -> Any:
        """Raise an error: the task of each kind processes its transactions."""
        raise ConfigurationError(f"{self.name} runs {transaction.id!r} in the task of its kind")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Open one reaper, all kinds with their registration, and a cron scheduler for all entries."""
        reaper = self._reaper = await asyncio.to_thread(ProcessReaper)
        try:
            async with AsyncExitStack() as stack:
                for task in self.tasks.values():
                    await stack.enter_async_context(task.open())
                dsn = self.connector.dsn
                await stack.enter_async_context(registration(dsn, self.tasks.keys(), lease=self._lease, task=self.name))
                await stack.enter_async_context(run_cron(dsn, self._cron_rows, task=self.name))
                yield
        finally:
            self._reaper = None
            await asyncio.to_thread(reaper.close)

    async def consume_transactions(
        self,
        policy: ConsumerPolicy | None = None,
        *,
        gates: Sequence[Gate] | None = None,
        on_outcome: OnOutcome | None = None,
        driver: Callable[[], AsyncioDriver] = AsyncioDriver,
    ) -> Report:
        """Consume for all kinds concurrently; if one fails, the others are stopped. Return one report for all."""
        consumer_policy = with_default_streaming(policy or self._consumer_policy)
        running = [
            asyncio.create_task(
                task.consume_transactions(consumer_policy, gates=gates, on_outcome=on_outcome, driver=driver),
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
        return _sum_reports([report for report in reports if isinstance(report, Report)])

    @property
    def _consumer_policy(self) -> ConsumerPolicy | None:
        return self.policy if isinstance(self.policy, ConsumerPolicy) else None


def _sum_reports(reports: Sequence[Report]) -> Report:
    """Return the sum of all reports, with the stop reason of the last one."""
    summed = Report(end=reports[-1].end)
    for report in reports:
        for total in ("started", "fetches", "empty_fetches", "abandoned", "fenced", "released_started"):
            setattr(summed, total, getattr(summed, total) + getattr(report, total))
        for part in ("counts", "refused", "settled"):
            counts = getattr(summed, part)
            for key, count in getattr(report, part).items():
                counts[key] = counts.get(key, 0) + count
        summed.failures.extend(report.failures)
    return summed
