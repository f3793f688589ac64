"""Bell: a thread that listens to a service for everybody in this process who wants to be woken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import grpc

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.boundary import Unlisten
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.line import Line
from ergon_framework.facts.service.messages import written

#: Seconds before it listens again to a service that has gone; then twice as many, up to the last.
WAITS: Final = (0.1, 5.0)


class Bell:
    """Rings with every word of the service, and whenever the line is there again: facts may have come meanwhile."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._wakes: tuple[Callable[[], None], ...] = ()
        self._listening: _Listening | None = None

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        """Have *wake* called, until the returned function is."""
        with self._lock:
            self._wakes = (*self._wakes, wake)
            if self._listening is None:
                self._listening = _Listening(self._address, self._ring)

        def unlisten() -> None:
            with self._lock:
                kept = list(self._wakes)
                with suppress(ValueError):
                    kept.remove(wake)
                self._wakes = tuple(kept)
                if kept or self._listening is None:
                    return
                listening, self._listening = self._listening, None
            listening.stop()

        return unlisten

    def close(self) -> None:
        """Nobody is woken any more."""
        with self._lock:
            self._wakes = ()
            listening, self._listening = self._listening, None
        if listening is not None:
            listening.stop()

    def _ring(self) -> None:
        for wake in self._wakes:
            # One whose event loop is closed must not silence the others.
            with suppress(Exception):
                wake()


class _Listening:
    def __init__(self, address: Address, ring: Callable[[], None]) -> None:
        self._line = Line(address)
        self._ring = ring
        self._stopped = threading.Event()
        self._call: Any = None
        threading.Thread(target=self._run, name="ergon-facts-bell", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self._line.close()

    def _run(self) -> None:
        wait = WAITS[0]
        while not self._stopped.is_set():
            # The line is down or the service refuses; those who are woken meet the reason themselves.
            with suppress(grpc.RpcError, ConnectionLost, ValueError), self._line.open() as held:
                for _ in held.call("unary_stream", SERVICE + "Watch")(written(wire.WatchRequest())):
                    if self._stopped.is_set():
                        return
                    wait = WAITS[0]
                    self._ring()
            self._stopped.wait(wait)
            wait = min(wait * 2, WAITS[1])
