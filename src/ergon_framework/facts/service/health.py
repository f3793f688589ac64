"""HealthService: grpc.health.v1 for a facts service. Checks do not count towards the limits of calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.errors import InvalidFactError, LimitExceeded
from ergon_framework.facts.service.admission import CallAdmission
from ergon_framework.facts.service.identity import Identity
from ergon_framework.facts.service.refusals import RejectionHandler

SERVICE_NAME: Final = "grpc.health.v1.Health"
#: Concurrent checks with one certificate, seconds that each has to send its request, and maximum bytes of the request.
MAX_CHECKS: Final = 8
REQUEST_SECONDS: Final = 2.0
MAX_REQUEST_BYTES: Final = 1024
#: Seconds after which the certificate of a watching caller is checked again.
RECHECK_SECONDS: Final = 1.0

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
        return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)

    async def _check(self, incoming: AsyncIterator[bytes], context: Any) -> bytes:
        async with self._rejections.abort_on_error("Health.Check", context):
            self._record_identity(context)
            # Counted by the certificate itself, because it may name no zone.
            certificate = context.auth_context().get("x509_pem_cert", [b""])[0]
            if self._checks[certificate] >= MAX_CHECKS:
                raise LimitExceeded(f"there are {MAX_CHECKS} checks at once with this certificate, which is the limit")
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
                        raise ConnectionLostError("the service is being stopped; watch another one, or again later")
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), RECHECK_SECONDS)
                    self._recheck(identity)

    async def _read_request(self, incoming: AsyncIterator[bytes]) -> str:
        async with asyncio.timeout(REQUEST_SECONDS):
            data = await anext(aiter(incoming), b"")
        if len(data) > MAX_REQUEST_BYTES:
            raise InvalidFactError(f"a HealthCheckRequest has at most {MAX_REQUEST_BYTES:,} bytes, not {len(data):,}")
        try:
            name: str = health_pb2.HealthCheckRequest.FromString(data).service
        except DecodeError as error:
            raise InvalidFactError(f"the request is no HealthCheckRequest: {error}") from error
        return name

    def _get_status(self, name: str) -> int | None:
        return self._status if name in self._names else None
