"""Signals: heard in the main thread, acted upon elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Both mean the same: drain; asked again, hurry.
STOPPING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def heard(put: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hand each stopping signal to *put*, which must be safe to call between any two instructions."""

    def handler(number: int, _frame: object) -> None:
        put(signal.Signals(number))

    before = {number: signal.signal(number, handler) for number in STOPPING}
    try:
        yield
    finally:
        for number, old in before.items():
            # None means that it was not installed from Python, and cannot be given back.
            signal.signal(number, signal.SIG_DFL if old is None else old)
