"""Start and finish the attempts of many jobs in batches: the database access of the orchestrators of one kind.

An orchestrator claims the messages of jobs, begins an attempt of each and sends it to an executor; a job has one row,
and each attempt is counted there before it is sent. One statement and one commit for many jobs is called coalescing.
A write names the claim: that of an orchestrator which has lost it changes nothing.

Callers that arrive while a statement runs join the next batch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from ergon_framework.database.operation import Operation
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import ConnectionLostError, ErgonError
from ergon_framework.failure import describe_error
from ergon_framework.jobs import metrics, store
from ergon_framework.jobs.model import JobState
from ergon_framework.jobs.store import AttemptEnd, JobClaim, StartedAttempt
from ergon_framework.worker.policies import RetryPolicy

T = TypeVar("T")
R = TypeVar("R")

#: Maximum number of items in one statement.
MAX_BATCH_ITEMS: Final = 200


class AsyncCoalescer(Generic[T, R]):
    """Calls *call* with batches of items, one batch after the other; belongs to one event loop.

    An error other than a lost connection may be caused by one item, so each item of the batch is then called alone.
    """

    def __init__(
        self, call: Callable[[Sequence[T]], Awaitable[Sequence[R]]], *, linger: Callable[[], float] = float
    ) -> None:
        self._call = call
        #: Returns the seconds that the first item waits for others.
        self._linger = linger
        self._pending: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._worker_task: asyncio.Task[None] | None = None

    async def __call__(self, item: T) -> R:
        """Return the answer for *item*. Cancellation ends only the wait; the call may still be made."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.append((item, answer))
        if self._worker_task is None or self._worker_task.done():
            self._worker_task = asyncio.create_task(self._run_batches(), name="ergon-jobs-together")
        return await answer

    def close(self) -> None:
        """Cancel the batch that is under way; it has no waiting caller any more."""
        if self._worker_task is not None:
            self._worker_task.cancel()

    async def _run_batches(self) -> None:
        while self._pending:
            linger = self._linger()
            if linger > 0:
                await asyncio.sleep(linger)
            batch = [self._pending.popleft() for _ in range(min(MAX_BATCH_ITEMS, len(self._pending)))]
            # Items whose callers were cancelled before the batch began are dropped.
            batch = [(item, answer) for item, answer in batch if not answer.done()]
            if batch:
                await self._run_batch(batch)

    async def _run_batch(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._call([item for item, _ in batch])
        except BaseException as error:
            if len(batch) > 1 and isinstance(error, Exception) and not isinstance(error, ConnectionLostError):
                for pending in batch:
                    await self._run_batch([pending])
                return
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error if isinstance(error, Exception) else ConnectionLostError("interrupted"))
            if not isinstance(error, Exception):
                raise
            return
        for (_, answer), result in zip(batch, results, strict=True):
            if not answer.done():
                answer.set_result(result)


#: Timeout of one statement in seconds.
_TIMEOUT_SECONDS: Final = 15.0
#: The delays between retries of a database call.
_RETRY_POLICY: Final = RetryPolicy(backoff=0.05, multiplier=2.0, cap=2.0)
#: Maximum number of retries of a call that the server rejects although it is reachable.
_MAX_REJECTED_RETRIES: Final = 5
#: Minimum seconds between two warnings.
_WARN_INTERVAL_SECONDS: Final = 5.0
#: Seconds that an outcome waits to be written in a batch, under load: fewer statements carry more outcomes.
_LINGER_SECONDS: Final = 0.005
#: Number of expired jobs that are deleted in one statement.
_DELETE_BATCH_SIZE: Final = 500


class JobWriteError(ErgonError):
    """The database rejects a write about a job; the message is redelivered, and the row decides what happens then."""

    code = "job_unwritten"
    not_attempted = True
    retry_after = 5.0


class BatchedJobStore:
    """Starts and finishes attempts; belongs to one event loop.

    *is_busy* returns whether outcomes are to wait for others before they are written, because the orchestrator is under
    load. *max_attempts* and *timeout* apply to jobs that do not set their own.
    """

    def __init__(
        self,
        connection_pool: ConnectionPool,
        *,
        task: str,
        max_attempts: int,
        timeout: float | None,
        is_busy: Callable[[], bool],
    ) -> None:
        self._connection_pool = connection_pool
        self._task = task
        self._max_attempts = max_attempts
        self._timeout = timeout
        self._start_coalescer: AsyncCoalescer[JobClaim, StartedAttempt] = AsyncCoalescer(self._start)
        self._finish_coalescer: AsyncCoalescer[AttemptEnd, JobState | None] = AsyncCoalescer(
            self._finish, linger=self._linger_seconds
        )
        self._is_busy = is_busy
        #: The time of the last warning, because every job fails while the database is unavailable.
        self._warned_at = float("-inf")

    async def start(self, claim: JobClaim) -> StartedAttempt:
        """Begin an attempt. A repeated call for the same claim returns the same attempt and counts nothing."""
        return await self._retry_until_written(self._start_coalescer, claim)

    async def finish(self, end: AttemptEnd) -> JobState | None:
        """Write how an attempt ended; return the job's state, None if another claim has taken over the job.

        A repeated call writes nothing more.
        The write is retried while the database is unavailable, so that an outage loses no result.
        """
        return await self._retry_until_written(self._finish_coalescer, end)

    async def jobs_to_kill(self) -> set[str]:
        """Return the running jobs with a kill request."""
        return await self.run(store.jobs_to_kill())

    async def delete_expired(self) -> None:
        """Delete jobs whose retention has expired."""
        while await self.run(store.delete_expired(_DELETE_BATCH_SIZE)) == _DELETE_BATCH_SIZE:
            pass

    def close(self) -> None:
        """Stop the batches that are under way; there are no more callers."""
        self._start_coalescer.close()
        self._finish_coalescer.close()

    async def run(self, operation: Operation[R]) -> R:
        """Run *operation*; every database call goes through here."""
        return await self._connection_pool.run_async(operation, timeout_seconds=_TIMEOUT_SECONDS)

    async def _start(self, claims: Sequence[JobClaim]) -> Sequence[StartedAttempt]:
        return await self.run(store.start_attempts(claims, max_attempts=self._max_attempts, timeout=self._timeout))

    async def _finish(self, ends: Sequence[AttemptEnd]) -> Sequence[JobState | None]:
        return await self.run(store.finish_attempts(ends))

    async def _retry_until_written(self, call: Callable[[R], Awaitable[T]], item: R) -> T:
        retries = 0
        while True:
            try:
                return await call(item)
            except Exception as error:
                is_permanent = not isinstance(error, ErgonError) or error.final
                self._warn(error)
                if is_permanent or (not isinstance(error, ConnectionLostError) and retries >= _MAX_REJECTED_RETRIES):
                    raise JobWriteError(f"writing the job to the database failed: {describe_error(error)}") from error
            await asyncio.sleep(_RETRY_POLICY.delay(retries))
            # Bounded, because the delay is computed as a power of it; an outage has no maximum length.
            retries = min(retries + 1, 1000)

    def _linger_seconds(self) -> float:
        return _LINGER_SECONDS if self._is_busy() else 0.0

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._warned_at + _WARN_INTERVAL_SECONDS:
            self._warned_at = now
            metrics.log_write_failed(self._task, error)
