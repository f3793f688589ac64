"""The synthetic provider: a real server on this machine that misbehaves by a script, and providers that call it.

It exercises the whole path without calling anybody outside: sockets, a real client, statuses, hangs.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import struct
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from ergon_framework.providers import retry_after
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.books import AsyncBooks, Books
from ergon_framework.providers.errors import ProviderResponseFormatError
from ergon_framework.providers.execution import ProviderExecutionContext, Reply
from ergon_framework.providers.mapping import for_status
from ergon_framework.providers.policy import ProviderPolicy

#: The most requests and keys that an upstream remembers.
REMEMBERED: Final = 10_000
#: Seconds that an upstream which is closed waits for its last answers.
PATIENCE: Final = 5.0
#: The most bytes of an answer that are read.
LARGEST: Final = 1_000_000
_HOST: Final = "127.0.0.1"
_LINGER_NOT: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What the upstream does with one request.

    It waits *latency* seconds, then hangs until it is closed, resets the connection, or answers with
    *status* and *body*, or with *garbage* in its place; *slow* seconds pass between its first byte and
    its last. *wait* is the Retry-After in seconds, sent as a date if *as_date* is set.
    """

    status: int = 200
    body: Any = None
    latency: float = 0.0
    hang: bool = False
    reset: bool = False
    garbage: bool = False
    slow: float = 0.0
    wait: float | None = None
    as_date: bool = False

    def retry_after(self, now: float) -> str | None:
        """The header's value."""
        if self.wait is None:
            return None
        return formatdate(now + self.wait, usegmt=True) if self.as_date else f"{self.wait:g}"


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it arrived."""

    operation: str
    payload: Any
    idempotency_key: str | None
    correlation_id: str | None
    tenant_id: str | None


class SyntheticUpstream:
    """A local HTTP server whose n-th request meets the n-th behaviour of its script, and *then* afterwards.

    Without a body an answer is ``{"operation": ..., "received": ...}``. It is a context manager, and
    ``close`` ends every hang and closes every socket.
    """

    def __init__(self, *script: Behaviour, then: Behaviour | None = None) -> None:
        self._script = script
        self._then = then or Behaviour()
        self._lock = threading.Condition()
        self._over = threading.Event()
        self._answering = 0
        self._requests: deque[Received] = deque(maxlen=REMEMBERED)
        #: How many requests have arrived.
        self.calls = 0
        #: How often each key has arrived.
        self.keys: Counter[str] = Counter()
        self._server = _Server(self)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="ergon-synthetic", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return _HOST, self.port

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def requests(self) -> list[Received]:
        """The last requests, the oldest first."""
        with self._lock:
            return list(self._requests)

    def close(self) -> None:
        """End every hang, wait for the last answers, close every socket."""
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        with self._lock:
            self._lock.wait_for(lambda: self._answering == 0, timeout=PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what its threads call ----------------------------------------------------------------------

    def arrived(self, received: Received) -> Behaviour:
        """Note a request; what is to be done with it."""
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            self._requests.append(received)
            key = received.idempotency_key
            if key is not None and (key in self.keys or len(self.keys) < REMEMBERED):
                self.keys[key] += 1
        return self._script[number] if number < len(self._script) else self._then

    def answering(self, change: int) -> None:
        with self._lock:
            self._answering += change
            self._lock.notify_all()

    def pause(self, seconds: float | None) -> None:
        """Wait, but no longer than until the end."""
        self._over.wait(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: SyntheticUpstream) -> None:
        self.upstream = upstream
        super().__init__((_HOST, 0), _Handler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.upstream.answering(1)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.upstream.answering(-1)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left in the middle is what this is for."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        upstream = self.server.upstream
        received = self._received()
        if received is None:
            return
        behaviour = upstream.arrived(received)
        if behaviour.latency:
            upstream.pause(behaviour.latency)
        if behaviour.hang:
            upstream.pause(None)
            return
        if behaviour.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            self.connection.close()
            return
        self._answer(behaviour, received)

    def _received(self) -> Received | None:
        """The request; nothing where its sender was gone before its last byte, because then nobody has called."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            return None
        return Received(
            self.path.lstrip("/"),
            json.loads(body) if body else None,
            self.headers.get("Idempotency-Key"),
            self.headers.get("X-Correlation-Id"),
            self.headers.get("X-Tenant-Id"),
        )

    def _answer(self, behaviour: Behaviour, received: Received) -> None:
        told = {"operation": received.operation, "received": received.payload}
        body = b"<html>a proxy" if behaviour.garbage else json.dumps(behaviour.body or told).encode()
        self.send_response(behaviour.status)
        self.send_header("Content-Length", str(len(body)))
        wait = behaviour.retry_after(time.time())
        if wait is not None:
            self.send_header("Retry-After", wait)
        self.end_headers()
        if behaviour.slow:
            self.wfile.write(body[:1])
            self.wfile.flush()
            self.server.upstream.pause(behaviour.slow)
            body = body[1:]
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard signature
        """Nothing is printed."""


class SyntheticProvider(ProviderBase):
    """Calls an upstream through ``http.client``; with *patient* the client itself never gives up."""

    provider_name = "synthetic"
    capability = "echo"

    def __init__(
        self,
        upstream: SyntheticUpstream,
        *,
        books: Books | None = None,
        policy: ProviderPolicy | None = None,
        patient: bool = False,
    ) -> None:
        super().__init__(books=books, policy=policy)
        self._address = upstream.address
        self._patient = patient

    def _execute_impl(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,  # noqa: ARG002 - no part of this wire
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> Reply:
        timeout = None if self._patient else context.timeout
        line = http.client.HTTPConnection(*self._address, timeout=timeout)
        try:
            line.request("POST", f"/{operation}", json.dumps(payload), _headers(tenant_id, context))
            # It owns the socket where no second request may follow, so it is closed on its own.
            with line.getresponse() as response:
                return _judged(response.status, response.getheader("Retry-After"), response.read(LARGEST))
        finally:
            line.close()


class AsyncSyntheticProvider(AsyncProviderBase):
    """Calls an upstream through asyncio's streams."""

    provider_name = "synthetic"
    capability = "echo"

    def __init__(
        self, upstream: SyntheticUpstream, *, books: AsyncBooks | None = None, policy: ProviderPolicy | None = None
    ) -> None:
        super().__init__(books=books, policy=policy)
        self._address = upstream.address

    async def _execute_impl(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,  # noqa: ARG002 - no part of this wire
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> Reply:
        body = json.dumps(payload).encode()
        headers = _headers(tenant_id, context) | {"Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(f"POST /{operation} HTTP/1.0\r\n{head}\r\n".encode() + body)
            await writer.drain()
            status, found = await _head(reader)
            answer = await reader.readexactly(min(int(found.get("content-length", 0)), LARGEST))
            return _judged(status, found.get("retry-after"), answer)
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split(" ")[1]), {name.lower(): value for name, value in headers.items()}


def _headers(tenant_id: str, context: ProviderExecutionContext) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-Tenant-Id": tenant_id}
    if context.correlation_id is not None:
        headers["X-Correlation-Id"] = context.correlation_id
    if context.idempotency_key is not None:
        headers["Idempotency-Key"] = context.idempotency_key
    return headers


def _judged(status: int, wait: str | None, body: bytes) -> Reply:
    if not 200 <= status < 300:  # noqa: PLR2004 - what is a success
        raise for_status(status, retry_after=retry_after.seconds(wait, now=time.time()))
    try:
        value = json.loads(body)
    except ValueError as error:
        raise ProviderResponseFormatError("the answer is no JSON", http_status=status) from error
    return Reply(value, status)
