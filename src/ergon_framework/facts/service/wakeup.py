"""ServiceListener: a thread that listens to a service and notifies all subscribers in this process.

A subscriber is a reader that waits for new facts; the service sends a message when there may be some.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import grpc

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.boundary import Unlisten
from ergon_framework.facts.service import boundary_pb2 as pb
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.channel import ReconnectingChannel, ServiceAddress
from ergon_framework.facts.service.wire import encode

#: Seconds before listening again after a lost connection: first delay, then doubled up to the second value.
RECONNECT_DELAYS_SECONDS: Final = (0.1, 5.0)


class ServiceListener:
    """Notifies its subscribers on every message of the service; one follows each reconnect."""

    def __init__(self, address: ServiceAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._callbacks: tuple[Callable[[], None], ...] = ()
        self._thread: _ListenerThread | None = None

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        """Call *wake* on every notification, until the returned function is called."""
        with self._lock:
            self._callbacks = (*self._callbacks, wake)
            if self._thread is None:
                self._thread = _ListenerThread(self._address, self._notify)

        def unlisten() -> None:
            with self._lock:
                callbacks = list(self._callbacks)
                with suppress(ValueError):
                    callbacks.remove(wake)
                self._callbacks = tuple(callbacks)
                if callbacks or self._thread is None:
                    return
                thread, self._thread = self._thread, None
            thread.stop()

        return unlisten

    def close(self) -> None:
        """Stop listening and remove all subscribers; a notification that is being delivered continues."""
        with self._lock:
            self._callbacks = ()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    def _notify(self) -> None:
        for wake in self._callbacks:
            # A callback that fails, for example because its event loop is closed, must not prevent the others.
            with suppress(Exception):
                wake()


class _ListenerThread:
    def __init__(self, address: ServiceAddress, notify: Callable[[], None]) -> None:
        self._channel = ReconnectingChannel(address)
        self._notify = notify
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="ergon-facts-listener", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self._channel.close()

    def _run(self) -> None:
        delay = RECONNECT_DELAYS_SECONDS[0]
        while not self._stopped.is_set():
            # The connection is lost, the service rejects the call, or stop has closed the channel (ValueError). The
            # subscribers' own calls report the cause.
            with suppress(grpc.RpcError, ConnectionLostError, ValueError), self._channel.open() as lease:
                # Each call begins with one message, because facts may have arrived while nothing listened.
                for _ in lease.get_stub("unary_stream", SERVICE + "Watch")(encode(pb.WatchRequest())):
                    if self._stopped.is_set():
                        return
                    delay = RECONNECT_DELAYS_SECONDS[0]
                    self._notify()
            self._stopped.wait(delay)
            delay = min(delay * 2, RECONNECT_DELAYS_SECONDS[1])
