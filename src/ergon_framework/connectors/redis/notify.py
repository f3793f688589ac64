"""Notification listener: a thread with a dedicated connection that blocks until an entry is added to the queue.

It saves polling, and nothing depends on it: while its connection is lost, loops poll at the interval of their policy.
It listens only after an empty fetch, from the id which that fetch has seen: entries added meanwhile notify immediately,
and a busy queue sends no notifications.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from ergon_framework.connectors.redis.connection import Connection, pack_command

#: Maximum seconds for which one command blocks.
_MAX_BLOCK_SECONDS: Final = 5.0
#: Seconds before the first attempt to reconnect, and the maximum that later delays grow to.
_MIN_RECONNECT_SECONDS, _MAX_RECONNECT_SECONDS = 0.1, 5.0
#: Seconds for which the thread waits for a state before it ends, if the listener has no users any more.
_LINGER_SECONDS: Final = 5.0


class EmptyFetchState(NamedTuple):
    """What an empty fetch has seen; every change after it may have made a message available."""

    #: The id of the last entry of the queue's stream that the consumer group was given.
    last_delivered: bytes
    #: The id of the last entry of the stream of notifications.
    last_notification: bytes
    #: A time of the monotonic clock; None if no message is deferred.
    due_at: float | None


class NotificationListener:
    """Calls *notify* once when there may be a message after the state that was passed to ``watch_from``.

    *streams* are the keys of the queue's stream, and of the stream of notifications: an entry is added to it when a
    message becomes available without being added to the queue's stream, because it was released, or will be due earlier
    than all others. The users of the listener are consume loops, and fetches that wait for a message.
    """

    def __init__(self, connect: Callable[[], Connection], streams: tuple[str, str], notify: Callable[[], None]) -> None:
        self._connect = connect
        self._streams = streams
        self._notify = notify
        self._condition = threading.Condition(threading.RLock())
        self._user_count = 0
        #: The state to watch from; None after a notification, until the next empty fetch sets it again.
        self._state: EmptyFetchState | None = None
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._closed = False

    def enable(self) -> None:
        """Count one more user; each calls ``disable`` once when it ends."""
        with self._condition:
            self._user_count += 1

    def disable(self) -> None:
        """Count one user less; without users the thread notifies for a state that is set already, and then ends."""
        with self._condition:
            self._user_count -= 1

    @property
    def enabled(self) -> bool:
        return self._user_count > 0

    def watch_from(self, state: EmptyFetchState) -> None:
        """Notify once for any entry after *state*; does nothing without users."""
        with self._condition:
            if self._closed or not self._user_count:
                return
            self._state = state
            if self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="ergon-doorbell", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def close(self) -> None:
        """Stop notifying, and end the thread."""
        with self._condition:
            self._closed, self._state = True, None
            connection = self._connection
            self._condition.notify_all()
        if connection is not None:
            with suppress(Exception):  # another thread uses the connection, which may be in any state
                connection.disconnect()

    def _listen(self) -> None:
        """Wait for an entry after each state that is set, and notify once for it."""
        delay = _MIN_RECONNECT_SECONDS
        while (state := self._wait_for_state()) is not None:
            try:
                has_entry = self._wait_for_entry(state)
                delay = _MIN_RECONNECT_SECONDS
            except Exception:  # noqa: BLE001 - whatever the error is, the connection is lost: loops poll meanwhile
                self._disconnect()
                has_entry = state.due_at is not None and time.monotonic() >= state.due_at
                with self._condition:
                    if not self._closed and not has_entry:
                        self._condition.wait(delay)
                delay = min(delay * 2, _MAX_RECONNECT_SECONDS)
            if has_entry:
                with self._condition:
                    # A newer state, set meanwhile, still has to be watched.
                    if self._state is state:
                        self._state = None
                self._notify()

    def _wait_for_state(self) -> EmptyFetchState | None:
        """Wait for a state to watch and return it; return None when the thread is to end."""
        with self._condition:
            while self._state is None and not self._closed:
                if not self._condition.wait(_LINGER_SECONDS) and not self._user_count:
                    break
            if self._state is None or self._closed:
                self._thread = None
                # Within the lock: a new thread would open its own connection, which must not be closed here.
                self._disconnect()
                return None
            return self._state

    def _wait_for_entry(self, state: EmptyFetchState) -> bool:
        """Block for a while; return whether there is an entry after *state*, or a message is due."""
        connection = self._connection
        if connection is None:
            connection = self._connect()
            with self._condition:
                self._connection = connection
        remaining = (
            _MAX_BLOCK_SECONDS if state.due_at is None else min(_MAX_BLOCK_SECONDS, state.due_at - time.monotonic())
        )
        # BLOCK 0 would block without limit.
        block = max(1, round(remaining * 1000))
        command = (
            "XREAD",
            "COUNT",
            1,
            "BLOCK",
            block,
            "STREAMS",
            *self._streams,
            state.last_delivered,
            state.last_notification,
        )
        connection.send_packed_command([pack_command(command)])
        answer = connection.read_response(timeout=remaining + _MAX_BLOCK_SECONDS)
        return bool(answer) or (state.due_at is not None and time.monotonic() >= state.due_at)

    def _disconnect(self) -> None:
        with self._condition:
            connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # it may be in any state
                connection.disconnect()
