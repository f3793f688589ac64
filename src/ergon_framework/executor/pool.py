"""Pool: executors of one kind, kept running, each with a job at a time, and killed when a job takes too long."""

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
from typing import Any, Final, NamedTuple, Self

from pydantic import Field

from ergon_framework.errors import ConnectionLost, ErgonError
from ergon_framework.executor import start, verdict
from ergon_framework.executor.deadlines import Deadlines
from ergon_framework.executor.guard import Guard
from ergon_framework.executor.process import STRAYS, Command, ExecutorProcess
from ergon_framework.executor.protocol import ExecutionOutcome, write_call
from ergon_framework.executor.start import ExecutorNotStarted, FailedStart, LastLines
from ergon_framework.executor.tally import Figures, PoolTally
from ergon_framework.policy import Policy
from ergon_framework.task.mixins.policies import RetryPolicy
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.metrics import registry_of
from ergon_framework.telemetry.names import Event
from ergon_framework.telemetry.names import Field as Names

log: Final = logging.getLogger("ergon_framework.executor")
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
#: A handler that nobody has: whoever answers that it is not there is ready for those that are.
PROBE: Final = "ergon.ready"
#: Seconds before a job comes back, at least, that found no executor up, or none with a place.
NOBODY: Final = 1.0


class PoolClosed(ErgonError):
    """The pool takes no job any more; nothing was sent, and it costs no attempt."""

    code = "pool_closed"
    later = True
    retry_after = 0.0


class ExecutorsBusy(ErgonError):
    """Executors are up, and none has a place; nothing was sent, and it costs no attempt."""

    code = "executors_busy"
    later = True


class Patience(NamedTuple):
    """For how many seconds somebody waits for a place: while executors are up, and while none is."""

    busy: float
    start: float


class PoolPolicy(Policy):
    """How many executors there are, how long they live, and how they are ended."""

    size: int = Field(default=2, ge=1, le=1024, description="Executors that are kept running.")
    max_in_flight: int = Field(default=1, ge=1, le=1024, description="Jobs at a time in one executor.")
    grace: float = Field(default=3.0, ge=0, description="Seconds between SIGTERM and SIGKILL.")
    start_timeout: float = Field(default=30.0, gt=0, description="Seconds within which a new executor must answer.")
    max_jobs: int | None = Field(default=None, ge=1, description="Jobs after which an executor is replaced.")
    max_age: float | None = Field(default=None, gt=0, description="Seconds after which an executor is replaced.")
    max_memory: int | None = Field(default=None, ge=1, description="Bytes beyond which an executor is replaced.")
    restart: RetryPolicy = Field(
        default=RetryPolicy(backoff=0.1, multiplier=2, cap=30.0), description="Waits after starts that failed."
    )


class _Job(NamedTuple):
    """A job in flight, and how long it may take; 0 where nobody has said."""

    process: ExecutorProcess
    id: str
    timeout: float


