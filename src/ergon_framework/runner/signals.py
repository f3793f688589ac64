"""Signals: received in the main thread, handled by its event queue."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ergon_framework.runner.tokens import SignalQueue

#: Both mean the same: drain; a second one means stop now.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def handle_signals(events: SignalQueue[Any]) -> Iterator[None]:
    """Put each stop signal into *events* while the context lasts."""

    def handler(number: int, _frame: object) -> None:
        events.put(signal.Signals(number))

    previous_fd = signal.set_wakeup_fd(events.wakeup_fd, warn_on_full_buffer=False)
    previous_handlers = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, previous in previous_handlers.items():
            # None means that the handler was not installed from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
