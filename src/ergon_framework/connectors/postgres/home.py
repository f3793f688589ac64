"""The client of one database, shared by all its queues in this process.

It holds the connection pool, the worker lease, the notification listener and the clean-up thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Final

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.postgres import statements
from ergon_framework.connectors.postgres.cleanup import Cleanup
from ergon_framework.connectors.postgres.doorbell import NotificationListener
from ergon_framework.connectors.postgres.durability import PostgresDurability, read_durability
from ergon_framework.connectors.postgres.tenure import WorkerLease
from ergon_framework.errors import ConfigurationError
from ergon_framework.schema.lines import ConnectionPool
from ergon_framework.schema.operation import BEGIN, COMMIT, Operation, Query
from ergon_framework.schema.revisions import REQUIRED_REVISION, is_compatible
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)
_clients: dict[tuple[str, float, int], DatabaseClient] = {}
_registry_lock = threading.Lock()

#: Seconds between two searches for claims of workers that do not exist.
_STRAY_SEARCH_SECONDS: Final = 600.0


class DatabaseClient:
    """The per-process state of one database."""

    def __init__(self, dsn: str, lease: float) -> None:
        #: A forked child is another worker instance: with its parent's number it would share its parent's claims.
        self.owner_pid = os.getpid()
        self.pool = ConnectionPool(dsn, error_type=ConnectorError)
        self.worker_lease = WorkerLease(lease)
        self.listener = NotificationListener(self.pool)
        self.cleanup = Cleanup(dsn)
        #: None until it is read.
        self.durability: PostgresDurability | None = None
        #: Whether the schema stores the length of each lease.
        self.has_leases = False
        #: Whether the schema has the function that bounds claims.
        self.has_bounded_claims = False
        self.users = 0
        self._last_reap = float("-inf")
        self._last_stray_search = time.monotonic()

    def check_schema(self) -> Operation[None]:
        """Check once per process that the schema exists, and read the durability of a commit."""
        if self.durability is not None:
            return
        rows = yield Query(statements.SELECT_REVISION)
        revision = rows[0][0] if rows else None
        if not is_compatible(revision):
            raise ConfigurationError(
                f"the database is at revision {revision or 'none'}, this release needs "
                f"{REQUIRED_REVISION}; run: ergon db upgrade"
            )
        self.has_leases = is_compatible(revision, statements.LEASES_REVISION)
        self.has_bounded_claims = is_compatible(revision, statements.BOUNDED_CLAIM_REVISION)
        self.durability = durability = yield from read_durability(self.pool.host_count)
        level = logging.INFO if durability.durable and not durability.promotion else logging.WARNING
        fields = {"durable": durability.durable, "words": durability.summary}
        logs.log_event(level, "postgres durability", fields, to=_log)

    def reap_expired_workers(self) -> Operation[bool]:
        """Return the claims of expired workers, at most every few seconds; return whether there were any."""
        now = time.monotonic()
        if now < self._last_reap + min(self.worker_lease.lease / 4, 5.0):
            return False
        self._last_reap = now
        has_reaped = False
        if (yield Query(statements.HAS_EXPIRED_OR_AHEAD_WORKER if self.has_leases else statements.HAS_EXPIRED_WORKER)):
            if self.has_leases:
                yield Query(statements.BOUND_LEASES)
            yield BEGIN
            expired = yield Query(statements.DELETE_EXPIRED_WORKERS)
            if expired:
                yield Query(statements.REAP_WORKERS, {"workers": [row[0] for row in expired]})
                has_reaped = True
            yield COMMIT
        if now >= self._last_stray_search + _STRAY_SEARCH_SECONDS:
            self._last_stray_search = now
            yield Query(statements.REAP_STRAYS)
            yield Query(statements.DELETE_EXPIRED_LISTENERS)
        return has_reaped


def acquire_client(dsn: str, lease: float) -> DatabaseClient:
    """Return the client of *dsn*, one per process and lease; end its use with ``release_client``."""
    with _registry_lock:
        key = dsn, lease, os.getpid()
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = DatabaseClient(dsn, lease)
        client.users += 1
        return client


def release_client(client: DatabaseClient) -> bool:
    """Decrement the reference count; return True for the last user, which closes the client."""
    with _registry_lock:
        client.users -= 1
        if client.users > 0:
            return False
        for key, other in list(_clients.items()):
            if other is client:
                del _clients[key]
        return True
