"""Line: the connection of a client, in both flavours; another one takes its place when the certificate is renewed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.files import Renewed, channel_credentials


class _Held:
    """A channel with those who use it; it is closed when nobody does any more and another one has taken its place."""

    __slots__ = ("calls", "channel", "loop", "retired", "users")

    def __init__(self, channel: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.channel = channel
        self.loop = loop
        self.calls: dict[str, Any] = {}
        self.users = 0
        self.retired = False

    def call(self, kind: str, method: str) -> Any:
        """A call by its name; made once for each channel, because that takes longer than many a call."""
        found = self.calls.get(method)
        if found is None:
            found = self.calls[method] = getattr(self.channel, kind)(method)
        return found


class Line:
    """Of threads."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._renewed = Renewed(address.files)
        self._lock = threading.Lock()
        self._held: _Held | None = None
        self._closed = False

    @contextmanager
    def open(self) -> Iterator[_Held]:
        """A channel with the certificate of now."""
        gone = None
        with self._lock:
            if self._closed:
                raise ConnectionLost("the client is closed; make another one")
            if self._renewed.changed() is not None and self._held is not None:
                gone, self._held = self._held, None
                gone.retired = True
            if self._held is None:
                credentials = channel_credentials(self._renewed.pem)
                self._held = _Held(grpc.secure_channel(self.address.host, credentials, self.address.options()))
            held = self._held
            held.users += 1
            unused = gone is not None and not gone.users
        if gone is not None and unused:
            gone.channel.close()
        try:
            yield held
        finally:
            with self._lock:
                held.users -= 1
                last = held.retired and not held.users
            if last:
                held.channel.close()

    def close(self) -> None:
        """No call after this; those that are under way are cancelled."""
        with self._lock:
            self._closed = True
            held, self._held = self._held, None
        if held is not None:
            held.channel.close()


class AsyncLine:
    """Of asyncio; on another event loop it connects anew."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._renewed = Renewed(address.files)
        self._held: _Held | None = None
        self._closed = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[_Held]:
        """A channel with the certificate of now."""
        if self._closed:
            raise ConnectionLost("the client is closed; make another one")
        loop = asyncio.get_running_loop()
        gone = None
        renewed = self._renewed.changed() is not None
        if self._held is not None and (renewed or self._held.loop is not loop):
            gone, self._held = self._held, None
            gone.retired = True
        if self._held is None:
            credentials = channel_credentials(self._renewed.pem)
            channel = grpc.aio.secure_channel(self.address.host, credentials, self.address.options())
            self._held = _Held(channel, loop)
        held = self._held
        held.users += 1
        try:
            if gone is not None and not gone.users and gone.loop is loop:
                await gone.channel.close()
            yield held
        finally:
            held.users -= 1
            if held.retired and not held.users:
                await held.channel.close()

    async def close(self) -> None:
        """No call after this; those that are under way are cancelled."""
        self._closed = True
        held, self._held = self._held, None
        if held is not None:
            await held.channel.close()
