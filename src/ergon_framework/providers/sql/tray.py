"""The bounded queue of attempts that wait to be written; adding an attempt never blocks."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

from ergon_framework.providers.execution import AttemptRecord
from ergon_framework.providers.observe import provider_metrics

#: Number of attempts that are written together.
MAX_BATCH: Final = 1_000


class AttemptQueue:
    """The attempts between the callers and the writer's thread."""

    def __init__(self, room: int) -> None:
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
