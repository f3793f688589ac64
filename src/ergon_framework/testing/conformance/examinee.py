"""ExecutorUnderTest: an executor's process during one check, and the decorator of executor checks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, Self, TypeAlias

from ergon_framework.executor import lines
from ergon_framework.executor.lines import LineSplitter
from ergon_framework.executor.protocol import VERSION, ExecutionOutcome, InvalidMessage, read_outcome
from ergon_framework.testing.conformance.check import CheckFailed, expect

#: Handlers that an executor must have for the conformance suite, with what they do.
HANDLERS: Final = {
    "exam.echo": "takes one argument, `value`, and returns it",
    "exam.fail": "takes a text and fails with it as its message",
    "exam.retry": "takes a number of seconds and asks for a retry after them",
    "exam.context": "returns the request's context as an object",
    "exam.sleep": "takes a number of seconds and sleeps for so long",
    "exam.print": "takes a text and prints it as programs of its language print, then returns null",
    "exam.child": "takes a text and has a child process print it, then returns null",
    "exam.crash": "ends the process at once, without an answer",
}
#: Bytes that one read or write transfers.
CHUNK: Final = 65_536
#: Bytes of stderr that a failure message quotes.
TOLD: Final = 300


class ExecutorUnderTest:
    """The process and its output so far. *patience* limits all waiting."""

    def __init__(self, command: Sequence[str], *, patience: float) -> None:
        self.patience = patience
        self.strays: list[InvalidMessage] = []
        self._outcomes: list[ExecutionOutcome] = []
        self._jobs = 0
        self._unsent = bytearray()
        self._splitter = LineSplitter()
        self._left = 0
        self._over = False
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the process
        self._process = self._started(command)
        self._in, self._out = self._pipe(self._process.stdin), self._pipe(self._process.stdout)

    def _started(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            # A separate session: all processes that it starts can be killed with it.
            return subprocess.Popen(  # noqa: S603 - the command under test
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
            )
        except OSError:
            self._log.close()
            raise

    @staticmethod
    def _pipe(end: IO[bytes] | None) -> IO[bytes]:
        assert end is not None  # noqa: S101 - requested above
        os.set_blocking(end.fileno(), False)
        return end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for end in (self._in, self._out, self._log):
            with contextlib.suppress(OSError):
                end.close()

    # -- requests ---------------------------------------------------------------------------------

    def request(self, function_name: str, *args: Any, **changes: Any) -> dict[str, Any]:
        """Create a request for a new job; *changes* replace fields of it."""
        self._jobs += 1
        job_id = changes.pop("job_id", f"exam-{self._jobs}")
        context = {"job_id": job_id, "attempt": 1, "enqueue_time": "2026-01-31T23:59:59Z", "queue_name": "exam"}
        told: dict[str, Any] = {
            "protocol_version": VERSION,
            "job_id": job_id,
            "function_name": function_name,
            "args": list(args),
            "kwargs": {},
            "context": context | changes.pop("context", {}),
        }
        return told | changes

    def send(self, *requests: dict[str, Any] | bytes) -> None:
        """Queue *requests* for sending when the pipe has space; bytes are sent unchanged."""
        for each in requests:
            self._unsent += each if isinstance(each, bytes) else lines.format_line(each)

    def answer(self, request: dict[str, Any], *, within: float | None = None) -> ExecutionOutcome:
        """Return the first outcome for *request*, which was sent."""
        job_id, end = request["job_id"], time.monotonic() + (self.patience if within is None else within)
        while True:
            for outcome in self._outcomes:
                if outcome.job_id == job_id:
                    return outcome
            if self._over or time.monotonic() >= end:
                how = "it ended" if self._over else f"not within {self.patience:g} s"
                raise CheckFailed(f"no answer to {request['function_name']!r} of job {job_id!r}: {how}{self._said()}")
            self._pump(end)

    def ask(self, function_name: str, *args: Any, **changes: Any) -> ExecutionOutcome:
        """Send a request and wait for its outcome."""
        request = self.request(function_name, *args, **changes)
        self.send(request)
        return self.answer(request)

    def check_echo(self, value: Any = "sound", **changes: Any) -> None:
        """Check that the executor echoes *value*; unexpected lines are ignored, because other checks cover them."""
        got = self.ask("exam.echo", value, **changes)
        expect(got.status == "success", f"exam.echo ended with {got.status}: {got.error_type}: {got.error_message}")
        expect(json_equal(got.result, value), "exam.echo returned something else than it was given")

    # -- exit -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the executor's stdin after everything is sent."""
        end = time.monotonic() + self.patience
        while self._unsent and not self._over and time.monotonic() < end:
            self._pump(end)
        with contextlib.suppress(OSError):
            self._in.close()

    def remaining_output(self, *, within: float | None = None) -> list[ExecutionOutcome]:
        """Return all outcomes, once stdout has ended or the time is over."""
        end = time.monotonic() + (self.patience if within is None else within)
        while not self._over and time.monotonic() < end:
            self._pump(end)
        return list(self._outcomes)

    def exit_code(self, *, within: float | None = None) -> int | None:
        """Return the exit code, or None if the process still runs when the time is over."""
        end = time.monotonic() + (self.patience if within is None else within)
        self.remaining_output(within=within)
        try:
            # Stdout may be closed long before the process is gone: an interpreter needs time to exit.
            return self._process.wait(max(0.01, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def half_a_line(self) -> bool:
        """Whether the output ended in the middle of a line."""
        return self._left > 0

    # -- the pipes --------------------------------------------------------------------------------

    def _pump(self, end: float) -> None:
        writing = [self._in] if self._unsent and not self._in.closed else []
        ready, room, _ = select.select([self._out], writing, [], max(0.0, end - time.monotonic()))
        if ready:
            self._take(os.read(self._out.fileno(), CHUNK))
        if room:
            try:
                del self._unsent[: os.write(self._in.fileno(), self._unsent[:CHUNK])]
            except OSError:  # it no longer reads; its output may still arrive
                self._unsent.clear()

    def _take(self, data: bytes) -> None:
        self._over = not data
        for line in self._splitter.feed(data):
            found = read_outcome(line)
            if isinstance(found, InvalidMessage):
                self.strays.append(found)
            else:
                self._outcomes.append(found)
        if data:
            self._left = len(data) - data.rfind(b"\n") - 1 if b"\n" in data else self._left + len(data)

    def _said(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - TOLD))
        words = self._log.read().decode(errors="replace").strip()
        return f"; its last words: {words}" if words else ""


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

Run: TypeAlias = Callable[[ExecutorUnderTest], None]


@dataclass(frozen=True, slots=True)
class ExecutorCheck:
    """One rule: its name, its requirement ids, and the function that checks it."""

    name: str
    ids: tuple[str, ...]
    run: Run


def executor_check(*ids: str) -> Callable[[Run], ExecutorCheck]:
    """Make an executor check from a function; its name becomes the name of the rule."""
    return lambda run: ExecutorCheck(run.__name__, ids, run)


def checks_in(module: Any) -> Iterator[ExecutorCheck]:
    """Return the checks of a module, in order."""
    return (value for value in vars(module).values() if isinstance(value, ExecutorCheck))
