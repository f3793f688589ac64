"""Notification listener: one listening connection for all queues of a database in this process.

An idle worker waits for a notification that a message has become ready. A worker that waits is registered as a listener
in the database, and dispatchers notify only queues with listeners.

It saves polling, and nothing depends on it: behind a connection pooler, which passes on no notifications, or while the
connection is lost, loops poll at the interval of their policy.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from typing import Final

import psycopg

from ergon_framework.connectors.postgres.sql import CHANNEL, REGISTER_LISTENER
from ergon_framework.database.connection import DeadlineConnection
from ergon_framework.database.listen import NotificationWaiter
from ergon_framework.database.pool import ConnectionPool

#: The first and the longest pause in seconds before a reconnect; the second is also the longest wait for notifications.
_MIN_RECONNECT_SECONDS, _MAX_RECONNECT_SECONDS = 0.2, 5.0
#: Seconds for which a new listener is registered; a worker whose fetch finds nothing renews the registration.
_REGISTRATION_SECONDS: Final = 30.0
#: Added to the delay of a message: a worker that wakes up before it is due by the server's clock finds nothing.
_DUE_MARGIN_SECONDS: Final = 0.01


class NotificationListener:
    """Calls the subscribers of a queue when a message becomes ready in it."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        #: The id under which producers see this listener.
        self.listener_id = random.getrandbits(62)
        self._lock = threading.Lock()
        self._callbacks: dict[int, tuple[Callable[[], None], ...]] = {}
        self._thread: threading.Thread | None = None
        self._waiter: NotificationWaiter | None = None
        #: Queues for which the listener is not registered in the database yet.
        self._unregistered: set[int] = set()
        #: When a deferred message becomes due, and in which queue.
        self._due_times: list[tuple[float, int]] = []
        #: Whether a notification would be received now; set by the thread while its connection listens.
        self.listening = False

    def subscribe(self, queue: int, notify: Callable[[], None]) -> Callable[[], None]:
        """Call *notify* for each notification of *queue*, until the returned function is called."""
        with self._lock:
            self._callbacks[queue] = (*self._callbacks.get(queue, ()), notify)
            self._unregistered.add(queue)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._listen, name="ergon-doorbell", daemon=True)
                self._thread.start()
            self._wake_thread()

        def unsubscribe() -> None:
            with self._lock:
                remaining = tuple(other for other in self._callbacks.get(queue, ()) if other is not notify)
                self._callbacks[queue] = remaining
                if not remaining:
                    del self._callbacks[queue]
                if not self._callbacks:
                    self._wake_thread()

        return unsubscribe

    def wake_after(self, queue: int, seconds: float) -> None:
        """Notify the subscribers of *queue* in *seconds*: a deferred message sends no notification when it is due."""
        with self._lock:
            if queue in self._callbacks:
                due_time = time.monotonic() + seconds, queue
                heappush(self._due_times, due_time)
                if self._due_times[0] is due_time:
                    self._wake_thread()

    def _wake_thread(self) -> None:
        """Wake the thread, so that it checks its state; called with the lock held."""
        if self._waiter is not None:
            self._waiter.wake()

    def _has_subscribers(self) -> bool:
        """Return whether the thread is to continue; if not, it ends, and the next subscriber starts a new one."""
        with self._lock:
            if self._callbacks:
                return True
            self._thread = None
            return False

    # -- its thread -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with NotificationWaiter() as waiter:
            with self._lock:
                self._waiter = waiter
            try:
                self._keep_listening(waiter)
            finally:
                with self._lock:
                    if self._waiter is waiter:
                        self._waiter = None

    def _keep_listening(self, waiter: NotificationWaiter) -> None:
        """Listen while there are subscribers; behind a pooler, only report due messages."""
        delay = _MIN_RECONNECT_SECONDS
        while self._has_subscribers():
            try:
                with self._pool.connect() as connection:
                    if not self._pool.is_direct:
                        self._idle(waiter, _MAX_RECONNECT_SECONDS)
                        continue
                    connection.execute(f"listen {CHANNEL}")
                    self.listening, delay = True, _MIN_RECONNECT_SECONDS
                    with self._lock:
                        self._unregistered = set(self._callbacks)
                    self._receive(connection, waiter)
            except psycopg.Error:
                self._idle(waiter, delay)
                delay = min(delay * 2, _MAX_RECONNECT_SECONDS)
            finally:
                self.listening = False

    def _receive(self, connection: DeadlineConnection, waiter: NotificationWaiter) -> None:
        # After a failover the pool connects to another server, whose notifications are needed.
        while self._has_subscribers() and self._pool.is_current(connection):
            self._register(connection)
            for payload in waiter.notifications(connection, self._compute_wait(_MAX_RECONNECT_SECONDS)):
                self._notify(payload)
            self._notify_due()

    def _register(self, connection: DeadlineConnection) -> None:
        with self._lock:
            unregistered, self._unregistered = self._unregistered, set()
        for queue in unregistered:
            connection.execute(
                REGISTER_LISTENER, {"queue": queue, "listener": self.listener_id, "seconds": _REGISTRATION_SECONDS}
            )
            # Messages that came before the registration have sent no notification.
            self._notify(str(queue))

    def _compute_wait(self, max_seconds: float) -> float:
        """Return the seconds until the next deferred message is due, at most *max_seconds*."""
        with self._lock:
            due = self._due_times[0][0] - time.monotonic() if self._due_times else max_seconds
        return min(max_seconds, max(0.0, due))

    def _notify_due(self) -> None:
        now, due_queues = time.monotonic(), set()
        with self._lock:
            while self._due_times and self._due_times[0][0] <= now:
                due_queues.add(heappop(self._due_times)[1])
        for queue in due_queues:
            self._notify(str(queue))

    def _idle(self, waiter: NotificationWaiter, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (remaining := until - time.monotonic()) > 0 and self._has_subscribers():
            waiter.wait(self._compute_wait(remaining))
            self._notify_due()

    def _notify(self, payload: str) -> None:
        queue, _, delay = payload.partition(" ")
        if delay and queue.isdigit():
            # A message was dispatched that is due in so many seconds.
            with suppress(ValueError):
                self.wake_after(int(queue), max(0.0, float(delay)) + _DUE_MARGIN_SECONDS)
            return
        with self._lock:
            callbacks = self._callbacks.get(int(payload), ()) if payload.isdigit() else ()
        for callback in callbacks:
            callback()
