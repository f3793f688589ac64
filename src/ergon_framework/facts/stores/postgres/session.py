"""DatabaseSession: one database as this process knows it: its connections, durability, identity and epoch.

An epoch names the history of a store. Offsets are unique within an epoch only: a restored backup assigns some of them
again, so it begins a new epoch, which readers must accept.

The first call after a restore detects the restored backup. The row of the store records the cluster, database, timeline
and database transaction that it was written for, and a difference begins a new epoch. A data folder that was copied
back unchanged differs in none of these; a process that has seen a higher offset than the store has now detects it.

A database must have the required schema and keep committed data, unless the caller accepts their loss.

``FactListener`` is one listening connection per store: it notifies subscribers of new facts from any process. It saves
polling and is optional: behind a pooler, or while the connection is lost, readers poll.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import psycopg
from psycopg import Connection
from psycopg.rows import TupleRow

from ergon_framework.connectors.postgres.inspect import PostgresDurability, assess_durability, log_unverified
from ergon_framework.connectors.postgres.sql import CHANNEL, REGISTER_LISTENER, SELECT_REVISION, SELECT_SETTINGS
from ergon_framework.database.operation import Operation, Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.database.revisions import is_compatible
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.facts import metrics
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import BoundarySide, ZonePair
from ergon_framework.facts.stores.postgres import sql as statements
from ergon_framework.facts.stores.postgres.sql import FACT_LISTENER_QUEUE
from ergon_framework.telemetry import logs

#: Seconds between two checks for subscribers, and bounds of the delay before the next connection attempt.
_POLL_INTERVAL_SECONDS: Final = 0.2
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.2, 5.0
#: Seconds for which an announcement tells appenders that this process listens, and until it is renewed.
_ANNOUNCEMENT_SECONDS, _RENEWAL_SECONDS = 30.0, 10.0


class FactListener:
    """Calls its subscribers from a separate thread."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._callbacks: tuple[Callable[[], None], ...] = ()
        self._thread: threading.Thread | None = None
        self._listener_id = random.getrandbits(62)
        #: Set while notifications are received.
        self.receiving = threading.Event()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call *callback* on new facts until the returned function is called."""
        with self._lock:
            self._callbacks = (*self._callbacks, callback)
            # The thread does not exist after a fork, or after a callback has raised.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._listen, name="ergon-facts-listener", daemon=True)
                self._thread.start()

        def unsubscribe() -> None:
            with self._lock:
                positions = [position for position, other in enumerate(self._callbacks) if other is callback]
                if positions:
                    self._callbacks = self._callbacks[: positions[0]] + self._callbacks[positions[0] + 1 :]

        return unsubscribe

    def notify(self) -> None:
        """Call all subscribers."""
        for callback in self._callbacks:
            callback()

    def close(self) -> None:
        """Remove all subscribers."""
        with self._lock:
            self._callbacks = ()

    def _has_subscribers(self) -> bool:
        with self._lock:
            if self._callbacks:
                return True
            self._thread = None
            return False

    def _listen(self) -> None:
        delay = _MIN_RETRY_SECONDS
        while self._has_subscribers():
            try:
                with self._pool.connect() as connection:
                    if not self._pool.is_direct:
                        self._sleep(_MAX_RETRY_SECONDS)
                        continue
                    connection.execute(f"listen {CHANNEL}")
                    delay = _MIN_RETRY_SECONDS
                    self._receive(connection)
            except psycopg.Error:
                self._sleep(delay)
                delay = min(delay * 2, _MAX_RETRY_SECONDS)
            finally:
                self.receiving.clear()

    def _receive(self, connection: Connection[TupleRow]) -> None:
        """Announce this process to appenders, and notify the subscribers while there are any."""
        announced_at = float("-inf")
        while self._has_subscribers():
            if time.monotonic() > announced_at + _RENEWAL_SECONDS:
                connection.execute(
                    REGISTER_LISTENER,
                    {"queue": FACT_LISTENER_QUEUE, "listener": self._listener_id, "seconds": _ANNOUNCEMENT_SECONDS},
                )
                if not self.receiving.is_set():
                    self.receiving.set()
                    # Notifications before the first announcement were not sent.
                    self.notify()
                announced_at = time.monotonic()
            if any(
                notice.payload == str(FACT_LISTENER_QUEUE)
                for notice in connection.notifies(timeout=_POLL_INTERVAL_SECONDS)
            ):
                self.notify()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._has_subscribers():
            time.sleep(_POLL_INTERVAL_SECONDS)


_log = logging.getLogger(__name__)


def check_database(
    data_name: str, *, required: str, accept_loss: bool, known: PostgresDurability | None = None
) -> Operation[PostgresDurability]:
    """Return the durability of a commit; raise if the schema is outdated or if *data_name* could be lost.

    The durability is logged, unless it equals *known*.
    """
    rows = yield Query(SELECT_REVISION)
    revision = rows[0][0] if rows else None
    if not is_compatible(revision, required):
        raise ConfigurationError(
            f"database revision {revision or 'none'} is outdated: {data_name} need {required}; run: ergon db upgrade"
        )
    durability = assess_durability(dict((yield Query(SELECT_SETTINGS))))
    if durability != known:
        level = logging.INFO if durability.durable else logging.WARNING
        logs.log_event(
            level, "postgres durability", {"durable": durability.durable, "summary": durability.message}, to=_log
        )
    if not durability.durable and not accept_loss:
        raise ConfigurationError(
            f"this database may lose {data_name}: {durability.message}; set it on, or pass accept_loss=True if "
            f"confirmed {data_name} may be lost"
        )
    return durability


#: The latest revision that the statements of this package need.
_REQUIRED_REVISION: Final = "0004"
#: Maximum number of attempts of a call when the store changes its identity meanwhile.
MAX_ATTEMPTS: Final = 5


class StoreIdentity(NamedTuple):
    """The identity of the store at its last verification."""

    #: Changes whenever the store may have become a different one.
    token: str
    epoch: str


class DatabaseSession:
    """A database that ``ergon db upgrade`` has prepared; safe from all threads and event loops of this process."""

    def __init__(self, dsn: str, *, side: BoundarySide, accept_loss: bool) -> None:
        #: The process that created it; a forked child has its own connections.
        self.owner_pid = os.getpid()
        self.pool = ConnectionPool(dsn, error_type=FactError)
        self.side = side
        self.accept_loss = accept_loss
        #: None before the first check.
        self.durability: PostgresDurability | None = None
        self.identity: StoreIdentity | None = None
        #: The highest known offset of each pair in this epoch.
        self._highest_offsets: dict[ZonePair, int] = {}

    def ensure_open(self) -> Operation[StoreIdentity]:
        """Return the known identity, or verify the store first."""
        return self.identity or (yield from self.verify())

    def verify(self) -> Operation[StoreIdentity]:
        """Check schema, settings and identity of the store; begin a new epoch if the identity differs from its row."""
        if self.durability is None:
            log_unverified(self.pool)
        self.durability = yield from check_database(
            "facts", required=_REQUIRED_REVISION, accept_loss=self.accept_loss, known=self.durability
        )
        if (yield Query(statements.IN_RECOVERY)) == [(True,)]:
            raise ConnectionLostError("the database is a standby and accepts no facts; use the address of the primary")
        for _ in range(MAX_ATTEMPTS):
            rows = yield Query(statements.VERIFY_STORE)
            if not rows:
                yield from self._insert_epoch(None, "the first", "")
                continue
            token, epoch, side, is_same = rows[0]
            if side != self.side:
                raise ConfigurationError(
                    f"the store in this database is on the {side} side, but was opened as {self.side.value}; "
                    f"pass side=BoundarySide.{side.upper()}"
                )
            if is_same:
                return self._set_identity(StoreIdentity(token, epoch))
            yield from self._insert_epoch(epoch, "a backup was restored, or another server took over", "")
        raise ConnectionLostError("store epoch keeps changing; check ergon.fact_epochs")

    def _set_identity(self, identity: StoreIdentity) -> StoreIdentity:
        previous, self.identity = self.identity, identity
        if previous is not None and previous.epoch != identity.epoch:
            self._highest_offsets = {}
            metrics.log_epoch_changed(identity.epoch)
        return identity

    def _insert_epoch(self, previous_epoch: str | None, why: str, by: str) -> Operation[None]:
        yield Query(statements.BEGIN_EPOCH, {"was": previous_epoch, "side": self.side.value, "why": why, "by": by})

    def begin_epoch(self, identity: StoreIdentity, *, why: str, by: str = "") -> Operation[StoreIdentity]:
        """Begin a new epoch, unless another process has begun one since *identity* was read."""
        yield from self._insert_epoch(identity.epoch, why, by)
        return (yield from self.verify())

    # -- highest offsets ------------------------------------------------------------------------------

    def highest_offset(self, pair: ZonePair) -> int:
        """Return the highest offset of *pair* that this process has seen."""
        return self._highest_offsets.get(pair, 0)

    def record_offset(self, pair: ZonePair, offset: int) -> None:
        """Record an offset that was assigned or read."""
        if offset > self._highest_offsets.get(pair, 0):
            self._highest_offsets[pair] = offset

    def begin_epoch_after_restore(self, identity: StoreIdentity) -> Operation[StoreIdentity]:
        """Begin a new epoch, because the store is older than what this process has seen of it; the caller retries."""
        return (
            yield from self.begin_epoch(identity, why="an older state was restored: higher offsets had been assigned")
        )
