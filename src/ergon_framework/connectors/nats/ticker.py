"""Ticker: since when at the latest this event loop has not looked at its sockets.

The server's lease begins when it sends a message, and a message may lie in the socket for as long as
somebody keeps the event loop busy. What is read now was sent after the tick before the last one: the
last one may have come in the same round of the loop in which the message was read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

#: Ticks within a lease; the claim is taken to be older than it is by two of them at most.
_TICKS: Final = 20


class Ticker:
    """Ticks on the running event loop for as long as *ticked* says that it is needed."""

    def __init__(self, lease: float, ticked: Callable[[], bool]) -> None:
        self._interval = lease / _TICKS
        self._ticked = ticked
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last = 0.0
        #: When the loop certainly still looked at its sockets.
        self.before = 0.0

    def start(self) -> None:
        """Tick, if it does not yet."""
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
        if self._ticked() and self._loop is not None:
            self._timer = self._loop.call_later(self._interval, self._tick)
