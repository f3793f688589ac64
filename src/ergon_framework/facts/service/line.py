"""ReconnectingChannel: the gRPC channel of a client, sync and async; replaced when the certificate is renewed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.service.address import ServiceAddress
from ergon_framework.facts.service.files import ReloadingTlsFiles, channel_credentials


class _ChannelLease:
    """A channel with a reference count; a replaced channel is closed when its last user has released it."""

    __slots__ = ("channel", "loop", "retired", "stubs", "user_count")

    def __init__(self, channel: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.channel = channel
        self.loop = loop
        self.stubs: dict[str, Any] = {}
        self.user_count = 0
        self.retired = False

    def get_stub(self, kind: str, method: str) -> Any:
        """Return the stub of a method; cached per channel, because creating one takes longer than many a call."""
        stub = self.stubs.get(method)
        if stub is None:
            stub = self.stubs[method] = getattr(self.channel, kind)(method)
        return stub


class ReconnectingChannel:
    """The variant for threads."""

    def __init__(self, address: ServiceAddress) -> None:
        self.address = address
        self._files = ReloadingTlsFiles(address.files)
        self._lock = threading.Lock()
        self._lease: _ChannelLease | None = None
        self._closed = False

    @contextmanager
    def open(self) -> Iterator[_ChannelLease]:
        """Yield a channel with the current certificate."""
        replaced = None
        with self._lock:
            if self._closed:
                raise ConnectionLostError("the client is closed; make another one")
            if self._files.reload_if_changed() is not None and self._lease is not None:
                replaced, self._lease = self._lease, None
                replaced.retired = True
            if self._lease is None:
                credentials = channel_credentials(self._files.pem)
                self._lease = _ChannelLease(grpc.secure_channel(self.address.host, credentials, self.address.options()))
            lease = self._lease
            lease.user_count += 1
            is_unused = replaced is not None and not replaced.user_count
        if replaced is not None and is_unused:
            replaced.channel.close()
        try:
            yield lease
        finally:
            with self._lock:
                lease.user_count -= 1
                is_last = lease.retired and not lease.user_count
            if is_last:
                lease.channel.close()

    def close(self) -> None:
        """Close the channel: no call starts afterwards, and running calls are cancelled."""
        with self._lock:
            self._closed = True
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.channel.close()


class AsyncReconnectingChannel:
    """The variant for asyncio; on another event loop it opens a new channel."""

    def __init__(self, address: ServiceAddress) -> None:
        self.address = address
        self._files = ReloadingTlsFiles(address.files)
        self._lease: _ChannelLease | None = None
        self._closed = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[_ChannelLease]:
        """Yield a channel with the current certificate."""
        if self._closed:
            raise ConnectionLostError("the client is closed; make another one")
        loop = asyncio.get_running_loop()
        replaced = None
        is_renewed = self._files.reload_if_changed() is not None
        if self._lease is not None and (is_renewed or self._lease.loop is not loop):
            replaced, self._lease = self._lease, None
            replaced.retired = True
        if self._lease is None:
            credentials = channel_credentials(self._files.pem)
            channel = grpc.aio.secure_channel(self.address.host, credentials, self.address.options())
            self._lease = _ChannelLease(channel, loop)
        lease = self._lease
        lease.user_count += 1
        try:
            if replaced is not None and not replaced.user_count and replaced.loop is loop:
                await replaced.channel.close()
            yield lease
        finally:
            lease.user_count -= 1
            if lease.retired and not lease.user_count:
                await lease.channel.close()

    async def close(self) -> None:
        """Close the channel: no call starts afterwards, and running calls are cancelled."""
        self._closed = True
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.channel.close()
