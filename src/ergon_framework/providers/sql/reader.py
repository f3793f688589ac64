"""The reader of provider health: summaries for an event loop, without blocking it, over a few separate connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection

from ergon_framework.errors import ConnectionLostError
from ergon_framework.providers.sql.summary import TenantSummary, read_summary_async
from ergon_framework.schema.lines import connect_options

_SET_LIMITS: Final = "select set_config('statement_timeout', %s, true), set_config('transaction_read_only', 'on', true)"


class DatabaseUnavailable(ConnectionLostError):
    """The database did not answer, or not in time."""


class HealthReader:
    """A reader with at most *max_connections* concurrent connections, and a *timeout* in seconds for each answer.

    Concurrent callers that ask for the same tenant share one read, so that no tenant uses more than one connection.
    It is small and not a pool with background workers: after an outage the very next read connects.
    It belongs to the event loop of its first use, and is closed there.
    """

    def __init__(self, dsn: str, *, max_connections: int = 4, timeout: float = 2.0) -> None:
        self._options: dict[str, Any] = {**connect_options(dsn), "autocommit": True, "prepare_threshold": None}
        self._timeout = timeout
        self._semaphore = asyncio.Semaphore(max_connections)
        self._idle: list[AsyncConnection[Any]] = []
        self._reads: dict[str, asyncio.Task[TenantSummary]] = {}
        #: Running reads, including those that took too long and are being cancelled.
        self._running: set[asyncio.Task[TenantSummary]] = set()

    async def read(self, tenant_id: str) -> TenantSummary:
        """Return the summary of *tenant_id*; raise DatabaseUnavailable if it cannot be read in time."""
        task = self._reads.get(tenant_id) or self._start_read(tenant_id)
        # A late read is not awaited: to cancel a statement the driver must ask the same server.
        await asyncio.wait({task}, timeout=self._timeout)
        if not task.done():
            task.cancel()
            self._discard_read(tenant_id, task)
        if not task.done() or task.cancelled():
            raise DatabaseUnavailable("the database did not answer in time")
        try:
            return task.result()
        except psycopg.Error as error:
            raise DatabaseUnavailable("the database is out of reach") from error

    async def close(self) -> None:
        """Close all connections; the reader can be used again, and then connects again."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=self._timeout)
        while self._idle:
            await self._idle.pop().close()

    def _start_read(self, tenant_id: str) -> asyncio.Task[TenantSummary]:
        task = self._reads[tenant_id] = asyncio.create_task(self._read_with_connection(tenant_id))
        self._running.add(task)
        task.add_done_callback(self._handle_read_end)
        task.add_done_callback(lambda finished: self._discard_read(tenant_id, finished))
        return task

    def _discard_read(self, tenant_id: str, task: asyncio.Task[TenantSummary]) -> None:
        """Let the next caller start its own read."""
        if self._reads.get(tenant_id) is task:
            del self._reads[tenant_id]

    def _handle_read_end(self, task: asyncio.Task[TenantSummary]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved

    async def _read_with_connection(self, tenant_id: str) -> TenantSummary:
        async with self._semaphore:
            # Idle connections may be broken since a restart of the server; a new connection shows its true state.
            while self._idle:
                with suppress(psycopg.OperationalError):
                    return await self._read_summary(self._idle.pop(), tenant_id)
            return await self._read_summary(await AsyncConnection.connect(**self._options), tenant_id)

    async def _read_summary(self, connection: AsyncConnection[Any], tenant_id: str) -> TenantSummary:
        try:
            async with connection.pipeline(), connection.transaction():
                await connection.execute(_SET_LIMITS, [f"{round(1000 * self._timeout)}ms"])
                tenant_summary = await read_summary_async(connection, tenant_id)
        except BaseException:
            await connection.close()
            raise
        self._idle.append(connection)
        return tenant_summary
