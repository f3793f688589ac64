"""The client of one database, shared by all its queues in this process, and the worker lease.

A lease is the time for which a worker keeps its claims (its rights to process messages) without renewing it.

The client holds the connection pool, the worker lease, the notification listener and the clean-up thread.

The worker lease says which worker instance this process is, and how long its claims last. All claims of a process
belong to one row that is renewed as a whole. If the row was deleted, because its lease ended and another worker
noticed, all earlier claims are lost and a new instance is registered; a receipt with the old number settles nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.credentials import CredentialsSource
from ergon_framework.connectors.postgres import sql
from ergon_framework.connectors.postgres.cleanup import Cleanup
from ergon_framework.connectors.postgres.inspect import PostgresDurability, log_unverified, read_durability
from ergon_framework.connectors.postgres.notify import NotificationListener
from ergon_framework.database.operation import BEGIN, COMMIT, Operation, Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.database.revisions import REQUIRED_REVISION, is_compatible
from ergon_framework.errors import ConfigurationError
from ergon_framework.telemetry import logs

#: The remaining share of a lease below which another call renews it first.
_RENEW_SHARE = 0.6
#: The remaining share of a lease above which a renewal is skipped.
_SKIP_RENEWAL_SHARE = 0.9


class WorkerLease:
    """The current worker instance; shared by all queues of one database in this process."""

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self._lock = threading.Lock()
        self.worker: int | None = None
        #: The end of the lease on the monotonic clock, counted from before the request to the server.
        self.until = 0.0
        # Unique within an instance: a repeated claim of the same process is another claim.
        self._tokens: Iterator[int] = itertools.count(1)
        #: Claims of closed queues, each with the end of its lease; the row as a whole may be renewed beyond that.
        self._abandoned: dict[tuple[int, int], float] = {}

    def next_token(self) -> int:
        """Return a number that no other claim of this instance has."""
        return next(self._tokens)

    def abandon(self, claims: Iterable[tuple[int, int]]) -> None:
        """Let these claims, each a worker and a token, return at the end of their current lease."""
        with self._lock:
            self._abandoned |= dict.fromkeys(claims, self.until)

    def return_abandoned(self) -> Operation[bool]:
        """Return the messages of abandoned claims whose lease is over to their queues; return whether there were any.

        Called with each fetch and each renewal.
        """
        if not self._abandoned:
            return False
        now = time.monotonic()
        with self._lock:
            # The claims of an earlier instance returned when that instance expired.
            self._abandoned = {claim: end for claim, end in self._abandoned.items() if claim[0] == self.worker}
            due = [claim for claim, end in self._abandoned.items() if end <= now]
        if due:
            # Kept until the server has answered: the next call repeats a call that fails.
            yield Query(sql.REAP_CLAIMS, {"worker": due[0][0], "tokens": [token for _, token in due]})
            with self._lock:
                self._abandoned = {claim: end for claim, end in self._abandoned.items() if claim not in due}
        return bool(due)

    def ensure(self) -> Operation[int]:
        """Return the number of the instance; register it or renew its lease where that is due."""
        worker = self.worker
        if worker is not None and self.until - time.monotonic() < self.lease * _RENEW_SHARE:
            worker = yield from self.renew(worker)
        if worker is None:
            worker = yield from self._register()
        return worker

    def renew(self, worker: int) -> Operation[int | None]:
        """Renew the lease of *worker*; return None if it has expired."""
        began = time.monotonic()
        if worker == self.worker and self.until - began > self.lease * _SKIP_RENEWAL_SHARE:
            return worker
        rows = yield Query(sql.RENEW_WORKER, {"worker": worker, "lease": self.lease})
        if not rows:
            self.mark_expired(worker)
            return None
        if worker == self.worker:
            self.until = began + self.lease
        return worker

    def _register(self) -> Operation[int]:
        began = time.monotonic()
        ((number,),) = yield Query(sql.INSERT_WORKER, {"lease": self.lease, "name": _build_worker_name()})
        with self._lock:
            # Two threads may have registered at the same time. One instance is kept, because only one is renewed.
            if self.worker is None:
                self.worker, self.until = number, began + self.lease
            worker = self.worker
        if worker != number:
            yield Query(sql.DELETE_WORKER, {"worker": number})
        return worker

    def mark_expired(self, worker: int) -> None:
        """Record that the instance *worker* has expired."""
        with self._lock:
            if self.worker == worker:
                self.worker = None

    def deregister(self) -> Operation[None]:
        """Delete the row of the instance, unless it has claims: those end with the lease."""
        with self._lock:
            worker, self.worker = self.worker, None
        if worker is not None:
            yield Query(sql.DELETE_WORKER, {"worker": worker})


def _build_worker_name() -> str:
    return f"{socket.gethostname()[:100]}:{os.getpid()}"


# -- client -----------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
_clients: dict[tuple[str, float, CredentialsSource | None, int], DatabaseClient] = {}
_registry_lock = threading.Lock()

#: Seconds between two searches for claims of workers that do not exist.
_STRAY_SEARCH_SECONDS: Final = 600.0


class DatabaseClient:
    """The per-process state of one database."""

    def __init__(self, dsn: str, lease: float, credentials: CredentialsSource | None) -> None:
        #: A forked child is another worker instance: with its parent's number it would share its parent's claims.
        self.owner_pid = os.getpid()
        self.pool = ConnectionPool(dsn, error_type=ConnectorError, credentials=credentials)
        self.worker_lease = WorkerLease(lease)
        self.listener = NotificationListener(self.pool)
        self.cleanup = Cleanup(dsn, credentials)
        #: None until it is read.
        self.durability: PostgresDurability | None = None
        self.users = 0
        self._last_reap = float("-inf")
        self._last_stray_search = time.monotonic()

    def check_schema(self) -> Operation[None]:
        """Check once per process that the schema exists, and read the durability of a commit."""
        if self.durability is not None:
            return
        rows = yield Query(sql.SELECT_REVISION)
        revision = rows[0][0] if rows else None
        if not is_compatible(revision):
            raise ConfigurationError(
                f"the database is at revision {revision or 'none'}, this release needs "
                f"{REQUIRED_REVISION}; run: ergon db upgrade"
            )
        self.durability = durability = yield from read_durability(self.pool.host_count)
        level = logging.INFO if durability.durable and not durability.promotion else logging.WARNING
        fields = {"durable": durability.durable, "summary": durability.summary}
        logs.log_event(level, "postgres durability", fields, to=_log)
        log_unverified(self.pool)

    def reap_expired_workers(self) -> Operation[bool]:
        """Return the messages of expired workers to their queues, at most every few seconds.

        Return whether a worker had expired. Leases that are too long since the server's clock was set back are
        shortened as well.
        """
        now = time.monotonic()
        if now < self._last_reap + min(self.worker_lease.lease / 4, 5.0):
            return False
        self._last_reap = now
        has_reaped = False
        if (yield Query(sql.HAS_EXPIRED_OR_AHEAD_WORKER)):
            yield Query(sql.BOUND_LEASES)
            yield BEGIN
            expired = yield Query(sql.DELETE_EXPIRED_WORKERS)
            if expired:
                yield Query(sql.REAP_WORKERS, {"workers": [row[0] for row in expired]})
                has_reaped = True
            yield COMMIT
        if now >= self._last_stray_search + _STRAY_SEARCH_SECONDS:
            self._last_stray_search = now
            yield Query(sql.REAP_STRAYS)
            yield Query(sql.DELETE_EXPIRED_LISTENERS)
        return has_reaped


def acquire_client(dsn: str, lease: float, credentials: CredentialsSource | None = None) -> DatabaseClient:
    """Return the client of *dsn*, one per process, lease and source; end its use with ``release_client``."""
    with _registry_lock:
        key = dsn, lease, credentials, os.getpid()
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = DatabaseClient(dsn, lease, credentials)
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
