"""BoundaryServer: serves a store over mutual TLS, with health checks, limits and graceful shutdown.

A store keeps the facts and artifacts of its zones, which are sites; remote callers prove by a certificate which zones
they act for. ``HealthService`` is grpc.health.v1; its checks do not count towards the limits of calls.
``ThreadedBoundary`` adapts a store that has only the sync variant to the async contract of a service. A thread cannot
be stopped: a call whose caller has disconnected runs to its end, and its result is discarded.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.facts.boundary import (
    AppendResult,
    AsyncBlobSource,
    AsyncBoundary,
    Boundary,
    BoundaryCapabilities,
    LogState,
    NewFact,
    ObjectInfo,
    PruneResult,
    Unlisten,
)
from ergon_framework.facts.errors import InvalidFactError, LimitExceeded
from ergon_framework.facts.model import Cursor, FactConfirmation, StoredArtifact, StoredFact, ZonePair
from ergon_framework.facts.service import errors
from ergon_framework.facts.service.access import AccessPolicy, Identity, RevocationList
from ergon_framework.facts.service.admission import CallAdmission
from ergon_framework.facts.service.connections import OPEN_FILES_PATH
from ergon_framework.facts.service.errors import RejectionHandler
from ergon_framework.facts.service.handlers import SERVICE_NAME, BoundaryService
from ergon_framework.facts.service.limits import Limits
from ergon_framework.facts.service.tls import TlsFiles, server_credentials

HEALTH_SERVICE_NAME: Final = "grpc.health.v1.Health"
#: Concurrent checks with one certificate, seconds that each has to send its request, and maximum bytes of the request.
MAX_HEALTH_CHECKS: Final = 8
HEALTH_REQUEST_SECONDS: Final = 2.0
MAX_HEALTH_REQUEST_BYTES: Final = 1024
#: Seconds after which the certificate of a watching caller is checked again.
CERTIFICATE_RECHECK_SECONDS: Final = 1.0

_STATUS: Final = health_pb2.HealthCheckResponse


class HealthService:
    """Reports whether the services *names* can be used. For one event loop.

    Check is answered for every certificate that the handshake has accepted, also for one that names no zone, as probes
    have. Watch is a long-running call, so it requires an identity and counts as one of its streams.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        identify: Callable[[Any], Identity],
        record_identity: Callable[[Any], None],
        recheck: Callable[[Identity], None],
        admission: CallAdmission,
        rejections: RejectionHandler,
        timeout: float,
    ) -> None:
        self._names = names
        self._identify = identify
        self._record_identity = record_identity
        self._recheck = recheck
        self._admission = admission
        self._rejections = rejections
        self._timeout = timeout
        self._status = _STATUS.SERVING
        self._is_stopping = False
        #: Set once, at the next change of the status, and then replaced: each watching caller waits for its own.
        self._changed = asyncio.Event()
        self._checks: Counter[bytes] = Counter()

    def set_serving(self, *, serving: bool) -> None:
        """Set whether the service can be used."""
        self._set_status(_STATUS.SERVING if serving else _STATUS.NOT_SERVING)

    def stop(self) -> None:
        """Report the service as not serving, and end the streams of watching callers."""
        self._is_stopping = True
        self._set_status(_STATUS.NOT_SERVING)

    def _set_status(self, status: int) -> None:
        self._status = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def make_handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of both calls, registered as streams: a caller is identified before its request."""
        handlers = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE_NAME, handlers)

    async def _check(self, incoming: AsyncIterator[bytes], context: Any) -> bytes:
        async with self._rejections.abort_on_error("Health.Check", context):
            self._record_identity(context)
            # Counted by the certificate itself, because it may name no zone.
            certificate = context.auth_context().get("x509_pem_cert", [b""])[0]
            if self._checks[certificate] >= MAX_HEALTH_CHECKS:
                raise LimitExceeded(f"{MAX_HEALTH_CHECKS} checks with this certificate are running, which is the limit")
            self._checks[certificate] += 1
            try:
                status = self._get_status(await self._read_request(incoming))
            finally:
                self._checks[certificate] -= 1
                if not self._checks[certificate]:
                    del self._checks[certificate]
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no service of that name")
        answer: bytes = _STATUS(status=status).SerializeToString()
        return answer

    async def _watch(self, incoming: AsyncIterator[bytes], context: Any) -> None:
        async with self._rejections.abort_on_error("Health.Watch", context):
            identity = self._identify(context)
            with self._admission.admit(identity, stream=True):
                name = await self._read_request(incoming)
                last = None
                while True:
                    changed, status = self._changed, self._get_status(name)
                    if status is None:
                        status = _STATUS.SERVICE_UNKNOWN
                    if status != last:
                        async with asyncio.timeout(self._timeout):
                            await context.write(_STATUS(status=status).SerializeToString())
                        last = status
                    if self._is_stopping:
                        raise ConnectionLostError(
                            "the service is shutting down; connect to another instance, or retry later"
                        )
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), CERTIFICATE_RECHECK_SECONDS)
                    self._recheck(identity)

    async def _read_request(self, incoming: AsyncIterator[bytes]) -> str:
        async with asyncio.timeout(HEALTH_REQUEST_SECONDS):
            data = await anext(aiter(incoming), b"")
        if len(data) > MAX_HEALTH_REQUEST_BYTES:
            raise InvalidFactError(
                f"HealthCheckRequest is {len(data):,} bytes; the maximum is {MAX_HEALTH_REQUEST_BYTES:,}"
            )
        try:
            name: str = health_pb2.HealthCheckRequest.FromString(data).service
        except DecodeError as error:
            raise InvalidFactError(f"the request is not a valid HealthCheckRequest message: {error}") from error
        return name

    def _get_status(self, name: str) -> int | None:
        return self._status if name in self._names else None


T = TypeVar("T")


def as_async(store: Boundary | AsyncBoundary) -> AsyncBoundary:
    """Return *store* itself if it has the async variant, else an adapter with its own threads."""
    return store if isinstance(store, AsyncBoundary) else ThreadedBoundary(store)


class ThreadedBoundary(AsyncBoundary):
    """A sync store with a limited number of threads; further calls wait for a free one."""

    def __init__(self, store: Boundary, *, threads: int = 32) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ergon-facts")

    @property
    def epoch(self) -> str:
        return self._store.epoch

    @property
    def capabilities(self) -> BoundaryCapabilities:
        return self._store.capabilities

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        return self._store.listen(wake)

    async def _run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *args, **kwargs))

    async def append_facts_async(self, facts: Sequence[NewFact]) -> Sequence[AppendResult]:
        return await self._run(self._store.append_facts, facts)

    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[AppendResult]:
        return await self._run(self._store.forward_facts, facts)

    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return await self._run(self._store.get_fact, from_zone, message_id)

    async def fetch_facts_async(
        self, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        return await self._run(self._store.fetch_facts, reader, pair, limit, after=after, max_readers=max_readers)

    async def confirm_receipt_async(self, reader: str, pair: ZonePair, cursor: Cursor) -> None:
        await self._run(self._store.confirm_receipt, reader, pair, cursor)

    async def get_cursor_async(self, reader: str, pair: ZonePair) -> Cursor | None:
        return await self._run(self._store.get_cursor, reader, pair)

    async def last_offset_async(self, pair: ZonePair) -> Cursor | None:
        return await self._run(self._store.last_offset, pair)

    async def cursor_at_time_async(self, pair: ZonePair, unix_ms: int) -> Cursor | None:
        return await self._run(self._store.cursor_at_time, pair, unix_ms)

    async def retire_reader_async(self, reader: str, pair: ZonePair, *, by: str = "") -> bool:
        return await self._run(self._store.retire_reader, reader, pair, by=by)

    async def list_logs_async(self) -> Sequence[LogState]:
        return await self._run(self._store.list_logs)

    async def uploaded_bytes_async(self, bucket: str, key: str, expected: StoredArtifact, *, zone: str = "") -> int:
        return await self._run(self._store.uploaded_bytes, bucket, key, expected, zone=zone)

    async def stat_object_async(self, bucket: str, key: str, *, zone: str = "") -> ObjectInfo | None:
        return await self._run(self._store.stat_object, bucket, key, zone=zone)

    async def prune_async(self, before_unix_ms: int) -> PruneResult:
        return await self._run(self._store.prune, before_unix_ms)

    async def put_object_async(
        self,
        bucket: str,
        key: str,
        blob: AsyncBlobSource,
        *,
        expected: StoredArtifact | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> StoredArtifact:
        pieces = _PullBlob(blob) if isinstance(blob, AsyncIterable) else blob
        try:
            put = partial(self._store.put_object, expected=expected, begin=begin, zone=zone)
            return await self._run(put, bucket, key, pieces)
        finally:
            if isinstance(pieces, _PullBlob):
                pieces.cancel()

    async def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]:
        pieces = self._store.get_object(bucket, key, begin=begin, zone=zone)
        while (piece := await self._run(next, pieces, None)) is not None:
            yield piece


class _PullBlob:
    """The chunks of an async blob, for a thread that requests them one by one from the event loop."""

    def __init__(self, blob: AsyncIterable[bytes]) -> None:
        self._pieces = aiter(blob)
        self._loop = asyncio.get_running_loop()
        self._future: Future[bytes | None] | None = None
        self._is_cancelled = False
        # Without the lock, a cancellation during a request would miss the new future, which would never end.
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[bytes]:
        while (future := self._request_next()) is not None:
            try:
                piece = future.result()
            except CancelledError:
                break
            if piece is None:
                return
            yield piece
        raise ConnectionLostError("the uploading caller has disconnected")

    def _request_next(self) -> Future[bytes | None] | None:
        """Request the next chunk and return its future; None after the upload was cancelled."""
        with self._lock:
            if not self._is_cancelled:
                self._future = asyncio.run_coroutine_threadsafe(self._read_next(), self._loop)
                return self._future
            return None

    async def _read_next(self) -> bytes | None:
        return await anext(self._pieces, None)

    def cancel(self) -> None:
        """Cancel the upload: the thread gets no further chunk, and therefore stores nothing."""
        with self._lock:
            self._is_cancelled = True
            if self._future is not None:
                self._future.cancel()


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
        errors.ignore_broken_connections()
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
            raise ConfigurationError(f"cannot listen at {self.listen!r}; check that the port is free") from error
        try:
            service.connections.enforce_limits(self.port)
        except OSError as error:
            raise ConfigurationError(
                f"the connections of the service cannot be limited: {OPEN_FILES_PATH} cannot be read "
                f"({error.strerror}); mount /proc, to which {OPEN_FILES_PATH} refers on Linux"
            ) from error
        await self._server.start()
        self._health_task = asyncio.create_task(self._check_health())
        self._connections_task = asyncio.create_task(service.connections.watch(self.port))
        return self.port

    async def _check_health(self) -> None:
        """Report through the health service whether the store answers; recheck open connections at the same time."""
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
