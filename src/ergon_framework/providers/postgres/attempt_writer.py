"""The writer that stores the attempts of this process in the database, in a background thread.

An attempt is one try of a call of a provider; its row is for monitoring, and no decision depends on it. Rates are the
success rate and latency of the last hour, by tenant, provider and capability (the scope).

Callers add attempts to a bounded queue and never wait. The loop of the thread writes them in batches, computes rates,
applies retention and logs its problems.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Final
from weakref import WeakSet

import psycopg

from ergon_framework.database.address import connect_options
from ergon_framework.database.errors import has_server_changed
from ergon_framework.providers.models import AttemptRecord
from ergon_framework.providers.postgres.attempt_batch import (
    AttemptBatch,
    Sampler,
    SamplingPolicy,
    ScopeKey,
    is_data_error,
    prepare_batch,
    refresh_rates,
    write_batch,
)
from ergon_framework.providers.postgres.connection import TimeoutConnection, connect
from ergon_framework.providers.postgres.retention import (
    BATCH_ID_RETENTION,
    ProviderRetention,
    RetentionProgress,
    create_future_partitions,
    retention_steps,
)
from ergon_framework.providers.postgres.task_table import OWN_TASK_TABLE, read_task_table
from ergon_framework.providers.telemetry import provider_metrics, suppress_errors
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

#: Number of attempts that are written together.
MAX_BATCH: Final = 1_000


class AttemptQueue:
    """The attempts between the callers and the writer's thread."""

    def __init__(self, room: int) -> None:
        #: Maximum number of attempts that wait.
        self.room = room
        self.batch_size = min(MAX_BATCH, room)
        self.rows: deque[AttemptRecord] = deque()
        self.wakeup = threading.Event()
        #: The writer's thread does not read the rows until the event is set.
        self.is_asleep = True
        self.closed = False
        #: Number of dropped attempts, by reason.
        self.dropped: Counter[str] = Counter()
        self._count_lock = threading.Lock()
        self._deadline: float | None = None

    def put(self, row: AttemptRecord) -> bool:
        """Add an attempt, or drop and count it if the queue is full; return whether the thread must be woken."""
        rows = self.rows
        if len(rows) >= self.room or self.closed:
            self.drop((row,), "closed" if self.closed else "full")
            return False
        rows.append(row)
        if len(rows) >= self.batch_size and not self.wakeup.is_set():
            self.wakeup.set()
        return self.is_asleep

    def take(self) -> list[AttemptRecord]:
        """Remove and return the attempts of the next batch."""
        return [self.rows.popleft() for _ in range(min(len(self.rows), self.batch_size))]

    def drop(self, rows: Iterable[AttemptRecord], reason: str) -> None:
        """Count *rows* as attempts that no table will contain."""
        count_by_scope = Counter((row.provider_name, row.capability) for row in rows)
        with self._count_lock:
            self.dropped[reason] += count_by_scope.total()
        for (provider_name, capability), count in count_by_scope.items():
            provider_metrics(provider_name).record_dropped(capability, reason, count)

    def close(self, timeout: float) -> None:
        """Accept no more attempts; the queued ones may be written for *timeout* seconds."""
        self._deadline = time.monotonic() + timeout
        self.closed = True
        self.wakeup.set()

    @property
    def seconds_left(self) -> float:
        """Seconds until writing must stop."""
        return float("inf") if self._deadline is None else self._deadline - time.monotonic()


# -- the loop of the writer's thread ----------------------------------------------------------------

log: Final = logging.getLogger(f"{LIBRARY}.providers")

