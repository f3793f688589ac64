"""The journal: the outcomes of transactions, written in batches by a thread of each process that keeps one.

Each run of a transaction in a worker is one entry, which ``ergon why`` and the journal's readers show.

People read it; no work depends on it. Entries that cannot be written are kept up to the capacity of the buffer, and
then dropped, the oldest first.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.encryption import Keys, hide_text, load_environment_keys, reveal_text
from ergon_framework.connectors.lookup import MAX_DEAD_LETTERS
from ergon_framework.connectors.postgres.cleanup import Cleanup, retain_journal
from ergon_framework.database.operation import Operation, Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import ErgonError
from ergon_framework.history import History, HistoryEvent, Location, Value, WorkKind, WorkState
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Rows of one statement, and seconds between two statements.
MAX_BATCH_ROWS: Final = 500
WRITE_INTERVAL_SECONDS: Final = 0.5
#: Timeout of one statement, and the longest pause between two attempts during an outage or without the table.
_TIMEOUT_SECONDS: Final = 10.0
_MAX_RETRY_SECONDS: Final = 15.0
#: Seconds between two warnings about dropped rows.
_WARN_INTERVAL_SECONDS: Final = 10.0

_INSERT_ENTRIES: Final = """
insert into ergon.journal (
    at, transaction_id, task, queue, correlation, tenant, outcome, category, code, reason, error, attempts, seconds,
    failed_attempts, worker
)
select to_timestamp(r.at), r.transaction_id, %(task)s, %(queue)s, r.correlation, r.tenant, r.outcome, r.category,
    r.code, r.reason, r.error, r.attempts, r.seconds, r.tries, %(worker)s
from jsonb_to_recordset(%(rows)s::jsonb) as r(
    at float8, transaction_id text, correlation text, tenant text, outcome text, category text, code text,
    reason text, error text, attempts integer, seconds float8, tries jsonb
)
"""
#: The database may have no tables yet.
_TABLE_EXISTS: Final = "select to_regclass('ergon.journal') is not null"
#: Distinct, because a batch whose confirmation was lost is written again.
_SELECT_ENTRIES: Final = """
select distinct j.queue, j.task, j.worker, extract(epoch from j.at)::float8, j.transaction_id, j.correlation, j.tenant,
    j.outcome, j.category, j.code, j.reason, j.error, j.attempts, j.seconds, j.failed_attempts
