"""A thread that watches signals and the parent process, because a handler may occupy the main thread."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, Final

#: Seconds between two checks of the parent where the system cannot report its end.
PARENT_POLL_SECONDS: Final = 0.5
#: The exit code of a process that exited while its handler was running.
FORCED_EXIT_CODE: Final = 70
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class SignalWatcher:
    """Calls *stop* at the first signal, and exits *grace* seconds later, at a second signal, or as an orphan.

    A process whose parent has ended exits immediately: its outcome would have no reader, and another worker has its
    job by then.
    """

    def __init__(
        self, stop: Callable[[str], None], *, grace: float, exit_process: Callable[[int], Any] = os._exit
    ) -> None:
        self._stop = stop
        self._grace = grace
        self._exit_process = exit_process
        self._signal_read_fd, self._signal_write_fd = os.pipe()
        os.set_blocking(self._signal_write_fd, False)
        self._parent = os.getppid()
        self._pidfd = _open_pidfd(self._parent)
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        Thread(target=self._watch, name="ergon-executor-watch", daemon=True).start()

    def _on_signal(self, number: int, _frame: object) -> None:
        with suppress(BlockingIOError):
            os.write(self._signal_write_fd, bytes([number]))

    def stop(self) -> None:
        """Restore the previous signal handlers; the process is about to exit."""
        for number, previous in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _watch(self) -> None:
        deadline: float | None = None
        while True:
            received, orphaned = self._wait(deadline)
            is_late = deadline is not None and time.monotonic() >= deadline
            if orphaned or is_late or (received and deadline is not None):
                self._exit_process(FORCED_EXIT_CODE)
                return
            if received:
                deadline = time.monotonic() + self._grace
                # The grace ends even if the call fails.
                with suppress(Exception):
                    self._stop(signal.Signals(received[0]).name)

    def _wait(self, deadline: float | None) -> tuple[bytes, bool]:
        """Return the received signal, if any, and whether the parent has ended."""
        waits = [] if deadline is None else [max(0.0, deadline - time.monotonic())]
        if self._pidfd is None:
            waits.append(PARENT_POLL_SECONDS)
        watched = [self._signal_read_fd] if self._pidfd is None else [self._signal_read_fd, self._pidfd]
        ready, _, _ = select.select(watched, [], [], min(waits, default=None))
        # Another process may have adopted this one, even before its parent could be watched.
        orphaned = self._pidfd in ready or os.getppid() != self._parent
        return os.read(self._signal_read_fd, 1) if self._signal_read_fd in ready else b"", orphaned


def _open_pidfd(parent: int) -> int | None:
    """Return a descriptor that becomes readable when *parent* ends; None where the system has none."""
    try:
        return os.pidfd_open(parent)
    except (AttributeError, OSError):
        return None
