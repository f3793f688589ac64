"""Run the tasks of one process: receive signals, drain all loops, and exit in time.

Sync tasks run on a thread each. Async tasks share an event loop on one thread, so that they can share clients; an
isolated one has its own. Each event loop has a watchdog, which names the task whose handler blocks it. The main thread
only waits, so that it receives a signal whatever the tasks are doing, and a task that never ends cannot keep the
process.

A shutdown passes through up to four stages and never returns to an earlier one; all tasks are stopped together. A
process may have a parent, the supervisor of several worker processes, which sends it commands. A ``TaskRunner`` runs
one task and restarts it.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import partial
from math import inf
from signal import Signals
from threading import Thread
from typing import Any, Self

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner.exit import RunExit, exit_code_for, most_severe
from ergon_framework.runner.probes import ProcessHealth, Watchdog
from ergon_framework.runner.settings import RestartSettings
from ergon_framework.runner.signals import BackgroundCaller, SignalQueue, handle_signals
from ergon_framework.runner.task_runner import TaskResult, TaskRunner, TaskSetup
from ergon_framework.task.base import AsyncTask
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import LabelLimiter, LoopMetrics, Numbers, get_registry
from ergon_framework.telemetry.options import get_options
from ergon_framework.worker.running import running_loops
from ergon_framework.worker.solo import SoloRun

# -- shutdown ---------------------------------------------------------------------------------------


class ShutdownStage(StrEnum):
    """Every stage with its meaning; a shutdown without anything to wait for passes through all of them immediately."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    DRAINING = "draining", "nothing more is fetched, running work may finish; for `drain_timeout` at most"
    RELEASING = "releasing", "claims without a running handler call are released, the last settlements are sent"
    EXITING = "exiting", "the loop has ended; connector and lifespan are closed, telemetry is flushed"
    KILLED = "killed", "it did not exit in time and was killed"

    def is_after(self, other: ShutdownStage | None) -> bool:
        """Return whether this stage is after *other*."""
        order = list(ShutdownStage)
        return other is None or order.index(self) > order.index(other)


# -- event loops -----------------------------------------------------------------------------------


class EventLoopThread:
    """Runs async tasks on one event loop, on a thread of its own.

    *on_task_end* is called with each runner when its task has ended. *timeout* is the number of seconds that the event
    loop may be blocked before the process is not live; None disables the watchdog.
    """

    def __init__(
        self, runners: Sequence[TaskRunner], *, on_task_end: Callable[[TaskRunner], None], timeout: float | None
    ) -> None:
        self._runners = runners
        self._on_task_end = on_task_end
        self._timeout = timeout
        self._watchdog: Watchdog | None = None

    @property
    def blocked(self) -> str | None:
        """What blocks the event loop and for how long; None if nothing does."""
        return None if self._watchdog is None else self._watchdog.blocked

    def start(self) -> None:
        Thread(target=self._run, name="ergon-task", daemon=True).start()

    def _run(self) -> None:
        try:
            runner = asyncio.Runner(loop_factory=_loop_factory())
            runner.get_loop()  # before the coroutine exists, which would never run if this fails
            try:
                runner.run(self._run_tasks())
            finally:
                # Closing waits for every asyncio task; one that ignores its cancellation would block the exit.
                if not any(each.report is not None and each.report.still_running for each in self._runners):
                    runner.close()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread; returned as data
            for each in self._runners:
                if each.result is None:
                    each.fail(error)
                    self._on_task_end(each)

    async def _run_tasks(self) -> None:
        if self._timeout is not None:
            self._watchdog = Watchdog([each.task for each in self._runners], self._timeout).start()
        try:
            await asyncio.gather(*map(self._run_task, self._runners))
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()

    async def _run_task(self, runner: TaskRunner) -> None:
        await runner.run_async()
        self._on_task_end(runner)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop factory of uvloop if it is installed; None selects asyncio's own."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return factory


# -- the process ------------------------------------------------------------------------------------

