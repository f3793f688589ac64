"""Probes: liveness and readiness of the process over HTTP, or in a file, with the reasons against each.

The process also serves its metrics over HTTP in the Prometheus format. A watchdog detects a blocked event loop and
reports what blocks it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from threading import Event, Thread
from types import CodeType, FrameType
from typing import Any

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner.settings import ProbeSettings
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import Numbers, get_registry, snapshot
from ergon_framework.telemetry.names import LIBRARY, Field
from ergon_framework.telemetry.names import Event as LogEvent
from ergon_framework.telemetry.options import get_options
from ergon_framework.telemetry.prometheus import CONTENT_TYPE, render_prometheus
from ergon_framework.telemetry.user_metrics import Families, collect_families

#: Maximum number of functions of a stack that are reported.
MAX_FUNCTIONS = 5
#: Maximum number of tasks that are named for a block outside all steps.
MAX_TASKS = 3
#: Maximum seconds between two checks.
MAX_CHECK_INTERVAL_SECONDS = 1.0

_STEP_BY_METHOD = {
    "process_transaction": "process",
    "handle_transaction_success": "success",
    "handle_transaction_exception": "exception",
    "produce_transaction": "produce",
    "handle_produce_success": "success",
    "handle_produce_exception": "exception",
}


@dataclass(frozen=True, slots=True)
class EventLoopBlock:
    """What blocks an event loop: the step, if it is one of a task's, and the innermost functions. No values.

    *tasks* has the task of the step, or all tasks of the event loop if no step is on the stack.
    """

    tasks: tuple[str, ...]
    step: str | None
    functions: tuple[str, ...]

    @property
    def task(self) -> str:
        """The task of the step, or the first tasks of the event loop."""
        more = len(self.tasks) - MAX_TASKS
        return ", ".join(self.tasks[:MAX_TASKS]) + (f" and {more} more" if more > 0 else "")

    def __str__(self) -> str:
        subject = f"{self.step} of {self.task}" if self.step else f"something inside {self.task}"
        return f"{subject}, in {' < '.join(self.functions)}" if self.functions else subject


class Watchdog:
    """Checks repeatedly whether the event loop of *tasks* responds; created on the loop's own thread.

    A loop that is blocked for longer than *limit* seconds is reported once per block in the log and in the metrics,
    and in ``blocked`` while the block lasts.
    """

    def __init__(self, tasks: Sequence[Any], limit: float) -> None:
        self._tasks = tasks
        self._limit = limit
        self._check_interval = min(MAX_CHECK_INTERVAL_SECONDS, limit / 4)
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._step_by_code = {code: step for task in tasks for code, step in _find_step_codes(task).items()}
        self._stopped = Event()
        #: By the name of a task: metrics of its own, which count only the blocks; no step is recorded in them.
        self._counts = {
            task.name: get_registry(get_options(task).meter_provider).new_loop_metrics(
                task.name, steps=(), success_steps=("process", "success")
            )
            for task in tasks
        }
        #: When the last callback was scheduled: the beginning of a block, if there is one.
        self._since = 0.0
        self._block: EventLoopBlock | None = None

    def start(self) -> Watchdog:
        for task in self._tasks:
            get_registry(get_options(task).meter_provider).open(self._counts[task.name])
        Thread(target=self._run_checks, name="ergon-watchdog", daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop the checks; the loop ends, and blocks from now on are not reported."""
        self._stopped.set()
        for task in self._tasks:
            get_registry(get_options(task).meter_provider).close(self._counts[task.name])

    @property
    def blocked(self) -> str | None:
        """What blocks the event loop and for how long; None if nothing does."""
        block = self._block
        return None if block is None else f"event loop is blocked for {time.monotonic() - self._since:.0f} s by {block}"

    def _run_checks(self) -> None:
        """Schedule a callback on the event loop repeatedly; report a block if it is not called within the limit."""
        while not self._stopped.is_set():
            beat = Event()
            self._since = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(beat.set)
            except RuntimeError:
                return  # the loop is closed
            if not beat.wait(self._limit):
                self._report_block(beat)
            self._stopped.wait(self._check_interval)

    def _report_block(self, beat: Event) -> None:
        """Report a block, and wait for its end: the event loop then sets *beat*."""
        self._block = block = self._find_block()
        for name in block.tasks:
            self._counts[name].add(names.EVENT_LOOP_BLOCKED, block.step or "")
        fields = {Field.TASK: block.task, Field.STEP: block.step}
        seconds = round(time.monotonic() - self._since, 3)
        details = {Field.FUNCTIONS: list(block.functions), Field.SECONDS: seconds}
        logs.log_event(logging.ERROR, LogEvent.EVENT_LOOP_BLOCKED, fields | details)
        while not beat.wait(self._check_interval) and not self._stopped.is_set():
            self._block = self._find_block()
        self._block = None
        if beat.is_set():
            logs.log_event(
                logging.INFO,
                LogEvent.EVENT_LOOP_FREE,
                fields | {Field.SECONDS: round(time.monotonic() - self._since, 3)},
            )

    def _find_block(self) -> EventLoopBlock:
        """Walk the stack of the loop's thread outwards, up to a step of a task, without the framework's functions."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - the documented way to see another thread
        functions: list[str] = []
        step = name = None
        while frame is not None and step is None:
            name = self._find_task(frame)
            step = None if name is None else self._step_by_code[frame.f_code]
            module = str(frame.f_globals.get("__name__", "?"))
            if not f"{module}.".startswith(f"{LIBRARY}.") and len(functions) < MAX_FUNCTIONS:
                functions.append(f"{module}.{frame.f_code.co_qualname}")
            frame = frame.f_back
        # Without a step of a task, the outer end of the stack is the event loop itself.
        tasks = tuple(task.name for task in self._tasks) if name is None else (name,)
        return EventLoopBlock(tasks, step, tuple(functions))

    def _find_task(self, frame: FrameType) -> str | None:
        """Return the name of the task whose step *frame* runs; tasks of one class share the code of their steps."""
        code = frame.f_code
        if code not in self._step_by_code:
            return None
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
        name: str | None = next((task.name for task in self._tasks if _step_owner(task) is owner), None)
        return name


def _step_owner(task: Any) -> Any:
    """Return the object whose methods are the steps of *task*.

    A producer with a file as its input runs inside a task that feeds it; the steps are the producer's.
    """
    return getattr(task, "producer", task)


def _find_step_codes(task: Any) -> dict[CodeType, str]:
    """Return the code objects of the task's own methods, which identify a step in a stack."""
    step_by_code = {}
    for method, step in _STEP_BY_METHOD.items():
        function = getattr(type(_step_owner(task)), method, None)
        code = None if function is None else getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:
            step_by_code[code] = step
    return step_by_code


