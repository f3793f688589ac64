"""Process: one executor, its pipes, what is in flight in it, and its end."""

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
from ergon_framework.executor import verdict
from ergon_framework.executor.descendants import MARK, Descendant, kill_all, kill_marked, list_children
from ergon_framework.executor.guard import Guard
from ergon_framework.executor.lines import Overlong, Reason, Splitter
from ergon_framework.executor.protocol import BadLine, ExecutionOutcome, Status, read_outcome
from ergon_framework.executor.start import LastLines
from ergon_framework.policy import Policy
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event
from ergon_framework.telemetry.names import Field as Names
from ergon_framework.telemetry.redaction import masked

log: Final = logging.getLogger(f"{LIBRARY}.executor")

#: As much as a pipe holds; memory for more would be asked of the system anew for each line.
CHUNK: Final = 65_536
#: How many times so much is read of an executor that is gone.
DRAINED: Final = 1024
#: A line that is longer is read in a thread: in the loop it would hold all others for too long.
LONG: Final = 131_072
#: How many lines are taken before others have their turn.
TURN: Final = 200
#: What a line may be that is no outcome of a job in flight.
STRAYS: Final = ("malformed", "unknown", "late")
#: How many strays of a kind one executor is blamed for in the logs; all are counted.
TOLD: Final = 10
#: Seconds that an executor has to end by itself once it has closed its stdout.
LAST: Final = 1.0
#: Longest line of stderr that is logged, and how much of it.
LONGEST_SAID: Final = 65_536
SAID: Final = 2_000
#: How much of stderr is taken at a time.
SAID_CHUNK: Final = 8_192
# Waits for one line before it becomes the executor: until its group is entrusted to the guard. An orchestrator that
# dies in between closes the pipe, and then nothing is ever started. dash and bash read no byte beyond the line.
_GATE: Final = ("/bin/sh", "-c", 'read -r go && exec "$@"', "gate")


class ExecutorReleased(ErgonError):
    """The executor was ended for another job's sake: this one was interrupted, and costs no attempt."""

    code = "executor_released"
    later = True


class Limits(Policy):
    """What the system allows one executor."""

    cpu: int | None = Field(default=None, ge=1, description="Seconds of processor time in all; then SIGKILL.")
    open_files: int | None = Field(default=None, ge=16, description="Descriptors that it may have open.")


class Command(Policy):
    """How an executor is started. It sees no variable of the environment but these and ERGON_EXECUTOR, its mark."""

    words: tuple[str, ...] = Field(min_length=1, description="The program and its arguments.")
    environment: Mapping[str, str] = Field(default_factory=dict, description="All of its environment.")
    folder: str | None = Field(default=None, description="Where it runs; the orchestrator's folder by default.")
    limits: Limits = Limits()


