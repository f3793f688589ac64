"""LoopHeartbeat: the latest time at which this event loop certainly polled its sockets.

The server's lease begins when it sends a message, and a message may stay in the socket for as long as the event loop
is blocked. A message that is read now was sent after the tick before the last one: the last tick may have run in the
same loop iteration that read the message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

#: Ticks per lease; a claim is assumed to be older than it is by two of them at most.
_TICKS_PER_LEASE: Final = 20


class LoopHeartbeat:
    """Ticks on the running event loop for as long as *on_tick* returns true."""

    def __init__(self, lease: float, on_tick: Callable[[], bool]) -> None:
        self._interval = lease / _TICKS_PER_LEASE
        self._on_tick = on_tick
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last = 0.0
        #: A time at which the loop certainly still polled its sockets.
        self.before = 0.0

    def start(self) -> None:
        """Start ticking, if it is not running yet."""
        loop = asyncio.get_running_loop()
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self.before = self._last = time.monotonic()
            self._timer = loop.call_later(self._interval, self._tick)

    def stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _tick(self) -> None:
        self.before, self._last = self._last, time.monotonic()
        self._timer = None
        if self._on_tick() and self._loop is not None:
            self._timer = self._loop.call_later(self._interval, self._tick)