from ergon.journal j where j.transaction_id = %(id)s order by 4 desc limit %(most)s
"""


class JournalEntry(NamedTuple):
    """The outcome of one run of a transaction in a worker; *at* is in seconds since the epoch."""

    at: float
    transaction_id: str
    correlation: str | None
    tenant: str | None
    outcome: str
    category: str | None
    code: str | None
    reason: str | None
    error: str | None
    attempts: int
    seconds: float
    #: The last failed attempts of this run, as plain data; None if there are none.
    tries: list[dict[str, Any]] | None


def insert_entries(entries: Sequence[JournalEntry], *, task: str, queue: str, worker: str) -> Operation[None]:
    """Insert *entries*."""
    rows = json.dumps([entry._asdict() for entry in entries], allow_nan=False)
    # Neither jsonb nor text can hold a NUL. Escaped backslashes are rewritten first: u0000 after one is plain text.
    clean = rows.replace("\\\\", "\\u005c").replace("\\u0000", "\\ufffd")
    yield Query(_INSERT_ENTRIES, {"rows": clean, "task": task, "queue": queue, "worker": worker})


def _encrypt_texts(keys: Keys | None, entry: JournalEntry) -> JournalEntry:
    """Return *entry* with its texts encrypted; done once, because all attempts to write it must write the same."""
    if keys is None or (entry.error is None and not entry.tries):
        return entry
    return _map_texts(entry, lambda text: hide_text(keys, text, entry.transaction_id))


def _decrypt_texts(keys: Keys | None, entry: JournalEntry) -> JournalEntry:
    return _map_texts(entry, lambda text: reveal_text(keys, text, entry.transaction_id))


def _map_texts(entry: JournalEntry, change: Callable[[str | None], str | None]) -> JournalEntry:
    tries = entry.tries and [{**attempt, "error": change(attempt.get("error"))} for attempt in entry.tries]
    return entry._replace(error=change(entry.error), tries=tries)


# -- for workers ----------------------------------------------------------------------------------------


class _JournalBatch(NamedTuple):
    """Entries that are written together; *first* is the number of the first among all entries ever recorded."""

    first: int
    entries: list[JournalEntry]


class JournalWriteError(ConnectorError):
    """The server has rejected the rows."""


class Journal:
    """Accepts entries without waiting and writes them in the background; at most *capacity* entries are buffered."""

    def __init__(
        self, dsn: str, *, task: str, queue: str, worker: str, retention_seconds: float, capacity: int
    ) -> None:
        self._pool = ConnectionPool(dsn, max_size=1, error_type=JournalWriteError)
        self._labels = {"task": task, "queue": queue, "worker": worker}
        self._cleanup = Cleanup(dsn)
        self._keys = load_environment_keys()
        self._retention = retain_journal(retention_seconds)
        self._capacity = capacity
        self._lock = threading.Lock()
        self._buffer: deque[JournalEntry] = deque()
        self._dropped = 0
        self._last_warning = -_WARN_INTERVAL_SECONDS
        #: Number of entries removed from the front of the buffer, written or dropped.
        self._removed = 0
        #: Number of entries at the front to write one by one, because the server rejected a batch that contains them.
        self._single_writes = 0
        #: Whether the database was unavailable at the last write: an outage is logged once at its start and at its end.
        self._is_failing = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ergon-journal", daemon=True)

    def start(self) -> Journal:
        self._thread.start()
        return self

    def record(self, entry: JournalEntry) -> None:
        """Buffer *entry* for the next batch; thread-safe, never blocks."""
        entry = _encrypt_texts(self._keys, entry)
        with self._lock:
            if len(self._buffer) >= self._capacity:
                self._buffer.popleft()
                self._removed += 1
                self._dropped += 1
            self._buffer.append(entry)

    def stop(self, timeout: float) -> None:
        """Write the buffered entries within *timeout* seconds; drop the rest and log how many were dropped."""
        self._stopped.set()
        self._thread.join(max(0.0, timeout))
        with self._lock:
            self._dropped += len(self._buffer)
            self._removed += len(self._buffer)
            self._buffer.clear()
        self._warn(force=True)

    # -- its thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        end_retention = self._cleanup.add(self._retention)
        pause = WRITE_INTERVAL_SECONDS
        while not self._stopped.wait(pause):
            pause = WRITE_INTERVAL_SECONDS if self._write_all() else min(2 * pause, _MAX_RETRY_SECONDS)
        end_retention()
        self._write_all()
        self._pool.close()

    def _write_all(self) -> bool:
        """Write all buffered entries; return whether that succeeded."""
        try:
            while (batch := self._next_batch()).entries:
                self._write(batch)
        except ErgonError as error:
            if not self._is_failing:
                self._is_failing = True
                logs.log_event(
                    logging.WARNING,
                    "journal unavailable",
                    {"task": self._labels["task"], "error": type(error).__name__},
                    to=_log,
                )
            return False
        finally:
            self._warn()
        return True

    def _write(self, batch: _JournalBatch) -> None:
        """Write one batch; a rejected batch is written again one by one, and a single rejected entry is dropped."""
        try:
            self._pool.run(insert_entries(batch.entries, **self._labels), timeout_seconds=_TIMEOUT_SECONDS)
        except JournalWriteError:
            # The server rejects at least one entry. They are written one by one, so that the others succeed.
            if len(batch.entries) > 1:
                self._single_writes = len(batch.entries)
                return
            self._remove_batch(batch, written=False)
        else:
            self._remove_batch(batch, written=True)
            if self._is_failing:
                self._is_failing = False
                logs.log_event(logging.INFO, "journal restored", {"task": self._labels["task"]}, to=_log)

    def _next_batch(self) -> _JournalBatch:
        # Entries stay buffered until they are written; when the buffer is full, the oldest is dropped before that.
        with self._lock:
            size = min(1 if self._single_writes else MAX_BATCH_ROWS, len(self._buffer))
            return _JournalBatch(self._removed, [self._buffer[index] for index in range(size)])

    def _remove_batch(self, batch: _JournalBatch, *, written: bool) -> None:
        """Remove *batch* from the buffer; if it was not *written*, the server rejected it, and it counts as dropped."""
        with self._lock:
            count = len(batch.entries)
            self._single_writes = max(0, self._single_writes - count)
            # Entries dropped from a full buffer during the write were counted as dropped, but are written after all.
            dropped_before = min(count, self._removed - batch.first)
            for _ in range(count - dropped_before):
                self._buffer.popleft()
                self._removed += 1
            self._dropped += -dropped_before if written else count - dropped_before

    def _warn(self, *, force: bool = False) -> None:
        """Log how many rows were dropped since the last warning, once per interval unless *force* is set."""
        now = time.monotonic()
        with self._lock:
            dropped = self._dropped
            if not dropped or not (force or now - self._last_warning >= _WARN_INTERVAL_SECONDS):
                return
            self._dropped, self._last_warning = 0, now
        logs.log_event(
            logging.WARNING, "journal rows dropped", {"task": self._labels["task"], "rows": dropped}, to=_log
        )


# -- for people -----------------------------------------------------------------------------------------


def lookup_journal(transaction_id: str) -> Operation[list[History]]:
    """Return the journal's histories of a transaction, one for each queue that it was in."""
    ((has_table,),) = yield Query(_TABLE_EXISTS)
    if not has_table:
        return []
    rows = yield Query(_SELECT_ENTRIES, {"id": transaction_id, "most": MAX_DEAD_LETTERS})
    keys = load_environment_keys()
    by_queue: dict[str, list[_JournalRow]] = {}
    for queue, task, worker, *entry in reversed(rows):
        revealed = _decrypt_texts(keys, JournalEntry(*entry))
        by_queue.setdefault(str(queue), []).append(_JournalRow(str(task), str(worker), revealed))
    return [_to_history(transaction_id, queue, queue_rows) for queue, queue_rows in by_queue.items()]