class ExecutorProcess:
    """A running executor; everything but ``start`` belongs to one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], guard: Guard, readers: ThreadPoolExecutor, mark: str) -> None:
        self.pid = process.pid
        #: What the environment of each of its children names.
        self._mark = mark
        #: Those that were below it when it was told to end.
        self._descendants: set[Descendant] = set()
        self.began = time.monotonic()
        self.answered = 0
        self.counts: Counter[str] = Counter()
        #: Done when the process is gone and reaped, with how it ended in words.
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        #: Whether it was told to end; it gets nothing further.
        self.killed = False
        #: Whether it has answered for a job that it did not have: its next answer may be another such one.
        self.suspect = False
        #: How many requests it was sent.
        self.asked = 0
        #: What it wrote to stderr before its first answer.
        self.last_lines = LastLines()
        self._retired = False
        self._leaving: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._guard = guard
        self._process = process
        self._in, self._out, self._err = (
            cast("IO[bytes]", end) for end in (process.stdin, process.stdout, process.stderr)
        )
        self._flights: dict[str, asyncio.Future[ExecutionOutcome]] = {}
        self._verdicts: dict[str, ExecutionOutcome] = {}
        self._trace: dict[str, str] = {}
        self._unsent = bytearray()
        self._outcomes, self._said = Splitter(), Splitter(LONGEST_SAID)
        self._readers = readers
        #: Lines that have come and were not taken yet. While some are, nothing further is read.
        #: Of what was read last; nothing is read before all of them are taken.
        self._lines: Iterator[bytes | Overlong] = iter(())
        self._held = False
        #: Whether its stdout is closed, whether it has ended, and how often it may still be read then.
        self._silent = self._over = False
        self._rest = DRAINED
        self._pidfd = os.pidfd_open(process.pid)
        self._attach()

    @classmethod
    async def start(cls, command: Command, guard: Guard, readers: ThreadPoolExecutor) -> Self:
        """Start an executor; OSError if that cannot be done, ConnectionLost if no guard would know of it."""
        loop = asyncio.get_running_loop()
        mark = guard.create_mark()
        process = await loop.run_in_executor(guard.threads, _spawned, command, guard, mark)
        return cls(process, guard, readers, mark)

    # -- jobs -------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def send(self, line: bytes, job_id: str, *, trace_id: str | None = None) -> asyncio.Future[ExecutionOutcome]:
        """Send a request; what becomes of it, whatever happens to the process."""
        flight: asyncio.Future[ExecutionOutcome] = self._loop.create_future()
        if self.gone.done() or self.killed:
            flight.set_exception(ExecutorReleased("the executor is ending; nothing was sent", retry_after=0.0))
            return flight
        if job_id in self._flights:
            # Its outcome could not be told from the other's, and one of the two would wait for ever.
            flight.set_exception(
                ExecutorReleased("the executor has this job already; nothing was sent", retry_after=1.0)
            )
            return flight
        self.asked += 1
        self._flights[job_id] = flight
        if trace_id is not None:
            self._trace[job_id] = trace_id
        self._write(line)
        return flight

    def end(self, job_id: str, outcome: ExecutionOutcome, *, grace: float) -> bool:
        """End the process because of *job_id*, whose outcome this is once the process is gone; False if it has one."""
        if job_id not in self._flights:
            return False
        self._verdicts[job_id] = outcome
        self.kill(grace=grace)
        return True

    def kill(self, *, grace: float) -> None:
        """SIGTERM to the whole group, and SIGKILL after *grace* seconds."""
        self.killed = True
        self._signal(signal.SIGTERM)
        self._loop.call_later(grace, self._signal, signal.SIGKILL)

    def retire(self, *, grace: float) -> None:
        """Close its stdin, so that it ends by itself; it is killed if it has not after *grace* seconds."""
        self.killed = self._retired = True
        self._close_input()
        self._loop.call_later(grace, self._signal, signal.SIGKILL)

    def memory(self) -> int | None:
        """Bytes of memory that the process holds; its children are not counted."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return pages * resource.getpagesize()

    # -- pipes ------------------------------------------------------------------------------------

    def _attach(self) -> None:
        for end in (self._in, self._out, self._err):
            os.set_blocking(end.fileno(), False)
        self._loop.add_reader(self._out.fileno(), self._read)
        self._loop.add_reader(self._err.fileno(), self._hear)
        self._loop.add_reader(self._pidfd, self._exited)

    def _write(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        sent = self._sent(data)
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._in.fileno(), self._write_more)

    def _write_more(self) -> None:
        del self._unsent[: self._sent(bytes(self._unsent[:CHUNK]))]
        if not self._unsent and not self._in.closed:
            self._loop.remove_writer(self._in.fileno())

    def _sent(self, data: bytes) -> int:
        try:
            return os.write(self._in.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError:
            # It reads no more; how it ended is told when it has.
            self._unsent.clear()
            return len(data)

    def _close_input(self) -> None:
        if not self._in.closed:
            self._loop.remove_writer(self._in.fileno())
            self._in.close()

    def _read(self) -> None:
        data = _available(self._out)
        if data is None:
            return
        if not data:
            # An executor that closed its stdout can answer nothing any more; most of them are about to end.
            self._silent = True
            self._loop.remove_reader(self._out.fileno())
            self._loop.call_later(LAST, self._signal, signal.SIGKILL)
            return
        self._lines = self._outcomes.feed(data)
        self._take_lines()

    def _take_lines(self) -> None:
        """Take what has come, in its order; what would hold the loop for long later, or in a thread."""
        for _ in range(TURN):
            line = next(self._lines, None)
            if line is None:
                if self._over and self._take_rest():
                    continue
                self._taken()
                return
            if isinstance(line, bytes) and len(line) > LONG:
                self._hold()
                read = partial(read_outcome, line, yielding=True)
                reading = self._loop.run_in_executor(self._readers, read)
                reading.add_done_callback(partial(self._was_read, line))
                return
            self._take(line, read_outcome(line))
        self._hold()
        self._loop.call_soon(self._take_lines)

    def _was_read(self, line: bytes, reading: asyncio.Future[ExecutionOutcome | BadLine]) -> None:
        error = reading.exception()
        if error is None:
            self._take(line, reading.result())
        else:
            # No memory for what is in it, for one. Whoever waits for more of this executor must not wait for ever.
            self._take(line, BadLine(Reason.NOT_JSON, f"not to be read: {type(error).__name__}", len(line)))
        self._take_lines()

    def _hold(self) -> None:
        if not self._held:
            self._held = True
            self._loop.remove_reader(self._out.fileno())

    def _taken(self) -> None:
        """All that has come is taken."""
        if self._over:
            self._leave()
        elif self._held:
            self._held = False
            if not self._silent:
                self._loop.add_reader(self._out.fileno(), self._read)

    def _take(self, line: bytes | Overlong, found: ExecutionOutcome | BadLine) -> None:
        job_id = found.job_id
        flight = None if job_id is None else self._flights.get(job_id)
        if job_id in self._verdicts and (flight is None or not self._succeeded_before_kill(job_id, found)):
            self._stray("late", line)
        elif flight is None or job_id is None:
            self._stray("malformed" if isinstance(found, BadLine) else "unknown", line)
        else:
            outcome = verdict.unreadable(job_id, found) if isinstance(found, BadLine) else found
            self.answered += 1
            self._landed(job_id, outcome)

    def _succeeded_before_kill(self, job_id: str, found: ExecutionOutcome | BadLine) -> bool:
        """Whether a job has succeeded after a request to kill it and before its process ended."""
        succeeded = isinstance(found, ExecutionOutcome) and found.status is Status.SUCCESS
        return succeeded and self._verdicts[job_id].error_type == verdict.KILLED

    def _stray(self, kind: str, line: bytes | Overlong) -> None:
        self.counts[kind] += 1
        self.suspect = self.suspect or kind == "unknown"
        if self.killed or self.counts[kind] > TOLD:
            return  # what comes from one that was told to end is no news, nor is the same thing for ever
        size = line.size if isinstance(line, Overlong) else len(line)
        told = {Names.REASON: kind, Names.BYTES: size, Names.PID: self.pid}
        logs.say(logging.WARNING, Event.EXECUTOR_STRAY, told, to=log)

    def _hear(self) -> None:
        data = _available(self._err, SAID_CHUNK)
        if data is None:
            return
        if not data:
            self._loop.remove_reader(self._err.fileno())
            return
        for line in self._said.feed(data):
            self._tell(line)

    def _tell(self, line: bytes | Overlong) -> None:
        if isinstance(line, Overlong):
            return
        if not self.answered:
            self.last_lines.add(line)
        if not log.isEnabledFor(logging.INFO):
            return
        told: dict[str, Any] = {Names.LINE: masked(line.decode(errors="replace")[:SAID]), Names.PID: self.pid}
        if len(self._flights) == 1:
            # With several nobody knows whose line it is.
            (job_id,) = self._flights
            told |= {Names.TRANSACTION_ID: job_id, Names.TRACE_ID: self._trace.get(job_id)}
        logs.say(logging.INFO, Event.EXECUTOR_SAID, told, to=log)

    # -- the end ----------------------------------------------------------------------------------

    def _signal(self, number: signal.Signals) -> None:
        # Until it is reaped its group cannot be anybody else's.
        if not self.gone.done():
            self._descendants.update(list_children(self.pid))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._out.fileno())
        self._signal(signal.SIGKILL)  # whatever it has left behind in its group
        self._over = True
        self._deliver_final_verdicts()
        if not self._held:
            self._take_lines()

    def _deliver_final_verdicts(self) -> None:
        """Deliver the verdicts that no line can change, such as timeouts: reading the rest may take many seconds."""
        for job_id, outcome in self._verdicts.items():
            if job_id in self._flights and outcome.error_type != verdict.KILLED:
                self._landed(job_id, outcome)

    def _take_rest(self) -> bool:
        """Whether there is more of what it said before it ended; a child may be writing for ever."""
        data = _available(self._out) if self._rest else None
        if not data:
            return False
        self._rest -= 1
        self._lines = self._outcomes.feed(data)
        return True

    def _leave(self) -> None:
        for _ in range(DRAINED):
            said = _available(self._err)
            if not said:
                break
            for line in self._said.feed(said):
                self._tell(line)
        how = _worded(self._process.wait())
        self._loop.remove_reader(self._err.fileno())
        self._close_input()
        self._out.close()
        self._err.close()
        os.close(self._pidfd)
        self.gone.set_result(how)
        self._leaving = self._loop.run_in_executor(self._guard.threads, self._end_descendants)
        for job_id in list(self._flights):
            if job_id in self._verdicts:
                self._landed(job_id, self._verdicts[job_id])
            elif self._verdicts or self._retired:
                self._dropped(job_id, "the executor was ended, and not for what this job did")
            else:
                self._landed(job_id, verdict.died(job_id, how=how))

    def _end_descendants(self) -> None:
        """Kill what it has started in other sessions, then forget its group."""
        kill_all(self._descendants)
        kill_marked(self._mark)
        self._guard.remove(self.pid)

    def _landed(self, job_id: str, outcome: ExecutionOutcome) -> None:
        flight = self._flights.pop(job_id)
        self._trace.pop(job_id, None)
        if not flight.done():
            flight.set_result(outcome)

    def _dropped(self, job_id: str, words: str) -> None:
        flight = self._flights.pop(job_id)
        self._trace.pop(job_id, None)
        if not flight.done():
            flight.set_exception(ExecutorReleased(words, retry_after=0.0))


def _spawned(command: Command, guard: Guard, mark: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603 - the operator's own command
        [*_GATE, *command.words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**command.environment, MARK: mark},
        cwd=command.folder,
        start_new_session=True,
        bufsize=0,
    )
    try:
        guard.add(process.pid)
        for kind, most in (
            (resource.RLIMIT_CPU, command.limits.cpu),
            (resource.RLIMIT_NOFILE, command.limits.open_files),
        ):
            if most is not None:
                resource.prlimit(process.pid, kind, (most, most))
        cast("IO[bytes]", process.stdin).write(b"\n")
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process


def _available(end: IO[bytes], most: int = CHUNK) -> bytes | None:
    """What can be read at once; None if that is nothing yet, and empty if there will be no more."""
    try:
        return os.read(end.fileno(), most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _worded(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
