"""A pool of executors of one kind: it keeps them running, sends them jobs and kills them at a hard timeout.

An executor is a process, in any language, that runs handlers for an orchestrator. A hard timeout ends the process of a
job: a handler cannot be stopped in another way.

``ExecutorProcess`` is one of these processes. ``is_ending`` says that it was asked to end, ``is_suspect`` that it has
answered for a job that it did not have, ``answer_count`` includes the answer to the readiness probe, and ``exited``
is done when the process is gone. Errors with ``not_attempted`` say that nothing ran: the job is redelivered without
counting an attempt.

One timer serves the deadlines of all jobs. Nearly every job ends long before its deadline, so a timer for each job
would be created, sorted and discarded for nothing. The one timer is set again only for a deadline before all others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from pydantic import Field

from ergon_framework.errors import ConnectionLostError, ErgonError
from ergon_framework.executors import decision, startup
from ergon_framework.executors.metrics import PoolMetrics, PoolStats
from ergon_framework.executors.process import UNEXPECTED_LINE_KINDS, ExecutorCommand, ExecutorProcess
from ergon_framework.executors.protocol import ExecutionOutcome, format_request_line
from ergon_framework.executors.reaper import ProcessReaper
from ergon_framework.executors.startup import ExecutorNotStarted, StartupFailure, StderrTail
from ergon_framework.policy import Policy
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.telemetry.names import Event
from ergon_framework.telemetry.names import Field as LogField
from ergon_framework.worker.policies import RetryPolicy

K = TypeVar("K")


class DeadlineHeap(Generic[K]):
    """Calls *on_expired* with each key whose deadline has passed; belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expired: Callable[[K], object]) -> None:
        self._loop = loop
        self._on_expired = on_expired
        self._deadlines: dict[K, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_deadline = 0.0

    def add(self, key: K, seconds: float) -> None:
        """Expire *key* after *seconds*, unless it is removed first."""
        due = self._deadlines[key] = self._loop.time() + seconds
        if self._timer is None or due < self._next_deadline:
            self._set_timer(due)

    def remove(self, key: K) -> None:
        self._deadlines.pop(key, None)

    def clear(self) -> None:
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_deadline = due
        self._timer = self._loop.call_at(due, self._expire_due)

    def _expire_due(self) -> None:
        self._timer = None
        now = self._loop.time()
        for key in [key for key, due in self._deadlines.items() if due <= now]:
            # A callback for an earlier key of this batch may have removed it.
            if self._deadlines.pop(key, None) is not None:
                self._on_expired(key)
        if self._deadlines and self._timer is None:
            self._set_timer(min(self._deadlines.values()))


# -- pool -------------------------------------------------------------------------------------------

log: Final = logging.getLogger("ergon_framework.executors")
_EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})
#: A handler that no executor has: an executor that answers "not found" is ready for its handlers.
READINESS_PROBE_HANDLER: Final = "ergon.ready"
#: Minimum seconds before the redelivery of a job that found no running executor or no free slot.
NO_EXECUTOR_RETRY_SECONDS: Final = 1.0


class PoolClosed(ErgonError):
    """The pool accepts no more jobs; nothing was sent, and no attempt is counted."""

    code = "pool_closed"
    not_attempted = True
    retry_after = 0.0


class ExecutorsBusy(ErgonError):
    """Executors are running, and none has a free slot; nothing was sent, and no attempt is counted."""

    code = "executors_busy"
    not_attempted = True


class WaitLimits(NamedTuple):
    """Maximum seconds that a caller waits for a slot: while executors are running, and while none is."""

    busy: float
    start: float


class PoolPolicy(Policy):
    """The number of executors, their lifetime, and how they are stopped."""

    size: int = Field(default=2, ge=1, le=1024, description="Executors that are kept running.")
    max_in_flight: int = Field(default=1, ge=1, le=1024, description="Jobs at a time in one executor.")
    grace: float = Field(default=3.0, ge=0, description="Seconds between SIGTERM and SIGKILL.")
    start_timeout: float = Field(default=30.0, gt=0, description="Seconds within which a new executor must answer.")
    max_jobs: int | None = Field(default=None, ge=1, description="Jobs after which an executor is replaced.")
    max_age: float | None = Field(default=None, gt=0, description="Seconds after which an executor is replaced.")
    max_memory: int | None = Field(default=None, ge=1, description="Bytes beyond which an executor is replaced.")
    restart: RetryPolicy = Field(
        default=RetryPolicy(backoff=0.1, multiplier=2, cap=30.0), description="Delays after failed starts."
    )


