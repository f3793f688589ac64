"""Doorbell: one listening connection for all queues of a database in this process.

It saves polling and is not relied on: where it cannot listen, behind a pooler or while the line
is down, loops look by themselves, as rarely as their policy says.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

import psycopg

from ergon_framework.connectors.postgres.statements import CHANNEL, SLEEP
from ergon_framework.schema.hearing import Hearing
from ergon_framework.schema.line import Line
from ergon_framework.schema.lines import Lines

#: Seconds before it connects again: first, and longest; also the longest that it waits for anything.
_FIRST, _LONGEST = 0.2, 5.0
#: Seconds for which a new listener is known to sleep; whoever then finds nothing says so again.
_ANNOUNCED: Final = 30.0


class Doorbell:
    """Calls whoever hung up for a queue when something comes into it."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        #: As whom it is known to those who send.
        self.sleeper = random.getrandbits(62)
        self._lock = threading.Lock()
        self._ringers: dict[int, tuple[Callable[[], None], ...]] = {}
        self._thread: threading.Thread | None = None
        self._hearing: Hearing | None = None
        #: Queues of which nobody has been told yet that somebody sleeps there.
        self._new: set[int] = set()
        #: When something becomes due by itself, and in which queue.
        self._reminders: list[tuple[float, int]] = []
        #: Whether a ring would be heard now.
        self.hears = False

    def hang(self, queue: int, ring: Callable[[], None]) -> Callable[[], None]:
        """Have *ring* called until the returned function is."""
        with self._lock:
            self._ringers[queue] = (*self._ringers.get(queue, ()), ring)
            self._new.add(queue)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._listen, name="ergon-doorbell", daemon=True)
                self._thread.start()
            self._nudge()

        def unhang() -> None:
            with self._lock:
                left = tuple(other for other in self._ringers.get(queue, ()) if other is not ring)
                self._ringers[queue] = left
                if not left:
                    del self._ringers[queue]
                if not self._ringers:
                    self._nudge()

        return unhang

    def remind(self, queue: int, seconds: float) -> None:
        """Ring for *queue* in *seconds*: what was put off until then wakes nobody by itself."""
        with self._lock:
            if queue in self._ringers:
                reminder = time.monotonic() + seconds, queue
                heappush(self._reminders, reminder)
                if self._reminders[0] is reminder:
                    self._nudge()

    def _nudge(self) -> None:
        """Have the thread look around; under the lock."""
        if self._hearing is not None:
            self._hearing.wake()

    def _wanted(self) -> bool:
        with self._lock:
            if self._ringers:
                return True
            self._thread = None
            return False

    # -- its thread -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with Hearing() as hearing:
            with self._lock:
                self._hearing = hearing
            try:
                self._keep_listening(hearing)
            finally:
                with self._lock:
                    if self._hearing is hearing:
                        self._hearing = None

    def _keep_listening(self, hearing: Hearing) -> None:
        delay = _FIRST
        while self._wanted():
            try:
                with self._lines.connect() as connection:
                    if not self._lines.direct:
                        self._idle(hearing, _LONGEST)
                        continue
                    connection.execute(f"listen {CHANNEL}")
                    self.hears, delay = True, _FIRST
                    with self._lock:
                        self._new = set(self._ringers)
                    self._hear(connection, hearing)
            except psycopg.Error:
                self._idle(hearing, delay)
                delay = min(delay * 2, _LONGEST)
            finally:
                self.hears = False

    def _hear(self, connection: Line, hearing: Hearing) -> None:
        while self._wanted():
            self._announce(connection)
            for payload in hearing.notices(connection, self._until_due(_LONGEST)):
                self._ring(payload)
            self._ring_due()

    def _announce(self, connection: Line) -> None:
        with self._lock:
            new, self._new = self._new, set()
        for queue in new:
            connection.execute(SLEEP, {"queue": queue, "sleeper": self.sleeper, "seconds": _ANNOUNCED})
            # Whatever came before that rang for nobody.
            self._ring(str(queue))

    def _until_due(self, longest: float) -> float:
        """Seconds until the next reminder, if it is so soon."""
        with self._lock:
            due = self._reminders[0][0] - time.monotonic() if self._reminders else longest
        return min(longest, max(0.0, due))

    def _ring_due(self) -> None:
        now, due = time.monotonic(), set()
        with self._lock:
            while self._reminders and self._reminders[0][0] <= now:
                due.add(heappop(self._reminders)[1])
        for queue in due:
            self._ring(str(queue))

    def _idle(self, hearing: Hearing, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._wanted():
            hearing.wait(self._until_due(left))
            self._ring_due()

    def _ring(self, payload: str) -> None:
        with self._lock:
            rung = self._ringers.get(int(payload), ()) if payload.isdigit() else ()
        for ring in rung:
            ring()
