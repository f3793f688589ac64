"""A fake provider: a real server on this machine that misbehaves by a script, and providers that call it.

A provider is the framework's client of a third-party API, with retries, quota, circuit breaker and idempotency keys.
The fake exercises the complete path without external calls: sockets, a real client, statuses, hangs.
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

from ergon_framework.providers import error_mapping
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.error_mapping import error_for_status
from ergon_framework.providers.errors import ProviderResponseFormatError
from ergon_framework.providers.models import ProviderExecutionContext, ProviderReply
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.state import AsyncProviderState, ProviderState

#: Maximum number of requests and of keys that the server remembers.
MAX_REMEMBERED: Final = 10_000
#: Seconds that a closing server waits for its last responses.
CLOSE_TIMEOUT_SECONDS: Final = 5.0
#: Maximum number of bytes read of a response.
MAX_RESPONSE_BYTES: Final = 1_000_000
_HOST: Final = "127.0.0.1"
#: A socket option that makes a close reset the connection (RST) instead of ending it cleanly.
_NO_LINGER: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """The server's behaviour for one request.

    It waits *latency* seconds, then hangs until it is closed, resets the connection, or responds with
    *status* and *body*, or with *garbage* instead of the body; *slow* seconds pass between the first and the
    remaining bytes. *wait* is the Retry-After in seconds, sent as a date if *as_date* is set.
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

    def format_retry_after(self, now: float) -> str | None:
        """Return the value of the Retry-After header."""
        if self.wait is None:
            return None
        return formatdate(now + self.wait, usegmt=True) if self.as_date else f"{self.wait:g}"


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One received request."""

    operation: str
    payload: Any
    idempotency_key: str | None
    correlation_id: str | None
    tenant_id: str | None


class FakeProviderServer:
    """A local HTTP server that applies its script's n-th behaviour to the n-th request.

    Requests after the script get the behaviour *then*. A response without a configured body is
    ``{"operation": ..., "received": ...}``. The server is a context manager; ``close`` ends every hang and closes every
    socket.
    """

    def __init__(self, *script: Behaviour, then: Behaviour | None = None) -> None:
        self._script = script
        self._then = then or Behaviour()
        self._lock = threading.Condition()
        self._closed = threading.Event()
        #: Number of connections that a thread of the server handles now.
        self._active_count = 0
        self._requests: deque[ReceivedRequest] = deque(maxlen=MAX_REMEMBERED)
        #: Number of received requests.
        self.calls = 0
        #: Number of requests for each idempotency key.
        self.keys: Counter[str] = Counter()
        self._server = _FakeHttpServer(self)
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
    def requests(self) -> list[ReceivedRequest]:
        """The last requests, the oldest first."""
        with self._lock:
            return list(self._requests)

    def close(self) -> None:
        """End every hang, wait for the last responses, close every socket."""
        self._closed.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        with self._lock:
            self._lock.wait_for(lambda: self._active_count == 0, timeout=CLOSE_TIMEOUT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- called by the server's threads ---------------------------------------------------------------

    def record_request(self, received: ReceivedRequest) -> Behaviour:
        """Record a request and return the behaviour for it."""
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            self._requests.append(received)
            key = received.idempotency_key
            if key is not None and (key in self.keys or len(self.keys) < MAX_REMEMBERED):
                self.keys[key] += 1
        return self._script[number] if number < len(self._script) else self._then

    def change_active_count(self, change: int) -> None:
        with self._lock:
            self._active_count += change
            self._lock.notify_all()

    def pause(self, seconds: float | None) -> None:
        """Wait for *seconds*, or until the server is closed."""
        self._closed.wait(seconds)


class _FakeHttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: FakeProviderServer) -> None:
        self.upstream = upstream
        super().__init__((_HOST, 0), _FakeRequestHandler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.upstream.change_active_count(1)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.upstream.change_active_count(-1)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: clients that disconnect early are expected."""


