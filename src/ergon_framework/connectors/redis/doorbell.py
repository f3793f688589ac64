"""Doorbell: a thread with a connection of its own that blocks until something comes into the queue.

It saves polling and is not relied on: while its line is down, loops look by themselves, as rarely
as their policy says. It listens only after a look has found nothing, from the id which that look
has seen: whatever came between the two rings at once, and a busy queue rings no bells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from ergon_framework.connectors.redis.lines import Line, packed

#: Longest time, in seconds, for which one command blocks.
_BLOCK: Final = 5.0
#: How long it waits before it connects again, and before it leaves when nobody wants to hear.
_FIRST, _LONGEST, _LINGER = 0.1, 5.0, 5.0


class Seen(NamedTuple):
    """What a look that found nothing has seen: the last id handed out, the last ring, and when something is due."""

    last: bytes
    rung: bytes
    #: Seconds of the monotonic clock; None when nothing is put off.
    due: float | None


class Doorbell:
    """Calls *ring* once when there may be something for whoever has armed it."""

    def __init__(self, connect: Callable[[], Line], streams: tuple[str, str], ring: Callable[[], None]) -> None:
        self._connect = connect
        self._streams = streams
        self._ring = ring
        self._changed = threading.Condition(threading.RLock())
        self._wanted = 0
        self._seen: Seen | None = None
        self._thread: threading.Thread | None = None
        self._line: Line | None = None
        self._closed = False

    def want(self) -> None:
        """Somebody wants to hear it, until ``unwant``."""
        with self._changed:
            self._wanted += 1

    def unwant(self) -> None:
        with self._changed:
            self._wanted -= 1

    @property
    def wanted(self) -> bool:
        return self._wanted > 0

    def arm(self, seen: Seen) -> None:
        """Ring once for anything behind what was seen."""
        with self._changed:
            if self._closed or not self._wanted:
                return
            self._seen = seen
            if self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="ergon-doorbell", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """It rings no more, and its thread leaves."""
        with self._changed:
            self._closed, self._seen = True, None
            line = self._line
            self._changed.notify_all()
        if line is not None:
            with suppress(Exception):  # it is another thread's, and may be in any state
                line.disconnect()

    def _listen(self) -> None:
        delay = _FIRST
        while (seen := self._armed()) is not None:
            try:
                heard = self._heard(seen)
                delay = _FIRST
            except Exception:  # noqa: BLE001 - whatever it is, the line is gone: loops look by themselves meanwhile
                self._hang_up()
                heard = seen.due is not None and time.monotonic() >= seen.due
                with self._changed:
                    if not self._closed and not heard:
                        self._changed.wait(delay)
                delay = min(delay * 2, _LONGEST)
            if heard:
                with self._changed:
                    # Armed again meanwhile, it has to listen from there.
                    if self._seen is seen:
                        self._seen = None
                self._ring()

    def _armed(self) -> Seen | None:
        """What was seen last; None when it is time to leave."""
        with self._changed:
            while self._seen is None and not self._closed:
                if not self._changed.wait(_LINGER) and not self._wanted:
                    break
            if self._seen is None or self._closed:
                self._thread = None
                # Before anybody can start another thread, whose line it would be.
                self._hang_up()
                return None
            return self._seen

    def _heard(self, seen: Seen) -> bool:
        line = self._line
        if line is None:
            line = self._connect()
            with self._changed:
                self._line = line
        left = _BLOCK if seen.due is None else min(_BLOCK, seen.due - time.monotonic())
        # A block of 0 would last for ever.
        block = max(1, round(left * 1000))
        command = ("XREAD", "COUNT", 1, "BLOCK", block, "STREAMS", *self._streams, seen.last, seen.rung)
        line.send_packed_command([packed(command)])
        answer = line.read_response(timeout=left + _BLOCK)
        return bool(answer) or (seen.due is not None and time.monotonic() >= seen.due)

    def _hang_up(self) -> None:
        with self._changed:
            line, self._line = self._line, None
        if line is not None:
            with suppress(Exception):  # it may be in any state
                line.disconnect()
