"""Ear: waits on an event loop for the answers to one connection, and stays there between them.

To register with a loop and to leave it again costs more than to hear that an answer has come, and one that drives the
driver itself spares its task a turn of the loop. The price is a file that the loop knows beyond an answer: whoever
closes the connection closes the ear first.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from ergon_framework.schema.failures import Silent

#: What the driver waits for, in its own numbers.
READ: Final = 1
WRITE: Final = 2


class Ear:
    """Of one connection, on one event loop."""

    __slots__ = ("_armed", "_file", "_found", "_gen", "_reads", "_timer", "_until", "_writes", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, file: int) -> None:
        self.loop = loop
        self._file = file
        self._gen: Any = None
        self._found: asyncio.Future[Any] | None = None
        self._until = self._armed = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reads = self._writes = False

    async def heard(self, gen: Any, until: float) -> Any:
        """What *gen* of the driver comes to; Silent if the server does not answer before *until*."""
        try:
            wanted = next(gen)
            self._gen, self._until = gen, until
            found = self._found = self.loop.create_future()
            self._want(wanted)
            # One that is early enough is not made anew: it looks again when its time has come.
            if self._timer is None or self._armed > until:
                self._arm(until)
            return await found
        except StopIteration as ended:
            return ended.value
        except BaseException:
            # Whatever may still come is for nobody.
            self.close()
            raise
        finally:
            self._gen = self._found = None

    def close(self) -> None:
        """Leave the loop; a later answer can be waited for again."""
        if self.loop.is_closed():
            return
        self._want(0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- called by the loop -------------------------------------------------------------------------------

    def _came(self, ready: int) -> None:
        found = self._found
        if found is None or found.done():
            # Not an answer: a line that goes down says so unasked. Whoever takes it next looks before he uses it.
            self._want(0)
            return
        try:
            wanted = self._gen.send(ready)
        except StopIteration as ended:
            found.set_result(ended.value)
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            # At once: a driver that met a broken connection has let go of its file, and anybody may get that number.
            self.close()
            found.set_exception(error)
        else:
            self._want(wanted)

    def _rung(self) -> None:
        self._timer, found = None, self._found
        if found is None or found.done():
            return
        if self._until > self._armed:
            self._arm(self._until)
        else:
            found.set_exception(Silent())

    def _arm(self, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed, self._timer = until, self.loop.call_at(until, self._rung)

    def _want(self, wanted: int) -> None:
        reads, writes = bool(wanted & READ), bool(wanted & WRITE)
        if reads != self._reads:
            self._reads = reads
            if reads:
                self.loop.add_reader(self._file, self._came, READ)
            else:
                self.loop.remove_reader(self._file)
        if writes != self._writes:
            self._writes = writes
            if writes:
                self.loop.add_writer(self._file, self._came, WRITE)
            else:
                self.loop.remove_writer(self._file)
