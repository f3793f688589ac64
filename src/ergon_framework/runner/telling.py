"""Telling: words for the outside, spoken in order by a thread that may wait where its caller may not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Teller:
    """Calls what it is given, one after the other. What the calls write to may be blocked: nobody waits for it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._thread = Thread(target=self._speak, name="ergon-teller", daemon=True)
        self._thread.start()

    def tell(self, call: Callable[[], Any]) -> None:
        self._calls.put(call)

    def _speak(self) -> None:
        while True:
            call = self._calls.get()
            # A closed stream or a handler of the user's must not silence what comes after.
            with suppress(Exception):
                call()
