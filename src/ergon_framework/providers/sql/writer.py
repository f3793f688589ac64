"""The writer: brings the attempts of this process into the database, behind the back of every call."""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Final
from weakref import WeakSet

from ergon_framework.providers.execution import AttemptRow
from ergon_framework.providers.observe import safely
from ergon_framework.providers.sql.desk import Desk
from ergon_framework.providers.sql.reaching import PatientLine
from ergon_framework.providers.sql.retention import Retention
from ergon_framework.providers.sql.sampling import Sample
from ergon_framework.providers.sql.tray import Tray
from ergon_framework.schema.lines import options_of
from ergon_framework.telemetry import logs

#: Seconds that the end of the interpreter waits for a writer that nobody closed.
_LAST: Final = 1.0


class MetricsWriter:
    """Takes attempts with ``record``, which neither waits nor raises, and writes them from a thread of its own.

    At most *room* attempts wait at any time, one more for each thread that records at the same moment; what comes on
    top is dropped, and counted in ``dropped``. An attempt is written *every* seconds after it came at the latest, as
    long as the database can be reached. The thread starts with the first attempt. A forked child has its own, and none
    of its parent's attempts.
    """

    def __init__(
        self,
        dsn: str,
        *,
        room: int = 20_000,
        every: float = 1.0,
        sample: Sample | None = None,
        retention: Retention | None = None,
    ) -> None:
        options_of(dsn)  # an address that cannot be read is told here, where somebody listens
        self._dsn = dsn
        self._room = room
        self._every = every
        self._sample = sample
        self._retention = Retention() if retention is None else retention
        self._dropped_before = 0
        self._begin()
        _everybody.add(self)

    def _begin(self) -> None:
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._tray = Tray(self._room)
        self._desk = Desk(self._dsn, self._tray, every=self._every, sample=self._sample, retention=self._retention)

    def record(self, row: AttemptRow) -> None:
        """Note an attempt; what there is no room for is dropped, and counted."""
        try:
            if self._tray.put(row):
                self._wake()
        except Exception as error:  # noqa: BLE001 - no thread to be had, or telemetry that breaks: no call fails for it
            logs.telemetry_failed(error)

    def _wake(self) -> None:
        # Nobody waits for it: whoever has it rings the bell for both.
        if self._starting.acquire(blocking=False):
            try:
                if self._thread is None or not self._thread.is_alive():
                    thread = threading.Thread(target=self._desk.work, name="ergon-provider-metrics", daemon=True)
                    thread.start()
                    self._thread = thread
                self._tray.bell.set()
            finally:
                self._starting.release()

    @property
    def dropped(self) -> int:
        """How many attempts will be in no table, for whatever reason."""
        return self._dropped_before + self._tray.lost.total()

    @property
    def waiting(self) -> int:
        """How many attempts wait to be taken into a batch."""
        return len(self._tray.rows)

    def close(self, timeout: float = 5.0) -> bool:
        """Take no more, and write what waits, for at most *timeout* seconds; whether all of it was written.

        What could not be written by then is dropped. A batch whose commit was on its way may be there all the same.
        """
        with self._starting:
            self._tray.close(timeout)
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, timeout))
        left = []
        while self._tray.rows:
            left += self._tray.take()
        if left:
            safely(self._tray.drop, left, "closed")
        return not self._tray.lost["closed"] and (thread is None or not thread.is_alive())

    def flush(self, timeout: float = 5.0) -> bool:
        """Write what waits, for at most *timeout* seconds, as ``close`` does; a later attempt starts a new thread."""
        written = self.close(timeout)
        self._dropped_before = self.dropped
        self._begin()
        return written

    def after_fork(self) -> None:
        """In a child: the attempts, the thread and whoever held a lock are the parent's, and so is the line."""
        if self._desk.line is not None:
            _inherited.append(self._desk.line)
        if not self._tray.closed:
            self._begin()


# -- forks, and the end of the process ---------------------------------------------------------------

_everybody: Final[WeakSet[MetricsWriter]] = WeakSet()
#: Closing one of these would end a session of the parent, so nobody may collect them.
_inherited: Final[list[PatientLine]] = []


def _forked() -> None:
    for writer in list(_everybody):
        writer.after_fork()


def close_writers() -> None:
    """Close every writer of this process, at its end."""
    until = time.monotonic() + _LAST
    for writer in list(_everybody):
        writer.close(max(0.0, until - time.monotonic()))


os.register_at_fork(after_in_child=_forked)
atexit.register(close_writers)
