"""Connections with a deadline for every wait, as a sync and an async class."""

from __future__ import annotations

import asyncio
import select
import time
from typing import Any, Final

from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from ergon_framework.schema.ear import READ, WRITE, SocketWaiter
from ergon_framework.schema.failures import ServerTimeout

#: The driver's events as poll() events: read, write, or either.
_POLL_EVENTS: Final = {1: select.POLLIN, 2: select.POLLOUT, 3: select.POLLIN | select.POLLOUT}


class DeadlineConnection(Connection[TupleRow]):
    """A connection on which no call waits beyond *deadline*, a time of the monotonic clock.

    The kernel of a machine whose server hangs may still acknowledge packets, so that no network setting ends such a
    wait. A later answer belongs to no caller: a connection that is left busy must not be used again. Without a deadline
    it waits as the driver does.
    """

    deadline: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a statement is running whose answer was not fully read."""
        return self.pgconn.transaction_status == TransactionStatus.ACTIVE

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        if self.deadline is None:
            return super().wait(gen, *args, **options)
        # Not the driver's loop: it wakes ten times a second to look at the clock, and after an interrupt it waits for
        # the server to stop.
        poll, fd = select.poll(), self.pgconn.socket
        try:
            events = next(gen)
            while True:
                poll.register(fd, _POLL_EVENTS[events])
                ready = poll.poll(max(0.0, 1000 * (self.deadline - time.monotonic())))
                if not ready:
                    raise ServerTimeout
                events = gen.send(_to_driver_events(ready[0][1], events))
        except StopIteration as stop:
            return stop.value

    def abort(self) -> None:
        """Close the connection, whatever is running on it."""
        self.pgconn.finish()


class AsyncDeadlineConnection(AsyncConnection[TupleRow]):
    """The async variant; *deadline* is a time of the event loop's clock."""

    deadline: float | None = None
    _waiter: SocketWaiter | None = None

    @property
    def is_under_way(self) -> bool:
        return self.pgconn.transaction_status == TransactionStatus.ACTIVE

    async def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        if self.deadline is None:
            self._close_waiter()  # the driver registers the same file itself
            return await super().wait(gen, *args, **options)
        loop, waiter = asyncio.get_running_loop(), self._waiter
        if waiter is None or waiter.loop is not loop:
            self._close_waiter()
            waiter = self._waiter = SocketWaiter(loop, self.pgconn.socket)
        return await waiter.wait(gen, self.deadline)

    def abort(self) -> None:
        """Close the connection without waiting; also after its event loop has closed."""
        self._close_waiter()
        self.pgconn.finish()

    async def close(self) -> None:
        self._close_waiter()
        await super().close()

    def __del__(self, *args: Any) -> None:
        # A closed file that its loop still knows disturbs the next file with the same number.
        self._close_waiter()
        super().__del__(*args)

    def _close_waiter(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.close()


def _to_driver_events(poll_events: int, requested: int) -> int:
    if poll_events & ~(select.POLLIN | select.POLLOUT):
        return requested  # hung up: the driver's next read or write raises the error
    return READ * bool(poll_events & select.POLLIN) | WRITE * bool(poll_events & select.POLLOUT)
