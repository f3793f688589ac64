"""HealthService: grpc.health.v1 for a facts service. A check is answered outside of the limits of calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.errors import InvalidFactError, LimitExceeded
from ergon_framework.facts.service.admission import Admission
from ergon_framework.facts.service.identity import Identity
from ergon_framework.facts.service.refusals import Refusals

NAME: Final = "grpc.health.v1.Health"
#: Checks at once with one certificate, how long each may take to send its request, and the most bytes of it.
MAX_CHECKS: Final = 8
REQUEST_SECONDS: Final = 2.0
MAX_REQUEST: Final = 1024
#: Seconds after which the certificate of a caller that watches is checked again.
RECHECK_SECONDS: Final = 1.0

_STATUS: Final = health_pb2.HealthCheckResponse


class HealthService:
    """Says whether the services *names* can be used. For one event loop.

    Check is answered to every certificate that the handshake has accepted, also to one that names no zone: probes have
    such ones. Watch lasts, so it takes an identity and counts as a stream of it.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        identify: Callable[[Any], Identity],
        recognise: Callable[[Any], None],
        recheck: Callable[[Identity], None],
        admission: Admission,
        refusals: Refusals,
        timeout: float,
    ) -> None:
        self._names = names
        self._identify = identify
        self._recognise = recognise
        self._recheck = recheck
        self._admission = admission
        self._refusals = refusals
        self._timeout = timeout
        self._status = _STATUS.SERVING
        self._leaving = False
        self._changed = asyncio.Event()
        self._checks: Counter[bytes] = Counter()

    def set(self, *, serving: bool) -> None:
        """Say from now on whether the service can be used."""
        self._tell(_STATUS.SERVING if serving else _STATUS.NOT_SERVING)

    def leave(self) -> None:
        """Say that it cannot be used, and end the streams of those that watch."""
        self._leaving = True
        self._tell(_STATUS.NOT_SERVING)

    def _tell(self, status: int) -> None:
        self._status = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def handler(self) -> grpc.GenericRpcHandler:
        """Both calls, registered as taking a stream: a caller that sends no request is known while it is waited for."""
        handlers = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }
        return grpc.method_handlers_generic_handler(NAME, handlers)

    async def _check(self, incoming: AsyncIterator[bytes], context: Any) -> bytes:
        async with self._refusals.told("Health.Check", context):
            self._recognise(context)
            # By the certificate as it is: it may name no zone.
            certificate = context.auth_context().get("x509_pem_cert", [b""])[0]
            if self._checks[certificate] >= MAX_CHECKS:
                raise LimitExceeded(f"there are {MAX_CHECKS} checks at once with this certificate, which is the limit")
            self._checks[certificate] += 1
            try:
                status = self._of(await self._request(incoming))
            finally:
                self._checks[certificate] -= 1
                if not self._checks[certificate]:
                    del self._checks[certificate]
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no service of that name")
        answer: bytes = _STATUS(status=status).SerializeToString()
        return answer

    async def _watch(self, incoming: AsyncIterator[bytes], context: Any) -> None:
        async with self._refusals.told("Health.Watch", context):
            who = self._identify(context)
            with self._admission.admit(who, stream=True):
                name = await self._request(incoming)
                last = None
                while True:
                    changed, status = self._changed, self._of(name)
                    if status is None:
                        status = _STATUS.SERVICE_UNKNOWN
                    if status != last:
                        async with asyncio.timeout(self._timeout):
                            await context.write(_STATUS(status=status).SerializeToString())
                        last = status
                    if self._leaving:
                        raise ConnectionLost("the service is being stopped; watch another one, or again later")
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), RECHECK_SECONDS)
                    self._recheck(who)

    async def _request(self, incoming: AsyncIterator[bytes]) -> str:
        async with asyncio.timeout(REQUEST_SECONDS):
            data = await anext(aiter(incoming), b"")
        if len(data) > MAX_REQUEST:
            raise InvalidFactError(f"a HealthCheckRequest has at most {MAX_REQUEST:,} bytes, not {len(data):,}")
        try:
            name: str = health_pb2.HealthCheckRequest.FromString(data).service
        except DecodeError as error:
            raise InvalidFactError(f"the request is no HealthCheckRequest: {error}") from error
        return name

    def _of(self, name: str) -> int | None:
        return self._status if name in self._names else None
