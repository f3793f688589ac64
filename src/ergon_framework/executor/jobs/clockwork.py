"""The cron scheduler of an orchestrator: it fires due cron entries while the orchestrator runs its jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from ergon_framework.errors import ConnectionLostError
from ergon_framework.executor.jobs import crontab, observe
from ergon_framework.executor.jobs.observe import CronTickResult
from ergon_framework.schema.lines import ConnectionPool

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
            await connection_pool.run_async(crontab.declare(crons), timeout_seconds=_TIMEOUT_SECONDS)
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
        self._metrics = observe.job_metrics(task)
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
        seconds = await self._connection_pool.run_async(crontab.seconds_until_due(), timeout_seconds=_TIMEOUT_SECONDS)
        if seconds is None or seconds > 0:
            return MAX_POLL_INTERVAL_SECONDS if seconds is None else min(MAX_POLL_INTERVAL_SECONDS, seconds)
        # An entry is due but was not fired: another orchestrator has it, or it cannot be fired.
        return 0.0 if await self._fire_all() else MAX_POLL_INTERVAL_SECONDS

    async def _fire_all(self) -> bool:
        """Fire all due entries; return whether there was any."""
        tried: set[str] = set()
        has_fired = False
        while True:
            tried_before = len(tried)
            try:
                fired = await self._connection_pool.run_async(
                    crontab.fire_next(tried), timeout_seconds=_TIMEOUT_SECONDS
                )
            except ConnectionLostError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of an entry: the other entries are still fired
                self._warn(error, *tried)
                if len(tried) == tried_before:
                    return has_fired
                continue
            if fired is None:
                return has_fired
            has_fired = True
            self._metrics.record_tick(CronTickResult.FIRED, fired.submitted)
            self._metrics.record_tick(CronTickResult.REPEATED, fired.repeated)
            if fired.missed_since is not None:
                observe.log_misfire(self._task, fired.name, submitted=fired.submitted)

    def _warn(self, error: Exception, *names: str) -> None:
        now = time.monotonic()
        if now >= self._warned_at + _WARN_INTERVAL_SECONDS:
            self._warned_at = now
            observe.log_cron_failed(self._task, error, names)
