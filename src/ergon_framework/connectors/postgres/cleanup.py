"""Clean-up: a dedicated thread deletes rows that are older than their retention, apart from every fetch.

The rows are dead letters, journal entries, and inbox marks: the ids of processed transactions. Each statement deletes
one batch in its own transaction and reads only what it deletes, by an index on the time. An advisory lock lets one
process at a time delete the rows of one queue in a table. A failed round is logged and retried.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.credentials import CredentialsSource
from ergon_framework.database.operation import BEGIN, COMMIT, Operation, Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Rows that one statement deletes at most.
BATCH_ROWS: Final = 2_000
#: Seconds between two rounds of one process.
INTERVAL_SECONDS: Final = 60.0
#: Seconds that the server has for one statement.
_STATEMENT_SECONDS: Final = 5.0
#: Seconds that this process waits for the answer.
_ANSWER_SECONDS: Final = 10.0
#: The first key of the advisory lock, "ergo" in ASCII; the second one is the name of the retention.
_LOCK_CLASS: Final = 0x6572676F

#: Sequential and bitmap scans are off, so that the index on the time is used. A direct session has this setting
#: already; behind a pooler the settings of a session are lost, so each transaction sets them.
_LIMITS: Final = """
select pg_try_advisory_xact_lock(%(class)s, hashtext(%(name)s)), set_config('statement_timeout', %(timeout)s, true),
    set_config('lock_timeout', '500ms', true), set_config('enable_seqscan', 'off', true),
    set_config('enable_bitmapscan', 'off', true)
"""
#: *where* ends with "and " and *order* with ", ": the column after both is "at".
_DELETE: Final = """
with old as materialized (
    select ctid from ergon.{table} where {where}at < now() - make_interval(secs => %(seconds)s)
    order by {order}at limit %(most)s
),
deleted as (delete from ergon.{table} where ctid = any(array(select ctid from old)) returning 1)
select count(*) from deleted
"""
_QUEUE_FILTER: Final = {"where": "queue = %(queue)s and ", "order": "queue, "}
DELETE_MARKS: Final = _DELETE.format(table="inbox", **_QUEUE_FILTER)
DELETE_DEAD_LETTERS: Final = _DELETE.format(table="dead_letter", **_QUEUE_FILTER)
DELETE_JOURNAL: Final = _DELETE.format(table="journal", where="", order="")


@dataclass(frozen=True, slots=True, eq=False)
class RowRetention:
    """Rows to delete: *sql* deletes at most %(most)s of them that are older than *seconds*, and returns how many."""

    #: The key of the advisory lock; the same in every process.
    name: str
    sql: str
    seconds: float
    parameters: Mapping[str, Any] = field(default_factory=dict)


def retain_marks(queue: int, seconds: float) -> RowRetention:
    """Return the rule that keeps the inbox marks of *queue*, its number in ergon.queue, for *seconds*."""
    return RowRetention(f"inbox {queue}", DELETE_MARKS, seconds, {"queue": queue})


def retain_dead_letters(queue: int, seconds: float) -> RowRetention:
    """Return the rule that keeps the dead letters of *queue* for *seconds*."""
    return RowRetention(f"dead_letter {queue}", DELETE_DEAD_LETTERS, seconds, {"queue": queue})


def retain_journal(seconds: float) -> RowRetention:
    """Return the rule that keeps journal rows for *seconds*."""
    return RowRetention("journal", DELETE_JOURNAL, seconds)


def delete_batch(retention: RowRetention) -> Operation[int]:
    """Delete one batch; return the number of rows, 0 while another process works on the same rows."""
    yield BEGIN
    limits = {"class": _LOCK_CLASS, "name": retention.name, "timeout": f"{_STATEMENT_SECONDS}s"}
    ((is_locked, *_),) = yield Query(_LIMITS, limits)
    deleted = 0
    if is_locked:
        values = {**retention.parameters, "seconds": retention.seconds, "most": BATCH_ROWS}
        ((deleted,),) = yield Query(retention.sql, values)
    yield COMMIT
    return int(deleted)


class Cleanup:
    """Deletes expired rows of one database while at least one retention is registered; thread-safe."""

    def __init__(self, dsn: str, credentials: CredentialsSource | None = None) -> None:
        self._dsn = dsn
        self._credentials = credentials
        self._lock = threading.Lock()
        self._retentions: tuple[RowRetention, ...] = ()
        self._stop: threading.Event | None = None

    def add(self, retention: RowRetention) -> Callable[[], None]:
        """Apply *retention* until the returned function is called."""
        with self._lock:
            self._retentions = (*self._retentions, retention)
            if self._stop is None:
                self._stop = threading.Event()
                threading.Thread(target=self._run, args=(self._stop,), name="ergon-cleanup", daemon=True).start()

        def remove() -> None:
            with self._lock:
                self._retentions = tuple(other for other in self._retentions if other is not retention)
                if not self._retentions and self._stop is not None:
                    self._stop.set()
                    self._stop = None

        return remove

    def _run(self, stop: threading.Event) -> None:
        # A random start spreads the rounds of workers that were started together.
        pause = random.uniform(0.0, INTERVAL_SECONDS)  # noqa: S311 - no secret
        while not stop.wait(pause):
            self.delete_expired(stop)
            pause = INTERVAL_SECONDS

    def delete_expired(self, stop: threading.Event) -> None:
        """Delete batch after batch until no expired row is left or *stop* is set; a failure ends the round."""
        # A connection per round: between two rounds the server keeps none for this.
        pool = ConnectionPool(self._dsn, max_size=1, error_type=ConnectorError, credentials=self._credentials)
        try:
            for retention in self._retentions:
                while not stop.is_set():
                    began = time.monotonic()
                    deleted = pool.run(delete_batch(retention), timeout_seconds=_ANSWER_SECONDS)
                    if deleted < BATCH_ROWS:
                        break
                    # At most half of the time is spent on deleting, so that the server has room for work.
                    stop.wait(time.monotonic() - began)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: no failure here may reach a worker
            logs.log_event(logging.WARNING, "cleanup failed", {"error": type(error).__name__}, to=_log)
        finally:
            pool.close()
