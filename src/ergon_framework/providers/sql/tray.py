"""The tray: where attempts wait to be written, with room for so many; who puts one there never waits."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

from ergon_framework.providers.execution import AttemptRow
from ergon_framework.providers.observe import tally_of

#: Attempts that are written together.
MANY: Final = 1_000


class Tray:
    """Attempts between those who make calls and the one thread that writes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.many = min(MANY, room)
        self.rows: deque[AttemptRow] = deque()
        self.bell = threading.Event()
        #: Nobody looks at the rows before the bell rings.
        self.asleep = True
        self.closed = False
        #: By why they were dropped, how many.
        self.lost: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._until: float | None = None

    def put(self, row: AttemptRow) -> bool:
        """Whether the thread has to be woken for it; it is dropped, and counted, where there is no room."""
        rows = self.rows
        if len(rows) >= self.room or self.closed:
            self.drop((row,), "closed" if self.closed else "full")
            return False
        rows.append(row)
        if len(rows) >= self.many and not self.bell.is_set():
            self.bell.set()
        return self.asleep

    def take(self) -> list[AttemptRow]:
        """The attempts of the next batch."""
        return [self.rows.popleft() for _ in range(min(len(self.rows), self.many))]

    def drop(self, rows: Iterable[AttemptRow], reason: str) -> None:
        """Count *rows* as attempts that will be in no table."""
        lost = Counter((row.provider_name, row.capability) for row in rows)
        with self._counting:
            self.lost[reason] += lost.total()
        for (provider_name, capability), count in lost.items():
            tally_of(provider_name).dropped(capability, reason, count)

    def close(self, timeout: float) -> None:
        """Take no more; what is here has *timeout* seconds left."""
        self._until = time.monotonic() + timeout
        self.closed = True
        self.bell.set()

    @property
    def left(self) -> float:
        """Seconds until nothing more is to be written."""
        return float("inf") if self._until is None else self._until - time.monotonic()
