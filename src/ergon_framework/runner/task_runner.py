"""Run one task of a process: open it, run its loop, and restart a streaming loop that ends with an error.

A process has one runner for each of its tasks; it decides when they stop. A streaming worker whose server is
unavailable at its start retries the opening. A streaming loop that ends with an error is restarted with exponential
backoff, and its connector and lifespan (the context manager that opens its clients) are closed and opened again; the
other tasks of the process continue. A stop request that arrives before a loop has begun is not lost: it takes effect at
a gate, a function that the loop calls before every fetch. ``running_loops`` of a task knows its running loops: it stops
them and reports their state.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import Any, Protocol, TypeAlias

from ergon_framework.errors import ConfigurationError
from ergon_framework.failure import describe_error
from ergon_framework.gates import Gate, Pause
from ergon_framework.runner.loop_restart import LoopRestart
from ergon_framework.runner.queue_depth import publish_depth, publish_depth_async
from ergon_framework.runner.settings import RestartSettings
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.telemetry.redaction import mask_credentials
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.worker.report import Outcome, Report, StopReason
from ergon_framework.worker.running import running_loops
from ergon_framework.worker.solo import SoloRun

Runnable: TypeAlias = Task | AsyncTask


@dataclass(frozen=True, slots=True)
class TaskSetup:
    """A task and how it runs in a process.

    *gates* are called before the task's own. *on_outcome* is called with each outcome. *depth* is the interval of queue
    depth measurements; None disables them.
    """

    task: Runnable
    policy: ConsumerPolicy | ProducerPolicy
    gates: Sequence[Gate] = ()
    on_outcome: Callable[[Outcome], None] | None = None
    depth: float | None = None


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How a task ended: with a report, an error, or both; with neither if the process exited without it."""

    name: str
    report: Report | None
    error: BaseException | None = None


# -- stopping ---------------------------------------------------------------------------------------


class Stoppable(Protocol):
    """A task that can be stopped."""

    def stop(self) -> None: ...


class StopRequest:
    """Passes stop requests to a task's loop; an early request waits at the loop's gate."""

    def __init__(self, task: Stoppable) -> None:
        self._task = task
        self._lock = Lock()
        self._has_begun = False
        self._request_count = 0
        self._stop_count = 0

    def stop(self) -> None:
        """Request a stop; a second request ends the drain."""
        with self._lock:
            self._request_count += 1
            if self._has_begun:
                self._stop_task()

    def expect_loop(self) -> None:
        """Note that a new loop begins: a request from now until its first fetch waits at its gate."""
        with self._lock:
            self._has_begun = False
            self._stop_count = 0

    def gate(self) -> Pause | None:
        """Return a pause after a stop request; the loop calls this before every fetch.

        The first call shows that the loop has begun, and passes on a request that came earlier: before that, a stop of
        the task would find no loop and be lost.
        """
        with self._lock:
            self._has_begun = True
            if not self._request_count:
                return None
            if not self._stop_count:
                self._stop_task()
            return Pause("the process is stopping", 0.05)

    def _stop_task(self) -> None:
        self._stop_count += 1
        # An event loop that has just been closed raises; then there is nothing left to stop.
        with suppress(RuntimeError):
            self._task.stop()