#: Seconds to wait for one answer of the server.
_ANSWER_TIMEOUT_SECONDS: Final = 15.0
#: The first and the longest delay in seconds after a failure.
_MIN_RETRY_SECONDS: Final = 0.1
_MAX_RETRY_SECONDS: Final = 5.0
#: Seconds after which a batch with unknown outcome is dropped: well before its id is deleted.
_MAX_UNKNOWN_SECONDS: Final = BATCH_ID_RETENTION.total_seconds() / 4
#: Seconds between two computations of one scope's rates with and without new attempts, because the hour moves on.
REFRESH_SECONDS: Final = 5.0
IDLE_REFRESH_SECONDS: Final = 60.0
#: Scopes whose rates are computed in one database transaction.
_REFRESH_BATCH: Final = 200
#: Maximum number of scopes without new attempts whose rates are still computed.
_MAX_IDLE_SCOPES: Final = 10_000
#: Maximum number of partitions that are created before the first batch.
_MAX_INITIAL_PARTITIONS: Final = 400
#: Seconds between two log records about the same problem.
_LOG_INTERVAL_SECONDS: Final = 10.0


class AttemptWriterLoop:
    """The loop that writes queued attempts. Only one thread runs it; errors are handled as data and never end it."""

    def __init__(
        self,
        dsn: str,
        queue: AttemptQueue,
        *,
        every: float,
        sample: SamplingPolicy | None,
        retention: ProviderRetention,
    ) -> None:
        self._dsn = dsn
        self._queue = queue
        self._every = every
        self._retention = retention
        self._sampler = Sampler(sample)
        self.connection: TimeoutConnection | None = None
        #: The task table that the database named when the connection was opened.
        self._task_table = OWN_TASK_TABLE
        #: When the rates of a scope were last computed, and the scopes with attempts since then.
        self._refreshed_at: dict[ScopeKey, float] = {}
        self._changed_scopes: set[ScopeKey] = set()
        #: When retention is due; None before the first connection.
        self._retention_due_at: float | None = None
        self._retention_run: Iterator[None] | None = None
        #: By reason: when dropped attempts were last logged, and how many had been dropped until then.
        self._logged_at: dict[str, float] = {}
        self._logged_counts: Counter[str] = Counter()
        #: Whether the outage was logged; reset by the next batch that is written.
        self._is_unavailable = False

    def run(self) -> None:
        """Run until the queue is closed, and then until it is empty or its timeout has passed."""
        queue = self._queue
        try:
            while not queue.closed or (queue.rows and queue.seconds_left > 0):
                self._run_once(self._wait_for_rows())
            while self._changed_scopes and queue.seconds_left > 0:
                if not self._refresh_rates(self._changed_scopes):
                    self._pause(_MIN_RETRY_SECONDS)
        finally:
            # If an error ends the loop after all, the next attempt starts another thread.
            queue.is_asleep = True
            if self.connection is not None:
                self.connection.close()

    def _wait_for_rows(self) -> list[AttemptRecord]:
        """Return the attempts of the next batch, when there are enough or the first one has waited long enough."""
        queue = self._queue
        queue.is_asleep = True
        if not queue.rows and not queue.closed:
            queue.wakeup.wait(self._compute_idle_seconds())
        queue.is_asleep = False
        queue.wakeup.clear()
        if len(queue.rows) < queue.batch_size and queue.rows and not queue.closed:
            queue.wakeup.wait(self._every)
            queue.wakeup.clear()
        return queue.take()

    def _compute_idle_seconds(self) -> float | None:
        """Return the seconds until work other than attempts is due."""
        if self._retention_run is not None:
            return 0.0
        due_times = [self._compute_refresh_time(scope) for scope in self._refreshed_at.keys() | self._changed_scopes]
        if self._retention_due_at is not None:
            due_times.append(self._retention_due_at)
        return max(0.0, min(due_times) - time.monotonic()) if due_times else None

    def _run_once(self, rows: list[AttemptRecord]) -> None:
        batch, rejected = prepare_batch(rows, self._sampler)
        if rejected:
            self._drop(rejected, "rejected", ValueError())
        if batch.attempts:
            self._write_until_settled(batch)
        if not self._queue.closed:
            now = time.monotonic()
            scopes = self._refreshed_at.keys() | self._changed_scopes
            self._refresh_rates([scope for scope in scopes if self._compute_refresh_time(scope) <= now])
            self._run_due_retention()
        self._log_dropped()

    # -- a batch ------------------------------------------------------------------------------------

    def _write_until_settled(self, batch: AttemptBatch) -> None:
        """Retry until the batch is written, rejected, or no time is left."""
        pending = [batch]
        started_at, delay = time.monotonic(), _MIN_RETRY_SECONDS
        while pending:
            current = pending.pop()
            error = self._try_write(current)
            if error is None:
                started_at, delay, self._is_unavailable = time.monotonic(), _MIN_RETRY_SECONDS, False
            elif self._queue.seconds_left <= 0:
                self._drop((prepared.row for prepared in current.attempts), "closed", error)
            elif is_data_error(error) and not current.outcome_unknown:
                pending += self._split_rejected(current, error)
            elif current.outcome_unknown and time.monotonic() - started_at >= _MAX_UNKNOWN_SECONDS:
                self._drop((prepared.row for prepared in current.attempts), "outcome_unknown", error)
            else:
                pending.append(current)
                self._log_unavailable(error)
                self._pause(delay)
                delay = min(2 * delay, _MAX_RETRY_SECONDS)

    def _split_rejected(self, batch: AttemptBatch, error: Exception) -> list[AttemptBatch]:
        """Return the batches to retry after the server rejected the content of *batch*."""
        if not batch.was_rejected:
            # A partition that is attached concurrently causes the same error, which does not recur.
            batch.was_rejected = True
            return [batch]
        if len(batch) == 1:
            self._drop((prepared.row for prepared in batch.attempts), "rejected", error)
            return []
        return batch.split()

    def _try_write(self, batch: AttemptBatch) -> Exception | None:
        """Write *batch*; return the error that prevented it, or None."""
        try:
            conn = self._ensure_connection()
            write_batch(conn, batch, task_table=self._task_table)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: returned as data
            self._roll_back(error)
            return error
        self._changed_scopes |= {prepared.attempt[:3] for prepared in batch.attempts}
        return None

    # -- rates ------------------------------------------------------------------------------------------

    def _compute_refresh_time(self, scope: ScopeKey) -> float:
        """Return when the rates of *scope* are due next."""
        last = self._refreshed_at.get(scope, float("-inf"))
        return last + (REFRESH_SECONDS if scope in self._changed_scopes else IDLE_REFRESH_SECONDS)

    def _refresh_rates(self, scopes: Iterable[ScopeKey]) -> bool:
        """Compute the rates of *scopes*; return False if that failed and must be retried."""
        sorted_scopes = sorted(scopes)
        for start in range(0, len(sorted_scopes), _REFRESH_BATCH):
            chunk = sorted_scopes[start : start + _REFRESH_BATCH]
            try:
                empty_scopes = refresh_rates(self._ensure_connection(), chunk)
            except Exception as error:  # noqa: BLE001 - the thread's boundary: it is retried
                self._roll_back(error)
                self._refreshed_at |= dict.fromkeys(chunk, time.monotonic())
                self._log_unavailable(error)
                return False
            self._changed_scopes.difference_update(chunk)
            self._refreshed_at |= dict.fromkeys(chunk, time.monotonic())
            for scope in empty_scopes:
                del self._refreshed_at[scope]
        if len(self._refreshed_at) > _MAX_IDLE_SCOPES:
            self._refreshed_at = {
                scope: refreshed_at
                for scope, refreshed_at in self._refreshed_at.items()
                if scope in self._changed_scopes
            }
        return True

    def _ensure_connection(self) -> TimeoutConnection:
        seconds_left = self._queue.seconds_left
        if seconds_left <= 0:
            raise TimeoutError
        if self.connection is None or self.connection.closed:
            self.connection = connect(self._dsn, answer_timeout=min(_ANSWER_TIMEOUT_SECONDS, seconds_left))
            self._task_table = read_task_table(self.connection)
        self.connection.answer_timeout = min(_ANSWER_TIMEOUT_SECONDS, seconds_left)
        if self._retention_due_at is None:
            self._retention_due_at = time.monotonic()
            self._run_steps(
                create_future_partitions(self.connection, self._retention, RetentionProgress()),
                max_steps=_MAX_INITIAL_PARTITIONS,
            )
        return self.connection

    def _roll_back(self, cause: Exception) -> None:
        """Roll back an open database transaction; close the connection if that fails, or if its server has changed."""
        if self.connection is None or self.connection.closed:
            return
        if isinstance(cause, psycopg.Error) and has_server_changed(cause):
            self.connection.close()
        else:
            try:
                self.connection.execute("rollback")
            except Exception:  # noqa: BLE001 - a broken connection can raise anything
                self.connection.close()

    def _pause(self, delay: float) -> None:
        queue, until = self._queue, time.monotonic() + delay
        # New attempts set the event too; only the close ends the pause early.
        while not queue.closed and (seconds_left := until - time.monotonic()) > 0:
            queue.wakeup.wait(seconds_left)
            queue.wakeup.clear()
        if queue.closed:
            time.sleep(min(_MIN_RETRY_SECONDS, max(0.0, queue.seconds_left)))

    # -- retention --------------------------------------------------------------------------------------

    def _run_due_retention(self) -> None:
        """Run one short step of retention between two batches, if it is due."""
        if self._retention_due_at is not None and time.monotonic() >= self._retention_due_at:
            self._retention_due_at = time.monotonic() + self._retention.interval
            self._retention_run = self._iterate_retention()
        if self._retention_run is not None and not self._run_steps(self._retention_run):
            self._retention_run = None

    def _iterate_retention(self) -> Iterator[None]:
        yield from retention_steps(self._ensure_connection(), self._retention, RetentionProgress())

    def _run_steps(self, steps: Iterator[None], *, max_steps: int = 1) -> bool:
        """Run up to *max_steps* steps; return whether more follow. A failed run is left for another time."""
        try:
            for _ in range(max_steps):
                if next(steps, self) is self:
                    return False
        except Exception as error:  # noqa: BLE001 - the thread's boundary: it is retried
            self._roll_back(error)
            logs.log_event(logging.WARNING, Event.RETENTION_FAILED, {Field.ERROR_TYPE: type(error).__name__}, to=log)
            return False
        return True

    # -- logging ----------------------------------------------------------------------------------------

    def _drop(self, rows: Iterable[AttemptRecord], reason: str, error: BaseException) -> None:
        suppress_errors(self._queue.drop, list(rows), reason)
        self._log_dropped(error)

    def _log_dropped(self, error: BaseException | None = None) -> None:
        """Log the attempts dropped since the last record; of an error only the type, its message may quote the row."""
        now = time.monotonic()
        error_fields = {} if error is None else {Field.ERROR_TYPE: type(error).__name__}
        for reason, dropped in list(self._queue.dropped.items()):
            new_count = dropped - self._logged_counts[reason]
            if new_count and now - self._logged_at.get(reason, float("-inf")) >= _LOG_INTERVAL_SECONDS:
                self._logged_at[reason], self._logged_counts[reason] = now, dropped
                logs.log_event(
                    logging.WARNING,
                    Event.ROWS_DROPPED,
                    {Field.ROWS: new_count, Field.REASON: reason} | error_fields,
                    to=log,
                )

    def _log_unavailable(self, error: BaseException) -> None:
        if not self._is_unavailable:
            self._is_unavailable = True
            logs.log_event(logging.WARNING, Event.ROWS_WAITING, {Field.ERROR_TYPE: type(error).__name__}, to=log)
        self._log_dropped()


