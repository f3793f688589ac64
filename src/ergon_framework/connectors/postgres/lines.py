"""Lines: the connections of this process to one database, made when they are needed and kept while they are sound.

By hand and small instead of a pool with threads of its own: after an outage the very next call
tries to connect, so that a loop's own waiting decides when work goes on.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from ergon_framework.connectors.postgres.failures import translated
from ergon_framework.connectors.postgres.operation import Operation, perform, perform_async
from ergon_framework.connectors.postgres.statements import BACKEND, PLANS
from ergon_framework.errors import ConfigurationError

R = TypeVar("R")

#: How a silent network is noticed: an unanswered packet after twelve seconds, an idle line after twenty.
_SILENCE: Final = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 12_000,
    "application_name": "ergon",
}
#: A statement that was executed this often is prepared.
_PREPARE: Final = 2


class Lines:
    """Connections for both flavours; at most *most* each, whoever comes later waits."""

    def __init__(self, dsn: str, *, most: int = 8) -> None:
        try:
            given = psycopg.conninfo.conninfo_to_dict(dsn)
        except psycopg.ProgrammingError:
            # Without its cause, which quotes the address.
            raise ConfigurationError(
                "the address of the database cannot be read; it looks like postgresql://user@host:5432/name"
            ) from None
        self._options: dict[str, Any] = {**_SILENCE, **given}
        self._most = most
        #: False once a pooler was found between us and the server; None before anybody has looked.
        self.direct: bool | None = None
        self._closed = False
        self._owner = os.getpid()
        self._room = threading.BoundedSemaphore(most)
        self._idle: list[Connection[TupleRow]] = []
        #: Strongly: lines that went with their loop, unclosed, would be the driver's to complain about.
        self._per_loop: dict[asyncio.AbstractEventLoop, _LoopLines] = {}

    def _settings(self) -> dict[str, Any]:
        # A pooler hands one session to many: what was prepared in it may be somebody else's.
        return {**self._options, "autocommit": True, "prepare_threshold": _PREPARE if self.direct else None}

    # -- the sync flavour -----------------------------------------------------------------------

    def run(self, operation: Operation[R]) -> R:
        """Perform *operation* on a connection of its own."""
        with self.borrowed() as connection:
            return perform(connection, operation)

    @contextmanager
    def borrowed(self) -> Iterator[Connection[TupleRow]]:
        """A connection, given back afterwards; the driver's errors in our words."""
        self._after_fork()
        with self._room:
            connection: Connection[TupleRow] | None = None
            try:
                connection = _first_sound(self._idle) or self.connect()
                yield connection
            except psycopg.Error as error:
                raise translated(error, broken=connection is None or connection.broken) from None
            finally:
                if connection is not None:
                    self._back(connection)

    def connect(self) -> Connection[TupleRow]:
        """A new connection that nobody else will use; the caller closes it."""
        connection = Connection.connect(**self._settings())
        try:
            if self.direct is None:
                found = connection.execute(BACKEND).fetchone()
                # A pooler answers for a server process that the client was not told of.
                self.direct = found is not None and found[0] == connection.info.backend_pid
                connection.prepare_threshold = _PREPARE if self.direct else None
            if self.direct:
                connection.execute(PLANS)
        except BaseException:
            connection.close()
            raise
        return connection

    def _back(self, connection: Connection[TupleRow]) -> None:
        if connection.info.transaction_status is not TransactionStatus.IDLE:
            with suppress(psycopg.Error):
                connection.rollback()
        if self._closed or connection.closed or connection.info.transaction_status is not TransactionStatus.IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    def _after_fork(self) -> None:
        if self._owner == os.getpid():
            return
        # They are the parent's: closing them here would end its sessions. Kept, so that nobody collects them.
        self._inherited = (self._idle, self._per_loop)
        self._owner, self._idle, self._per_loop = os.getpid(), [], {}
        self._room = threading.BoundedSemaphore(self._most)

    def close(self) -> None:
        """Close what is idle; what is borrowed is closed when it comes back."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        self._forget_closed()

    # -- the async flavour ----------------------------------------------------------------------

    async def run_async(self, operation: Operation[R]) -> R:
        async with self._borrowed_async() as connection:
            return await perform_async(connection, operation)

    @asynccontextmanager
    async def _borrowed_async(self) -> AsyncIterator[AsyncConnection[TupleRow]]:
        lines = self._here()
        async with lines.room:
            connection: AsyncConnection[TupleRow] | None = None
            try:
                connection = _first_sound(lines.idle) or await self._connect_async()
                yield connection
            except psycopg.Error as error:
                raise translated(error, broken=connection is None or connection.broken) from None
            finally:
                if connection is not None:
                    await lines.back(connection, closed=self._closed)

    async def _connect_async(self) -> AsyncConnection[TupleRow]:
        connection = await AsyncConnection.connect(**self._settings())
        try:
            if self.direct is None:
                found = await (await connection.execute(BACKEND)).fetchone()
                self.direct = found is not None and found[0] == connection.info.backend_pid
                connection.prepare_threshold = _PREPARE if self.direct else None
            if self.direct:
                await connection.execute(PLANS)
        except BaseException:
            # Not awaited: whoever is cancelled here may be cancelled there too.
            connection.pgconn.finish()
            raise
        return connection

    def _here(self) -> _LoopLines:
        """The lines of the running event loop; those of loops that have closed are given up."""
        self._after_fork()
        loop = asyncio.get_running_loop()
        found = self._per_loop.get(loop)
        if found is None:
            self._forget_closed()
            self._per_loop[loop] = found = _LoopLines(self._most)
        return found

    def _forget_closed(self) -> None:
        for loop in [loop for loop in list(self._per_loop) if loop.is_closed()]:
            lines = self._per_loop.pop(loop, None)
            if lines is not None:
                lines.abandon()

    async def close_async(self) -> None:
        """Close what is idle on the running event loop, and all of the sync flavour."""
        found = self._per_loop.pop(asyncio.get_running_loop(), None)
        while found is not None and found.idle:
            await found.idle.pop().close()
        self.close()


class _LoopLines:
    """The connections of one event loop."""

    def __init__(self, most: int) -> None:
        self.room = asyncio.Semaphore(most)
        self.idle: list[AsyncConnection[TupleRow]] = []

    async def back(self, connection: AsyncConnection[TupleRow], *, closed: bool) -> None:
        try:
            if connection.info.transaction_status is not TransactionStatus.IDLE:
                with suppress(psycopg.Error):
                    await connection.rollback()
        except BaseException:
            connection.pgconn.finish()
            raise
        if closed or connection.closed or connection.info.transaction_status is not TransactionStatus.IDLE:
            connection.pgconn.finish()
        else:
            self.idle.append(connection)

    def abandon(self) -> None:
        """The loop has closed: nobody can await the closing, so it is done below the driver."""
        while self.idle:
            connection = self.idle.pop()  # held by a name: without one it is collected, unclosed, before it is closed
            connection.pgconn.finish()


C = TypeVar("C", Connection[TupleRow], AsyncConnection[TupleRow])


def _first_sound(idle: list[C]) -> C | None:
    """One of those that wait; a server that went away has said so on the line, and nobody has listened yet."""
    while idle:
        connection = idle.pop()
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        if not poll.poll(0):
            return connection
        connection.pgconn.finish()
    return None
