"""ReconnectingChannel: the gRPC channel of a client, sync and async; replaced when the certificate is renewed.

A channel is a connection of gRPC that reconnects automatically after a failure; a new certificate needs a new channel.

ServiceAddress: the location, credentials and timeouts of a remote service.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.service.limits import MAX_METADATA_BYTES
from ergon_framework.facts.service.tls import ReloadingTlsFiles, TlsFiles, channel_credentials

#: Maximum bytes of an answer: facts have at most 4 MiB, and the list of logs of many zones may be larger.
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """A service; *host* includes the port, as in ``facts.plant-a.example:7443``, and times are in seconds."""

    host: str
    files: TlsFiles
    #: The name in its certificate, if it is not the name of the host.
    name: str | None = None
    #: Maximum duration of a call, and maximum time without progress of an upload or download.
    deadline: float = 10.0
    #: Maximum time in which a store makes a completely received upload durable.
    commit_timeout: float = 120.0
    #: Interval of keepalive pings on an idle connection, and the time to wait for an answer.
    keepalive: float = 20.0
    keepalive_timeout: float = 10.0

    def options(self) -> list[tuple[str, Any]]:
        """Return the gRPC channel options."""
        name_options = [] if self.name is None else [("grpc.ssl_target_name_override", self.name)]
        return [
            *name_options,
            ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.keepalive_time_ms", int(self.keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_timeout * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # Reconnect soon after a service restart; the caller decides how long it retries.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1_000),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            # Two clients of one program may have certificates of two zones, so they must not share a connection.
            ("grpc.use_local_subchannel_pool", 1),
            # The caller retries, because only the caller knows whether a retry is worthwhile.
            ("grpc.enable_retries", 0),
        ]


class _ChannelLease:
    """A channel with a reference count; a replaced (retired) one is closed when its last user has released it."""

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
                raise ConnectionLostError("the client is closed; create a new one")
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
            raise ConnectionLostError("the client is closed; create a new one")
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
            # A channel of another event loop cannot be closed here; it ends with its loop.
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
