"""Pauses of tasks and queues: stored in the database, and watched by a thread of each process.

A paused task or queue fetches nothing and finishes its work in flight. The watcher of each process also reports whether
it has paused, so that ``ergon pause --wait`` can wait for all workers.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from psycopg import errors

from ergon_framework.audit import create_entry
from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.postgres import audit
from ergon_framework.database.connection import DeadlineConnection
from ergon_framework.database.listen import NotificationWaiter
from ergon_framework.database.operation import BEGIN, COMMIT, Operation, Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: The channel that a trigger of the table of pauses notifies.
CHANNEL: Final = "ergon_pause"
#: Seconds between two polls.
POLL_INTERVAL_SECONDS: Final = 0.9
#: Timeout of a poll.
_POLL_TIMEOUT_SECONDS: Final = 5.0
#: Seconds before it reconnects: first, at most, and where the schema has no table of pauses.
_MIN_RECONNECT_SECONDS, _MAX_RECONNECT_SECONDS, _NO_TABLE_RETRY_SECONDS = 0.1, 2.0, 30.0
#: Seconds between two reports of a watcher without changes, and after which a watcher without reports is ignored.
_REPORT_INTERVAL_SECONDS: Final = 5.0
WATCHER_EXPIRY_SECONDS: Final = 20.0

_SELECT_PAUSE: Final = (
    "select name, actor, reason from ergon.pause where name = any(%(names)s) order by at, name limit 1"
)
_SELECT_PAUSES: Final = "select name, actor, reason, extract(epoch from at)::float8 from ergon.pause order by at, name"
_UPSERT_PAUSE: Final = """
insert into ergon.pause as kept (name, actor, reason) values (%(name)s, %(actor)s, %(reason)s)
on conflict (name) do update set actor = excluded.actor, reason = excluded.reason
    where (kept.actor, kept.reason) <> (excluded.actor, excluded.reason)
"""
_DELETE_PAUSE: Final = "delete from ergon.pause where name = %(name)s returning name"
_UPSERT_WATCHER: Final = """
insert into ergon.pause_watcher (id, task, queue, host, pid, pause, in_flight)
values (%(id)s, %(task)s, %(queue)s, %(host)s, %(pid)s, %(pause)s, %(in_flight)s)
on conflict (id) do update set pause = excluded.pause, in_flight = excluded.in_flight, at = now()
"""
_DELETE_WATCHERS: Final = (
    "delete from ergon.pause_watcher where id = %(id)s or at < now() - make_interval(secs => 3600)"
)
_SELECT_WATCHERS: Final = """
select task, queue, host, pid, pause, in_flight from ergon.pause_watcher
where at > now() - make_interval(secs => %(expiry)s) order by task, host, pid
"""


@dataclass(frozen=True, slots=True)
class PauseRecord:
    """An operator's pause of the task or queue called *name*; *at* is in seconds since the epoch."""

    name: str
    actor: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class WorkerLoopState:
    """A loop of the fleet: its task and process, the pause that it has applied, if any, and its work in flight."""

    task: str
    queue: str
    host: str
    pid: int
    applied: str | None
    in_flight: int

    def matches(self, name: str) -> bool:
        """Return whether a pause of *name* applies to this loop."""
        return name in (self.task, self.queue)


# -- for operators --------------------------------------------------------------------------------------


def pause(name: str, *, actor: str, reason: str) -> Operation[None]:
    """Stop all fetches for the task or queue called *name*; a second pause replaces the first."""
    entry = create_entry("pause", name, actor=actor, reason=reason)
    yield BEGIN
    yield Query(_UPSERT_PAUSE, {"name": name, "actor": actor, "reason": reason})
    yield from audit.write_entry(None if entry is None else entry.end(count=1))
    yield COMMIT


def resume(name: str, *, actor: str = "", reason: str = "") -> Operation[bool]:
    """Resume the fetches; return False if *name* was not paused."""
    entry = create_entry("resume", name, actor=actor, reason=reason)
    yield BEGIN
    resumed = bool((yield Query(_DELETE_PAUSE, {"name": name})))
    yield from audit.write_entry(entry.end(count=1) if resumed and entry is not None else None)
    yield COMMIT
    return resumed


def list_pauses() -> Operation[tuple[list[PauseRecord], list[WorkerLoopState]]]:
    """Return all pauses, and the loops that have reported recently."""
    pauses = yield Query(_SELECT_PAUSES)
    watchers = yield Query(_SELECT_WATCHERS, {"expiry": WATCHER_EXPIRY_SECONDS})
    return [PauseRecord(*row) for row in pauses], [WorkerLoopState(*row) for row in watchers]


# -- for workers ----------------------------------------------------------------------------------------


