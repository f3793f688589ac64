"""One executor process: its pipes, its jobs in flight, and its end.

An executor is a process, in any language, that runs handlers for an orchestrator: it reads one request per line from
stdin, and writes one outcome per line to stdout. The reaper is a separate process that kills the executors if their
orchestrator is killed. The mark of an executor is an environment variable that all its descendants inherit.

A decided outcome is one that the orchestrator reports instead of the executor, after a timeout or a kill request. A
retired executor finishes its jobs and gets no more. A line is late if its job has a decided outcome, and unknown if the
executor does not have the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Self, cast

from pydantic import Field

from ergon_framework.errors import ErgonError
from ergon_framework.executors import decision
from ergon_framework.executors.descendants import EXECUTOR_VARIABLE, Descendant, kill_all, kill_marked, list_children
from ergon_framework.executors.json_lines import LineErrorReason, LineSplitter, OverlongLine
from ergon_framework.executors.protocol import ExecutionOutcome, InvalidMessage, Status, read_outcome
from ergon_framework.executors.reaper import ProcessReaper
from ergon_framework.executors.startup import StderrTail
from ergon_framework.policy import Policy
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event
from ergon_framework.telemetry.names import Field as LogField
from ergon_framework.telemetry.redaction import mask_credentials

log: Final = logging.getLogger(f"{LIBRARY}.executors")

#: Bytes of one read: the capacity of a pipe. More memory would be allocated from the system again for each line.
READ_BYTES: Final = 65_536
#: Maximum number of reads from the pipes of an executor that has exited; its children may still write to them.
MAX_DRAIN_READS: Final = 1024
#: Bytes above which a line is parsed in a thread: in the event loop it would block all others for too long.
LONG_LINE_BYTES: Final = 131_072
#: Maximum number of lines that are processed before other callbacks of the event loop run.
MAX_LINES_PER_TURN: Final = 200
#: Kinds of lines that are not an outcome of a job in flight.
UNEXPECTED_LINE_KINDS: Final = ("malformed", "unknown", "late")
#: Maximum number of unexpected lines of a kind that are logged for one executor; all are counted.
MAX_LOGGED_UNEXPECTED_LINES: Final = 10
#: Seconds that an executor has to exit after it has closed its stdout.
EXIT_TIMEOUT_SECONDS: Final = 1.0
#: Maximum length in bytes of a stderr line that is logged, and the number of its characters in the log.
MAX_STDERR_LINE_BYTES: Final = 65_536
MAX_LOGGED_LINE_CHARS: Final = 2_000
#: Bytes of one read from stderr.
STDERR_READ_BYTES: Final = 8_192
# Waits for one line before it executes the command, until its group is registered with the reaper. If the orchestrator
# dies in between, the pipe is closed and nothing starts. dash and bash read no byte beyond the line.
_START_GATE: Final = ("/bin/sh", "-c", 'read -r go && exec "$@"', "gate")


class ExecutorInterrupted(ErgonError):
    """The executor was ended because of another job: this job was interrupted, and no attempt is counted."""

    code = "executor_released"
    not_attempted = True


class ResourceLimits(Policy):
    """System resource limits of one executor."""

    cpu: int | None = Field(default=None, ge=1, description="Total seconds of processor time; then SIGKILL.")
    open_files: int | None = Field(default=None, ge=16, description="Maximum number of open file descriptors.")


class ExecutorCommand(Policy):
    """How an executor is started. Its environment holds only these variables and ERGON_EXECUTOR, its mark."""

    words: tuple[str, ...] = Field(min_length=1, description="The program and its arguments.")
    environment: Mapping[str, str] = Field(default_factory=dict, description="Its complete environment.")
    folder: str | None = Field(default=None, description="Where it runs; the orchestrator's folder by default.")
    limits: ResourceLimits = ResourceLimits()


class ExecutorProcess:
    """A running executor; everything but ``start`` belongs to one event loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], reaper: ProcessReaper, readers: ThreadPoolExecutor, mark: str
    ) -> None:
        self.pid = process.pid
        #: The value that identifies this executor in the environment of each of its children.
        self._mark = mark
        #: Its descendants at the time of each termination signal.
        self._descendants: set[Descendant] = set()
        self.started_at = time.monotonic()
        #: The number of answers to its requests, and of unexpected lines by kind.
        self.answer_count = 0
        self.counts: Counter[str] = Counter()
        #: Done when the process has exited and is reaped; the result describes how it ended.
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        #: Whether it was asked to end; it gets no more jobs.
        self.is_ending = False
        #: Whether it has answered for a job that it did not have: its next answer may be another such answer.
        self.is_suspect = False
        #: The number of requests that were sent to it.
        self.request_count = 0
        #: Lines that it wrote to stderr before its first answer.
        self.stderr_tail = StderrTail()
        #: Whether its stdin was closed: a job that it does not finish then was interrupted, not failed.
        self._is_retired = False
        #: Kept, because a future without a reference may be garbage-collected.
        self._cleanup: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._reaper = reaper
        self._process = process
        self._stdin, self._stdout, self._stderr = (
            cast("IO[bytes]", pipe) for pipe in (process.stdin, process.stdout, process.stderr)
        )
        #: By job id: the futures of jobs in flight, and the outcomes that the orchestrator decided (timeout or kill).
        self._replies: dict[str, asyncio.Future[ExecutionOutcome]] = {}
        self._decided_outcomes: dict[str, ExecutionOutcome] = {}
        self._trace_ids: dict[str, str] = {}
        self._unsent = bytearray()
        self._stdout_splitter, self._stderr_splitter = LineSplitter(), LineSplitter(MAX_STDERR_LINE_BYTES)
        self._readers = readers
        #: Lines of the last read that are not processed yet; nothing more is read before all of them are.
        self._received_lines: Iterator[bytes | OverlongLine] = iter(())
        #: Whether stdout is not read now, because a line is parsed in a thread or other callbacks run first.
        self._is_paused = False
        #: Whether its stdout is closed, whether it has exited, and how many more reads are allowed then.
        self._stdout_closed = self._has_exited = False
        self._reads_left = MAX_DRAIN_READS
        self._pidfd = os.pidfd_open(process.pid)
        self._attach()

    @classmethod
    async def start(cls, command: ExecutorCommand, reaper: ProcessReaper, readers: ThreadPoolExecutor) -> Self:
        """Start an executor; raise OSError if it cannot be started, ConnectionLostError if no reaper is reachable."""
        loop = asyncio.get_running_loop()
        mark = reaper.create_mark()
        process = await loop.run_in_executor(reaper.threads, _spawn, command, reaper, mark)
        return cls(process, reaper, readers, mark)

    # -- jobs -------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._replies)

    def send(self, line: bytes, job_id: str, *, trace_id: str | None = None) -> asyncio.Future[ExecutionOutcome]:
        """Send a request and return the future of its outcome, which completes whatever happens to the process."""
        reply: asyncio.Future[ExecutionOutcome] = self._loop.create_future()
        if self.exited.done() or self.is_ending:
            reply.set_exception(ExecutorInterrupted("the executor is ending; nothing was sent", retry_after=0.0))
            return reply
        if job_id in self._replies:
            # The two outcomes could not be told apart, and one caller would wait forever.
            reply.set_exception(
                ExecutorInterrupted("the executor has this job already; nothing was sent", retry_after=1.0)
            )
            return reply
        self.request_count += 1
        self._replies[job_id] = reply
        if trace_id is not None:
            self._trace_ids[job_id] = trace_id
        self._write(line)
        return reply

    def terminate(self, job_id: str, outcome: ExecutionOutcome, *, grace: float) -> bool:
        """Kill the process because of *job_id*; *outcome* is its result after the exit. False if not in flight."""
        if job_id not in self._replies:
            return False
        self._decided_outcomes[job_id] = outcome
        self.kill(grace=grace)
        return True

    def kill(self, *, grace: float) -> None:
        """Send SIGTERM to the whole group, and SIGKILL after *grace* seconds."""
        self.is_ending = True
        self._signal(signal.SIGTERM)
        self._loop.call_later(grace, self._signal, signal.SIGKILL)

    def retire(self, *, grace: float) -> None:
        """Close its stdin so that it exits; kill it if it has not exited after *grace* seconds."""
        self.is_ending = self._is_retired = True
        self._close_input()
        self._loop.call_later(grace, self._signal, signal.SIGKILL)

    def memory(self) -> int | None:
        """Return the resident memory of the process in bytes; its children are not counted."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return pages * resource.getpagesize()

    # -- pipes ------------------------------------------------------------------------------------

    def _attach(self) -> None:
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(self._stdout.fileno(), self._read_stdout)
        self._loop.add_reader(self._stderr.fileno(), self._read_stderr)
        self._loop.add_reader(self._pidfd, self._on_exit)

    def _write(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        sent = self._write_available(data)
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._stdin.fileno(), self._write_more)

    def _write_more(self) -> None:
        del self._unsent[: self._write_available(bytes(self._unsent[:READ_BYTES]))]
        if not self._unsent and not self._stdin.closed:
            self._loop.remove_writer(self._stdin.fileno())

    def _write_available(self, data: bytes) -> int:
        try:
            return os.write(self._stdin.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError:
            # The executor reads no more; its exit is reported separately.
            self._unsent.clear()
            return len(data)

    def _close_input(self) -> None:
        if not self._stdin.closed:
            self._loop.remove_writer(self._stdin.fileno())
            self._stdin.close()

    def _read_stdout(self) -> None:
        data = _read_available(self._stdout)
        if data is None:
            return
        if not data:
            # An executor that closed its stdout can answer nothing any more; most of them are about to exit.
            self._stdout_closed = True
            self._loop.remove_reader(self._stdout.fileno())
            self._loop.call_later(EXIT_TIMEOUT_SECONDS, self._signal, signal.SIGKILL)
            return
        self._received_lines = self._stdout_splitter.feed(data)
        self._process_lines()

    def _process_lines(self) -> None:
        """Process received lines in order; continue later or in a thread if they would block the event loop."""
        for _ in range(MAX_LINES_PER_TURN):
            line = next(self._received_lines, None)
            if line is None:
                if self._has_exited and self._read_rest():
                    continue
                self._resume_reading()
                return
            if isinstance(line, bytes) and len(line) > LONG_LINE_BYTES:
                self._pause_reading()
                parse = partial(read_outcome, line, yielding=True)
                reading = self._loop.run_in_executor(self._readers, parse)
                reading.add_done_callback(partial(self._on_parsed, line))
                return
            self._process_line(line, read_outcome(line))
        self._pause_reading()
        self._loop.call_soon(self._process_lines)

    def _on_parsed(self, line: bytes, reading: asyncio.Future[ExecutionOutcome | InvalidMessage]) -> None:
        error = reading.exception()
        if error is None:
            self._process_line(line, reading.result())
        else:
            # For example out of memory. Callers that wait for more lines of this executor must not wait forever.
            self._process_line(
                line, InvalidMessage(LineErrorReason.NOT_JSON, f"cannot be parsed: {type(error).__name__}", len(line))
            )
        self._process_lines()

    def _pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._loop.remove_reader(self._stdout.fileno())

    def _resume_reading(self) -> None:
        """Resume reading, or finish after the exit, when all received lines are processed."""
        if self._has_exited:
            self._finish_exit()
        elif self._is_paused:
            self._is_paused = False
            if not self._stdout_closed:
                self._loop.add_reader(self._stdout.fileno(), self._read_stdout)

    def _process_line(self, line: bytes | OverlongLine, message: ExecutionOutcome | InvalidMessage) -> None:
        job_id = message.job_id
        reply = None if job_id is None else self._replies.get(job_id)
        if job_id in self._decided_outcomes and (reply is None or not self._has_succeeded_before_kill(job_id, message)):
            self._count_unexpected_line("late", line)
        elif reply is None or job_id is None:
            self._count_unexpected_line("malformed" if isinstance(message, InvalidMessage) else "unknown", line)
        else:
            outcome = decision.invalid_outcome(job_id, message) if isinstance(message, InvalidMessage) else message
            self.answer_count += 1
            self._deliver(job_id, outcome)

    def _has_succeeded_before_kill(self, job_id: str, message: ExecutionOutcome | InvalidMessage) -> bool:
        """Return whether a job succeeded after the kill request for it and before its process exited."""
        succeeded = isinstance(message, ExecutionOutcome) and message.status is Status.SUCCESS
        return succeeded and self._decided_outcomes[job_id].error_type == decision.KILLED

    def _count_unexpected_line(self, kind: str, line: bytes | OverlongLine) -> None:
        self.counts[kind] += 1
        self.is_suspect = self.is_suspect or kind == "unknown"
        if self.is_ending or self.counts[kind] > MAX_LOGGED_UNEXPECTED_LINES:
            return  # unexpected lines of an ending executor are expected, and the same kind is not logged forever
        size = line.size if isinstance(line, OverlongLine) else len(line)
        fields = {LogField.REASON: kind, LogField.BYTES: size, LogField.PID: self.pid}
        logs.log_event(logging.WARNING, Event.EXECUTOR_UNEXPECTED_LINE, fields, to=log)

    def _read_stderr(self) -> None:
        data = _read_available(self._stderr, STDERR_READ_BYTES)
        if data is None:
            return
        if not data:
            self._loop.remove_reader(self._stderr.fileno())
            return
        for line in self._stderr_splitter.feed(data):
            self._log_stderr_line(line)

    def _log_stderr_line(self, line: bytes | OverlongLine) -> None:
        if isinstance(line, OverlongLine):
            return
        if not self.answer_count:
            self.stderr_tail.add(line)
        if not log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, Any] = {
            LogField.LINE: mask_credentials(line.decode(errors="replace")[:MAX_LOGGED_LINE_CHARS]),
            LogField.PID: self.pid,
        }
        if len(self._replies) == 1:
            # With several jobs in flight, the job of the line is unknown.
            (job_id,) = self._replies
            fields |= {LogField.TRANSACTION_ID: job_id, LogField.TRACE_ID: self._trace_ids.get(job_id)}
        logs.log_event(logging.INFO, Event.EXECUTOR_STDERR, fields, to=log)

    # -- the end ----------------------------------------------------------------------------------

    def _signal(self, number: signal.Signals) -> None:
        # Until the process is reaped, its group id cannot be reused.
        if not self.exited.done():
            self._descendants.update(list_children(self.pid))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._stdout.fileno())
        self._signal(signal.SIGKILL)  # for processes that the executor has left in its group
        self._has_exited = True
        self._deliver_decided_outcomes()
        # If reading is paused, _process_lines is called anyway, and then finishes the exit.
        if not self._is_paused:
            self._process_lines()

    def _deliver_decided_outcomes(self) -> None:
        """Deliver decided outcomes that no line can change, such as timeouts: reading the rest may take long."""
        for job_id, outcome in self._decided_outcomes.items():
            if job_id in self._replies and outcome.error_type != decision.KILLED:
                self._deliver(job_id, outcome)

    def _read_rest(self) -> bool:
        """Read more of its output from before the exit; return whether there was any. A child may write forever."""
        data = _read_available(self._stdout) if self._reads_left else None
        if not data:
            return False
        self._reads_left -= 1
        self._received_lines = self._stdout_splitter.feed(data)
        return True

    def _finish_exit(self) -> None:
        for _ in range(MAX_DRAIN_READS):
            data = _read_available(self._stderr)
            if not data:
                break
            for line in self._stderr_splitter.feed(data):
                self._log_stderr_line(line)
        exit_description = _describe_exit(self._process.wait())
        self._loop.remove_reader(self._stderr.fileno())
        self._close_input()
        self._stdout.close()
        self._stderr.close()
        os.close(self._pidfd)
        self.exited.set_result(exit_description)
        self._cleanup = self._loop.run_in_executor(self._reaper.threads, self._end_descendants)
        for job_id in list(self._replies):
            if job_id in self._decided_outcomes:
                self._deliver(job_id, self._decided_outcomes[job_id])
            elif self._decided_outcomes or self._is_retired:
                # It was killed for another job, or did not finish in the grace of its retirement.
                self._interrupt(job_id, "the executor was ended for a reason other than this job")
            else:
                self._deliver(job_id, decision.executor_died(job_id, exit_description=exit_description))

    def _end_descendants(self) -> None:
        """Kill the processes that it started in other sessions, then remove its group from the reaper."""
        kill_all(self._descendants)
        kill_marked(self._mark)
        self._reaper.remove(self.pid)

    def _deliver(self, job_id: str, outcome: ExecutionOutcome) -> None:
        reply = self._replies.pop(job_id)
        self._trace_ids.pop(job_id, None)
        if not reply.done():
            reply.set_result(outcome)

    def _interrupt(self, job_id: str, message: str) -> None:
        reply = self._replies.pop(job_id)
        self._trace_ids.pop(job_id, None)
        if not reply.done():
            reply.set_exception(ExecutorInterrupted(message, retry_after=0.0))


def _spawn(command: ExecutorCommand, reaper: ProcessReaper, mark: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603 - the operator's own command
        [*_START_GATE, *command.words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**command.environment, EXECUTOR_VARIABLE: mark},
        cwd=command.folder,
        start_new_session=True,
        bufsize=0,
    )
    try:
        reaper.add(process.pid)
        for kind, limit in (
            (resource.RLIMIT_CPU, command.limits.cpu),
            (resource.RLIMIT_NOFILE, command.limits.open_files),
        ):
            if limit is not None:
                resource.prlimit(process.pid, kind, (limit, limit))
        cast("IO[bytes]", process.stdin).write(b"\n")
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process


def _read_available(pipe: IO[bytes], max_bytes: int = READ_BYTES) -> bytes | None:
    """Return the bytes available now; None if there are none yet, and empty at the end of the pipe."""
    try:
        return os.read(pipe.fileno(), max_bytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