class _FakeRequestHandler(BaseHTTPRequestHandler):
    server: _FakeHttpServer

    def do_POST(self) -> None:
        upstream = self.server.upstream
        received = self._read_request()
        if received is None:
            return
        behaviour = upstream.record_request(received)
        if behaviour.latency:
            upstream.pause(behaviour.latency)
        if behaviour.hang:
            upstream.pause(None)
            return
        if behaviour.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.connection.close()
            return
        self._send_behaviour(behaviour, received)

    def _read_request(self) -> ReceivedRequest | None:
        """Read the request; return None if the client disconnected before its last byte, because no call was made."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            return None
        return ReceivedRequest(
            self.path.lstrip("/"),
            json.loads(body) if body else None,
            self.headers.get("Idempotency-Key"),
            self.headers.get("X-Correlation-Id"),
            self.headers.get("X-Tenant-Id"),
        )

    def _send_behaviour(self, behaviour: Behaviour, received: ReceivedRequest) -> None:
        default_body = {"operation": received.operation, "received": received.payload}
        body = b"<html>a proxy" if behaviour.garbage else json.dumps(behaviour.body or default_body).encode()
        self.send_response(behaviour.status)
        self.send_header("Content-Length", str(len(body)))
        retry_after_value = behaviour.format_retry_after(time.time())
        if retry_after_value is not None:
            self.send_header("Retry-After", retry_after_value)
        self.end_headers()
        if behaviour.slow:
            self.wfile.write(body[:1])
            self.wfile.flush()
            self.server.upstream.pause(behaviour.slow)
            body = body[1:]
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard signature
        """Print nothing."""


class FakeProvider(ProviderBase):
    """A provider that calls the fake server through ``http.client``; *without_timeout* disables its timeout."""

    provider_name = "synthetic"
    capability = "echo"

    def __init__(
        self,
        upstream: FakeProviderServer,
        *,
        state_store: ProviderState | None = None,
        policy: ProviderPolicy | None = None,
        without_timeout: bool = False,
    ) -> None:
        super().__init__(state_store=state_store, policy=policy)
        self._address = upstream.address
        self._without_timeout = without_timeout

    def _execute_impl(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,  # noqa: ARG002 - not sent to the server
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> ProviderReply:
        timeout = None if self._without_timeout else context.timeout
        connection = http.client.HTTPConnection(*self._address, timeout=timeout)
        try:
            connection.request("POST", f"/{operation}", json.dumps(payload), _build_headers(tenant_id, context))
            # Without keep-alive the response owns the socket, so it is closed separately.
            with connection.getresponse() as response:
                return _to_reply(response.status, response.getheader("Retry-After"), response.read(MAX_RESPONSE_BYTES))
        finally:
            connection.close()


class AsyncFakeProvider(AsyncProviderBase):
    """A provider that calls the fake server through asyncio streams."""

    provider_name = "synthetic"
    capability = "echo"

    def __init__(
        self,
        upstream: FakeProviderServer,
        *,
        state_store: AsyncProviderState | None = None,
        policy: ProviderPolicy | None = None,
    ) -> None:
        super().__init__(state_store=state_store, policy=policy)
        self._address = upstream.address

    async def _execute_impl(
        self,
        *,
        tenant_id: str,
        campaign_id: str | None,  # noqa: ARG002 - not sent to the server
        operation: str,
        payload: dict[str, Any],
        context: ProviderExecutionContext,
    ) -> ProviderReply:
        body = json.dumps(payload).encode()
        headers = _build_headers(tenant_id, context) | {"Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(f"POST /{operation} HTTP/1.0\r\n{head}\r\n".encode() + body)
            await writer.drain()
            status, response_headers = await _read_head(reader)
            response_body = await reader.readexactly(
                min(int(response_headers.get("content-length", 0)), MAX_RESPONSE_BYTES)
            )
            return _to_reply(status, response_headers.get("retry-after"), response_body)
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split(" ")[1]), {name.lower(): value for name, value in headers.items()}


def _build_headers(tenant_id: str, context: ProviderExecutionContext) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-Tenant-Id": tenant_id}
    if context.correlation_id is not None:
        headers["X-Correlation-Id"] = context.correlation_id
    if context.idempotency_key is not None:
        headers["Idempotency-Key"] = context.idempotency_key
    return headers


def _to_reply(status: int, retry_after_value: str | None, body: bytes) -> ProviderReply:
    if not 200 <= status < 300:  # noqa: PLR2004 - the success statuses
        raise error_for_status(status, retry_after=error_mapping.parse_retry_after(retry_after_value, now=time.time()))
    try:
        value = json.loads(body)
    except ValueError as error:
        raise ProviderResponseFormatError("the response is not JSON", http_status=status) from error
    return ProviderReply(value, status)
