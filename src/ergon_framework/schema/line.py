"""Lines: connections whose owners can go away in the middle of a wait; one class for each flavour."""

from __future__ import annotations

import asyncio
import select
import time
from typing import Any, Final

from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from ergon_framework.schema.ear import READ, WRITE, Ear
from ergon_framework.schema.failures import Silent

#: What the driver waits for, as the kernel is asked for it: to read, to write, or either.
_EVENTS: Final = {1: select.POLLIN, 2: select.POLLOUT, 3: select.POLLIN | select.POLLOUT}


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
                    raise Silent
                wanted = gen.send(_ready(found[0][1], wanted))
        except StopIteration as ended:
            return ended.value

    def finish(self) -> None:
        """Close it, whatever is under way."""
        self.pgconn.finish()


class AsyncLine(AsyncConnection[TupleRow]):
    """The same for asyncio; *until* is a moment of the event loop's clock."""

    until: float | None = None
    _ear: Ear | None = None

    @property
    def is_under_way(self) -> bool:
        return self.pgconn.transaction_status == TransactionStatus.ACTIVE

    async def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        if self.until is None:
            self._leave()  # the driver registers the same file for itself
            return await super().wait(gen, *args, **options)
        loop, ear = asyncio.get_running_loop(), self._ear
        if ear is None or ear.loop is not loop:
            self._leave()
            ear = self._ear = Ear(loop, self.pgconn.socket)
        return await ear.heard(gen, self.until)

    def finish(self) -> None:
        """Close it without waiting; also after its event loop has closed."""
        self._leave()
        self.pgconn.finish()

    async def close(self) -> None:
        self._leave()
        await super().close()

    def __del__(self, *args: Any) -> None:
        # A file that its loop still knows when its number is given to another makes trouble for that one.
        self._leave()
        super().__del__(*args)

    def _leave(self) -> None:
        ear, self._ear = self._ear, None
        if ear is not None:
            ear.close()


def _ready(events: int, wanted: int) -> int:
    if events & ~(select.POLLIN | select.POLLOUT):
        return wanted  # hung up: whoever reads or writes is told what it is
    return READ * bool(events & select.POLLIN) | WRITE * bool(events & select.POLLOUT)
