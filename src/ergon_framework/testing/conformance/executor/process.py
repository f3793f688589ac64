"""ExecutorUnderTest: an executor's process during one check, and the decorator of executor checks.

An executor is a process in any language that runs jobs: it reads one request per line of JSON from stdin and writes
one outcome per line to stdout. A check of the conformance suite tests one rule of this protocol.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, Self, TypeAlias

from ergon_framework.executors import json_lines
from ergon_framework.executors.json_lines import LineSplitter
from ergon_framework.executors.protocol import VERSION, ExecutionOutcome, InvalidMessage, read_outcome
from ergon_framework.testing.conformance.check import CheckFailed, expect

#: Handlers that an executor must have for the conformance suite, with what they do.
HANDLERS: Final = {
    "conformance.echo": "takes one argument, `value`, and returns it",
    "conformance.fail": "takes a text and fails with it as its message",
    "conformance.retry": "takes a number of seconds and requests a retry after them",
    "conformance.context": "returns the request's context as an object",
    "conformance.sleep": "takes a number of seconds and sleeps that long",
    "conformance.print": "takes a text and prints it in the usual way of its language, then returns null",
    "conformance.child": "takes a text and has a child process print it, then returns null",
    "conformance.crash": "ends the process immediately, without an answer",
}
#: Bytes that one read or write transfers.
CHUNK_BYTES: Final = 65_536
#: Bytes of stderr that a failure message quotes.
MAX_QUOTED_BYTES: Final = 300


class ExecutorUnderTest:
    """The process and its output so far. *timeout* limits each wait, in seconds, unless a call passes its own."""

    def __init__(self, command: Sequence[str], *, timeout: float) -> None:
        self.timeout = timeout
        #: Lines of stdout that are no outcomes.
        self.unexpected_lines: list[InvalidMessage] = []
        self._outcomes: list[ExecutionOutcome] = []
        self._job_count = 0
        self._unsent = bytearray()
        self._splitter = LineSplitter()
        #: Bytes of stdout after its last line end.
        self._partial_bytes = 0
        #: Whether stdout was closed.
        self._has_ended = False
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the process
        self._process = self._start(command)
        self._stdin, self._stdout = (
            self._to_nonblocking(self._process.stdin),
            self._to_nonblocking(self._process.stdout),
        )

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            # A separate session: all processes that it starts can be killed with it.
            return subprocess.Popen(  # noqa: S603 - the command under test
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
            )
        except OSError:
            self._log.close()
            raise

    @staticmethod
    def _to_nonblocking(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None  # noqa: S101 - requested above
        os.set_blocking(pipe.fileno(), False)
        return pipe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._stdin, self._stdout, self._log):
            with contextlib.suppress(OSError):
                stream.close()

    # -- requests ---------------------------------------------------------------------------------

    def make_request(self, function_name: str, *args: Any, **changes: Any) -> dict[str, Any]:
        """Create a request for a new job; *changes* replace fields of it."""
        self._job_count += 1
        job_id = changes.pop("job_id", f"conformance-{self._job_count}")
        context = {"job_id": job_id, "attempt": 1, "enqueue_time": "2026-01-31T23:59:59Z", "queue_name": "conformance"}
        fields: dict[str, Any] = {
            "protocol_version": VERSION,
            "job_id": job_id,
            "function_name": function_name,
            "args": list(args),
            "kwargs": {},
            "context": context | changes.pop("context", {}),
        }
        return fields | changes

    def enqueue(self, *requests: dict[str, Any] | bytes) -> None:
        """Queue *requests*, which the next wait sends; bytes are sent unchanged."""
        for each in requests:
            self._unsent += each if isinstance(each, bytes) else json_lines.format_line(each)

    def wait_for_outcome(self, request: dict[str, Any], *, within: float | None = None) -> ExecutionOutcome:
        """Send what is queued, and return the first outcome for *request*; raise CheckFailed if there is none."""
        job_id, timeout = request["job_id"], self.timeout if within is None else within
        deadline = time.monotonic() + timeout
        while True:
            for outcome in self._outcomes:
                if outcome.job_id == job_id:
                    return outcome
            if self._has_ended or time.monotonic() >= deadline:
                state = "its stdout was closed" if self._has_ended else f"timed out after {timeout:g} s"
                raise CheckFailed(
                    f"no answer to {request['function_name']!r} of job {job_id!r}: {state}{self._quote_stderr()}"
                )
            self._pump(deadline)

    def ask(self, function_name: str, *args: Any, **changes: Any) -> ExecutionOutcome:
        """Send a request and wait for its outcome."""
        request = self.make_request(function_name, *args, **changes)
        self.enqueue(request)
        return self.wait_for_outcome(request)

    def check_echo(self, value: Any = "ping", **changes: Any) -> None:
        """Check that the executor echoes *value*; unexpected lines are ignored, because other checks cover them."""
        outcome = self.ask("conformance.echo", value, **changes)
        expect(
            outcome.status == "success",
            f"conformance.echo ended with {outcome.status}: {outcome.error_type}: {outcome.error_message}",
        )
        expect(json_equal(outcome.result, value), "conformance.echo returned another value than it received")

    # -- exit -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the executor's stdin after everything is sent."""
        deadline = time.monotonic() + self.timeout
        while self._unsent and not self._has_ended and time.monotonic() < deadline:
            self._pump(deadline)
        with contextlib.suppress(OSError):
            self._stdin.close()

    def collect_outcomes(self, *, within: float | None = None) -> list[ExecutionOutcome]:
        """Send what is queued, and return all outcomes once stdout was closed or the time is over."""
        deadline = time.monotonic() + (self.timeout if within is None else within)
        while not self._has_ended and time.monotonic() < deadline:
            self._pump(deadline)
        return list(self._outcomes)

    def exit_code(self, *, within: float | None = None) -> int | None:
        """Return the exit code, or None if the process still runs when the time is over."""
        deadline = time.monotonic() + (self.timeout if within is None else within)
        self.collect_outcomes(within=within)
        try:
            # Stdout may be closed long before the process is gone: an interpreter needs time to exit.
            return self._process.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def has_partial_line(self) -> bool:
        """Whether the output ended in the middle of a line."""
        return self._partial_bytes > 0

    # -- the pipes --------------------------------------------------------------------------------

    def _pump(self, deadline: float) -> None:
        """Wait until stdout has data or stdin accepts some, and read or write one chunk; return after the deadline."""
        pending_pipes = [self._stdin] if self._unsent and not self._stdin.closed else []
        readable, writable, _ = select.select([self._stdout], pending_pipes, [], max(0.0, deadline - time.monotonic()))
        if readable:
            self._process_output(os.read(self._stdout.fileno(), CHUNK_BYTES))
        if writable:
            try:
                del self._unsent[: os.write(self._stdin.fileno(), self._unsent[:CHUNK_BYTES])]
            except OSError:  # it no longer reads; its output may still arrive
                self._unsent.clear()

    def _process_output(self, data: bytes) -> None:
        self._has_ended = not data
        for line in self._splitter.feed(data):
            outcome = read_outcome(line)
            if isinstance(outcome, InvalidMessage):
                self.unexpected_lines.append(outcome)
            else:
                self._outcomes.append(outcome)
        if data:
            self._partial_bytes = (
                len(data) - data.rfind(b"\n") - 1 if b"\n" in data else self._partial_bytes + len(data)
            )

    def _quote_stderr(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - MAX_QUOTED_BYTES))
        stderr_text = self._log.read().decode(errors="replace").strip()
        return f"; last output on stderr: {stderr_text}" if stderr_text else ""


def json_equal(one: Any, other: Any) -> bool:
    """Compare two values as JSON: ``1`` and ``1.0`` are equal, ``1`` and ``true`` are not."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(json_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(json_equal(one[key], other[key]) for key in one)
    return bool(one == other)


# -- checks ---------------------------------------------------------------------------------------

ExecutorCheckFunction: TypeAlias = Callable[[ExecutorUnderTest], None]


@dataclass(frozen=True, slots=True)
class ExecutorCheck:
    """One rule: its name, its requirement ids, and the function that checks it."""

    name: str
    ids: tuple[str, ...]
    run: ExecutorCheckFunction


def executor_check(*ids: str) -> Callable[[ExecutorCheckFunction], ExecutorCheck]:
    """Make a check of the requirements *ids* from a function; its name becomes the name of the rule."""
    return lambda run: ExecutorCheck(run.__name__, ids, run)
