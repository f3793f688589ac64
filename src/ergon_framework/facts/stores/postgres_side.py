"""PostgresFactConsumerStore: the durable state of fact consumers, kept outside the log, in PostgreSQL."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Self

from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.postgres.queue import DSN_VARIABLE
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import ZonePair
from ergon_framework.facts.side import ConsumerStoreCalls, ReaderInfo
from ergon_framework.facts.stores.postgres_fitness import check_database
from ergon_framework.facts.stores.postgres_side_keeping import ConsumerStoreOperations
from ergon_framework.schema.lines import ConnectionPool
from ergon_framework.schema.operation import Operation

#: The revision that created its tables.
_REQUIRED_REVISION: Final = "0008"
#: Timeout of a call.
_CALL_TIMEOUT_SECONDS: Final = 30.0


class PostgresFactConsumerStore:
    """The consumer state of all readers, in a database that ``ergon db upgrade`` has prepared.

    The address is *dsn*, or the environment's ``ERGON_POSTGRES__DSN``. A ``PostgresBoundary`` has one in its own
    database, which its consumers use automatically; this class is for facts that are stored elsewhere, for instance
    behind a service. A database that may lose committed data is rejected, unless *accept_loss*.
    """

    def __init__(self, dsn: str | None = None, *, accept_loss: bool = False) -> None:
        self._dsn = dsn
        self._accept_loss = accept_loss
        self._lock = threading.Lock()
        self._pool: ConnectionPool | None = None
        self._is_checked = False
        #: The sync and async runner of a boundary in the same database; None without one.
        self._boundary_runners: tuple[Callable[..., Any], Callable[..., Awaitable[Any]]] | None = None

    @classmethod
    def for_boundary(cls, run: Callable[..., Any], run_async: Callable[..., Awaitable[Any]]) -> Self:
        """Create the consumer store of a boundary, which runs its operations over its own connections."""
        consumer_store = cls()
        consumer_store._boundary_runners = run, run_async
        return consumer_store

    # -- lifecycle ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect; the next call connects again. Connections of a boundary stay open."""
        pool = self._detach_pool()
        if pool is not None:
            pool.close()

    async def close_async(self) -> None:
        pool = self._detach_pool()
        if pool is not None:
            await pool.close_async()

    def _detach_pool(self) -> ConnectionPool | None:
        with self._lock:
            pool, self._pool = self._pool, None
        return pool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    def _get_pool(self) -> ConnectionPool:
        with self._lock:
            if self._pool is None:
                dsn = self._dsn or os.environ.get(DSN_VARIABLE)
                if not dsn:
                    raise ConfigurationError(
                        f"the side of facts needs a database: set {DSN_VARIABLE} in the environment or give dsn=…"
                    )
                self._pool = ConnectionPool(dsn, error_type=FactError)
            return self._pool

    def _run(self, make_operation: Callable[..., Operation[Any]], *args: Any) -> Any:
        if self._boundary_runners is not None:
            return self._boundary_runners[0](partial(_ignore_session, make_operation), *args)
        return self._get_pool().run(self._check_and_run(make_operation, *args), timeout_seconds=_CALL_TIMEOUT_SECONDS)

    async def _run_async(self, make_operation: Callable[..., Operation[Any]], *args: Any) -> Any:
        if self._boundary_runners is not None:
            return await self._boundary_runners[1](partial(_ignore_session, make_operation), *args)
        return await self._get_pool().run_async(
            self._check_and_run(make_operation, *args), timeout_seconds=_CALL_TIMEOUT_SECONDS
        )

    def _check_and_run(self, make_operation: Callable[..., Operation[Any]], *args: Any) -> Operation[Any]:
        if not self._is_checked:
            yield from check_database("dead letters", required=_REQUIRED_REVISION, accept_loss=self._accept_loss)
            self._is_checked = True
        return (yield from make_operation(*args))

    # -- operations -----------------------------------------------------------------------------------

    def get_calls(self, reader_info: ReaderInfo) -> ConsumerStoreCalls:
        return _to_calls(
            ConsumerStoreOperations(reader_info),
            self._run,
            None if self._boundary_runners is None else self._boundary_runners[0],
        )

    def get_calls_async(self, reader_info: ReaderInfo) -> ConsumerStoreCalls:
        return _to_calls(
            ConsumerStoreOperations(reader_info),
            self._run_async,
            None if self._boundary_runners is None else self._boundary_runners[1],
        )

    def forget_epoch(self, pair: ZonePair, reader: str = "default") -> int:
        """Let *reader* read in another epoch, after an operator has compared the stores.

        Deferred facts become dead letters, because their offsets may mean other facts; the result is their number. All
        other state of single facts is deleted: some facts may be delivered again.
        """
        return int(self._run(_make_operations(pair, reader).forget_epoch, time.time()))

    async def forget_epoch_async(self, pair: ZonePair, reader: str = "default") -> int:
        return int(await self._run_async(_make_operations(pair, reader).forget_epoch, time.time()))


def _make_operations(pair: ZonePair, reader: str) -> ConsumerStoreOperations:
    return ConsumerStoreOperations(
        ReaderInfo(pair, reader, f"{pair.from_zone}/{pair.to_zone}", JsonCodec(), lambda: True)
    )


def _ignore_session(make_operation: Callable[..., Operation[Any]], _session: object, *args: Any) -> Operation[Any]:
    return make_operation(*args)


def _to_calls(
    operations: ConsumerStoreOperations, run: Callable[..., Any], run_in_boundary: Callable[..., Any] | None
) -> ConsumerStoreCalls:
    return ConsumerStoreCalls(
        partial(run, operations.take_over),
        partial(run, operations.claim),
        partial(run, operations.settle),
        partial(run, operations.release),
        partial(run, operations.is_owner),
        partial(run, operations.get_dead_letter),
        partial(run, operations.replay),
        partial(run, operations.discard),
        partial(run, operations.list_dead),
        partial(run, operations.count_dead_letters),
        None if run_in_boundary is None else partial(run_in_boundary, operations.confirm),
    )
