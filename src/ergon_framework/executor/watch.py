"""Watch: a thread that hears what the main thread cannot, because a handler runs there: signals and orphanhood."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, Final

#: How often the parent is looked for where the system cannot tell that it is gone.
LOOK: Final = 0.5
#: A process that had to leave its handler behind.
FORCED: Final = 70
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Watch:
    """Calls *stop* at the first signal, and ends the process *grace* seconds later, at a second one, or as an orphan.

    A process whose parent is gone ends at once: nobody would read its outcome, and its job is
    somebody else's by then.
    """

    def __init__(self, stop: Callable[[str], None], *, grace: float, leave: Callable[[int], Any] = os._exit) -> None:
        self._stop = stop
        self._grace = grace
        self._leave = leave
        self._heard, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._parent = os.getppid()
        self._pidfd = _opened(self._parent)
        self._before = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        Thread(target=self._watch, name="ergon-executor-watch", daemon=True).start()

    def _signalled(self, number: int, _frame: object) -> None:
        with suppress(BlockingIOError):
            os.write(self._tell, bytes([number]))

    def over(self) -> None:
        """Signals are again what they were; the process is about to end by itself."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _watch(self) -> None:
        until: float | None = None
        while True:
            told, orphaned = self._wait(until)
            late = until is not None and time.monotonic() >= until
            if orphaned or late or (told and until is not None):
                self._leave(FORCED)
                return
            if told:
                until = time.monotonic() + self._grace
                # Whatever goes wrong there, the grace ends.
                with suppress(Exception):
                    self._stop(signal.Signals(told[0]).name)

    def _wait(self, until: float | None) -> tuple[bytes, bool]:
        """The signal that came, if one did, and whether the parent is gone."""
        waits = [] if until is None else [max(0.0, until - time.monotonic())]
        if self._pidfd is None:
            waits.append(LOOK)
        watched = [self._heard] if self._pidfd is None else [self._heard, self._pidfd]
        ready, _, _ = select.select(watched, [], [], min(waits, default=None))
        # Another process may have adopted this one, also before its parent could be watched.
        orphaned = self._pidfd in ready or os.getppid() != self._parent
        return os.read(self._heard, 1) if self._heard in ready else b"", orphaned


def _opened(parent: int) -> int | None:
    """A descriptor that becomes readable when *parent* ends; None where the system has none."""
    try:
        return os.pidfd_open(parent)
    except (AttributeError, OSError):
        return None
