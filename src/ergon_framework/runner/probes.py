"""Probes: who asks whether the process is live or ready gets an answer over HTTP, or finds it in a file.

Who asks what it has counted gets an answer over HTTP too, as Prometheus reads it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore, Event, Thread
from typing import Any

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner.health import Health
from ergon_framework.runner.settings import ProbeSettings
from ergon_framework.telemetry.exposition import CONTENT_TYPE, exposed
from ergon_framework.telemetry.metrics import Numbers, snapshot

#: Seconds after which a caller that says nothing is left, and how many may call at once.
PATIENCE = 2.0
CALLERS = 16

Check = Callable[[], Health]
Read = Callable[[], Numbers]


@contextmanager
def probed(settings: ProbeSettings, check: Check, read: Read = snapshot) -> Iterator[int | None]:
    """Answer for as long as this lasts; the port that does, if there is one. *read* is what /metrics tells."""
    with ExitStack() as stack:
        port = None
        if settings.port is not None:
            server = _server(settings.host, settings.port, check, read)
            port = int(server.server_address[1])
            Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="ergon-probe", daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
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
        self._thread.join(PATIENCE)
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


def _server(host: str, port: int, check: Check, read: Read) -> ThreadingHTTPServer:
    try:
        return _Server((host, port), _handler(check, read))
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(
            f"the probes cannot listen on {host}:{port}: {said}; choose another run.probes.port"
        ) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        # Who calls is answered in a moment; more than that at once is no probe.
        self._callers = BoundedSemaphore(CALLERS)
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._callers.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._callers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is no event."""


class _Answering(BaseHTTPRequestHandler):
    """Answers with what it is given, and says nothing of itself."""

    def version_string(self) -> str:
        return "ergon"

    def answer(self, status: HTTPStatus, told: dict[str, Any]) -> None:
        self.send(status, "application/json", json.dumps(told).encode())

    def send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard library's name
        """A probe every second is no event."""


def _handler(check: Check, read: Read) -> type[BaseHTTPRequestHandler]:
    class Answering(_Answering):
        timeout = PATIENCE

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._count()
                return
            health = check()
            good = {"/live": health.live, "/ready": health.ready}.get(path)
            if good is None:
                self.answer(HTTPStatus.NOT_FOUND, {"known": ["/live", "/ready", "/metrics"]})
                return
            self.answer(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, health.told())

        def do_HEAD(self) -> None:
            self.do_GET()

        def _count(self) -> None:
            try:
                text = exposed(read())
            except ConfigurationError as error:
                self.answer(HTTPStatus.NOT_IMPLEMENTED, {"missing": str(error)})
                return
            self.send(HTTPStatus.OK, CONTENT_TYPE, text)

    return Answering
