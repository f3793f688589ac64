"""Uploading and downloading over a connection of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.model import Stored
from ergon_framework.facts.service import faults
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.line import Line
from ergon_framework.facts.service.transfer import Breaks, Download, Sending, Upload, stored


def upload(given: Upload, line: Line, *, received: Callable[[str, str, Stored], int]) -> Stored:
    """Store an artifact; what can be read again goes on after a break, from what the service has received."""
    breaks, begin = Breaks(), given.begin
    while True:
        try:
            return _sent(given, line, begin)
        except ConnectionLost:
            if not given.repeatable or given.expected is None:
                raise
            wait = breaks.wait(begin)
            if wait is None:
                raise
            time.sleep(wait)
            try:
                begin = max(given.begin, received(given.bucket, given.key, given.expected))
            except ConnectionLost:
                continue


def _sent(given: Upload, line: Line, begin: int) -> Stored:
    with line.open() as held:
        sender = _Sender(given, begin)
        call: Any = held.call("stream_stream", SERVICE + "PutObject")(sender.messages())
        sender.begin(call)
        watch = _Watch(call, line.address.deadline, lambda: sender.still(line.address))
        try:
            return stored(next(call, None))
        except grpc.RpcError as error:
            if sender.error is not None:
                raise sender.error from None
            failed: Any = error
            raise faults.raised(failed, "PutObject") from error
        finally:
            watch.over()
            call.cancel()


class _Sender:
    """Reads the blob in the thread where gRPC wants to have the messages, and remembers what went wrong there."""

    def __init__(self, given: Upload, begin: int) -> None:
        self._given = given
        self._begin = begin
        self._call: Any = None
        self._begun = threading.Event()
        #: Since when it waits for the line; None while the blob is read, which takes as long as it takes.
        self._since: float | None = time.monotonic()
        self._ended = False
        self.error: BaseException | None = None

    def begin(self, call: Any) -> None:
        self._call = call
        self._begun.set()

    def still(self, address: Address) -> bool:
        """Whether nothing has moved for too long."""
        since = self._since
        longest = address.seal if self._ended else address.deadline
        return since is not None and time.monotonic() - since > longest

    def messages(self) -> Iterator[bytes]:
        try:
            yield self._given.header(self._begin)
            sending = Sending(self._begin - self._given.begin)
            blob: Any = self._given.blob
            self._since = None
            for piece in blob:
                for message in sending.pieces(piece):
                    self._since = time.monotonic()
                    yield message
                self._since = None
            self._ended = True
            self._since = time.monotonic()
            yield sending.end()
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the blob raises is for whoever uploads it
            self.error = error
            self._begun.wait()
            # Without its end the service keeps nothing of it, whether or not it hears of the cancellation.
            self._call.cancel()


def download(given: Download, line: Line) -> Iterator[bytes]:
    """The artifact; it goes on after a break, and is checked at its end."""
    breaks = Breaks()
    while True:
        try:
            yield from _received(given, line)
            given.end()
        except ConnectionLost:
            wait = breaks.wait(given.at) if given.repeatable else None
            if wait is None:
                raise
            time.sleep(wait)
        else:
            return


def _received(given: Download, line: Line) -> Iterator[bytes]:
    with line.open() as held:
        call: Any = held.call("unary_stream", SERVICE + "GetObject")(given.request())
        since: float | None = None

        def still() -> bool:
            return since is not None and time.monotonic() - since > line.address.deadline

        watch = _Watch(call, line.address.deadline, still)
        try:
            while True:
                since = time.monotonic()
                data = next(call, None)
                since = None
                if data is None:
                    return
                piece = given.take(data)
                if piece:
                    yield piece
        except grpc.RpcError as error:
            failed: Any = error
            raise faults.raised(failed, "GetObject") from error
        finally:
            watch.over()
            call.cancel()


class _Watch:
    """Cancels a call that stands still; nothing else ends a wait for the next message."""

    def __init__(self, call: Any, patience: float, still: Callable[[], bool]) -> None:
        self._call = call
        self._patience = patience
        self._still = still
        self._over = threading.Event()
        threading.Thread(target=self._run, name="ergon-facts-watch", daemon=True).start()

    def over(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._patience / 4):
            if self._still():
                self._call.cancel()
                return
