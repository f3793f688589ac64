"""The database side of one schedule of tasks: it is declared, its next tick is read, and its ticks are fired.

A tick is a scheduled time. To fire a tick is to send the transaction of that time, and to write the next time, in one
database transaction that has locked the entry's row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.database.login import DSN_VARIABLE
from ergon_framework.database.operation import Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import ConfigurationError
from ergon_framework.jobs import cron_store
from ergon_framework.jobs.cron import CronTiming, queue_columns
from ergon_framework.transaction import Transaction

#: Seconds that an operation of the database may take, and the firing of a tick with the call of its function.
_TIMEOUT_SECONDS: Final = 15.0
_FIRE_TIMEOUT_SECONDS: Final = cron_store.MAX_SEND_SECONDS + _TIMEOUT_SECONDS


class TickStore:
    """The entry of one schedule in the database at *dsn*, or ``ERGON_POSTGRES__DSN``; used by one thread at a time."""

    def __init__(
        self, timing: CronTiming, target: Connector | AsyncConnector, *, dsn: str | None, tenant: str | None
    ) -> None:
        address = dsn or os.environ.get(DSN_VARIABLE)
        if not address:
            raise ConfigurationError(
                f"schedule {timing.name!r} has no database address: PostgreSQL stores the scheduled times that were "
                f"fired, so that several processes fire each one once; set {DSN_VARIABLE} or pass dsn=…"
            )
        self._timing = timing
        self._target = target
        self._tenant = tenant
        self._connection_pool = ConnectionPool(address, max_size=1)
        is_in: Any = getattr(target, "is_in", None)
        #: Whether the transactions are written in the database transaction that moves the entry to its next time.
        self.is_atomic = is_in is not None and bool(is_in(address))

    def declare(self) -> None:
        """Create or change the entry; an entry that was declared the same stays as it is."""
        row = queue_columns(self._timing, queue=self._target.name, tenant=self._tenant)
        self._connection_pool.run(cron_store.declare([row]), timeout_seconds=_TIMEOUT_SECONDS)
        if self.is_atomic:
            # Opens the queue without the count of its consumer: the row of a new queue must not be inserted later, in
            # a longer database transaction, where it would block others.
            as_sync(self._target).find_queued([])

    def find_next_tick(self) -> tuple[datetime, float] | None:
        """Return the next tick and the seconds until then; None if the entry is paused, or has no more."""
        operation = cron_store.find_next_tick(self._timing.name)
        return self._connection_pool.run(operation, timeout_seconds=_TIMEOUT_SECONDS)

    def is_locked(self) -> bool:
        """Return whether another process fires the due tick at present."""
        return self._connection_pool.run(cron_store.is_locked(self._timing.name), timeout_seconds=_TIMEOUT_SECONDS)

    def fire(self, due_at: datetime, create: Callable[[datetime], Transaction]) -> cron_store.FiredEntry | None:
        """Fire the tick that was due at *due_at*; None if another process has fired it, or does."""

        def send(tick: datetime) -> Query | None:
            transaction = create(tick)
            if not self.is_atomic:
                as_sync(self._target).dispatch([transaction])
                return None
            target: Any = self._target
            return Query(*target.dispatch_statement([transaction]))

        operation = cron_store.fire_tick(self._timing.name, due_at, send)
        return self._connection_pool.run(operation, timeout_seconds=_FIRE_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Disconnect."""
        self._connection_pool.close()
