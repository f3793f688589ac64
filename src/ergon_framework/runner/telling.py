"""Run calls in order on a background thread, which may block where the caller must not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any


class BackgroundCaller:
    """Runs the given calls one after the other. A call may block on its output: the caller does not wait for it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._thread = Thread(target=self._run_calls, name="ergon-teller", daemon=True)
        self._thread.start()

    def call(self, call: Callable[[], Any]) -> None:
        self._calls.put(call)

    def _run_calls(self) -> None:
        while True:
            call = self._calls.get()
            # A closed stream or a failing handler of the user must not stop later calls.
            with suppress(Exception):
                call()