class _JournalRow(NamedTuple):
    """An entry, with the task and the worker that wrote it."""

    task: str
    worker: str
    entry: JournalEntry


#: The state after each outcome; the later state of a transaction that went back to its queue is not in the journal.
_STATES: Final = {"succeeded": WorkState.SUCCEEDED, "failed": WorkState.FAILED, "handler_failed": WorkState.FAILED}


def _to_history(transaction_id: str, queue: str, rows: Sequence[_JournalRow]) -> History:
    task, worker, last = rows[-1]
    labels = {"correlation": last.correlation, "tenant": last.tenant}
    details: dict[str, Value] = {name: value for name, value in labels.items() if value is not None}
    details |= {"task": task, "attempts": last.attempts}
    state = _STATES.get(last.outcome, WorkState.QUEUED)
    return History(
        kind=WorkKind.TRANSACTION,
        id=transaction_id,
        where=queue,
        attributes=details,
        events=tuple(event for row in rows for event in _to_events(row)),
        location=Location(state=state, since=last.at, details=f"recorded by {worker}"),
    )


def _to_events(row: _JournalRow) -> list[HistoryEvent]:
    """Return the events of one run: its failed attempts, and its end."""
    entry = row.entry
    tries = [
        HistoryEvent(
            at=attempt.get("at"),
            event=f"{attempt.get('step', 'process')} {int(attempt.get('attempt', 0)) + 1}",
            result=str(attempt.get("category") or ""),
            details=": ".join(str(attempt[name]) for name in ("code", "error") if attempt.get(name)),
            values={} if attempt.get("delay") is None else {"delay": float(attempt["delay"])},
        )
        for attempt in entry.tries or ()
    ]
    summary = ": ".join(word for word in (entry.code, entry.error or entry.reason) if word)
    end_event = HistoryEvent(
        at=entry.at,
        event=entry.outcome.replace("_", " "),
        result=entry.category or "",
        details=f"{summary} by {row.worker}" if summary else f"by {row.worker}",
        values={"seconds": round(entry.seconds, 6)},
    )
    return [*tries, end_event]
