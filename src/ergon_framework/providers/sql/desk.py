"""The loop of the writer's thread: it writes batches, computes rates, applies retention and logs its problems."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from ergon_framework.providers.execution import AttemptRecord
from ergon_framework.providers.observe import suppress_errors
from ergon_framework.providers.sql.batch import AttemptBatch, ScopeKey, prepare_batch
from ergon_framework.providers.sql.reaching import TimeoutConnection, connect
from ergon_framework.providers.sql.retention import (
    BATCH_ID_RETENTION,
    ProviderRetention,
    RetentionProgress,
    create_future_partitions,
    retention_steps,
)
from ergon_framework.providers.sql.sampling import Sampler, SamplingPolicy
from ergon_framework.providers.sql.task_table import OWN_TASK_TABLE, read_task_table
from ergon_framework.providers.sql.tray import AttemptQueue
from ergon_framework.providers.sql.writing import is_data_error, refresh_rates, write_batch
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

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
        self._logged_at: dict[str, float] = {}
        self._logged_counts: Counter[str] = Counter()
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
            self._drop(rejected, "refused", ValueError())
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
                self._drop((prepared.row for prepared in current.attempts), "doubt", error)
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
            self._drop((prepared.row for prepared in batch.attempts), "refused", error)
            return []
        return batch.split()

    def _try_write(self, batch: AttemptBatch) -> Exception | None:
        """Write *batch*; return the error that prevented it, or None."""
        try:
            conn = self._ensure_connection()
            write_batch(conn, batch, task_table=self._task_table)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: returned as data
            self._roll_back()
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
                self._roll_back()
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

    def _roll_back(self) -> None:
        """Roll back an open database transaction; close the connection if that fails."""
        if self.connection is not None and not self.connection.closed:
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
            self._roll_back()
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
            logs.log_event(logging.WARNING, Event.ROWS_WAIT, {Field.ERROR_TYPE: type(error).__name__}, to=log)
        self._log_dropped()