#: Maximum number of reported reasons, and of characters in each.
MAX_REASONS = 20
MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """Live: the process can make progress; if not, it must be restarted. Ready: it accepts work, if there is any."""

    live: bool
    ready: bool
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the health as plain data."""
        return {
            "live": self.live,
            "ready": self.ready,
            "reasons": [reason[:MAX_REASON_CHARS] for reason in self.reasons[:MAX_REASONS]],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProcessHealth:
        """Build the health from plain data; invalid values are ignored."""
        reasons = data.get("reasons")
        valid = (
            [reason[:MAX_REASON_CHARS] for reason in reasons if isinstance(reason, str)]
            if isinstance(reasons, list)
            else []
        )
        return cls(data.get("live") is True, data.get("ready") is True, tuple(valid[:MAX_REASONS]))


STARTING = ProcessHealth(live=True, ready=False, reasons=("starting",))


def combine_health(parts: Mapping[int, ProcessHealth]) -> ProcessHealth:
    """Combine the health of all processes: it is live, or ready, if each of them is."""
    return ProcessHealth(
        all(part.live for part in parts.values()),
        all(part.ready for part in parts.values()),
        tuple(f"process {number}: {reason}" for number, part in parts.items() for reason in part.reasons),
    )


# -- probes -----------------------------------------------------------------------------------------

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
ReadFamilies = Callable[[], Families]


@contextmanager
def serve_probes(
    settings: ProbeSettings,
    check: HealthCheck,
    read: ReadMetrics = snapshot,
    read_families: ReadFamilies = collect_families,
) -> Iterator[int | None]:
    """Serve probes while the context lasts; yield the port, if there is one.

    *read* returns the metrics of the framework, *read_families* those of user code.
    """
    with ExitStack() as stack:
        port = None
        if settings.port is not None:
            server = ProbeServer(settings.host, settings.port, check, read, read_families)
            port = server.port
            server.start()
            stack.callback(server.stop)
        if settings.file is not None:
            file = ProbeFile(Path(settings.file), settings.interval, check)
            file.start()
            # Stopped before the server: if the exit is cut short, an old file would be trusted, a server not.
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

    def __init__(
        self, host: str, port: int, check: HealthCheck, read: ReadMetrics, read_families: ReadFamilies
    ) -> None:
        self._check = check
        self._read = read
        self._read_families = read_families
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
            return _http_response(HTTPStatus.OK, CONTENT_TYPE, render_prometheus(self._read(), self._read_families()))
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
