"""BoundaryServer: a store served over mutual TLS, with health checking, limits and an orderly end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.model import Pair
from ergon_framework.facts.service.access import MAX_READERS, Access
from ergon_framework.facts.service.files import TlsFiles, server_credentials
from ergon_framework.facts.service.requests import MESSAGE
from ergon_framework.facts.service.revoked import Revoked
from ergon_framework.facts.service.service import NAME, BoundaryService
from ergon_framework.facts.service.threads import as_async
from ergon_framework.facts.service.uploads import MAX_UPLOADS

#: Bytes of metadata that are sent and taken; a fault has to fit.
METADATA: Final = 16 * 1024
#: Whose facts are asked for to see whether the store answers; there are none.
_NOBODY: Final = Pair("ergon", "health")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one caller and all of them together may take; times are in seconds."""

    #: Calls at once, of all callers and those included who only listen; and of one connection.
    calls: int = 1_000
    streams: int = 100
    #: Readers that a zone may have here that is no zone of the store; each holds up retention until it is retired.
    readers: int = MAX_READERS
    #: Artifacts that a zone may upload at the same time.
    uploads: int = MAX_UPLOADS
    #: How long a call may take, and how long a stream may stand still.
    patience: float = 30.0
    #: After that a connection is replaced, so that a handshake looks at the certificate anew; and how long its calls
    #: may go on after it.
    age: float = 300.0
    age_grace: float = 30.0
    #: How often a silent connection is asked whether somebody is there, and how long for an answer.
    keepalive: float = 20.0
    keepalive_patience: float = 10.0
    #: How often the store is asked whether it is there.
    look: float = 5.0

    def options(self) -> list[tuple[str, Any]]:
        """As gRPC wants to hear them."""
        return [
            ("grpc.max_receive_message_length", MESSAGE),
            ("grpc.max_metadata_size", METADATA),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_connection_age_ms", int(self.age * 1000)),
            ("grpc.max_connection_age_grace_ms", int(self.age_grace * 1000)),
            ("grpc.keepalive_time_ms", int(self.keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_patience * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            # Whoever asks more often than this is sent away.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # Two services on one port would each have half of the callers.
            ("grpc.so_reuseport", 0),
        ]


@dataclass(kw_only=True)
class BoundaryServer:
    """Serves *store*, which belongs to *zones*, at *listen*; to be started, and stopped, on one event loop."""

    store: Boundary | AsyncBoundary
    zones: Collection[str]
    files: TlsFiles
    listen: str = "127.0.0.1:0"
    #: Certificates and public keys that are no longer let in, and the CRLs of the authorities.
    revoked: Path | None = None
    crl: Path | None = None
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.time
    #: Where it listens, once it does.
    port: int = field(default=0, init=False)

    async def start(self) -> int:
        """Begin to listen; the port."""
        self._kept = as_async(self.store)
        revoked = Revoked(self.revoked, crl=self.crl, authorities=self.files.authorities, clock=self.clock)
        self._service = BoundaryService(
            self._kept,
            Access(self.zones, max_readers=self.limits.readers),
            revoked,
            patience=self.limits.patience,
            max_uploads=self.limits.uploads,
            clock=self.clock,
        )
        self._server = grpc.aio.server(options=self.limits.options(), maximum_concurrent_rpcs=self.limits.calls)
        self._server.add_generic_rpc_handlers((self._service.handler(),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        credentials = server_credentials(self.files)
        try:
            self.port = self._server.add_secure_port(self.listen, credentials)
        except RuntimeError as error:
            raise ConfigurationError(f"nobody can listen at {self.listen!r}; is the port taken?") from error
        await self._server.start()
        await self._say(well=True)
        self._looking = asyncio.create_task(self._look())
        return self.port

    async def _look(self) -> None:
        """Say by the health service whether the store answers."""
        while True:
            await asyncio.sleep(self.limits.look)
            try:
                async with asyncio.timeout(self.limits.patience):
                    await self._kept.end_of_async(_NOBODY)
            except Exception:  # noqa: BLE001 - whatever it is: who calls would meet it too
                await self._say(well=False)
            else:
                await self._say(well=True)

    async def _say(self, *, well: bool) -> None:
        kinds = health_pb2.HealthCheckResponse
        for name in ("", NAME):
            await self._health.set(name, kinds.SERVING if well else kinds.NOT_SERVING)

    async def drain(self, grace: float = 10.0) -> None:
        """Take nothing new, let what runs finish for *grace* seconds, and end."""
        self._looking.cancel()
        with suppress(asyncio.CancelledError):
            await self._looking
        await self._health.enter_graceful_shutdown()
        self._service.leave()
        await self._server.stop(grace)
