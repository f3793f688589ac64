"""The writer that stores the attempts of this process in the database, in the background."""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Final
from weakref import WeakSet

from ergon_framework.providers.execution import AttemptRecord
from ergon_framework.providers.observe import suppress_errors
from ergon_framework.providers.sql.desk import AttemptWriterLoop
from ergon_framework.providers.sql.reaching import TimeoutConnection
from ergon_framework.providers.sql.retention import ProviderRetention
from ergon_framework.providers.sql.sampling import SamplingPolicy
from ergon_framework.providers.sql.tray import AttemptQueue
from ergon_framework.schema.lines import connect_options
from ergon_framework.telemetry import logs

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


# -- forks, and the exit of the process --------------------------------------------------------------

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