class ExecutorPool:
    """Runs jobs in executors of one kind; it belongs to one event loop.

    Kinds have pools of their own, so that a slow one delays nobody else.
    """

    def __init__(
        self,
        command: Command,
        *,
        policy: PoolPolicy | None = None,
        name: str = "executor",
        guard: Guard | None = None,
    ) -> None:
        self.name = name
        self.policy = policy or PoolPolicy()
        #: What has happened: started, failed_starts, retired, killed, died, and strays by their kind.
        self.counts: Counter[str] = Counter()
        self._command = command
        #: The guard of several pools; without one the pool has its own.
        self._shared = guard
        self._guard: Guard | None = None
        self._loop: asyncio.AbstractEventLoop
        self._deadlines: Deadlines[_Job]
        self._running: set[ExecutorProcess] = set()
        #: How many places of each executor are taken, and which of them have one left.
        self._taken: dict[ExecutorProcess, int] = {}
        self._free: deque[ExecutorProcess] = deque()
        self._waiting: deque[asyncio.Future[ExecutorProcess]] = deque()
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = False
        #: The last start, while it has failed and nobody is up, and when the next one is due.
        self._failed: FailedStart | None = None
        self._next = 0.0
        #: How many are being started.
        self._starting = 0
        #: One has answered, or could not be started: from here on somebody who waits knows what for.
        self._tried = asyncio.Event()
        self._probes = 0
        #: The last of them that was told to take too long for somebody.
        self._slow = -1
        self._served = 0
        self._waited_for = 0.0
        self._tally: PoolTally | None = None
        self._worker = f"{name}-{os.getpid()}"
        # A thread of each kind's own: the long lines of one delay no other's.
        self._readers = ThreadPoolExecutor(1, f"{name}-lines")

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(self._loop, self._end)
        self._guard = self._shared or await asyncio.to_thread(Guard)
        self._tally = registry_of().join(partial(PoolTally, figures=self._figures), self.name)
        self._keepers = [asyncio.create_task(self._keep(), name=f"{self.name}-{n}") for n in range(self.policy.size)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """The executors that run."""
        return sorted(process.pid for process in self._running)

    @property
    def unstarted(self) -> ExecutorNotStarted | None:
        """Why nobody is up, if that is known."""
        if self._failed is None or self._up:
            return None
        return self._failed.error(retry_after=max(NOBODY, self._next - self._loop.time()))

    async def tried(self) -> None:
        """Wait until the first start has ended, well or not."""
        await self._tried.wait()

    async def close(self) -> None:
        """Take no further job, have every executor end, and leave none behind."""
        self._closing = True
        self._tried.set()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(PoolClosed("the pool is closed"))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for process in list(self._running):
            process.retire(grace=self.policy.grace)
        await asyncio.gather(*(asyncio.shield(process.gone) for process in list(self._running)))
        guard, self._guard = self._guard, None
        if guard is not None:
            self._deadlines.clear()
            self._readers.shutdown(wait=False)
        if self._tally is not None:
            registry_of().close(self._tally)
        if guard is not None and guard is not self._shared:
            await asyncio.to_thread(guard.close)

    def _figures(self) -> Figures:
        # Asked from other threads: everything that may change meanwhile is copied first.
        running, counts = list(self._running), dict(self.counts)
        strays: Counter[str] = Counter({kind: counts.pop(f"stray_{kind}", 0) for kind in STRAYS})
        for process in running:
            strays.update(dict(process.counts))
        return Figures(
            running=len(running),
            in_flight=sum(list(self._taken.values())),
            waiting=len(self._waiting),
            served=self._served,
            waited=self._waited_for,
            ends=counts,
            strays=strays,
        )

    # -- one job ----------------------------------------------------------------------------------

    async def run(
        self,
        function_name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NONE,
        *,
        job_id: str,
        timeout: float | None,
        attempt_number: int = 1,
        enqueued_at: float | None = None,
        queue_name: str = "default",
        carrier: Mapping[str, str] = _NONE,
        place: Reservation | None = None,
    ) -> ExecutionOutcome:
        """What an executor makes of the job, once one is free; whatever happens there is an outcome.

        The clock of *timeout* starts when the request is sent. At its end the executor is killed,
        and the outcome is there when it is gone, so that no second attempt overlaps the first.
        Raises LineError for what cannot be sent, and errors that say ``later`` where nothing ran
        or it was interrupted for another job's sake. Whoever has a *place* keeps it afterwards.
        """
        process = await self._acquired() if place is None else place.process
        try:
            now = time.time()
            line = write_call(
                function_name,
                args,
                kwargs,
                job_id=job_id,
                attempt_number=attempt_number,
                enqueue_time=_moment(now if enqueued_at is None else enqueued_at),
                queue_name=queue_name,
                deadline=None if timeout is None else _moment(now + timeout),
                trace_context=carrier or None,
                worker_id=self._worker,
            )
            return await self._sent(process, line, job_id, timeout=timeout, carrier=carrier)
        finally:
            if place is None:
                self._release(process)

    async def reserve(self, patience: Patience | None = None) -> Reservation:
        """A place in an executor, once there is one, for a job that is to be sent in a moment; it has to be left.

        ExecutorNotStarted where nobody is up and a start has failed, or takes longer than *patience* has;
        ExecutorsBusy where some are up, and for so long none has had a place.
        """
        return Reservation(await self._acquired(patience), self._release)

    def reserve_now(self) -> Reservation | None:
        """A place that is free at this moment; None if there is none, or somebody else waits for it."""
        process = None if self._closing or self._waiting else self._picked()
        if process is None:
            return None
        self._served += 1
        return Reservation(process, self._release)

    @property
    def places(self) -> int:
        """How many jobs run at once when every executor is up."""
        return self.policy.size * self.policy.max_in_flight

    def kill(self, job_id: str) -> bool:
        """End the executor that has *job_id*, as at a hard timeout; False if none has it."""
        outcome = verdict.killed(job_id)
        ended = any(process.end(job_id, outcome, grace=self.policy.grace) for process in self._running)
        self.counts["killed"] += ended
        return ended

    async def _sent(
        self,
        process: ExecutorProcess,
        line: bytes,
        job_id: str,
        *,
        timeout: float | None,
        carrier: Mapping[str, str] = _NONE,
    ) -> ExecutionOutcome:
        flight = process.send(line, job_id, trace_id=_trace_id(carrier) if carrier else None)
        job = _Job(process, job_id, timeout or 0.0)
        if timeout is not None:
            self._deadlines.add(job, timeout)
        try:
            return await flight
        except asyncio.CancelledError:
            # Nobody waits for it any more, but it runs: an executor with such a job takes no other.
            if self._end(job):
                # Whoever leaves now may come back with a second attempt, which must not overlap this one.
                await asyncio.shield(process.gone)
            raise
        finally:
            self._deadlines.remove(job)

    def _end(self, job: _Job) -> bool:
        outcome = verdict.timed_out(job.id, after=job.timeout)
        ended = job.process.end(job.id, outcome, grace=self.policy.grace)
        self.counts["killed"] += ended
        return ended

    # -- who is free ------------------------------------------------------------------------------

    async def _acquired(self, patience: Patience | None = None) -> ExecutorProcess:
        # Who waits longest is first, also before one who comes when somebody happens to be free.
        process = None if self._waiting or self._closing else self._picked()
        if process is None:
            process = await self._waited(patience)
        self._served += 1
        return process

    async def _waited(self, patience: Patience | None) -> ExecutorProcess:
        """The next executor that has a place, and that place taken."""
        if self._closing or self._guard is None:
            raise PoolClosed("the pool is not open")
        error = self.unstarted
        if error is not None and not self._starting:
            raise error
        waiter: asyncio.Future[ExecutorProcess] = self._loop.create_future()
        self._waiting.append(waiter)
        began = self._loop.time()
        timers: list[asyncio.TimerHandle] = []
        if patience is not None:
            timers = [self._loop.call_later(after, self._give_up, waiter, after, patience) for after in patience]
        try:
            process = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(waiter.result())
            raise
        finally:
            for timer in timers:
                timer.cancel()
        self._waited_for += self._loop.time() - began
        return process

    def _give_up(self, waiter: asyncio.Future[ExecutorProcess], after: float, patience: Patience) -> None:
        # Asked now, because it may have changed: what is waited for decides how much patience there is.
        if waiter.done() or after < (patience.busy if self._up else patience.start):
            return
        waiter.set_exception(self._busy(after) if self._up else self._slow_start(after))
        self._waiting.remove(waiter)

    def _busy(self, after: float) -> ExecutorsBusy:
        return ExecutorsBusy(
            f"for {after:.3g} s all executors were busy, and this was not begun; have as many places (size times "
            f"max_in_flight, {self.places} now) as the task's concurrency has slots, or give the step more time",
            retry_after=NOBODY,
        )

    def _slow_start(self, after: float) -> ExecutorNotStarted:
        error = self.unstarted
        if error is None:
            said = next((process.last_lines for process in self._running if not process.answered), LastLines())
            slow = start.starting(self._command.words, after, said)
            error = slow.error(retry_after=NOBODY)
            if self._slow != self._probes:  # many may wait for the same start
                self._slow = self._probes
                self._unstarted(slow)
        return error

    def _picked(self) -> ExecutorProcess | None:
        """An executor with a place left, and that place taken."""
        while self._free:
            process = self._free.popleft()
            if self._usable(process):
                self._taken[process] += 1
                if self._taken[process] < self.policy.max_in_flight:
                    self._free.append(process)
                return process
        return None

    @property
    def _up(self) -> bool:
        """Whether there is one that has answered, busy or not."""
        return any(map(self._usable, self._taken))

    def _usable(self, process: ExecutorProcess) -> bool:
        return not process.killed and not process.gone.done()

    def _release(self, process: ExecutorProcess) -> None:
        if process not in self._taken:  # it is gone
            self._serve()
            return
        was_full = self._taken[process] == self.policy.max_in_flight
        self._taken[process] -= 1
        if self._usable(process) and self._worn(process):
            self.counts["retired"] += 1
            # It finishes what it has, and gets nothing further.
            process.retire(grace=self.policy.grace + self.policy.start_timeout)
        elif was_full and self._usable(process):
            self._free.append(process)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            if self._waiting[0].done():  # its caller has gone
                del self._waiting[0]
                continue
            process = self._picked()
            if process is None:
                return
            waiter = self._waiting.popleft()
            waiter.set_result(process)

    def _worn(self, process: ExecutorProcess) -> bool:
        policy = self.policy
        if process.suspect:
            return True
        if policy.max_jobs is not None and process.answered > policy.max_jobs:  # the probe was answered too
            return True
        if policy.max_age is not None and time.monotonic() - process.began > policy.max_age:
            return True
        return policy.max_memory is not None and (process.memory() or 0) > policy.max_memory

    # -- keeping them running ---------------------------------------------------------------------

    async def _keep(self) -> None:
        """Have one executor running, and another in its place when it is gone."""
        failures = 0
        while True:
            self._starting += 1
            try:
                process = await self._ready()
            finally:
                self._starting -= 1
            if isinstance(process, ExecutorProcess):
                self._failed = None
                self._tried.set()
                self._taken[process] = 0
                self._free.append(process)
                self._serve()
                await asyncio.shield(process.gone)
                lived = time.monotonic() - process.began
                if process.killed or process.asked > 1 or lived > self.policy.start_timeout:
                    failures = 0
                    continue
                # It answered, and left before anybody could give it a job: the next one may do the same.
            else:
                self.counts["failed_starts"] += 1
                self._fail(process, self.policy.restart.delay(failures))
            await asyncio.sleep(self.policy.restart.delay(failures))
            failures += 1

    def _fail(self, failed: FailedStart | None, delay: float) -> None:
        """Tell whoever waits, if nobody else is up to serve him, and those who come while it is so."""
        self._tried.set()
        if failed is None:
            return
        self._failed, self._next = failed, self._loop.time() + delay
        if self._up:
            return
        waiting = [waiter for waiter in self._waiting if not waiter.done()]
        self._waiting.clear()
        for waiter in waiting:
            waiter.set_exception(failed.error(retry_after=max(NOBODY, delay)))

    async def _ready(self) -> ExecutorProcess | FailedStart | None:
        """An executor that has answered, or why there is none to be had now; None if that is told already."""
        assert self._guard is not None  # noqa: S101 - keepers live between opening and closing
        starting = asyncio.ensure_future(ExecutorProcess.start(self._command, self._guard, self._readers))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # It is being started by a thread, which nothing stops: whoever comes of it is ended.
            await asyncio.wait([starting])
            if starting.exception() is None:
                self._running.add(starting.result())
            raise
        except OSError as error:
            where = "" if error.filename is None else f": {error.filename!r}"
            return self._unstarted(start.refused(self._command.words, f"{error.strerror}{where}"))
        except ConnectionLost as error:
            return self._unstarted(start.refused(self._command.words, str(error)))
        self._running.add(process)
        process.gone.add_done_callback(lambda gone: self._ended(process, gone.result()))
        self.counts["started"] += 1
        # A request that waits for an interpreter to start would pay for it with its own time.
        self._probes += 1
        job_id = f"{PROBE}-{self._probes}"
        now = datetime.now(UTC)
        line = write_call(PROBE, job_id=job_id, attempt_number=1, enqueue_time=now, worker_id=self._worker)
        try:
            await self._sent(process, line, job_id, timeout=self.policy.start_timeout)
        except ErgonError:
            # Nothing was sent: it is ended with the pool, or had ended before it could be asked.
            return None if process.killed else self._never_answered(process)
        return process if self._usable(process) else self._never_answered(process)

    def _never_answered(self, process: ExecutorProcess) -> FailedStart | None:
        if process.answered:
            return None
        words, said = self._command.words, process.last_lines
        if process.killed:
            strays = sum(process.counts.values())
            failed = start.silent(words, self.policy.start_timeout, said, strays=strays)
        else:
            failed = start.ended(words, process.gone.result(), said)
        return self._unstarted(failed, process.pid)

    def _unstarted(self, failed: FailedStart, pid: int | None = None) -> FailedStart:
        told = {Names.EXECUTOR: self.name, Names.PID: pid, Names.EXIT_CODE: failed.how, Names.LINE: failed.lines}
        told[Names.ERROR] = str(failed.error(retry_after=0.0))
        logs.say(logging.ERROR, Event.EXECUTOR_NOT_STARTED, told, to=log)
        return failed

    def _ended(self, process: ExecutorProcess, how: str) -> None:
        self._running.discard(process)
        self._taken.pop(process, None)
        for kind, count in process.counts.items():
            self.counts[f"stray_{kind}"] += count
        if process.killed:
            return
        self.counts["died"] += 1
        # Whoever starts it tells of one that never answered.
        if process.answered:
            told = {Names.EXECUTOR: self.name, Names.PID: process.pid, Names.EXIT_CODE: how}
            logs.say(logging.ERROR, Event.EXECUTOR_ENDED, told, to=log)


class Reservation:
    """A place in an executor, until the end of its ``with``."""

    __slots__ = ("_leave", "process")

    def __init__(self, process: ExecutorProcess, leave: Callable[[ExecutorProcess], None]) -> None:
        self.process = process
        self._leave = leave

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(self.process)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _trace_id(carrier: Mapping[str, str]) -> str | None:
    parts = carrier.get("traceparent", "").split("-")
    return parts[1] if len(parts) > 1 else None
