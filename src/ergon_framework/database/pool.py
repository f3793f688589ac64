"""Connection pool: the connections of this process to one database, opened on demand and kept while they are usable.

The pool is small and has no permanent thread: after an outage the very next call tries to connect, so that a loop's own
backoff decides when work continues. A permit is the right to use one connection of the pool; it can be transferred to
another owner.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Self, TypeVar

import psycopg
from psycopg import generators
from psycopg.pq import TransactionStatus

from ergon_framework.connectors.credentials import CredentialsSource
from ergon_framework.database.address import connect_options, find_login, is_unverified
from ergon_framework.database.connection import (
    AsyncDeadlineConnection,
    DeadlineConnection,
    open_connection,
    open_connection_async,
)
from ergon_framework.database.errors import ServerTimeout, has_server_changed, translate_error
from ergon_framework.database.operation import Operation, run_operation, run_operation_async
from ergon_framework.errors import ConnectionLostError, ErgonError
from ergon_framework.redaction import learn_address


class PoolPermit:
    """A permit that is returned at the end of its ``with``, unless it was transferred before."""

    __slots__ = ("_release",)

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release

    def transfer(self) -> PoolPermit:
        """Transfer the permit: return a new one, and make this one inert."""
        permit, self._release = PoolPermit(self._release), _do_nothing
        return permit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()


def _do_nothing() -> None:
    """Do nothing; the release of a transferred permit."""


# -- pool -------------------------------------------------------------------------------------------

R = TypeVar("R")

#: Executions after which a statement is prepared.
_PREPARE_THRESHOLD: Final = 2
#: Seconds for which an abandoned statement keeps its permit; the server's own limits are shorter.
_ABANDONED_TIMEOUT_SECONDS: Final = 10.0

_BACKEND_PID: Final = "select pg_backend_pid()"

#: For a direct session. Every statement is meant to use its indexes, whatever the statistics say: a plan that was made
#: while a table was empty must be good when it is full, so that no statement is planned twice. With read committed, a
#: second query of a transaction sees what was committed since the first.
_PLAN_SETTINGS: Final = """
select set_config(name, setting, false) from (values
    ('plan_cache_mode', 'force_generic_plan'), ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'),
    ('enable_hashjoin', 'off'), ('enable_mergejoin', 'off'), ('jit', 'off'),
    ('default_transaction_isolation', 'read committed')
) as wanted(name, setting)
"""


class ConnectionPool:
    """At most *max_size* sync connections, and as many async ones for each event loop; further callers wait.

    An error with which the server rejects a statement is raised as *error_type*. Before each new connection the
    credentials are read: from *credentials*, or from the files that the settings name for this database.
    """

    def __init__(
        self,
        dsn: str,
        *,
        max_size: int = 8,
        error_type: type[ErgonError] = ErgonError,
        credentials: CredentialsSource | None = None,
    ) -> None:
        learn_address(dsn)
        self._options: dict[str, Any] = connect_options(dsn)
        self._login = find_login(self._options, credentials)
        #: Host and port of the server of the newest connection; None before the first one.
        self.host: str | None = None
        #: Incremented when a server cannot be written to any more; connections of an earlier epoch are closed.
        self.epoch = 0
        self._max_size = max_size
        self._error_type = error_type
        #: False if there is a pooler in front of the server; None until a connection has checked it.
        self.is_direct: bool | None = None
        self._closed = False
        self._owner = os.getpid()
        self._create_permits()
        self._idle: list[DeadlineConnection] = []
        #: Strong references: the driver warns about connections that are collected unclosed with their loop.
        self._per_loop: dict[asyncio.AbstractEventLoop, _EventLoopPool] = {}

    @property
    def host_count(self) -> int:
        """The number of servers in the address."""
        return len(str(self._options.get("host") or self._options.get("hostaddr") or "").split(","))

    @property
    def is_unverified(self) -> bool:
        """Whether connections are encrypted without a verification of the server."""
        return is_unverified(self._options)

    def is_current(self, connection: DeadlineConnection | AsyncDeadlineConnection) -> bool:
        """Return whether *connection* is usable: the server has not become a standby or stopped since it was opened."""
        return connection.epoch == self.epoch

    def _build_settings(self) -> dict[str, Any]:
        # A pooler shares one session among clients: a prepared statement in it may belong to another client.
        return {
            **self._options,
            "autocommit": True,
            "prepare_threshold": _PREPARE_THRESHOLD if self.is_direct else None,
        }

    # -- sync -----------------------------------------------------------------------------------

    def run(self, operation: Operation[R], *, timeout_seconds: float | None = None) -> R:
        """Run *operation* on a connection of its own, for at most *timeout_seconds* whatever the server does.

        After a timeout it is unknown whether the running statement is executed.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._acquire_permit(timeout_seconds) as permit:
            connection: DeadlineConnection | None = None
            try:
                connection = _pop_usable(self._idle, self.is_current) or self._open_connection(deadline, permit)
                connection.deadline = deadline
                return run_operation(connection, operation)
            except psycopg.Error as error:
                raise self._translate(error, connection) from None
            finally:
                if connection is not None and connection.is_busy:
                    self._abandon(connection, permit)
                elif connection is not None:
                    self._release(connection)

    def _acquire_permit(self, timeout_seconds: float | None) -> PoolPermit:
        """Return a permit for one connection; wait for at most *timeout_seconds*."""
        self._reset_after_fork()
        try:
            self._permits.get(timeout=timeout_seconds)
        except Empty:
            # The caller has reached its deadline, so its operation must not run any more.
            raise self._pool_exhausted_error() from None
        return PoolPermit(self._release_permit)

    def _create_permits(self) -> None:
        # A queue, because a semaphore is written in Python and takes longer than the rest of a call up to the driver.
        self._permits: SimpleQueue[None] = SimpleQueue()
        self._release_permit = partial(self._permits.put, None)
        for _ in range(self._max_size):
            self._release_permit()

    def _pool_exhausted_error(self) -> ConnectionLostError:
        return ConnectionLostError(
            f"connection pool exhausted: no free connection of {self._max_size} within the timeout"
        )

    def _open_connection(self, deadline: float | None, permit: PoolPermit) -> DeadlineConnection:
        """Open a connection in another thread, because the lookup of a host name cannot be interrupted."""
        if deadline is None:
            return self.connect()
        future: Future[DeadlineConnection] = Future()
        try:
            threading.Thread(target=_dial, args=(future, self.connect), name="ergon-dial", daemon=True).start()
        except RuntimeError:
            raise ConnectionLostError("cannot start a thread to connect to the database") from None
        try:
            return future.result(deadline - time.monotonic())
        except BaseException as error:
            # The late connection becomes idle in the pool; it holds the permit until it is open.
            future.add_done_callback(partial(self._on_late_connection, permit.transfer()))
            if isinstance(error, TimeoutError):
                raise _unreachable_error() from None
            raise

    def _on_late_connection(self, permit: PoolPermit, future: Future[DeadlineConnection]) -> None:
        with permit:
            if future.exception() is None:
                self._release(future.result())

    def _abandon(self, connection: DeadlineConnection, permit: PoolPermit) -> None:
        """Abandon a connection whose statement still runs; it keeps its permit until the server has ended it.

        Otherwise abandoned statements would accumulate on the server without a bound.
        """
        transferred = permit.transfer()
        try:
            threading.Thread(
                target=_finish_abandoned, args=(connection, transferred), name="ergon-outwait", daemon=True
            ).start()
        except RuntimeError:
            with transferred:
                connection.close()

    def _translate(
        self, error: psycopg.Error, connection: DeadlineConnection | AsyncDeadlineConnection | None
    ) -> ErgonError:
        if connection is not None and has_server_changed(error) and self.is_current(connection):
            self.epoch += 1
        is_broken = connection is None or connection.broken or isinstance(error, ServerTimeout)
        return translate_error(error, is_broken=is_broken, error_type=self._error_type)

    def connect(self) -> DeadlineConnection:
        """Open a connection outside the pool; the caller closes it."""
        connection = open_connection(DeadlineConnection.connect, self._build_settings(), self._login)
        try:
            if self.is_direct is None:
                row = connection.execute(_BACKEND_PID).fetchone()
                # Behind a pooler, the server process is another one than the client was given at the start.
                self.is_direct = row is not None and row[0] == connection.info.backend_pid
                connection.prepare_threshold = _PREPARE_THRESHOLD if self.is_direct else None
            if self.is_direct:
                connection.execute(_PLAN_SETTINGS)
            self._on_connected(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _on_connected(self, connection: DeadlineConnection | AsyncDeadlineConnection) -> None:
        connection.epoch = self.epoch
        self.host = f"{connection.info.host}:{connection.info.port}"

    def _release(self, connection: DeadlineConnection) -> None:
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:
            with suppress(psycopg.Error):
                connection.rollback()
        if self._closed or connection.pgconn.transaction_status != TransactionStatus.IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    def _reset_after_fork(self) -> None:
        if self._owner == os.getpid():
            return
        # Closing the parent's connections would end its sessions. Kept, so that they are not garbage-collected.
        self._inherited = (self._idle, self._per_loop)
        self._owner, self._idle, self._per_loop = os.getpid(), [], {}
        self._create_permits()

    def close(self) -> None:
        """Close idle connections; one that is in use is closed when it is released."""
        self._reset_after_fork()
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        self._discard_closed_loops()

    # -- async ----------------------------------------------------------------------------------

    async def run_async(self, operation: Operation[R], *, timeout_seconds: float | None = None) -> R:
        """Run *operation* on an async connection; see ``run``."""
        pool = self._get_loop_pool()
        deadline = None if timeout_seconds is None else asyncio.get_running_loop().time() + timeout_seconds
        with await self._acquire_permit_async(pool, deadline) as permit:
            connection: AsyncDeadlineConnection | None = None
            try:
                connection = _pop_usable(pool.idle, self.is_current) or await self._open_connection_async(deadline)
                connection.deadline = deadline
                return await run_operation_async(connection, operation)
            except psycopg.Error as error:
                raise self._translate(error, connection) from None
            finally:
                if connection is not None and deadline is not None and connection.is_under_way:
                    pool.abandon_connection(connection, permit)
                elif connection is not None:
                    await pool.release(connection, closed=self._closed)

    async def _acquire_permit_async(self, pool: _EventLoopPool, deadline: float | None) -> PoolPermit:
        semaphore = pool.semaphore
        if not semaphore.locked():
            await semaphore.acquire()
        else:
            try:
                async with asyncio.timeout_at(deadline):
                    await semaphore.acquire()
            except TimeoutError:
                raise self._pool_exhausted_error() from None
        return PoolPermit(semaphore.release)

    async def _open_connection_async(self, deadline: float | None) -> AsyncDeadlineConnection:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._connect_async()
        except TimeoutError:
            raise _unreachable_error() from None

    async def _connect_async(self) -> AsyncDeadlineConnection:
        connection = await open_connection_async(AsyncDeadlineConnection.connect, self._build_settings(), self._login)
        try:
            if self.is_direct is None:
                row = await (await connection.execute(_BACKEND_PID)).fetchone()
                self.is_direct = row is not None and row[0] == connection.info.backend_pid
                connection.prepare_threshold = _PREPARE_THRESHOLD if self.is_direct else None
            if self.is_direct:
                await connection.execute(_PLAN_SETTINGS)
            self._on_connected(connection)
        except BaseException:
            # Not awaited: a cancelled task may be cancelled in that await too.
            connection.abort()
            raise
        return connection

    def _get_loop_pool(self) -> _EventLoopPool:
        """Return the pool of the running event loop; discard those of closed loops."""
        self._reset_after_fork()
        loop = asyncio.get_running_loop()
        pool = self._per_loop.get(loop)
        if pool is None:
            self._discard_closed_loops()
            self._per_loop[loop] = pool = _EventLoopPool(self._max_size)
        return pool

    def _discard_closed_loops(self) -> None:
        for loop in [loop for loop in list(self._per_loop) if loop.is_closed()]:
            pool = self._per_loop.pop(loop, None)
            if pool is not None:
                pool.discard_idle()

    async def close_async(self) -> None:
        """Close the idle connections of the running event loop, and all sync ones."""
        self._reset_after_fork()
        pool = self._per_loop.pop(asyncio.get_running_loop(), None)
        while pool is not None and pool.idle:
            await pool.idle.pop().close()
        self.close()


def _unreachable_error() -> ConnectionLostError:
    return ConnectionLostError("connecting to the database timed out")


def _dial(future: Future[DeadlineConnection], connect: Callable[[], DeadlineConnection]) -> None:
    try:
        future.set_result(connect())
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the connection
        future.set_exception(error)


def _finish_abandoned(connection: DeadlineConnection, permit: PoolPermit) -> None:
    with permit, suppress(psycopg.Error):
        connection.deadline = time.monotonic() + _ABANDONED_TIMEOUT_SECONDS
        try:
            connection.wait(generators.execute(connection.pgconn))
        finally:
            connection.close()


async def _finish_abandoned_async(connection: AsyncDeadlineConnection, permit: PoolPermit) -> None:
    with permit, suppress(psycopg.Error):
        connection.deadline = asyncio.get_running_loop().time() + _ABANDONED_TIMEOUT_SECONDS
        try:
            await connection.wait(generators.execute(connection.pgconn))
        finally:
            connection.abort()


class _EventLoopPool:
    """The connections of one event loop."""

    def __init__(self, max_size: int) -> None:
        self.semaphore = asyncio.Semaphore(max_size)
        self.idle: list[AsyncDeadlineConnection] = []
        #: Strong references: the event loop holds tasks only weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    async def release(self, connection: AsyncDeadlineConnection, *, closed: bool) -> None:
        try:
            if connection.pgconn.transaction_status != TransactionStatus.IDLE:
                with suppress(psycopg.Error):
                    await connection.rollback()
        except BaseException:
            connection.abort()
            raise
        if closed or connection.pgconn.transaction_status != TransactionStatus.IDLE:
            connection.abort()
        else:
            self.idle.append(connection)

    def abandon_connection(self, connection: AsyncDeadlineConnection, permit: PoolPermit) -> None:
        """Abandon a connection whose statement still runs; see ``ConnectionPool``."""
        task = asyncio.get_running_loop().create_task(_finish_abandoned_async(connection, permit.transfer()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def discard_idle(self) -> None:
        """Close idle connections without the driver, because the event loop has closed and cannot await it."""
        while self.idle:
            connection = self.idle.pop()  # a named reference: without it the driver would warn before it is closed
            connection.abort()


C = TypeVar("C", DeadlineConnection, AsyncDeadlineConnection)


def _pop_usable(idle: list[C], is_current: Callable[[C], bool]) -> C | None:
    """Pop a current idle connection that the server has not closed; a closed one is readable, without a read yet."""
    while True:
        try:
            connection = idle.pop()
        except IndexError:  # checking first is not enough: other threads pop from here too
            return None
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        if is_current(connection) and not poll.poll(0):
            return connection
        connection.abort()
