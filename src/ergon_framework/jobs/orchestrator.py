"""The orchestrator: executors of several kinds, each with its own queue, pool and claim limit.

An executor is a process that runs handlers, in any language; executors of one kind share a queue. A pool keeps the
processes of one kind running. A claim is the right to process a fetched job until its lease ends; its limit lets some
jobs wait for a free executor next to those that run. The reaper is a process that kills all executors if the
orchestrator is killed.

A cron entry submits a job at its scheduled times; the orchestrator fires due entries while it runs its jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from pydantic import Field

from ergon_framework.database.pool import ConnectionPool
from ergon_framework.engine.aio import AsyncioDriver
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.executors.decision import EXECUTOR_SEPARATOR
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.executors.reaper import ProcessReaper
from ergon_framework.gates import Gate
from ergon_framework.jobs import cron_store, metrics
from ergon_framework.jobs.cron import Cron, cron_columns
from ergon_framework.jobs.metrics import CronTickResult
from ergon_framework.jobs.model import DEFAULT_KIND
from ergon_framework.jobs.queue import JobQueue
from ergon_framework.jobs.registrations import registration
from ergon_framework.jobs.worker import JobWorker, with_default_streaming
from ergon_framework.policy import Policy
from ergon_framework.task.base import AsyncTask
from ergon_framework.task.consumer import AsyncConsumerMixin, OnOutcome
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.report import Report
from ergon_framework.worker.running import share_running_loops

#: Maximum seconds between two polls: an entry may be new.
MAX_POLL_INTERVAL_SECONDS: Final = 1.0
#: Timeout of one database operation in seconds.
_TIMEOUT_SECONDS: Final = 15.0
#: Minimum seconds between two warnings.
_WARN_INTERVAL_SECONDS: Final = 5.0


@asynccontextmanager
async def run_cron(dsn: str, crons: Sequence[dict[str, Any]], *, task: str) -> AsyncIterator[None]:
    """Declare these ``cron_columns``, and fire all due entries, whatever declared them, while the context lasts."""
    connection_pool = ConnectionPool(dsn, max_size=1)
    try:
        if crons:
            await connection_pool.run_async(cron_store.declare(crons), timeout_seconds=_TIMEOUT_SECONDS)
        running = asyncio.create_task(CronScheduler(connection_pool, task=task).run(), name=f"{task}-cron")
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await connection_pool.close_async()


class CronScheduler:
    """Polls for due entries and fires them; belongs to one event loop."""

    def __init__(self, connection_pool: ConnectionPool, *, task: str) -> None:
        self._connection_pool = connection_pool
        self._task = task
        self._metrics = metrics.job_metrics(task)
        self._warned_at = float("-inf")

    async def run(self) -> None:
        """Poll for due entries and fire them, forever."""
        while True:
            pause = MAX_POLL_INTERVAL_SECONDS
            try:
                pause = await self._poll()
            except Exception as error:  # noqa: BLE001 - the boundary of a poll: there is always a next one
                self._warn(error)
            await asyncio.sleep(pause)

    async def _poll(self) -> float:
        """Poll once; return the seconds until the next poll."""
        seconds = await self._connection_pool.run_async(
            cron_store.seconds_until_due(), timeout_seconds=_TIMEOUT_SECONDS
        )
        if seconds is None or seconds > 0:
            return MAX_POLL_INTERVAL_SECONDS if seconds is None else min(MAX_POLL_INTERVAL_SECONDS, seconds)
        # An entry is due but was not fired: another orchestrator has it, or it cannot be fired.
        return 0.0 if await self._fire_all() else MAX_POLL_INTERVAL_SECONDS

    async def _fire_all(self) -> bool:
        """Fire all due entries; return whether there was any."""
        # Filled by fire_next with the names of entries that could not be fired, which it then skips.
        tried: set[str] = set()
        has_fired = False
        while True:
            tried_before = len(tried)
            try:
                fired = await self._connection_pool.run_async(
                    cron_store.fire_next(tried), timeout_seconds=_TIMEOUT_SECONDS
                )
            except ConnectionLostError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of an entry: the other entries are still fired
                self._warn(error, *tried)
                # No entry was locked before the error, so another iteration would fail in the same way.
                if len(tried) == tried_before:
                    return has_fired
                continue
            if fired is None:
                return has_fired
            has_fired = True
            self._metrics.record_tick(CronTickResult.FIRED, fired.submitted)
            self._metrics.record_tick(CronTickResult.REPEATED, fired.repeated)
            if fired.missed_since is not None:
                metrics.log_misfire(self._task, fired.name, submitted=fired.submitted)

    def _warn(self, error: Exception, *names: str) -> None:
        now = time.monotonic()
        if now >= self._warned_at + _WARN_INTERVAL_SECONDS:
            self._warned_at = now
            metrics.log_cron_failed(self._task, error, names)


class ExecutorGroup(Policy):
    """The executors of one kind: the command that starts them, and their pool."""

    command: ExecutorCommand
    pool: PoolPolicy = Field(default=PoolPolicy(), description="Number of executors, and their lifetime.")


class Orchestrator(AsyncConsumerMixin, AsyncTask):
    """Runs jobs: a task for ``ergon run``, with a separate loop for each kind of executors.

    The address of the database is *dsn*, or ``ERGON_POSTGRES__DSN`` of the environment. The policy's
    ``steps.process.retry`` applies to jobs that do not set their own retries. It continues when its queues are empty,
    unless ``loop.streaming`` of the policy is false. *crons* are declared at its start; while it runs, it fires all due
    entries, whatever declared them.
    """

    # A task has one connector: that of the first kind. The worker of each kind fetches from its own.
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
                f"an orchestrator needs at least one executor kind, with names without {EXECUTOR_SEPARATOR!r}"
            )
        self._name = name
        self._cron_rows = [cron_columns(cron, default=DEFAULT_KIND, executors=kinds) for cron in crons]
        if len({cron.name for cron in crons}) < len(crons):
            raise ConfigurationError("two cron entries have the same name; give each entry a unique name")
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
            raise ConfigurationError("the orchestrator is not open: use run() or open()")
        return self._reaper

    async def process_transaction(self, transaction: Transaction) -> Any:
        """Raise an error: the task of each kind processes its transactions."""
        raise ConfigurationError(f"{self.name} cannot process {transaction.id!r}: the worker of its kind does")

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
                # Stops the loops of all kinds, which share_running_loops has joined.
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
    summed = Report(stop_reason=reports[-1].stop_reason)
    for report in reports:
        for total in ("started", "fetches", "empty_fetches", "still_running", "late_results", "released_started"):
            setattr(summed, total, getattr(summed, total) + getattr(report, total))
        for part in ("counts", "rejected", "settled"):
            counts = getattr(summed, part)
            for key, count in getattr(report, part).items():
                counts[key] = counts.get(key, 0) + count
        summed.failures.extend(report.failures)
    return summed
