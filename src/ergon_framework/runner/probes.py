"""Probes: liveness and readiness of the process over HTTP, or in a file.

The process also serves its metrics over HTTP in the Prometheus format.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner.health import ProcessHealth
from ergon_framework.runner.settings import ProbeSettings
from ergon_framework.telemetry.exposition import CONTENT_TYPE, render_prometheus
from ergon_framework.telemetry.metrics import Numbers, snapshot

#: Seconds for a request from its connection to its end, then for its answer, and the maximum number of connections.
REQUEST_TIMEOUT_SECONDS = 2.0
ANSWER_TIMEOUT_SECONDS = 10.0
MAX_CONNECTIONS = 512
#: Maximum bytes of a request line, and maximum number of header lines.
MAX_REQUEST_LINE_BYTES = 8 * 1024
MAX_HEADER_LINES = 100

_HEADERS_END = b"\r\n\r\n"

HealthCheck = Callable[[], ProcessHealth]
ReadMetrics = Callable[[], Numbers]


@contextmanager
def serve_probes(settings: ProbeSettings, check: HealthCheck, read: ReadMetrics = snapshot) -> Iterator[int | None]:
    """Serve probes while the context lasts; yield the port, if there is one. *read* returns the metrics."""
    with ExitStack() as stack:
        port = None
        if settings.port is not None:
            server = ProbeServer(settings.host, settings.port, check, read)
            port = server.port
            server.start()
            stack.callback(server.stop)
        if settings.file is not None:
            file = ProbeFile(Path(settings.file), settings.interval, check)
            file.start()
            # Stopped first: a file that stays behind would be trusted.
            stack.callback(file.stop)
        yield port


class ProbeFile:
    """A file with the health, for probes that are commands: rewritten at every interval, removed at the end.

    Its age matters as much as its content: a process that cannot write any more leaves an old file behind.
    """

    def __init__(self, path: Path, interval: float, check: HealthCheck) -> None:
        self._path = path
        self._interval = interval
        self._check = check
        self._stopped = Event()
        self._thread = Thread(target=self._rewrite_repeatedly, name="ergon-probe-file", daemon=True)

    def start(self) -> None:
        try:
            self._write()
        except OSError as error:
            raise ConfigurationError(f"the probe file {self._path} cannot be written: {error.strerror}") from error
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(REQUEST_TIMEOUT_SECONDS)
        self._path.unlink(missing_ok=True)

    def _rewrite_repeatedly(self) -> None:
        while not self._stopped.wait(self._interval):
            # While a disk is full, the file becomes old, as it should be then.
            with suppress(OSError):
                self._write()

    def _write(self) -> None:
        content = self._check().to_dict() | {"pid": os.getpid(), "at": time.time()}
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        # Atomic: no reader sees a partial file.
        temporary.replace(self._path)


class ProbeServer:
    """Serves /live, /ready and /metrics over HTTP, on an event loop in a separate thread.

    A caller has REQUEST_TIMEOUT_SECONDS for its whole request. At most MAX_CONNECTIONS are open, and a new one replaces
    the oldest: slow callers delay no probe, however many they are. /metrics is rendered in another thread, one request
    after the other, so that it delays no probe either.
    """

    def __init__(self, host: str, port: int, check: HealthCheck, read: ReadMetrics) -> None:
        self._check = check
        self._read = read
        self._connections: dict[asyncio.StreamWriter, None] = {}
        self._metrics_lock = asyncio.Lock()
        self._stopped = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="ergon-probe", daemon=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except (OSError, OverflowError) as error:
            self._loop.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigurationError(
                f"the probes cannot listen on {host}:{port}: {reason}; choose another run.probes.port"
            ) from error
        self.port = int(self._listener.getsockname()[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(REQUEST_TIMEOUT_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._handle_connection, sock=self._listener, backlog=MAX_CONNECTIONS, limit=MAX_REQUEST_LINE_BYTES
        )
        await self._stopped.wait()
        server.close()
        for writer in self._connections:
            writer.transport.abort()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = None
        if len(self._connections) > MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        try:
            # No answer if the caller has disconnected or is too slow, or if a check fails.
            with suppress(Exception):
                async with asyncio.timeout(REQUEST_TIMEOUT_SECONDS) as limit:
                    writer.write(await self._answer_request(reader, limit))
                    writer.write_eof()
                    # The rest of a rejected request is read, or closing would discard the answer.
                    while await reader.read(MAX_REQUEST_LINE_BYTES):
                        pass
        finally:
            self._connections.pop(writer, None)
            writer.transport.abort()

    async def _answer_request(self, reader: asyncio.StreamReader, limit: asyncio.Timeout) -> bytes:
        try:
            method, path = await _read_request(reader)
        except asyncio.LimitOverrunError:
            return _json_response(HTTPStatus.REQUEST_URI_TOO_LONG, {"limit": MAX_REQUEST_LINE_BYTES})
        if method not in ("GET", "HEAD"):
            return _json_response(HTTPStatus.NOT_IMPLEMENTED, {"known": ["GET", "HEAD"]})
        limit.reschedule(self._loop.time() + ANSWER_TIMEOUT_SECONDS)
        response = await self._answer_path(path)
        return response if method == "GET" else response.partition(_HEADERS_END)[0] + _HEADERS_END

    async def _answer_path(self, path: str) -> bytes:
        if path == "/metrics":
            return await self._run_in_thread(self._render_metrics)
        health = self._check()
        is_good = {"/live": health.live, "/ready": health.ready}.get(path)
        if is_good is None:
            return _json_response(HTTPStatus.NOT_FOUND, {"known": ["/live", "/ready", "/metrics"]})
        return _json_response(HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE, health.to_dict())

    async def _run_in_thread(self, work: Callable[[], bytes]) -> bytes:
        """Run *work* in a thread, one call after the other; a call that never returns blocks only other such calls."""
        await self._metrics_lock.acquire()
        answer: asyncio.Future[bytes] = self._loop.create_future()

        def finish(result: bytes | None) -> None:
            self._metrics_lock.release()
            if answer.done():
                return
            if result is None:
                answer.set_exception(ConnectionError("the metrics cannot be read"))
            else:
                answer.set_result(result)

        def run() -> None:
            result = None
            with suppress(Exception):
                result = work()
            # The loop may be closed: the process is ending.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(finish, result)

        # A daemon thread, so that it does not delay the exit of the process.
        Thread(target=run, name="ergon-probe-metrics", daemon=True).start()
        return await answer

    def _render_metrics(self) -> bytes:
        try:
            return _http_response(HTTPStatus.OK, CONTENT_TYPE, render_prometheus(self._read()))
        except ConfigurationError as error:
            return _json_response(HTTPStatus.NOT_IMPLEMENTED, {"missing": str(error)})


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Read the method and the path of a request, and all of its headers."""
    first = await reader.readuntil(b"\n")
    for _ in range(MAX_HEADER_LINES):
        if not (await reader.readuntil(b"\n")).strip():
            method, _, rest = first.decode("latin-1").partition(" ")
            return method, rest.partition(" ")[0].partition("?")[0]
    raise asyncio.LimitOverrunError("too many headers", 0)


def _json_response(status: HTTPStatus, content: dict[str, Any]) -> bytes:
    return _http_response(status, "application/json", json.dumps(content).encode())


def _http_response(status: HTTPStatus, content_type: str, body: bytes) -> bytes:
    lines = (
        f"HTTP/1.0 {status.value} {status.phrase}",
        "Server: ergon",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(lines).encode() + _HEADERS_END + body