#: Seconds after the grace for settlements, connector and lifespan; with FORCED_EXIT_SECONDS it is below one second.
EXIT_MARGIN_SECONDS = 0.7
#: Seconds for the final log output of a process that exits without its tasks.
FORCED_EXIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: the result of each task, or by force. *deadline* is when the process must have exited."""

    tasks: tuple[TaskResult, ...]
    forced: bool = False
    deadline: float = inf

    @property
    def exit(self) -> RunExit:
        """The most severe exit code of all tasks."""
        if self.forced:
            return RunExit.FORCED
        return most_severe(exit_code_for(each.report, each.error) for each in self.tasks)

    @property
    def has_abandoned_work(self) -> bool:
        """Whether work is still running that the interpreter must not wait for."""
        return self.forced or any(each.report is not None and each.report.still_running > 0 for each in self.tasks)


class ParentCommand(Enum):
    """A command of a parent to a process."""

    STOP = "stop"
    STOP_NOW = "hurry"


@dataclass(frozen=True, slots=True)
class _LoopEnded:
    """Event: the last loop of a task has ended; the resources that were opened for it are not closed yet."""


@dataclass(frozen=True, slots=True)
class _TaskEnded:
    """Event: a task has ended with a result."""

    runner: TaskRunner


class Process:
    """Runs tasks until all of them end, or until signals or commands end them.

    With a parent (*supervised*), a second signal does not stop the process immediately: a signal to a whole group
    reaches parent and child alike, so only the parent's command STOP_NOW is unambiguous. *event_loop_timeout* is
    the number of seconds that an event loop may be blocked before the process is not live; None disables the check.
    *restart* is the backoff of loops that end with an error. *on_first_fetch* is called for each task, before its first
    transaction starts.
    """

    def __init__(
        self,
        setups: Sequence[TaskSetup],
        *,
        on_signal: Callable[[Signals, int], None] | None = None,
        on_stage: Callable[[ShutdownStage], None] | None = None,
        supervised: bool = False,
        event_loop_timeout: float | None = None,
        restart: RestartSettings | None = None,
        on_first_fetch: Callable[[], None] | None = None,
    ) -> None:
        solo_run = SoloRun()
        self._runners = [
            TaskRunner(
                setup,
                restart or RestartSettings(),
                solo_run=solo_run,
                on_loop_end=self._on_loop_end,
                is_last=self._is_last_running,
            )
            for setup in setups
        ]
        for runner in self._runners:
            running_loops(runner.task).on_first_fetch = on_first_fetch
        self._event_loops = [
            EventLoopThread(group, on_task_end=self._on_task_end, timeout=event_loop_timeout)
            for group in _group_by_event_loop(self._runners)
        ]
        self._on_signal = on_signal
        self._on_stage = on_stage
        self._supervised = supervised
        self._background = BackgroundCaller()
        self._stage: ShutdownStage | None = None
        self._drain_deadline = inf
        self._events: SignalQueue[Signals | ParentCommand | _LoopEnded | _TaskEnded] = SignalQueue()
        self._signals = 0
        #: When the process exits by force; only ever moved earlier.
        self._deadline = inf

    def run(self) -> RunResult:
        """Run the tasks; only to be called in the main thread, because only that receives signals."""
        with handle_signals(self._events), _publish_presence([each.task for each in self._runners]):
            for runner in self._runners:
                if not isinstance(runner.task, AsyncTask):
                    Thread(target=self._run_sync, args=(runner,), name="ergon-task", daemon=True).start()
            for event_loop in self._event_loops:
                event_loop.start()
            return self._run_events()

    def handle_command(self, command: ParentCommand) -> None:
        """Handle a command of the parent: drain, or stop immediately; thread-safe."""
        self._events.put(command)

    def health(self) -> ProcessHealth:
        """Return the health of the process; thread-safe."""
        stuck_reasons = [blocked for each in self._event_loops if (blocked := each.blocked) is not None]
        stuck_reasons += [
            self._label(each, "every slot is occupied by a handler call that still runs after its timeout")
            for each in self._runners
            if each.is_stuck
        ]
        if self._stage is not None:
            return ProcessHealth(
                not stuck_reasons, ready=False, reasons=(*stuck_reasons, f"stopping: {self._stage.value}")
            )
        reasons = [self._label(each, reason) for each in self._runners for reason in each.not_ready_reasons]
        return ProcessHealth(not stuck_reasons, not stuck_reasons and not reasons, (*stuck_reasons, *reasons))

    def _label(self, runner: TaskRunner, reason: str) -> str:
        """Name the task of *reason* if there are several."""
        return reason if len(self._runners) == 1 else f"task {runner.name}: {reason}"

    # -- the main thread ------------------------------------------------------------------------

    def _run_events(self) -> RunResult:
        """Handle events and deadlines until all tasks have ended, or until the process must exit without them."""
        while True:
            event = self._events.get(self._wait_seconds())
            # None: the earlier of the two deadlines has passed, that of the drain or that of the process.
            if event is None and time.monotonic() < self._deadline:
                self._drain_deadline = inf
                self._enter_stage(ShutdownStage.RELEASING)
            elif event is None:
                self._enter_stage(ShutdownStage.KILLED)
                return self._collect_results(forced=True, deadline=time.monotonic() + FORCED_EXIT_SECONDS)
            elif isinstance(event, _TaskEnded):
                self._handle_task_end(event.runner)
                if all(each.result is not None for each in self._runners):
                    self._shorten_deadline(self._grace)
                    return self._collect_results(forced=False, deadline=self._deadline)
            elif isinstance(event, _LoopEnded):
                self._note_loop_end()
            elif isinstance(event, ParentCommand):
                self._stop(immediately=event is ParentCommand.STOP_NOW)
            else:
                self._handle_signal(event)

    def _handle_task_end(self, runner: TaskRunner) -> None:
        result = runner.result
        # The task cannot run as it is configured: the process ends, as it does if the task cannot be loaded.
        if result is not None and isinstance(result.error, ConfigurationError) and len(self._runners) > 1:
            self._stop(immediately=False)
        self._note_loop_end()

    def _note_loop_end(self) -> None:
        """Begin the exit if no loop runs any more."""
        if all(each.has_loop_ended or each.result is not None for each in self._runners) and any(
            each.has_loop_ended for each in self._runners
        ):
            self._drain_deadline = inf
            self._shorten_deadline(self._grace)
            self._enter_stage(ShutdownStage.EXITING)

    def _collect_results(self, *, forced: bool, deadline: float) -> RunResult:
        results = [each.result or TaskResult(each.name, each.report) for each in self._runners]
        return RunResult(tuple(results), forced=forced, deadline=deadline)

    def _wait_seconds(self) -> float | None:
        deadline = min(self._deadline, self._drain_deadline)
        return None if deadline == inf else max(0.0, deadline - time.monotonic())

    def _handle_signal(self, signal: Signals) -> None:
        self._signals += 1
        self._stop(immediately=self._signals > 1 and not self._supervised)
        if self._on_signal is not None:
            # In another thread: its output may block, and this thread keeps the deadlines.
            Thread(target=self._on_signal, args=(signal, self._signals), daemon=True).start()

    def _stop(self, *, immediately: bool) -> None:
        """Begin the drain of all tasks, if it has not begun; *immediately* also ends it."""
        if self._stage is None:
            self._shorten_deadline(self._grace)
            self._drain_deadline = time.monotonic() + self._grace
            self._stop_tasks()
            self._enter_stage(ShutdownStage.DRAINING)
        if immediately:
            # This ends the drain; only settlements and closing remain.
            self._shorten_deadline(0.0)
            self._drain_deadline = inf
            self._stop_tasks()
            self._enter_stage(ShutdownStage.RELEASING)

    def _stop_tasks(self) -> None:
        for runner in self._runners:
            runner.stop()

    def _enter_stage(self, stage: ShutdownStage) -> None:
        if stage.is_after(self._stage):
            self._stage = stage
            if self._on_stage is not None:
                # In another thread, because its output may block.
                self._background.call(partial(self._on_stage, stage))

    @property
    def _grace(self) -> float:
        """The longest drain timeout of all tasks."""
        return max(each.policy.loop.drain_timeout for each in self._runners)

    def _shorten_deadline(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds + EXIT_MARGIN_SECONDS)

    # -- the threads of the tasks ---------------------------------------------------------------

    def _run_sync(self, runner: TaskRunner) -> None:
        runner.run()
        self._on_task_end(runner)

    def _on_task_end(self, runner: TaskRunner) -> None:
        self._events.put(_TaskEnded(runner))

    def _on_loop_end(self, _: TaskRunner) -> None:
        self._events.put(_LoopEnded())

    def _is_last_running(self) -> bool:
        """Return whether at most one task has not ended."""
        return sum(each.result is None for each in self._runners) <= 1


def _group_by_event_loop(runners: Sequence[TaskRunner]) -> list[list[TaskRunner]]:
    """Return the runners of async tasks by their event loop: one for all that are not isolated."""
    async_runners = [each for each in runners if isinstance(each.task, AsyncTask)]
    shared = [each for each in async_runners if not each.is_isolated]
    return [*([shared] if shared else []), *([each] for each in async_runners if each.is_isolated)]


class _ProcessGauge(LoopMetrics):
    """The metric that a process is running."""

    def __init__(self, task: str, *, label_limiter: LabelLimiter) -> None:
        super().__init__(task, steps=(), success_steps=("", ""), label_limiter=label_limiter)

    def gauges(self) -> Numbers:
        return {(names.PROCESSES.name, ()): 1}


@contextmanager
def _publish_presence(tasks: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for task in tasks:
            registry = get_registry(get_options(task).meter_provider)
            stack.callback(registry.close, registry.register(_ProcessGauge, task.name))
        yield