# -- the writer -------------------------------------------------------------------------------------

#: Seconds that the exit of the interpreter waits for writers that were not closed.
_EXIT_TIMEOUT_SECONDS: Final = 1.0


class MetricsWriter:
    """A writer that takes attempts with ``record``, which neither waits nor raises, and writes them in its own thread.

    At most *room* attempts wait at any time, plus one for each thread that records concurrently; further attempts
    are dropped, and counted in ``dropped``. While the database is available, an attempt is written at the latest
    *every* seconds after it was recorded. The thread starts with the first attempt. A forked child has its own thread,
    and none of its parent's attempts.
    """

    def __init__(
        self,
        dsn: str,
        *,
        room: int = 20_000,
        every: float = 1.0,
        sample: SamplingPolicy | None = None,
        retention: ProviderRetention | None = None,
    ) -> None:
        connect_options(dsn)  # reports an invalid address here, where the caller sees the error
        self._dsn = dsn
        self._room = room
        self._every = every
        self._sample = sample
        self._retention = ProviderRetention() if retention is None else retention
        #: Attempts that were dropped before the last ``flush``, which replaces the queue with its counters.
        self._dropped_before = 0
        self._reset()
        _instances.add(self)

    def _reset(self) -> None:
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._queue = AttemptQueue(self._room)
        self._loop = AttemptWriterLoop(
            self._dsn, self._queue, every=self._every, sample=self._sample, retention=self._retention
        )

    def record(self, row: AttemptRecord) -> None:
        """Record an attempt; attempts that exceed the capacity are dropped, and counted."""
        try:
            if self._queue.put(row):
                self._wake()
        except Exception as error:  # noqa: BLE001 - a thread that cannot start, or telemetry: neither may fail a call
            logs.log_telemetry_failure(error)

    def _wake(self) -> None:
        # Not waited for: the current holder of the lock sets the event for both.
        if self._start_lock.acquire(blocking=False):
            try:
                if self._thread is None or not self._thread.is_alive():
                    thread = threading.Thread(target=self._loop.run, name="ergon-provider-metrics", daemon=True)
                    thread.start()
                    self._thread = thread
                self._queue.wakeup.set()
            finally:
                self._start_lock.release()

    @property
    def dropped(self) -> int:
        """Number of attempts that no table will contain, for any reason."""
        return self._dropped_before + self._queue.dropped.total()

    @property
    def waiting(self) -> int:
        """Number of attempts that are not yet part of a batch."""
        return len(self._queue.rows)

    def close(self, timeout: float = 5.0) -> bool:
        """Accept no more attempts, write pending ones for at most *timeout* seconds; return whether all were written.

        Attempts that are unwritten by then are dropped. A batch whose commit was sent may be stored nevertheless.
        """
        with self._start_lock:
            self._queue.close(timeout)
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, timeout))
        unwritten = []
        while self._queue.rows:
            unwritten += self._queue.take()
        if unwritten:
            suppress_errors(self._queue.drop, unwritten, "closed")
        return not self._queue.dropped["closed"] and (thread is None or not thread.is_alive())

    def flush(self, timeout: float = 5.0) -> bool:
        """Write pending attempts like ``close`` for at most *timeout* seconds; a later attempt starts a new thread."""
        all_written = self.close(timeout)
        self._dropped_before = self.dropped
        self._reset()
        return all_written

    def after_fork(self) -> None:
        """Reset a forked child: attempts, thread, connection and the holders of locks belong to the parent."""
        if self._loop.connection is not None:
            _inherited_connections.append(self._loop.connection)
        if not self._queue.closed:
            self._reset()


# -- forks, and the exit of the process -------------------------------------------------------------

_instances: Final[WeakSet[MetricsWriter]] = WeakSet()
#: Closing one of these would end a session of the parent, so they must not be garbage collected.
_inherited_connections: Final[list[TimeoutConnection]] = []


def _reset_instances() -> None:
    for writer in list(_instances):
        writer.after_fork()


def close_writers() -> None:
    """Close every writer of this process at exit."""
    until = time.monotonic() + _EXIT_TIMEOUT_SECONDS
    for writer in list(_instances):
        writer.close(max(0.0, until - time.monotonic()))


os.register_at_fork(after_in_child=_reset_instances)
atexit.register(close_writers)
