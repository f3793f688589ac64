"""BoundaryServer: a store served over mutual TLS, with health checking, limits and an orderly end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.model import Pair
from ergon_framework.facts.service import refusals
from ergon_framework.facts.service.access import Access
from ergon_framework.facts.service.connections import OPEN_FILES
from ergon_framework.facts.service.files import TlsFiles, server_credentials
from ergon_framework.facts.service.health import HealthService
from ergon_framework.facts.service.limits import Limits
from ergon_framework.facts.service.revoked import Revoked
from ergon_framework.facts.service.service import NAME, BoundaryService
from ergon_framework.facts.service.threads import as_async

#: Whose facts are asked for to see whether the store answers; there are none.
_NOBODY: Final = Pair("ergon", "health")


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
        refusals.ignore_broken_connections()
        limits = self.limits.fitted()
        self._kept = as_async(self.store)
        revoked = Revoked(self.revoked, crl=self.crl, authorities=self.files.authorities, clock=self.clock)
        self._service = service = BoundaryService(
            self._kept,
            Access(self.zones, max_readers=self.limits.readers),
            revoked,
            limits=limits,
            clock=self.clock,
        )
        self._health = HealthService(
            ("", NAME),
            identify=service.identify,
            recognise=service.recognise,
            recheck=service.admit,
            admission=service.admission,
            refusals=service.refusals,
            timeout=self.limits.patience,
        )
        # The limit of all calls is counted by the service: gRPC's own would refuse checks of the health, too.
        self._server = grpc.aio.server(options=limits.options())
        self._server.add_generic_rpc_handlers((service.handler(), self._health.handler()))
        credentials = server_credentials(self.files)
        try:
            self.port = self._server.add_secure_port(self.listen, credentials)
        except RuntimeError as error:
            raise ConfigurationError(f"nobody can listen at {self.listen!r}; is the port taken?") from error
        try:
            service.connections.sweep(self.port)
        except OSError as error:
            raise ConfigurationError(
                f"the connections of the service cannot be limited: {OPEN_FILES} cannot be read ({error.strerror}); "
                "mount it, or /proc"
            ) from error
        await self._server.start()
        self._looking = asyncio.create_task(self._look())
        self._watching = asyncio.create_task(service.connections.watch(self.port))
        return self.port

    async def _look(self) -> None:
        """Say by the health service whether the store answers."""
        while True:
            await asyncio.sleep(self.limits.look)
            try:
                async with asyncio.timeout(self.limits.patience):
                    await self._kept.end_of_async(_NOBODY)
            except Exception:  # noqa: BLE001 - whatever it is: who calls would meet it too
                self._health.set(serving=False)
            else:
                self._health.set(serving=True)
            self._service.connections.recheck(self._service.admit)
            self._service.refusals.report()

    async def drain(self, grace: float = 10.0) -> None:
        """Take nothing new, let what runs finish for *grace* seconds, and end."""
        for task in (self._looking, self._watching):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._health.leave()
        self._service.leave()
        await self._server.stop(grace)
        self._service.close()
