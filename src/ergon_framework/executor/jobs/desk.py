"""The database access of the orchestrators of one kind: attempts of many jobs are started and finished in batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from ergon_framework.errors import ConnectionLostError, ErgonError
from ergon_framework.executor.jobs import attempts, observe
from ergon_framework.executor.jobs.attempts import AttemptEnd, JobClaim, StartedAttempt
from ergon_framework.executor.jobs.model import JobState
from ergon_framework.executor.jobs.together import AsyncCoalescer
from ergon_framework.failure import describe_error
from ergon_framework.schema.lines import ConnectionPool
from ergon_framework.schema.operation import Operation
from ergon_framework.task.mixins.policies import RetryPolicy

R = TypeVar("R")
T = TypeVar("T")

#: Timeout of one statement in seconds.
_TIMEOUT_SECONDS: Final = 15.0
#: The delays between retries of a database call.
_RETRY_POLICY: Final = RetryPolicy(backoff=0.05, multiplier=2.0, cap=2.0)
#: Maximum number of retries of a call that the server rejects although it is reachable.
_MAX_REJECTED_RETRIES: Final = 5
#: Minimum seconds between two warnings.
_WARN_INTERVAL_SECONDS: Final = 5.0
#: Seconds that an outcome waits to be written in a batch, under load: statements are expensive.
_LINGER_SECONDS: Final = 0.005
#: Number of expired jobs that are deleted in one statement.
_DELETE_BATCH_SIZE: Final = 500


class JobWriteError(ErgonError):
    """The database rejects a write about a job; the message is redelivered and follows the job's row."""

    code = "job_unwritten"
    not_attempted = True
    retry_after = 5.0


class BatchedJobStore:
    """Starts and finishes attempts; belongs to one event loop."""

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
        self._warned_at = float("-inf")

    async def start(self, claim: JobClaim) -> StartedAttempt:
        """Begin an attempt. A repeated call for the same claim returns the same and counts nothing."""
        return await self._retry_until_written(self._start_coalescer, claim)

    async def finish(self, end: AttemptEnd) -> JobState | None:
        """Write how an attempt ended; None if the claim was not the last. A repeated call writes nothing more.

        The write is retried while the database is unavailable: a result must not be lost for that.
        """
        return await self._retry_until_written(self._finish_coalescer, end)

    async def jobs_to_kill(self) -> set[str]:
        """Return the running jobs with a kill request."""
        return await self.run(attempts.jobs_to_kill())

    async def delete_expired(self) -> None:
        """Delete jobs whose retention has expired."""
        while await self.run(attempts.delete_expired(_DELETE_BATCH_SIZE)) == _DELETE_BATCH_SIZE:
            pass

    def close(self) -> None:
        """Stop the batches that are under way; there are no more callers."""
        self._start_coalescer.close()
        self._finish_coalescer.close()

    async def run(self, operation: Operation[R]) -> R:
        """Run *operation*; every database call goes through here."""
        return await self._connection_pool.run_async(operation, timeout_seconds=_TIMEOUT_SECONDS)

    async def _start(self, claims: Sequence[JobClaim]) -> Sequence[StartedAttempt]:
        return await self.run(attempts.start_attempts(claims, max_attempts=self._max_attempts, timeout=self._timeout))

    async def _finish(self, ends: Sequence[AttemptEnd]) -> Sequence[JobState | None]:
        return await self.run(attempts.finish_attempts(ends))

    async def _retry_until_written(self, call: Callable[[R], Awaitable[T]], item: R) -> T:
        retries = 0
        while True:
            try:
                return await call(item)
            except Exception as error:
                is_permanent = not isinstance(error, ErgonError) or error.final
                self._warn(error)
                if is_permanent or (not isinstance(error, ConnectionLostError) and retries >= _MAX_REJECTED_RETRIES):
                    raise JobWriteError(
                        f"the database does not take what it is told: {describe_error(error)}"
                    ) from error
            await asyncio.sleep(_RETRY_POLICY.delay(retries))
            retries = min(retries + 1, 1000)

    def _linger_seconds(self) -> float:
        return _LINGER_SECONDS if self._is_busy() else 0.0

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._warned_at + _WARN_INTERVAL_SECONDS:
            self._warned_at = now
            observe.log_write_failed(self._task, error)
