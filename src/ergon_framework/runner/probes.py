"""Probes: who asks whether the process is live or ready gets an answer over HTTP, or finds it in a file.

Who asks what it has counted gets an answer over HTTP too, as Prometheus reads it.
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
from ergon_framework.runner.health import Health
from ergon_framework.runner.settings import ProbeSettings
from ergon_framework.telemetry.exposition import CONTENT_TYPE, exposed
from ergon_framework.telemetry.metrics import Numbers, snapshot

#: Seconds that a request may take from its connection to its end, then its answer, and how many callers at once.
TIME_LIMIT = 2.0
ANSWER_LIMIT = 10.0
PLACES = 512
#: Bytes of a line of a request, and lines of its headers.
MAX_LINE = 8 * 1024
MAX_HEADERS = 100

_END = b"\r\n\r\n"

Check = Callable[[], Health]
Read = Callable[[], Numbers]


@contextmanager
def probed(settings: ProbeSettings, check: Check, read: Read = snapshot) -> Iterator[int | None]:
    """Answer for as long as this lasts; the port that does, if there is one. *read* is what /metrics tells."""
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
            # The first to go: a file that stays behind would be believed.
            stack.callback(file.stop)
        yield port


class ProbeFile:
    """A file that says how it is, for probes that are commands: written anew at every look, gone at the end.

    Its age matters as much as its content: a process that cannot write any more leaves an old one behind.
    """

    def __init__(self, path: Path, interval: float, check: Check) -> None:
        self._path = path
        self._interval = interval
        self._check = check
        self._over = Event()
        self._thread = Thread(target=self._look, name="ergon-probe-file", daemon=True)

    def start(self) -> None:
        try:
            self._write()
        except OSError as error:
            raise ConfigurationError(f"the probe file {self._path} cannot be written: {error.strerror}") from error
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(TIME_LIMIT)
        self._path.unlink(missing_ok=True)

    def _look(self) -> None:
        while not self._over.wait(self._interval):
            # A disk that is full for a while makes the file old, which is what it then should be.
            with suppress(OSError):
                self._write()

    def _write(self) -> None:
        told = self._check().told() | {"pid": os.getpid(), "at": time.time()}
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        beside.write_text(json.dumps(told) + "\n", encoding="utf-8")
        # In one step: nobody reads half of it.
        beside.replace(self._path)


class ProbeServer:
    """Answers /live, /ready and /metrics over HTTP, on an event loop in a thread of its own.

    A caller has TIME_LIMIT seconds for all of its request. There are PLACES for callers, and a new one takes the place
    of the oldest: slow callers delay no probe, however many they are. /metrics is put together in another thread, one
    after the other, so that it delays no probe either.
    """

    def __init__(self, host: str, port: int, check: Check, read: Read) -> None:
        self._check = check
        self._read = read
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._metrics = asyncio.Lock()
        self._over = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="ergon-probe", daemon=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=PLACES)
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
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(TIME_LIMIT)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._listener, backlog=PLACES, limit=MAX_LINE)
        await self._over.wait()
        server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > PLACES:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            # A caller that left or was too slow, or a check that failed: there is no answer.
            with suppress(Exception):
                async with asyncio.timeout(TIME_LIMIT) as limit:
                    writer.write(await self._response(reader, limit))
                    writer.write_eof()
                    # What is left of a request that was refused is read, or closing would discard the answer.
                    while await reader.read(MAX_LINE):
                        pass
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _response(self, reader: asyncio.StreamReader, limit: asyncio.Timeout) -> bytes:
        try:
            method, path = await _request(reader)
        except asyncio.LimitOverrunError:
            return _written(HTTPStatus.REQUEST_URI_TOO_LONG, {"limit": MAX_LINE})
        if method not in ("GET", "HEAD"):
            return _written(HTTPStatus.NOT_IMPLEMENTED, {"known": ["GET", "HEAD"]})
        limit.reschedule(self._loop.time() + ANSWER_LIMIT)
        response = await self._content(path)
        return response if method == "GET" else response.partition(_END)[0] + _END

    async def _content(self, path: str) -> bytes:
        if path == "/metrics":
            return await self._in_thread(self._exposed)
        health = self._check()
        good = {"/live": health.live, "/ready": health.ready}.get(path)
        if good is None:
            return _written(HTTPStatus.NOT_FOUND, {"known": ["/live", "/ready", "/metrics"]})
        return _written(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, health.told())

    async def _in_thread(self, work: Callable[[], bytes]) -> bytes:
        """Run *work* in a thread, one after the other; one that never returns keeps only others of its kind."""
        await self._metrics.acquire()
        answer: asyncio.Future[bytes] = self._loop.create_future()

        def finish(result: bytes | None) -> None:
            self._metrics.release()
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

        # A daemon: it must not keep a process that ends.
        Thread(target=run, name="ergon-probe-metrics", daemon=True).start()
        return await answer

    def _exposed(self) -> bytes:
        try:
            return _response(HTTPStatus.OK, CONTENT_TYPE, exposed(self._read()))
        except ConfigurationError as error:
            return _written(HTTPStatus.NOT_IMPLEMENTED, {"missing": str(error)})


async def _request(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Read the method and the path of a request, and its headers up to their end."""
    first = await reader.readuntil(b"\n")
    for _ in range(MAX_HEADERS):
        if not (await reader.readuntil(b"\n")).strip():
            method, _, rest = first.decode("latin-1").partition(" ")
            return method, rest.partition(" ")[0].partition("?")[0]
    raise asyncio.LimitOverrunError("too many headers", 0)


def _written(status: HTTPStatus, content: dict[str, Any]) -> bytes:
    return _response(status, "application/json", json.dumps(content).encode())


def _response(status: HTTPStatus, kind: str, body: bytes) -> bytes:
    lines = (
        f"HTTP/1.0 {status.value} {status.phrase}",
        "Server: ergon",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(lines).encode() + _END + body
