"""Socket waiter: waits on an event loop for the answers to one connection, and stays registered between them.

To register with a loop and to unregister costs more than to receive an answer, and driving the driver's generator here
saves the task one iteration of the loop. In return the loop knows the file descriptor between answers, so that the
owner of the connection must close the waiter before the connection.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from ergon_framework.schema.failures import ServerTimeout

#: The events that the driver waits for, as its own constants.
READ: Final = 1
WRITE: Final = 2


class SocketWaiter:
    """The waiter of one connection, on one event loop."""

    __slots__ = (
        "_deadline",
        "_fd",
        "_future",
        "_generator",
        "_is_reading",
        "_is_writing",
        "_timer",
        "_timer_deadline",
        "loop",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self.loop = loop
        self._fd = fd
        self._generator: Any = None
        self._future: asyncio.Future[Any] | None = None
        self._deadline = self._timer_deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_reading = self._is_writing = False

    async def wait(self, generator: Any, deadline: float) -> Any:
        """Run *generator* of the driver and return its result; raise ServerTimeout if it takes beyond *deadline*."""
        try:
            events = next(generator)
            self._generator, self._deadline = generator, deadline
            future = self._future = self.loop.create_future()
            self._watch(events)
            # A timer that fires earlier is kept: it is restarted when it fires before the deadline.
            if self._timer is None or self._timer_deadline > deadline:
                self._start_timer(deadline)
            return await future
        except StopIteration as stop:
            return stop.value
        except BaseException:
            # A later answer belongs to no caller.
            self.close()
            raise
        finally:
            self._generator = self._future = None

    def close(self) -> None:
        """Unregister from the loop; the next wait registers again."""
        if self.loop.is_closed():
            return
        self._watch(0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- called by the loop -------------------------------------------------------------------------------

    def _on_ready(self, ready: int) -> None:
        future = self._future
        if future is None or future.done():
            # Not an answer: a lost connection becomes readable. The pool checks a connection before its next use.
            self._watch(0)
            return
        try:
            events = self._generator.send(ready)
        except StopIteration as stop:
            future.set_result(stop.value)
        except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
            # Immediately: with a broken connection the driver has closed its file, and its number may be reused.
            self.close()
            future.set_exception(error)
        else:
            self._watch(events)

    def _on_timer(self) -> None:
        self._timer, future = None, self._future
        if future is None or future.done():
            return
        if self._deadline > self._timer_deadline:
            self._start_timer(self._deadline)
        else:
            future.set_exception(ServerTimeout())

    def _start_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_deadline, self._timer = deadline, self.loop.call_at(deadline, self._on_timer)

    def _watch(self, events: int) -> None:
        reads, writes = bool(events & READ), bool(events & WRITE)
        if reads != self._is_reading:
            self._is_reading = reads
            if reads:
                self.loop.add_reader(self._fd, self._on_ready, READ)
            else:
                self.loop.remove_reader(self._fd)
        if writes != self._is_writing:
            self._is_writing = writes
            if writes:
                self.loop.add_writer(self._fd, self._on_ready, WRITE)
            else:
                self.loop.remove_writer(self._fd)