class _InFlightJob(NamedTuple):
    """A job in flight and its timeout; 0 without a timeout."""

    process: ExecutorProcess
    id: str
    timeout: float


class ExecutorPool:
    """Runs jobs in executors of one kind; belongs to one event loop.

    Each kind has its own pool, so that a slow kind delays no other. A slot is the place of one job in an executor. A
    keeper task starts one executor and replaces it when it has exited.
    """

    def __init__(
        self,
        command: ExecutorCommand,
        *,
        policy: PoolPolicy | None = None,
        name: str = "executor",
        reaper: ProcessReaper | None = None,
    ) -> None:
        self.name = name
        self.policy = policy or PoolPolicy()
        #: Events by name: started, failed_starts, retired, killed, died, and unexpected lines by their kind.
        self.counts: Counter[str] = Counter()
        self._command = command
        #: The reaper that several pools share; without one the pool creates its own.
        self._shared_reaper = reaper
        self._reaper: ProcessReaper | None = None
        self._loop: asyncio.AbstractEventLoop
        self._deadlines: DeadlineHeap[_InFlightJob]
        self._running: set[ExecutorProcess] = set()
        #: The number of occupied slots of each executor, and the executors with a free slot.
        self._used_slots: dict[ExecutorProcess, int] = {}
        self._free_executors: deque[ExecutorProcess] = deque()
        self._waiters: deque[asyncio.Future[ExecutorProcess]] = deque()
        self._keeper_tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        #: The last start that failed, None after a successful one; and the earliest time of the next start.
        self._last_failure: StartupFailure | None = None
        self._next_start = 0.0
        #: The number of executors that are starting.
        self._starting_count = 0
        #: Set when the first executor has answered or could not be started: the cause of further waiting is known.
        self._first_start_ended = asyncio.Event()
        #: The number of readiness probes, the first requests to new executors.
        self._probe_count = 0
        #: The number of the last probe whose executor was logged as too slow for a waiting caller.
        self._slow_probe = -1
        #: The number of slots that callers got, and the seconds for which they waited in all; for the metrics.
        self._served_count = 0
        self._wait_seconds = 0.0
        self._metrics: PoolMetrics | None = None
        self._worker_id = f"{name}-{os.getpid()}"
        # A separate thread for each kind: the long lines of one kind delay no other.
        self._readers = ThreadPoolExecutor(1, f"{name}-lines")

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._deadlines = DeadlineHeap(self._loop, self._terminate_timed_out)
        self._reaper = self._shared_reaper or await asyncio.to_thread(ProcessReaper)
        self._metrics = get_registry().register(partial(PoolMetrics, get_stats=self._get_stats), self.name)
        self._keeper_tasks = [
            asyncio.create_task(self._keep_running(), name=f"{self.name}-{n}") for n in range(self.policy.size)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the running executors."""
        return sorted(process.pid for process in self._running)

    @property
    def startup_error(self) -> ExecutorNotStarted | None:
        """The reason why no executor is running, if it is known."""
        if self._last_failure is None or self._is_up:
            return None
        return self._last_failure.error(
            retry_after=max(NO_EXECUTOR_RETRY_SECONDS, self._next_start - self._loop.time())
        )

    async def wait_first_start(self) -> None:
        """Wait until the first start has ended, successful or not."""
        await self._first_start_ended.wait()

    async def close(self) -> None:
        """Accept no more jobs and end every executor."""
        self._is_closing = True
        self._first_start_ended.set()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(PoolClosed("the pool is closed"))
        for keeper in self._keeper_tasks:
            keeper.cancel()
        await asyncio.gather(*self._keeper_tasks, return_exceptions=True)
        for process in list(self._running):
            process.retire(grace=self.policy.grace)
        await asyncio.gather(*(asyncio.shield(process.exited) for process in list(self._running)))
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            self._deadlines.clear()
            self._readers.shutdown(wait=False)
        if self._metrics is not None:
            get_registry().close(self._metrics)
        if reaper is not None and reaper is not self._shared_reaper:
            await asyncio.to_thread(reaper.close)

    def _get_stats(self) -> PoolStats:
        # Called from other threads: everything that may change meanwhile is copied first.
        running, counts = list(self._running), dict(self.counts)
        unexpected_lines: Counter[str] = Counter(
            {kind: counts.pop(f"unexpected_{kind}", 0) for kind in UNEXPECTED_LINE_KINDS}
        )
        for process in running:
            unexpected_lines.update(dict(process.counts))
        return PoolStats(
            running=len(running),
            in_flight=sum(list(self._used_slots.values())),
            waiting=len(self._waiters),
            served=self._served_count,
            wait_seconds=self._wait_seconds,
            events=counts,
            unexpected_lines=unexpected_lines,
        )

    # -- one job ----------------------------------------------------------------------------------

    async def run(
        self,
        function_name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _EMPTY,
        *,
        job_id: str,
        timeout: float | None,
        attempt_number: int = 1,
        enqueued_at: float | None = None,
        queue_name: str = "default",
        carrier: Mapping[str, str] = _EMPTY,
        reservation: Reservation | None = None,
    ) -> ExecutionOutcome:
        """Run the job in the next free executor and return its outcome; every event after sending is an outcome.

        The time of *timeout* starts when the request is sent. At its end the executor is killed, and the outcome is
        returned after the process has exited, so that no second attempt overlaps the first. Raises LineError if the
        job cannot be sent, and errors with ``not_attempted`` if nothing ran or the job was interrupted because of
        another job. A caller with a *reservation* keeps it afterwards.
        """
        process = await self._acquire() if reservation is None else reservation.process
        try:
            now = time.time()
            line = format_request_line(
                function_name,
                args,
                kwargs,
                job_id=job_id,
                attempt_number=attempt_number,
                enqueue_time=_to_utc(now if enqueued_at is None else enqueued_at),
                queue_name=queue_name,
                deadline=None if timeout is None else _to_utc(now + timeout),
                trace_context=carrier or None,
                worker_id=self._worker_id,
            )
            return await self._send(process, line, job_id, timeout=timeout, carrier=carrier)
        finally:
            if reservation is None:
                self._release(process)

    async def reserve(self, limits: WaitLimits | None = None) -> Reservation:
        """Wait for a slot in an executor and reserve it for a job; the caller must release it.

        Raises ExecutorNotStarted if no executor is running and a start has failed or takes longer than *limits*
        allows, and ExecutorsBusy if executors are running but had no free slot for that long.
        """
        return Reservation(await self._acquire(limits), self._release)

    def reserve_now(self) -> Reservation | None:
        """Reserve a slot that is free now; None if no slot is free, or another caller waits for one."""
        process = None if self._is_closing or self._waiters else self._take_free_slot()
        if process is None:
            return None
        self._served_count += 1
        return Reservation(process, self._release)

    @property
    def slot_count(self) -> int:
        """The number of jobs that run concurrently when every executor is running."""
        return self.policy.size * self.policy.max_in_flight

    def kill(self, job_id: str) -> bool:
        """Terminate the executor that runs *job_id*, as at a hard timeout; False if no executor runs it."""
        outcome = decision.job_killed(job_id)
        is_terminated = any(process.terminate(job_id, outcome, grace=self.policy.grace) for process in self._running)
        self.counts["killed"] += is_terminated
        return is_terminated

    async def _send(
        self,
        process: ExecutorProcess,
        line: bytes,
        job_id: str,
        *,
        timeout: float | None,
        carrier: Mapping[str, str] = _EMPTY,
    ) -> ExecutionOutcome:
        reply = process.send(line, job_id, trace_id=_trace_id(carrier) if carrier else None)
        job = _InFlightJob(process, job_id, timeout or 0.0)
        if timeout is not None:
            self._deadlines.add(job, timeout)
        try:
            return await reply
        except asyncio.CancelledError:
            # No caller waits for the outcome any more, but the job runs: its executor is killed and gets no other job.
            if self._terminate_timed_out(job):
                # The cancelled caller may retry with a second attempt, which must not overlap this one.
                await asyncio.shield(process.exited)
            raise
        finally:
            self._deadlines.remove(job)

    def _terminate_timed_out(self, job: _InFlightJob) -> bool:
        outcome = decision.job_timed_out(job.id, after=job.timeout)
        is_terminated = job.process.terminate(job.id, outcome, grace=self.policy.grace)
        self.counts["killed"] += is_terminated
        return is_terminated

    # -- free slots -------------------------------------------------------------------------------

    async def _acquire(self, limits: WaitLimits | None = None) -> ExecutorProcess:
        # Waiting callers are served first, even if an executor happens to be free.
        process = None if self._waiters or self._is_closing else self._take_free_slot()
        if process is None:
            process = await self._wait_for_slot(limits)
        self._served_count += 1
        return process

    async def _wait_for_slot(self, limits: WaitLimits | None) -> ExecutorProcess:
        """Wait for the next executor with a free slot and occupy that slot."""
        if self._is_closing or self._reaper is None:
            raise PoolClosed("the pool is not open")
        error = self.startup_error
        if error is not None and not self._starting_count:
            raise error
        waiter: asyncio.Future[ExecutorProcess] = self._loop.create_future()
        self._waiters.append(waiter)
        began = self._loop.time()
        timers: list[asyncio.TimerHandle] = []
        if limits is not None:
            timers = [self._loop.call_later(after, self._give_up, waiter, after, limits) for after in limits]
        try:
            process = await waiter
        except asyncio.CancelledError:
            # The caller was cancelled after it had been given a slot.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(waiter.result())
            raise
        finally:
            for timer in timers:
                timer.cancel()
        self._wait_seconds += self._loop.time() - began
        return process

    def _give_up(self, waiter: asyncio.Future[ExecutorProcess], after: float, limits: WaitLimits) -> None:
        # Checked now, because the state may have changed: it decides which of the two limits applies.
        if waiter.done() or after < (limits.busy if self._is_up else limits.start):
            return
        waiter.set_exception(self._busy_error(after) if self._is_up else self._slow_start_error(after))
        self._waiters.remove(waiter)

    def _busy_error(self, after: float) -> ExecutorsBusy:
        return ExecutorsBusy(
            f"all executors were busy for {after:.3g} s, and the job was not started; use as many slots (size times "
            f"max_in_flight, {self.slot_count} now) as the task's concurrency, or give the step more time",
            retry_after=NO_EXECUTOR_RETRY_SECONDS,
        )

    def _slow_start_error(self, after: float) -> ExecutorNotStarted:
        error = self.startup_error
        if error is None:
            stderr_tail = next(
                (process.stderr_tail for process in self._running if not process.answer_count), StderrTail()
            )
            slow = startup.still_starting(self._command.words, after, stderr_tail)
            error = slow.error(retry_after=NO_EXECUTOR_RETRY_SECONDS)
            if self._slow_probe != self._probe_count:  # many may wait for the same start
                self._slow_probe = self._probe_count
                self._log_failed_start(slow)
        return error

    def _take_free_slot(self) -> ExecutorProcess | None:
        """Return an executor with a free slot and occupy that slot; None if there is none."""
        while self._free_executors:
            process = self._free_executors.popleft()
            if self._is_usable(process):
                self._used_slots[process] += 1
                if self._used_slots[process] < self.policy.max_in_flight:
                    self._free_executors.append(process)
                return process
        return None

    @property
    def _is_up(self) -> bool:
        """Whether an executor has answered and is running, busy or not."""
        return any(map(self._is_usable, self._used_slots))

    def _is_usable(self, process: ExecutorProcess) -> bool:
        return not process.is_ending and not process.exited.done()

    def _release(self, process: ExecutorProcess) -> None:
        if process not in self._used_slots:  # it has exited
            self._serve_waiters()
            return
        was_full = self._used_slots[process] == self.policy.max_in_flight
        self._used_slots[process] -= 1
        if self._is_usable(process) and self._needs_replacement(process):
            self.counts["retired"] += 1
            # The executor finishes its jobs and gets no more.
            process.retire(grace=self.policy.grace + self.policy.start_timeout)
        elif was_full and self._is_usable(process):
            self._free_executors.append(process)
        self._serve_waiters()

    def _serve_waiters(self) -> None:
        while self._waiters:
            if self._waiters[0].done():  # its caller was cancelled
                del self._waiters[0]
                continue
            process = self._take_free_slot()
            if process is None:
                return
            waiter = self._waiters.popleft()
            waiter.set_result(process)

    def _needs_replacement(self, process: ExecutorProcess) -> bool:
        policy = self.policy
        # A wrong answer may have been meant for another job: the next one may be wrong as well.
        if process.is_suspect:
            return True
        if policy.max_jobs is not None and process.answer_count > policy.max_jobs:  # the probe was answered too
            return True
        if policy.max_age is not None and time.monotonic() - process.started_at > policy.max_age:
            return True
        return policy.max_memory is not None and (process.memory() or 0) > policy.max_memory

    # -- keeping them running ---------------------------------------------------------------------

    async def _keep_running(self) -> None:
        """Keep one executor running, and replace it after it has exited."""
        failures = 0
        while True:
            self._starting_count += 1
            try:
                process = await self._start_executor()
            finally:
                self._starting_count -= 1
            if isinstance(process, ExecutorProcess):
                self._last_failure = None
                self._first_start_ended.set()
                self._used_slots[process] = 0
                self._free_executors.append(process)
                self._serve_waiters()
                await asyncio.shield(process.exited)
                lifetime = time.monotonic() - process.started_at
                # An executor that was ended, had a job or lived long is replaced at once.
                if process.is_ending or process.request_count > 1 or lifetime > self.policy.start_timeout:
                    failures = 0
                    continue
                # The executor answered the probe and exited before a job was sent: the next one may do the same.
            else:
                self.counts["failed_starts"] += 1
                self._fail_waiters(process, self.policy.restart.delay(failures))
            await asyncio.sleep(self.policy.restart.delay(failures))
            failures += 1

    def _fail_waiters(self, failed: StartupFailure | None, delay: float) -> None:
        """Fail current and later waiters with the startup error, unless another executor is running."""
        self._first_start_ended.set()
        if failed is None:
            return
        self._last_failure, self._next_start = failed, self._loop.time() + delay
        if self._is_up:
            return
        waiting = [waiter for waiter in self._waiters if not waiter.done()]
        self._waiters.clear()
        for waiter in waiting:
            waiter.set_exception(failed.error(retry_after=max(NO_EXECUTOR_RETRY_SECONDS, delay)))

    async def _start_executor(self) -> ExecutorProcess | StartupFailure | None:
        """Start an executor and wait for its first answer; return it, or the failure of the start.

        None if there is no failure to report: the executor ends with the pool, or answered and then exited, which is
        logged as the exit of a running one.
        """
        assert self._reaper is not None  # noqa: S101 - keeper tasks run only while the pool is open
        starting = asyncio.ensure_future(ExecutorProcess.start(self._command, self._reaper, self._readers))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A thread starts the process and cannot be stopped: the process it starts is ended on close.
            await asyncio.wait([starting])
            if starting.exception() is None:
                self._running.add(starting.result())
            raise
        except OSError as error:
            file_hint = "" if error.filename is None else f": {error.filename!r}"
            return self._log_failed_start(startup.start_rejected(self._command.words, f"{error.strerror}{file_hint}"))
        except ConnectionLostError as error:
            return self._log_failed_start(startup.start_rejected(self._command.words, str(error)))
        self._running.add(process)
        process.exited.add_done_callback(lambda exited: self._on_exit(process, exited.result()))
        self.counts["started"] += 1
        # A request that waited for an interpreter to start would lose that time of its timeout.
        self._probe_count += 1
        job_id = f"{READINESS_PROBE_HANDLER}-{self._probe_count}"
        now = datetime.now(UTC)
        line = format_request_line(
            READINESS_PROBE_HANDLER, job_id=job_id, attempt_number=1, enqueue_time=now, worker_id=self._worker_id
        )
        try:
            await self._send(process, line, job_id, timeout=self.policy.start_timeout)
        except ErgonError:
            # Nothing was sent: the executor ends with the pool, or ended before the probe was sent.
            return None if process.is_ending else self._startup_failure(process)
        return process if self._is_usable(process) else self._startup_failure(process)

    def _startup_failure(self, process: ExecutorProcess) -> StartupFailure | None:
        if process.answer_count:
            return None
        command, stderr_tail = self._command.words, process.stderr_tail
        if process.is_ending:
            other_lines = sum(process.counts.values())
            failed = startup.no_answer(command, self.policy.start_timeout, stderr_tail, other_lines=other_lines)
        else:
            failed = startup.exited_early(command, process.exited.result(), stderr_tail)
        return self._log_failed_start(failed, process.pid)

    def _log_failed_start(self, failed: StartupFailure, pid: int | None = None) -> StartupFailure:
        fields = {
            LogField.EXECUTOR: self.name,
            LogField.PID: pid,
            LogField.EXIT_CODE: failed.exit_description,
            LogField.LINE: failed.lines,
        }
        fields[LogField.ERROR] = str(failed.error(retry_after=0.0))
        logs.log_event(logging.ERROR, Event.EXECUTOR_NOT_STARTED, fields, to=log)
        return failed

    def _on_exit(self, process: ExecutorProcess, exit_description: str) -> None:
        self._running.discard(process)
        self._used_slots.pop(process, None)
        for kind, count in process.counts.items():
            self.counts[f"unexpected_{kind}"] += count
        if process.is_ending:
            return
        self.counts["died"] += 1
        # An executor that never answered is logged as a failed start.
        if process.answer_count:
            fields = {LogField.EXECUTOR: self.name, LogField.PID: process.pid, LogField.EXIT_CODE: exit_description}
            logs.log_event(logging.ERROR, Event.EXECUTOR_EXITED, fields, to=log)


class Reservation:
    """A slot in an executor, held until the end of its ``with`` block."""

    __slots__ = ("_release", "process")

    def __init__(self, process: ExecutorProcess, release: Callable[[ExecutorProcess], None]) -> None:
        self.process = process
        self._release = release

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release(self.process)


def _to_utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _trace_id(carrier: Mapping[str, str]) -> str | None:
    parts = carrier.get("traceparent", "").split("-")
    return parts[1] if len(parts) > 1 else None
