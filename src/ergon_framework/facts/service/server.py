"""BoundaryServer: serves a store over mutual TLS, with health checks, limits and graceful shutdown."""

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
from ergon_framework.facts.model import ZonePair
from ergon_framework.facts.service import refusals
from ergon_framework.facts.service.access import AccessPolicy
from ergon_framework.facts.service.connections import OPEN_FILES_PATH
from ergon_framework.facts.service.files import TlsFiles, server_credentials
from ergon_framework.facts.service.health import HealthService
from ergon_framework.facts.service.limits import Limits
from ergon_framework.facts.service.revoked import RevocationList
from ergon_framework.facts.service.service import SERVICE_NAME, BoundaryService
from ergon_framework.facts.service.threads import as_async

#: A zone pair without facts, queried to check whether the store answers.
_HEALTH_CHECK_PAIR: Final = ZonePair("ergon", "health")


@dataclass(kw_only=True)
class BoundaryServer:
    """Serves *store*, which belongs to *zones*, at *listen*; start and stop it on the same event loop."""

    store: Boundary | AsyncBoundary
    zones: Collection[str]
    files: TlsFiles
    listen: str = "127.0.0.1:0"
    #: Files of the revoked certificates and public keys, and of the CRLs of the authorities.
    revoked: Path | None = None
    crl: Path | None = None
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.time
    #: The port, once the server listens.
    port: int = field(default=0, init=False)

    async def start(self) -> int:
        """Start to listen and return the port."""
        refusals.ignore_broken_connections()
        limits = self.limits.fit_to_open_files()
        self._async_store = as_async(self.store)
        revoked = RevocationList(self.revoked, crl=self.crl, authorities=self.files.authorities, clock=self.clock)
        self._service = service = BoundaryService(
            self._async_store,
            AccessPolicy(self.zones, max_readers=self.limits.readers),
            revoked,
            limits=limits,
            clock=self.clock,
        )
        self._health = HealthService(
            ("", SERVICE_NAME),
            identify=service.identify,
            record_identity=service.record_identity,
            recheck=service.admit,
            admission=service.admission,
            rejections=service.rejections,
            timeout=self.limits.call_timeout,
        )
        # The service itself counts the limit of all calls, because gRPC's limit would also reject health checks.
        self._server = grpc.aio.server(options=limits.options())
        self._server.add_generic_rpc_handlers((service.make_handler(), self._health.make_handler()))
        credentials = server_credentials(self.files)
        try:
            self.port = self._server.add_secure_port(self.listen, credentials)
        except RuntimeError as error:
            raise ConfigurationError(f"nobody can listen at {self.listen!r}; is the port taken?") from error
        try:
            service.connections.enforce_limits(self.port)
        except OSError as error:
            raise ConfigurationError(
                f"the connections of the service cannot be limited: {OPEN_FILES_PATH} cannot be read "
                f"({error.strerror}); mount it, or /proc"
            ) from error
        await self._server.start()
        self._health_task = asyncio.create_task(self._check_health())
        self._connections_task = asyncio.create_task(service.connections.watch(self.port))
        return self.port

    async def _check_health(self) -> None:
        """Report through the health service whether the store answers."""
        while True:
            await asyncio.sleep(self.limits.check_interval)
            try:
                async with asyncio.timeout(self.limits.call_timeout):
                    await self._async_store.last_offset_async(_HEALTH_CHECK_PAIR)
            except Exception:  # noqa: BLE001 - callers would receive the same error
                self._health.set_serving(serving=False)
            else:
                self._health.set_serving(serving=True)
            self._service.connections.recheck(self._service.admit)
            self._service.rejections.report()

    async def stop_gracefully(self, grace: float = 10.0) -> None:
        """Reject new calls, let running ones finish for *grace* seconds, and stop."""
        for task in (self._health_task, self._connections_task):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._health.stop()
        self._service.release()
        await self._server.stop(grace)
        self._service.close()
