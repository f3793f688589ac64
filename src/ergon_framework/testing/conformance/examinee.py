"""Examinee: an executor's process during one question of its exam, and the questions' own words."""

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
from ergon_framework.executor.lines import Splitter
from ergon_framework.executor.protocol import VERSION, BadLine, ExecutionOutcome, read_outcome
from ergon_framework.testing.conformance.check import Failed, expect

#: Handlers that an executor must have to be examined, with what they do.
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
#: How much is read and written at once.
CHUNK: Final = 65_536
#: How much of stderr is told with a failure.
TOLD: Final = 300


class Examinee:
    """The process, and what has come from it so far. All waiting is limited by *patience*."""

    def __init__(self, command: Sequence[str], *, patience: float) -> None:
        self.patience = patience
        self.strays: list[BadLine] = []
        self._outcomes: list[ExecutionOutcome] = []
        self._jobs = 0
        self._unsent = bytearray()
        self._splitter = Splitter()
        self._left = 0
        self._over = False
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the process
        self._process = self._started(command)
        self._in, self._out = self._pipe(self._process.stdin), self._pipe(self._process.stdout)

    def _started(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            # A session of its own: whatever it starts can be ended with it.
            return subprocess.Popen(  # noqa: S603 - the command is what is examined
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
            )
        except OSError:
            self._log.close()
            raise

    @staticmethod
    def _pipe(end: IO[bytes] | None) -> IO[bytes]:
        assert end is not None  # noqa: S101 - asked for above
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

    # -- asking -----------------------------------------------------------------------------------

    def request(self, function_name: str, *args: Any, **changes: Any) -> dict[str, Any]:
        """A request for a new job; *changes* replace fields of it."""
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
        """Have *requests* sent as soon as there is room for them; bytes go as they are."""
        for each in requests:
            self._unsent += each if isinstance(each, bytes) else lines.write(each)

    def answer(self, request: dict[str, Any], *, within: float | None = None) -> ExecutionOutcome:
        """The first outcome for *request*, which was sent."""
        job_id, end = request["job_id"], time.monotonic() + (self.patience if within is None else within)
        while True:
            for outcome in self._outcomes:
                if outcome.job_id == job_id:
                    return outcome
            if self._over or time.monotonic() >= end:
                how = "it ended" if self._over else f"not within {self.patience:g} s"
                raise Failed(f"no answer to {request['function_name']!r} of job {job_id!r}: {how}{self._said()}")
            self._pump(end)

    def ask(self, function_name: str, *args: Any, **changes: Any) -> ExecutionOutcome:
        """Send a request and wait for its outcome."""
        request = self.request(function_name, *args, **changes)
        self.send(request)
        return self.answer(request)

    def echoes(self, value: Any = "sound", **changes: Any) -> None:
        """Have it echo *value*; whatever strays came until then are forgotten, because others ask for them."""
        got = self.ask("exam.echo", value, **changes)
        expect(got.status == "success", f"exam.echo ended with {got.status}: {got.error_type}: {got.error_message}")
        expect(same(got.result, value), "exam.echo returned something else than it was given")

    # -- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close its stdin, once everything is sent."""
        end = time.monotonic() + self.patience
        while self._unsent and not self._over and time.monotonic() < end:
            self._pump(end)
        with contextlib.suppress(OSError):
            self._in.close()

    def rest(self, *, within: float | None = None) -> list[ExecutionOutcome]:
        """Every outcome there was, once its stdout has ended or the time is over."""
        end = time.monotonic() + (self.patience if within is None else within)
        while not self._over and time.monotonic() < end:
            self._pump(end)
        return list(self._outcomes)

    def ended(self, *, within: float | None = None) -> int | None:
        """Its exit code; None if it still runs when the time is over."""
        end = time.monotonic() + (self.patience if within is None else within)
        self.rest(within=within)
        try:
            # Its stdout may be closed long before the process is gone: an interpreter takes its time to end.
            return self._process.wait(max(0.01, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def half_a_line(self) -> bool:
        """Whether what came ended in the middle of a line."""
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
            except OSError:  # it does not read any more; what it has said may still come
                self._unsent.clear()

    def _take(self, data: bytes) -> None:
        self._over = not data
        for line in self._splitter.feed(data):
            found = read_outcome(line)
            if isinstance(found, BadLine):
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


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: ``1`` and ``1.0`` are, ``1`` and ``true`` are not."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


# -- questions ------------------------------------------------------------------------------------

Run: TypeAlias = Callable[[Examinee], None]


@dataclass(frozen=True, slots=True)
class Question:
    """One rule: its name, the requirements it belongs to, and how it is tried."""

    name: str
    ids: tuple[str, ...]
    run: Run


def question(*ids: str) -> Callable[[Run], Question]:
    """Make a question of a function; its name is the rule."""
    return lambda run: Question(run.__name__, ids, run)


def questions(module: Any) -> Iterator[Question]:
    """The questions of a module, in their order."""
    return (value for value in vars(module).values() if isinstance(value, Question))
