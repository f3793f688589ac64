"""The reader: summaries for an event loop, which it never holds, from a few connections of its own."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection

from ergon_framework.errors import ConnectionLost
from ergon_framework.providers.sql.summary import Summary, summary_async
from ergon_framework.schema.lines import options_of

_LIMITS: Final = "select set_config('statement_timeout', %s, true), set_config('transaction_read_only', 'on', true)"


class Unavailable(ConnectionLost):
    """The database did not answer, or not in time."""


class HealthReader:
    """Reads with at most *most* connections at once, each answer within *patience* seconds.

    Callers that ask for one tenant at the same time share one read, so that no tenant takes more than one connection.
    By hand and small instead of a pool with workers of its own: after an outage the very next question connects.
    It belongs to the event loop that it was first used in, and is closed there.
    """

    def __init__(self, dsn: str, *, most: int = 4, patience: float = 2.0) -> None:
        self._options: dict[str, Any] = {**options_of(dsn), "autocommit": True, "prepare_threshold": None}
        self._patience = patience
        self._room = asyncio.Semaphore(most)
        self._idle: list[AsyncConnection[Any]] = []
        self._reads: dict[str, asyncio.Task[Summary]] = {}
        #: Reads that run, those included that took too long and are being cancelled.
        self._asking: set[asyncio.Task[Summary]] = set()

    async def read(self, tenant_id: str) -> Summary:
        """The summary of *tenant_id*; Unavailable if it cannot be had in time."""
        task = self._reads.get(tenant_id) or self._begin(tenant_id)
        # Not awaited when it is late: to cancel a statement the driver has to ask the same server.
        await asyncio.wait({task}, timeout=self._patience)
        if not task.done():
            task.cancel()
            self._forget(tenant_id, task)
        if not task.done() or task.cancelled():
            raise Unavailable("the database did not answer in time")
        try:
            return task.result()
        except psycopg.Error as error:
            raise Unavailable("the database is out of reach") from error

    async def close(self) -> None:
        """Close all connections; the reader can be used again, and connects anew."""
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(self._asking, timeout=self._patience)
        while self._idle:
            await self._idle.pop().close()

    def _begin(self, tenant_id: str) -> asyncio.Task[Summary]:
        task = self._reads[tenant_id] = asyncio.create_task(self._read(tenant_id))
        self._asking.add(task)
        task.add_done_callback(self._answered)
        task.add_done_callback(lambda ended: self._forget(tenant_id, ended))
        return task

    def _forget(self, tenant_id: str, task: asyncio.Task[Summary]) -> None:
        """Let the next caller begin a read of its own."""
        if self._reads.get(tenant_id) is task:
            del self._reads[tenant_id]

    def _answered(self, task: asyncio.Task[Summary]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # somebody has to have looked at it

    async def _read(self, tenant_id: str) -> Summary:
        async with self._room:
            # What lay idle may have gone with a server that has been started anew since; a new one tells the truth.
            while self._idle:
                with suppress(psycopg.OperationalError):
                    return await self._asked(self._idle.pop(), tenant_id)
            return await self._asked(await AsyncConnection.connect(**self._options), tenant_id)

    async def _asked(self, connection: AsyncConnection[Any], tenant_id: str) -> Summary:
        try:
            async with connection.pipeline(), connection.transaction():
                await connection.execute(_LIMITS, [f"{round(1000 * self._patience)}ms"])
                found = await summary_async(connection, tenant_id)
        except BaseException:
            await connection.close()
            raise
        self._idle.append(connection)
        return found
