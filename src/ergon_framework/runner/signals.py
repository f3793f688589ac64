"""Signals: heard in the main thread, acted upon elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ergon_framework.runner.tokens import Tokens

#: Both mean the same: drain; asked again, hurry.
STOPPING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def heard(tokens: Tokens[Any]) -> Iterator[None]:
    """Put each stopping signal into *tokens*."""

    def handler(number: int, _frame: object) -> None:
        tokens.put(signal.Signals(number))

    woken = signal.set_wakeup_fd(tokens.wakeup, warn_on_full_buffer=False)
    before = {number: signal.signal(number, handler) for number in STOPPING}
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        for number, old in before.items():
            # None means that it was not installed from Python, and cannot be given back.
            signal.signal(number, signal.SIG_DFL if old is None else old)
