"""Notification waiter: a thread waits for notifications of the server, and can be woken meanwhile.

The driver's own wait polls ten times a second, which is most of the CPU time of an idle process.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from ergon_framework.database.connection import DeadlineConnection


class NotificationWaiter:
    """The waiter of one thread, which closes it; any thread may wake it."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.settimeout(0)
        self._sender.settimeout(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._receiver.close()
        self._sender.close()

    def wake(self) -> None:
        """Make the thread continue, now or at its next wait; without effect once the waiter is closed."""
        with suppress(OSError):  # also where the socket buffer is full of earlier wake-ups
            self._sender.send(b"!")

    def wait(self, seconds: float) -> None:
        """Wait for *seconds*, or until the thread is woken."""
        self._wait(seconds)

    def notifications(self, connection: DeadlineConnection, seconds: float) -> list[str]:
        """Return the payloads of notifications on *connection*, after *seconds* at the latest or when woken.

        Raise an error of the driver if the connection is lost.
        """
        # Notifications that came with an answer are buffered in the driver, where no poll sees them.
        payloads = _drain(connection)
        if payloads:
            return payloads
        self._wait(seconds, connection.pgconn.socket)
        return _drain(connection)

    def _wait(self, seconds: float, *fds: int) -> None:
        poll = select.poll()
        for fd in (self._receiver.fileno(), *fds):
            poll.register(fd, select.POLLIN)
        poll.poll(1000 * max(0.0, seconds))
        with suppress(BlockingIOError):
            self._receiver.recv(4096)


def _drain(connection: DeadlineConnection) -> list[str]:
    return [notice.payload for notice in connection.notifies(timeout=0)]