class StopSignal:
    """A flag that ends the waits between two loops, on threads and on event loops."""

    def __init__(self) -> None:
        self._event = Event()
        self._lock = Lock()
        self._callbacks: set[Callable[[], object]] = set()

    def set(self) -> None:
        with self._lock:
            self._event.set()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            # An event loop that has just been closed raises; then nothing waits there.
            with suppress(RuntimeError):
                callback()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait *seconds*, or less if the process is stopped; return whether it is."""
        return self._event.wait(seconds)

    async def wait_async(self, seconds: float) -> bool:
        """Wait as ``wait`` does, on the event loop."""
        stopped = asyncio.Event()
        callback = partial(asyncio.get_running_loop().call_soon_threadsafe, stopped.set)
        with self._lock:
            if self._event.is_set():
                return True
            self._callbacks.add(callback)
        try:
            async with asyncio.timeout(seconds):
                return await stopped.wait()
        except TimeoutError:
            return False
        finally:
            with self._lock:
                self._callbacks.discard(callback)


# -- the runner -------------------------------------------------------------------------------------


class TaskRunner:
    """Runs one task until it ends or is stopped.

    *on_loop_end* is called when the last loop has ended, while the connector and the lifespan are still open.
    """

    def __init__(
        self,
        setup: TaskSetup,
        restart: RestartSettings,
        *,
        solo_run: SoloRun,
        on_loop_end: Callable[[TaskRunner], None],
        is_last: Callable[[], bool],
    ) -> None:
        task: Any = setup.task
        self.task = task
        self.policy = setup.policy
        self._setup = setup
        self._on_loop_end = on_loop_end
        self._stop_request = StopRequest(task)
        self._stop_signal = StopSignal()
        self._restart = LoopRestart(self.task, setup.policy, restart, is_last=is_last)
        # Omitted if unused: a user's own task class may not accept it.
        self._options: dict[str, Any] = {} if setup.on_outcome is None else {"on_outcome": setup.on_outcome}
        #: The results of all loops so far.
        self._total: Report | None = None
        self.has_loop_ended = False
        self.result: TaskResult | None = None
        running_loops(self.task).solo_run = solo_run

    @property
    def name(self) -> str:
        return str(self.task.name)

    @property
    def report(self) -> Report | None:
        """The report of all ended loops of the task."""
        return self._total

    @property
    def is_isolated(self) -> bool:
        """Whether the task has an event loop of its own."""
        return bool(getattr(self.task, "isolated", False))

    def stop(self) -> None:
        """Make the loop drain and end; after a second call it ends immediately. Thread-safe."""
        self._stop_request.stop()
        self._stop_signal.set()

    @property
    def is_stuck(self) -> bool:
        """Whether calls that hang hold all slots of the loop."""
        return not running_loops(self.task).live

    @property
    def not_ready_reasons(self) -> list[str]:
        """Why the task accepts no work; empty while it does, and after it has ended as planned."""
        result = self.result
        if result is not None:
            error = result.error
            return (
                [] if error is None else [f"ended: {type(error).__name__}: {mask_credentials(describe_error(error))}"]
            )
        reasons = running_loops(self.task).not_fetching_reasons
        if reasons is None:
            reasons = ["starting" if self._restart.reason is None else self._restart.reason]
        return [mask_credentials(reason) for reason in reasons]

    def run(self) -> None:
        """Run a sync task on the calling thread; the result is in ``result``."""
        try:
            self._consume()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread; returned as data
            self.fail(error)
        else:
            self.result = TaskResult(self.name, self._total)

    async def run_async(self) -> None:
        """Run an async task on the running event loop; the result is in ``result``."""
        try:
            await self._consume_async()
        except BaseException as error:  # noqa: BLE001 - one task must not end the event loop of the others
            self.fail(error)
        else:
            self.result = TaskResult(self.name, self._total)

    def fail(self, error: BaseException) -> None:
        """Set the result to *error*."""
        self.result = TaskResult(self.name, self._total, error)

    def _consume(self) -> None:
        while True:
            try:
                self._restart.note_start()
                with self.task.open(), publish_depth(self.task, self._setup.depth):
                    policy = self._begin_loop()
                    try:
                        report = self.task.consume_transactions(policy, gates=self._gates, **self._options)
                    except BaseException as error:
                        self._end_failed_loop(error)
                        raise
                    self._end_loop(report)
                    return
            except Exception as error:  # noqa: BLE001 - whatever ended the loop, it may be restarted
                if self._stop_signal.wait(self._choose_delay(error)):
                    self._note_stop()
                    return

    async def _consume_async(self) -> None:
        while True:
            try:
                self._restart.note_start()
                async with self.task.open(), publish_depth_async(self.task, self._setup.depth):
                    policy = self._begin_loop()
                    try:
                        report = await self.task.consume_transactions(policy, gates=self._gates, **self._options)
                    except BaseException as error:
                        self._end_failed_loop(error)
                        raise
                    self._end_loop(report)
                    return
            except Exception as error:  # noqa: BLE001 - whatever ended the loop, it may be restarted
                if await self._stop_signal.wait_async(self._choose_delay(error)):
                    self._note_stop()
                    return

    def _begin_loop(self) -> ConsumerPolicy | ProducerPolicy:
        """Return the policy of the next loop: with the rest of the limit, after a restart."""
        self._restart.note_open()
        self._stop_request.expect_loop()
        policy = self.policy
        if policy.loop.limit is None or self._total is None:
            return policy
        limit = max(0, policy.loop.limit - self._total.started)
        return policy.model_copy(update={"loop": policy.loop.model_copy(update={"limit": limit})})

    def _end_loop(self, report: Report) -> None:
        self._total = report if self._total is None else _add_reports(self._total, report)
        self.has_loop_ended = True
        self._on_loop_end(self)

    def _choose_delay(self, error: Exception) -> float:
        """Return the seconds until the task is opened again; raise the error if it is not."""
        if self._stop_signal.is_set and self._restart.is_open:
            raise error
        # Explained first: a lifespan of the other variant fails in every attempt.
        explained = _explain_lifespan_error(error, self.task)
        return self._restart.delay(explained, getattr(error, "report", None))

    def _end_failed_loop(self, error: BaseException) -> None:
        """Note the end of a loop with *error*; a loop that is restarted has not ended for the process."""
        report: Report | None = getattr(error, "report", None)
        if report is not None:
            self._total = report if self._total is None else _add_reports(self._total, report)
        if not self._restart.can_follow(error):
            self.has_loop_ended = True
            self._on_loop_end(self)

    def _note_stop(self) -> None:
        """Note a stop between two loops."""
        self._total = self._total or Report()
        self._total.stop_reason = StopReason.STOP

    @property
    def _gates(self) -> tuple[Gate, ...]:
        return self._stop_request.gate, *self._setup.gates, *self.task.gates


def _add_reports(first: Report, second: Report) -> Report:
    """Return the report of two loops of one task, the second of which is the later one."""
    total = Report(stop_reason=second.stop_reason, still_running=second.still_running, paused=second.paused)
    for report in (first, second):
        total.started += report.started
        total.fetches += report.fetches
        total.empty_fetches += report.empty_fetches
        total.late_results += report.late_results
        total.released_started += report.released_started
        total.failures.extend(report.failures)
        for kind, count in report.counts.items():
            total.counts[kind] += count
        for counters, other in ((total.rejected, report.rejected), (total.settled, report.settled)):
            for key, count in other.items():
                counters[key] = counters.get(key, 0) + count
    total.still_running += first.still_running
    return total


def _explain_lifespan_error(error: Exception, task: Runnable) -> Exception:
    """Return *error*, or a clear error for a lifespan of the other variant, which Python's own does not explain."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_opening = trace is not None and trace.tb_frame.f_code is inspect.unwrap(type(task).open).__code__
    if not (is_opening and isinstance(error, TypeError)):
        return error
    decorator, variant = (
        ("@asynccontextmanager", "sync") if isinstance(task, AsyncTask) else ("@contextmanager", "async")
    )
    message = f"the lifespan of {task.name} is {variant} and its handlers are not; declare it with {decorator}"
    explained = ConfigurationError(message)
    explained.__cause__ = error
    return explained
