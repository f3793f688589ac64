"""FactListener: one listening connection per store that notifies subscribers of new facts from any process.

It saves polling and is optional: behind a pooler, or while the connection is lost, readers poll.
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

from ergon_framework.connectors.postgres.statements import CHANNEL, REGISTER_LISTENER
from ergon_framework.facts.stores.postgres_statements import FACT_LISTENER_QUEUE
from ergon_framework.schema.lines import ConnectionPool

#: Seconds between two checks for subscribers, and bounds of the delay before the next connection attempt.
_POLL_INTERVAL_SECONDS: Final = 0.2
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.2, 5.0
#: Seconds for which an announcement tells appenders that this process listens, and until it is renewed.
_ANNOUNCEMENT_SECONDS, _RENEWAL_SECONDS = 30.0, 10.0


class FactListener:
    """Calls its subscribers from a separate thread."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._callbacks: tuple[Callable[[], None], ...] = ()
        self._thread: threading.Thread | None = None
        self._listener_id = random.getrandbits(62)
        #: Set while notifications are received.
        self.receiving = threading.Event()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call *callback* on new facts until the returned function is called."""
        with self._lock:
            self._callbacks = (*self._callbacks, callback)
            # The thread is gone after a fork, or after a callback has raised.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._listen, name="ergon-facts-bell", daemon=True)
                self._thread.start()

        def unsubscribe() -> None:
            with self._lock:
                positions = [position for position, other in enumerate(self._callbacks) if other is callback]
                if positions:
                    self._callbacks = self._callbacks[: positions[0]] + self._callbacks[positions[0] + 1 :]

        return unsubscribe

    def notify(self) -> None:
        """Call all subscribers."""
        for callback in self._callbacks:
            callback()

    def close(self) -> None:
        """Remove all subscribers."""
        with self._lock:
            self._callbacks = ()

    def _has_subscribers(self) -> bool:
        with self._lock:
            if self._callbacks:
                return True
            self._thread = None
            return False

    def _listen(self) -> None:
        delay = _MIN_RETRY_SECONDS
        while self._has_subscribers():
            try:
                with self._pool.connect() as connection:
                    if not self._pool.is_direct:
                        self._sleep(_MAX_RETRY_SECONDS)
                        continue
                    connection.execute(f"listen {CHANNEL}")
                    delay = _MIN_RETRY_SECONDS
                    self._receive(connection)
            except psycopg.Error:
                self._sleep(delay)
                delay = min(delay * 2, _MAX_RETRY_SECONDS)
            finally:
                self.receiving.clear()

    def _receive(self, connection: Connection[TupleRow]) -> None:
        announced_at = float("-inf")
        while self._has_subscribers():
            if time.monotonic() > announced_at + _RENEWAL_SECONDS:
                connection.execute(
                    REGISTER_LISTENER,
                    {"queue": FACT_LISTENER_QUEUE, "sleeper": self._listener_id, "seconds": _ANNOUNCEMENT_SECONDS},
                )
                if not self.receiving.is_set():
                    self.receiving.set()
                    # Notifications before the first announcement were not sent.
                    self.notify()
                announced_at = time.monotonic()
            if any(
                notice.payload == str(FACT_LISTENER_QUEUE)
                for notice in connection.notifies(timeout=_POLL_INTERVAL_SECONDS)
            ):
                self.notify()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._has_subscribers():
            time.sleep(_POLL_INTERVAL_SECONDS)
