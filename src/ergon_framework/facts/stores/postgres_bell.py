"""Bell: one listening connection of a store that is rung when facts have come, from any process.

It saves polling and is not relied on: behind a pooler, or while the line is down, readers look by themselves.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final

import psycopg
from psycopg import Connection
from psycopg.rows import TupleRow

from ergon_framework.connectors.postgres.statements import CHANNEL, SLEEP
from ergon_framework.facts.stores.postgres_statements import BELL
from ergon_framework.schema.lines import Lines

#: Seconds between two looks whether anybody wants to hear, and until it connects again.
_LOOK: Final = 0.2
_FIRST, _LONGEST = 0.2, 5.0
#: Seconds for which it is known to those who append that somebody listens, and after which it says so again.
_ANNOUNCED, _AGAIN = 30.0, 10.0


class Bell:
    """Calls everybody who hung up, from a thread of its own."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._lock = threading.Lock()
        self._ringers: tuple[Callable[[], None], ...] = ()
        self._thread: threading.Thread | None = None
        self._sleeper = random.getrandbits(62)
        #: Set while a ring would be heard.
        self.hears = threading.Event()

    def hang(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Have *ring* called until the returned function is."""
        with self._lock:
            self._ringers = (*self._ringers, ring)
            # It is gone after a fork, or when somebody whom it called has raised.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._listen, name="ergon-facts-bell", daemon=True)
                self._thread.start()

        def unhang() -> None:
            with self._lock:
                places = [place for place, other in enumerate(self._ringers) if other is ring]
                if places:
                    self._ringers = self._ringers[: places[0]] + self._ringers[places[0] + 1 :]

        return unhang

    def ring(self) -> None:
        """Call everybody."""
        for ring in self._ringers:
            ring()

    def close(self) -> None:
        """Let everybody go."""
        with self._lock:
            self._ringers = ()

    def _wanted(self) -> bool:
        with self._lock:
            if self._ringers:
                return True
            self._thread = None
            return False

    def _listen(self) -> None:
        delay = _FIRST
        while self._wanted():
            try:
                with self._lines.connect() as connection:
                    if not self._lines.direct:
                        self._idle(_LONGEST)
                        continue
                    connection.execute(f"listen {CHANNEL}")
                    delay = _FIRST
                    self._hear(connection)
            except psycopg.Error:
                self._idle(delay)
                delay = min(delay * 2, _LONGEST)
            finally:
                self.hears.clear()

    def _hear(self, connection: Connection[TupleRow]) -> None:
        announced = float("-inf")
        while self._wanted():
            if time.monotonic() > announced + _AGAIN:
                connection.execute(SLEEP, {"queue": BELL, "sleeper": self._sleeper, "seconds": _ANNOUNCED})
                if not self.hears.is_set():
                    self.hears.set()
                    # Whatever came before that rang for nobody.
                    self.ring()
                announced = time.monotonic()
            if any(notice.payload == str(BELL) for notice in connection.notifies(timeout=_LOOK)):
                self.ring()

    def _idle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._wanted():
            time.sleep(_LOOK)
