"""Registrations: the executors that orchestrators serve, and how jobs for all others end.

An executor is a process that runs handlers; a kind names the executors that share a queue. An orchestrator sends them
jobs.

A client cannot know which executors exist, because orchestrators of other deployments may serve them. Each
orchestrator registers its kinds in the database and renews the registration while it runs. A job for a kind that no
orchestrator serves is dead-lettered once it has been due, and orchestrators have run, for GRACE_SECONDS.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from ergon_framework.connectors.base import Ack, Delivery, Release, Settlement
from ergon_framework.database.operation import Operation, PreparedTextQuery, Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import Category
from ergon_framework.executors.decision import FailureCause
from ergon_framework.jobs import metrics, sql
from ergon_framework.jobs.model import QUEUE_PREFIX, Job
from ergon_framework.jobs.queue import JobQueue
from ergon_framework.jobs.worker import JobFailed, dead_letter

#: Seconds that a job waits, after it is due, for the first orchestrator of its executors.
GRACE_SECONDS: Final = 600.0
#: Seconds between two renewals of a registration, and after which an unrenewed kind counts as not served at present.
RENEW_SECONDS: Final = 10.0
ABSENT_SECONDS: Final = 60.0
#: The code of the dead letter, as of any other job without a route.
NO_ROUTE: Final = "no_route"
#: Maximum number of messages that are settled in one batch.
_MAX_BATCH: Final = 100
#: Seconds that one statement may take, and between two warnings.
_TIMEOUT_SECONDS: Final = 15.0
_WARN_INTERVAL_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class ServedExecutor:
    """A kind of executors, and when an orchestrator of it was last seen to run."""

    kind: str
    served_at: datetime


def register(kinds: Collection[str]) -> Operation[None]:
    """Record that an orchestrator serves *kinds* now."""
    yield Query(sql.REGISTER, {"kinds": list(kinds), "absent": ABSENT_SECONDS})


def list_executors() -> Operation[list[ServedExecutor]]:
    """Return the executors that an orchestrator has served in the last 400 days, by name."""
    rows = yield Query(sql.EXECUTORS)
    return [ServedExecutor(*row) for row in rows]


def list_unserved() -> Operation[list[str]]:
    """Return the kinds without an orchestrator that have a message to settle."""
    rows = yield Query(sql.UNSERVED, {"grace": GRACE_SECONDS, "absent": ABSENT_SECONDS})
    return [row[0].removeprefix(QUEUE_PREFIX) for row in rows]


def describe_unknown(kind: str, known: Collection[str]) -> str:
    """Describe that no orchestrator serves *kind*, with the kinds that exist."""
    names = ", ".join(sorted(known)) or "none"
    return f"the executor {kind!r} does not exist: no orchestrator serves it; known: {names}"


def describe_wait(job: Job, known: Sequence[ServedExecutor], now: datetime) -> str | None:
    """Describe the wait of *job* for an orchestrator; None if an orchestrator of its kind runs."""
    served = {each.kind: each.served_at for each in known}
    if not served:
        return f"no orchestrator has run with this database yet; start one that serves {job.kind!r}"
    if job.kind not in served:
        earliest = _to_text(job.due_at + timedelta(seconds=GRACE_SECONDS))
        return f"{describe_unknown(job.kind, served)}; it becomes a dead letter at {earliest} or later"
    if now - served[job.kind] > timedelta(seconds=ABSENT_SECONDS):
        return f"no orchestrator of the executor {job.kind!r} has run since {_to_text(served[job.kind])}"
    return None


def _to_text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def fail_unserved(deliveries: Sequence[Delivery], message: str) -> Operation[dict[str, tuple[str, int]]]:
    """Fail the jobs of these messages that have been due for GRACE_SECONDS; return decision and attempts by job id.

    The decision is ``failed`` (dead-letter the message), ``over`` (the job has ended before) or ``waiting``.
    """
    claims = [
        {"id": each.transaction.id, "message": each.receipt.id, "worker": each.receipt.worker}
        | {"token": each.receipt.token}
        for each in deliveries
    ]
    ((answer,),) = yield PreparedTextQuery(
        sql.FAIL_UNSERVED, (json.dumps(claims), repr(GRACE_SECONDS), NO_ROUTE, message)
    )
    return {job_id: (decision, attempts) for job_id, decision, attempts in json.loads(answer or "[]")}


@asynccontextmanager
async def registration(dsn: str, kinds: Collection[str], *, lease: float, task: str) -> AsyncIterator[None]:
    """Register *kinds* and dead-letter jobs for unknown executors while the context lasts."""
    connection_pool = ConnectionPool(dsn, max_size=1)
    try:
        # A database without the table fails the start, not the first job.
        await connection_pool.run_async(register(kinds), timeout_seconds=_TIMEOUT_SECONDS)
        registrar = _Registrar(connection_pool, dsn, kinds, lease=lease, task=task)
        await registrar.dead_letter_unserved()
        renewing = asyncio.create_task(registrar.run(), name=f"{task}-registration")
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
    finally:
        await connection_pool.close_async()


class _Registrar:
    """Renew a registration and dead-letter unserved jobs; belongs to one event loop."""

    def __init__(
        self, connection_pool: ConnectionPool, dsn: str, kinds: Collection[str], *, lease: float, task: str
    ) -> None:
        self._connection_pool = connection_pool
        self._dsn = dsn
        self._kinds = kinds
        self._lease = lease
        self._task = task
        #: The time of the last warning: while the database is unavailable, every renewal fails.
        self._warned_at = float("-inf")

    async def run(self) -> None:
        """Renew the registration and dead-letter jobs without an executor, forever."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._connection_pool.run_async(register(self._kinds), timeout_seconds=_TIMEOUT_SECONDS)
                await self._settle_unserved()
            except Exception as error:  # noqa: BLE001 - the boundary of one iteration: there is always a next one
                self._warn(error)

    async def dead_letter_unserved(self) -> None:
        """Dead-letter jobs once at the start, so that a run that ends at an empty queue does it as well."""
        try:
            await self._settle_unserved()
        except Exception as error:  # noqa: BLE001 - the orchestrator starts anyway: ``run`` tries again
            self._warn(error)

    async def _settle_unserved(self) -> None:
        for kind in await self._connection_pool.run_async(list_unserved(), timeout_seconds=_TIMEOUT_SECONDS):
            known = await self._connection_pool.run_async(list_executors(), timeout_seconds=_TIMEOUT_SECONDS)
            message = describe_unknown(kind, [each.kind for each in known])
            queue = JobQueue(kind, dsn=self._dsn, lease=self._lease)
            try:
                while await self._settle_batch(queue, message):
                    pass
            finally:
                await queue.close_async()

    async def _settle_batch(self, queue: JobQueue, message: str) -> bool:
        """Settle one batch of ready messages; return whether there may be a further one."""
        deliveries = await queue.fetch_transactions_async(_MAX_BATCH)
        if not deliveries:
            return False
        decisions: dict[str, tuple[str, int]] = {}
        try:
            decisions = await self._connection_pool.run_async(
                fail_unserved(deliveries, message), timeout_seconds=_TIMEOUT_SECONDS
            )
        finally:
            # A message without a decision is released: its job is unchanged, or the next iteration finds it failed.
            settlings = [(each, _to_settlement(queue, each, decisions, message)) for each in deliveries]
            await queue.settle_async(settlings)
        failed = [job_id for job_id, (decision, _) in decisions.items() if decision == "failed"]
        for job_id in failed:
            metrics.record_unknown_executor(queue.name, job_id, message)
        return bool(failed)

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._warned_at + _WARN_INTERVAL_SECONDS:
            self._warned_at = now
            metrics.log_registration_failed(self._task, error)


def _to_settlement(
    queue: JobQueue, delivery: Delivery, decisions: dict[str, tuple[str, int]], message: str
) -> Settlement:
    decision, attempts = decisions.get(delivery.transaction.id, ("waiting", 0))
    if decision == "failed":
        cause = FailureCause(Category.SYSTEM, NO_ROUTE, message, final=True)
        return dead_letter(queue.name, delivery.transaction, JobFailed(cause, attempts))
    return Ack() if decision == "over" else Release()