class PauseWatcher:
    """Whether the loop of one task may fetch: kept up to date by its own thread, so that reading it never blocks.

    The last known state holds while the database is unavailable. *in_flight* returns how many deliveries the loop has
    in flight; *on_change* is called when the loop should check again, because it may be idle for long.
    """

    def __init__(
        self,
        dsn: str,
        *,
        task: str,
        queue: str,
        in_flight: Callable[[], int],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = ConnectionPool(dsn, max_size=1, error_type=ConnectorError)
        self._names = [task, queue]
        self._identity: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "task": task,
            "queue": queue,
            "host": socket.gethostname()[:200],
            "pid": os.getpid(),
        }
        self._in_flight = in_flight
        self._on_change = on_change
        self._stopped = threading.Event()
        self._waiter = NotificationWaiter()
        #: Set once it is known whether there is a pause, or that the database is unavailable.
        self._first_poll_done = threading.Event()
        #: Name, actor and reason of the pause as of the last successful poll.
        self._pause: tuple[str, str, str] | None = None
        #: Whether the loop has applied the pause and stopped fetching; set by the loop's gate, which is called before
        #: every fetch (``runner.services.PauseGate``).
        self.is_applied = False
        self._is_unavailable = False
        #: The last report, and when it is repeated although nothing has changed.
        self._last_report: tuple[str | None, int] | None = None
        self._next_report = 0.0
        self._thread = threading.Thread(target=self._watch, name="ergon-pauses", daemon=True)

    def start(self) -> PauseWatcher:
        self._thread.start()
        return self

    def stop(self, timeout: float = 1.0) -> None:
        """Stop the thread; a thread that is blocked in a connection is abandoned after *timeout*."""
        self._stopped.set()
        self._waiter.wake()
        self._thread.join(timeout)

    def wait(self, timeout: float) -> bool:
        """Wait at most *timeout* seconds for the first poll; return whether it is over."""
        return self._first_poll_done.wait(timeout)

    @property
    def initialized(self) -> bool:
        """Whether the first poll is over, successful or not."""
        return self._first_poll_done.is_set()

    @property
    def reason(self) -> str | None:
        """The reason why the loop must not fetch; None while it may."""
        pause = self._pause
        if pause is None:
            return None
        name, by, because = pause
        message = f"{name} was paused by {by}{f': {because}' if because else ''}"
        return (
            f"{message}; the database is unavailable, and the pause may have ended" if self._is_unavailable else message
        )

    # -- its thread -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        with self._waiter:
            self._keep_watching()

    def _keep_watching(self) -> None:
        """Poll over one connection for as long as it lasts, and connect again until stopped."""
        delay = _MIN_RECONNECT_SECONDS
        while not self._stopped.is_set():
            try:
                with self._pool.connect() as connection:
                    self._poll_until_stopped(connection)
            except errors.UndefinedTable:
                # Without the table nothing can be paused.
                self._pause, delay = None, _NO_TABLE_RETRY_SECONDS
                self._first_poll_done.set()
            except Exception as error:  # noqa: BLE001 - whatever the error is, the next poll may succeed
                delay = min(2 * delay, _MAX_RECONNECT_SECONDS) if self._is_unavailable else _MIN_RECONNECT_SECONDS
                self._record_failure(error)
            self._stopped.wait(delay)

    def _poll_until_stopped(self, connection: DeadlineConnection) -> None:
        if self._pool.is_direct:
            connection.execute(f"listen {CHANNEL}")
        while not self._stopped.is_set():
            self._poll(connection)
            self._wait(connection)
        connection.execute(_DELETE_WATCHERS, self._identity)

    def _poll(self, connection: DeadlineConnection) -> None:
        """Read the pause that applies to the loop, and report whether the loop has applied it."""
        # A server that does not answer in time is treated as a lost connection.
        connection.deadline = time.monotonic() + _POLL_TIMEOUT_SECONDS
        row = connection.execute(_SELECT_PAUSE, {"names": self._names}).fetchone()
        previous, self._pause = self._pause, None if row is None else (str(row[0]), str(row[1]), str(row[2]))
        # The loop misses a wake-up between its check of the pause and its fetch, so the wake-up is repeated.
        if previous != self._pause or (self._pause is not None and not self.is_applied):
            self._on_change()
        if self._is_unavailable:
            self._is_unavailable = False
            logs.log_event(logging.INFO, "pause channel restored", {"task": self._identity["task"]}, to=_log)
        self._first_poll_done.set()
        self._report(connection)
        connection.deadline = None

    def _report(self, connection: DeadlineConnection) -> None:
        """Report the loop: immediately when its pause changes and while it drains, otherwise at an interval."""
        pause_name, in_flight = (
            self._pause[0] if self._pause is not None and self.is_applied else None,
            self._in_flight(),
        )
        # The number in flight of a fetching loop is outdated when it is read, so its changes are not reported.
        report = (pause_name, 0 if pause_name is None else in_flight)
        now = time.monotonic()
        if report == self._last_report and now < self._next_report:
            return
        connection.execute(_UPSERT_WATCHER, {**self._identity, "pause": pause_name, "in_flight": in_flight})
        self._last_report, self._next_report = report, now + _REPORT_INTERVAL_SECONDS

    def _wait(self, connection: DeadlineConnection) -> None:
        """Wait for a notification of a change, the next poll or the stop."""
        if self._pool.is_direct:
            self._waiter.notifications(connection, POLL_INTERVAL_SECONDS)
        else:
            self._waiter.wait(POLL_INTERVAL_SECONDS)

    def _record_failure(self, error: Exception) -> None:
        self._first_poll_done.set()
        if not self._is_unavailable:
            self._is_unavailable = True
            state = "paused" if self._pause is not None else "fetching"
            logs.log_event(
                logging.WARNING,
                "pause channel unavailable",
                {"task": self._identity["task"], "state": state, "error": type(error).__name__},
                to=_log,
            )
