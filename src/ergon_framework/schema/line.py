"""Lines: connections whose owners can go away in the middle of a wait; one class for each flavour."""

from __future__ import annotations

import asyncio
import select
import time
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from ergon_framework.errors import ConnectionLost

#: What the driver waits for, as the kernel is asked for it: to read, to write, or either.
_EVENTS: Final = {1: select.POLLIN, 2: select.POLLOUT, 3: select.POLLIN | select.POLLOUT}
_READ: Final = 1
_WRITE: Final = 2


class Silent(ConnectionLost, psycopg.OperationalError):
    """The server did not answer in time; what it was told may still happen."""


class Line(Connection[TupleRow]):
    """A connection on which nobody waits beyond *until*, a moment of the monotonic clock.

    Packets may be confirmed by the kernel of a machine whose server stands still, so that no setting of the network
    ends such a wait. What may still come in answer belongs to nobody: a line that is left under way is of no further
    use. Without a moment it waits as the driver does.
    """

    until: float | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether somebody has asked for something, and was not there for the whole answer."""
        return self.pgconn.transaction_status == TransactionStatus.ACTIVE

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        if self.until is None:
            return super().wait(gen, *args, **options)
        # By hand: the driver looks at its clock ten times a second, and whoever is interrupted it has wait for the
        # server to stop.
        poll, file = select.poll(), self.pgconn.socket
        try:
            wanted = next(gen)
            while True:
                poll.register(file, _EVENTS[wanted])
                found = poll.poll(max(0.0, 1000 * (self.until - time.monotonic())))
                if not found:
                    raise Silent("the server did not answer in time")
                wanted = gen.send(_ready(found[0][1], wanted))
        except StopIteration as ended:
            return ended.value


class AsyncLine(AsyncConnection[TupleRow]):
    """The same for asyncio; *until* is a moment of the event loop's clock."""

    until: float | None = None

    @property
    def is_under_way(self) -> bool:
        return self.pgconn.transaction_status == TransactionStatus.ACTIVE

    async def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        if self.until is None:
            return await super().wait(gen, *args, **options)
        loop, file = asyncio.get_running_loop(), self.pgconn.socket
        try:
            wanted = next(gen)
            while True:
                wanted = gen.send(await _readiness(loop, file, wanted, self.until))
        except StopIteration as ended:
            return ended.value


async def _readiness(loop: asyncio.AbstractEventLoop, file: int, wanted: int, until: float) -> int:
    """Which of *wanted* can be done; Silent if nothing can in time."""
    found: asyncio.Future[int] = loop.create_future()

    def wake(ready: int) -> None:
        if not found.done():
            found.set_result(ready)

    timer = loop.call_at(until, wake, 0)
    if wanted & _READ:
        loop.add_reader(file, wake, _READ)
    if wanted & _WRITE:
        loop.add_writer(file, wake, _WRITE)
    try:
        ready = await found
    finally:
        timer.cancel()
        if wanted & _READ:
            loop.remove_reader(file)
        if wanted & _WRITE:
            loop.remove_writer(file)
    if not ready:
        raise Silent("the server did not answer in time")
    return ready


def _ready(events: int, wanted: int) -> int:
    if events & ~(select.POLLIN | select.POLLOUT):
        return wanted  # hung up: whoever reads or writes is told what it is
    return _READ * bool(events & select.POLLIN) | _WRITE * bool(events & select.POLLOUT)
