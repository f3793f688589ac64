"""Run one task in one process: receive signals, drain the loop, and exit in time.

The task runs on a separate thread. The main thread only waits, so that it receives a signal whatever the task is doing,
and a task that never ends cannot keep the process.

A streaming worker whose server is unavailable at its start retries the opening. A stop request that arrives before the
loop has begun is not lost: it takes effect at a gate, a function that the loop calls before every fetch. A shutdown
passes through up to four stages and never returns to an earlier one. A process may have a parent, the supervisor of
several worker processes, which sends it commands. The lifespan of a task is the context manager that opens its clients;
``running_loops`` of a task knows its running loops: it stops them and reports their state.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import partial
from math import inf
from signal import Signals
from threading import Event, Lock, Thread
from typing import Any, Protocol, Self, TypeAlias

from ergon_framework.connectors.outage import ConnectorOutage
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.failure import describe_error
from ergon_framework.gates import Gate, Pause
from ergon_framework.runner.exit import RunExit, exit_code_for
from ergon_framework.runner.probes import STARTING, ProcessHealth, Watchdog
from ergon_framework.runner.queue_depth import publish_depth, publish_depth_async
from ergon_framework.runner.signals import BackgroundCaller, SignalQueue, handle_signals
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import LabelLimiter, LoopMetrics, Numbers, get_registry
from ergon_framework.telemetry.options import get_options
from ergon_framework.telemetry.redaction import mask_credentials
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.worker.report import Outcome, Report, StopReason
from ergon_framework.worker.running import running_loops


class OpenRetry:
    """Decides whether an attempt to open *task* is repeated, and after which delay; stop() is thread-safe.

    Only a streaming consumer repeats it, under its policy for fetches and without a limit: a worker that is started
    while its server is down begins when the server is back. Any other run fails at once, so that its caller sees the
    error.
    """

    def __init__(self, task: Any, policy: ConsumerPolicy | ProducerPolicy) -> None:
        self._task = task
        self._retry = policy.steps.fetch.retry if isinstance(policy, ConsumerPolicy) and policy.loop.streaming else None
        self._attempts = 0
        self._is_open = False
        self._stopped = Event()
        #: Why the task is not open yet, for probes.
        self.not_open_reason: str | None = None

    def note_success(self) -> None:
        """Note that the task is open: later errors are not startup errors."""
        self._is_open = True
        self.not_open_reason = None

    def note_failure(self, error: ConnectionLostError) -> float:
        """Return the seconds until the next attempt; raise *error* if it is not a startup error that can be retried."""
        if self._retry is None or self._is_open:
            raise error
        connector = self._task.connector
        ConnectorOutage(connector).note_failure(error, began=time.monotonic())
        self.not_open_reason = f"the connector cannot be opened: {type(error).__name__}: {describe_error(error)}"
        delay = max(self._retry.delay(self._attempts, random.random), error.retry_after or 0.0)
        self._attempts += 1
        return delay

    def wait(self, seconds: float) -> bool:
        """Wait *seconds*, or less if the process is stopped; return whether it is."""
        return self._stopped.wait(seconds)

    def stop(self) -> None:
        self._stopped.set()


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


# -- the process ------------------------------------------------------------------------------------

#: Seconds after the grace for settlements, connector and lifespan; with FORCED_EXIT_SECONDS it is below one second.
EXIT_MARGIN_SECONDS = 0.7
#: Seconds for the final log output of a process that exits without its task.
FORCED_EXIT_SECONDS = 0.1

Runnable: TypeAlias = Task | AsyncTask


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: with a report, an error, both, or by force. *deadline* is when the process must have exited."""

    report: Report | None
    error: BaseException | None = None
    forced: bool = False
    deadline: float = inf

    @property
    def exit(self) -> RunExit:
        return exit_code_for(self.report, self.error, forced=self.forced)

    @property
    def has_abandoned_work(self) -> bool:
        """Whether work is still running that the interpreter must not wait for."""
        return self.forced or (self.report is not None and self.report.still_running > 0)


class ParentCommand(Enum):
    """A command of a parent to a process."""

    STOP = "stop"
    STOP_NOW = "hurry"


@dataclass(frozen=True, slots=True)
class _LoopEnded:
    """Event: the loop has ended; the resources that were opened for it are not closed yet."""

    report: Report | None


class Process:
    """Runs *task* until it ends, or until signals or commands end it.

    With a parent (*supervised*), a second signal does not stop the process immediately: a signal to a whole group
    reaches parent and child alike, so only the parent's command STOP_NOW is unambiguous. *event_loop_timeout* is
    the number of seconds that the event loop may be blocked before the process is not live, and *depth* the interval of
    queue depth measurements; None disables either. *gates* are called before the task's own. *on_outcome* is called
    with each outcome, *on_first_fetch* once, before the first transaction starts.
    """

    def __init__(
        self,
        task: Runnable,
        policy: ConsumerPolicy | ProducerPolicy,
        *,
        on_signal: Callable[[Signals, int], None] | None = None,
        on_stage: Callable[[ShutdownStage], None] | None = None,
        supervised: bool = False,
        event_loop_timeout: float | None = None,
        depth: float | None = None,
        gates: Sequence[Gate] = (),
        on_outcome: Callable[[Outcome], None] | None = None,
        on_first_fetch: Callable[[], None] | None = None,
    ) -> None:
        consumer: Any = task
        running_loops(consumer).on_first_fetch = on_first_fetch
        self._task = consumer
        self._policy = policy
        self._on_signal = on_signal
        self._on_stage = on_stage
        self._supervised = supervised
        self._event_loop_timeout = event_loop_timeout
        self._depth = depth
        self._more_gates = gates
        # Omitted if unused: a user's own task class may not accept it.
        self._consume_options: dict[str, Any] = {} if on_outcome is None else {"on_outcome": on_outcome}
        self._watchdog: Watchdog | None = None
        self._background = BackgroundCaller()
        self._stage: ShutdownStage | None = None
        self._drain_deadline = inf
        self._stop_request = StopRequest(consumer)
        self._open_retry = OpenRetry(consumer, policy)
        self._events: SignalQueue[Signals | ParentCommand | _LoopEnded | RunResult] = SignalQueue()
        self._report: Report | None = None
        #: The calls that still ran when the loop ended; the event loop is not closed then, because that would wait.
        self._abandoned = 0
        self._signals = 0
        #: When the process exits by force; only ever moved earlier.
        self._deadline = inf

    def run(self) -> RunResult:
        """Run the task; only to be called in the main thread, because only that receives signals."""
        with handle_signals(self._events), _publish_presence(self._task):
            Thread(target=self._run_task, name="ergon-task", daemon=True).start()
            return self._run_events()

    def handle_command(self, command: ParentCommand) -> None:
        """Handle a command of the parent: drain, or stop immediately; thread-safe."""
        self._events.put(command)

    def health(self) -> ProcessHealth:
        """Return the health of the process; thread-safe."""
        loops = running_loops(self._task)
        blocked = None if self._watchdog is None else self._watchdog.blocked
        stuck_reasons = [] if blocked is None else [blocked]
        if not loops.live:
            stuck_reasons.append("every slot is occupied by a handler call that still runs after its timeout")
        not_fetching = loops.not_fetching_reasons
        if self._stage is not None:
            return ProcessHealth(
                not stuck_reasons, ready=False, reasons=(*stuck_reasons, f"stopping: {self._stage.value}")
            )
        if not_fetching is None:
            not_open = self._open_retry.not_open_reason
            reasons = STARTING.reasons if not_open is None else (mask_credentials(not_open),)
            return ProcessHealth(not stuck_reasons, ready=False, reasons=(*stuck_reasons, *reasons))
        return ProcessHealth(
            not stuck_reasons,
            not stuck_reasons and not not_fetching,
            (*stuck_reasons, *map(mask_credentials, not_fetching)),
        )

    # -- the main thread ------------------------------------------------------------------------

    def _run_events(self) -> RunResult:
        """Handle events and deadlines until the task has ended, or until the process must exit without it."""
        while True:
            event = self._events.get(self._wait_seconds())
            # None: the earlier of the two deadlines has passed, that of the drain or that of the process.
            if event is None and time.monotonic() < self._deadline:
                self._drain_deadline = inf
                self._enter_stage(ShutdownStage.RELEASING)
            elif event is None:
                self._enter_stage(ShutdownStage.KILLED)
                return RunResult(self._report, forced=True, deadline=time.monotonic() + FORCED_EXIT_SECONDS)
            elif isinstance(event, RunResult):
                self._shorten_deadline(self._grace)
                return RunResult(event.report or self._report, event.error, deadline=self._deadline)
            elif isinstance(event, _LoopEnded):
                self._report = event.report
                self._drain_deadline = inf
                self._shorten_deadline(self._grace)
                self._enter_stage(ShutdownStage.EXITING)
            elif isinstance(event, ParentCommand):
                self._stop(immediately=event is ParentCommand.STOP_NOW)
            else:
                self._handle_signal(event)

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
        """Begin the drain, if it has not begun; *immediately* also ends it."""
        if self._stage is None:
            self._shorten_deadline(self._grace)
            self._drain_deadline = time.monotonic() + self._grace
            self._stop_request.stop()
            self._open_retry.stop()
            self._enter_stage(ShutdownStage.DRAINING)
        if immediately:
            # This ends the drain; only settlements and closing remain.
            self._shorten_deadline(0.0)
            self._drain_deadline = inf
            self._stop_request.stop()
            self._enter_stage(ShutdownStage.RELEASING)

    def _enter_stage(self, stage: ShutdownStage) -> None:
        if stage.is_after(self._stage):
            self._stage = stage
            if self._on_stage is not None:
                # In another thread, because its output may block.
                self._background.call(partial(self._on_stage, stage))

    @property
    def _grace(self) -> float:
        return self._policy.loop.drain_timeout

    def _shorten_deadline(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds + EXIT_MARGIN_SECONDS)

    # -- the task's thread ----------------------------------------------------------------------

    def _run_task(self) -> None:
        try:
            report = self._run_async_task() if isinstance(self._task, AsyncTask) else self._consume()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread; returned as data
            result = RunResult(getattr(error, "report", None), _explain_lifespan_error(error, self._task))
        else:
            result = RunResult(report)
        self._events.put(result)

    def _consume(self) -> Report:
        """Open the task and consume; open it again after a connection that was lost at the start."""
        while True:
            try:
                with self._task.open(), publish_depth(self._task, self._depth):
                    self._open_retry.note_success()
                    try:
                        report: Report = self._task.consume_transactions(
                            self._policy, gates=self._gates, **self._consume_options
                        )
                    except BaseException as error:
                        self._end_loop(getattr(error, "report", None))
                        raise
                    self._end_loop(report)
                    return report
            except ConnectionLostError as error:
                if self._open_retry.wait(self._open_retry.note_failure(error)):
                    return Report(stop_reason=StopReason.STOP)

    def _run_async_task(self) -> Report:
        runner = asyncio.Runner(loop_factory=_loop_factory())
        try:
            return runner.run(self._consume_async())
        finally:
            # Closing waits for every asyncio task; one that ignores its cancellation would block the exit.
            if self._abandoned == 0:
                runner.close()

    async def _consume_async(self) -> Report:
        """Open the task and consume, as ``_consume``, with a watchdog of the event loop."""
        if self._event_loop_timeout is not None:
            self._watchdog = Watchdog(self._task, self._event_loop_timeout).start()
        try:
            while True:
                try:
                    async with self._task.open(), publish_depth_async(self._task, self._depth):
                        self._open_retry.note_success()
                        try:
                            report: Report = await self._task.consume_transactions(
                                self._policy, gates=self._gates, **self._consume_options
                            )
                        except BaseException as error:
                            self._end_loop(getattr(error, "report", None))
                            raise
                        self._end_loop(report)
                        return report
                except ConnectionLostError as error:
                    delay = self._open_retry.note_failure(error)
                    if await asyncio.to_thread(self._open_retry.wait, delay):
                        return Report(stop_reason=StopReason.STOP)
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()

    def _end_loop(self, report: Report | None) -> None:
        self._abandoned = 0 if report is None else report.still_running
        self._events.put(_LoopEnded(report))

    @property
    def _gates(self) -> tuple[Any, ...]:
        return self._stop_request.gate, *self._more_gates, *self._task.gates


class _ProcessGauge(LoopMetrics):
    """The metric that a process is running."""

    def __init__(self, task: str, *, label_limiter: LabelLimiter) -> None:
        super().__init__(task, steps=(), success_steps=("", ""), label_limiter=label_limiter)

    def gauges(self) -> Numbers:
        return {(names.PROCESSES.name, ()): 1}


@contextmanager
def _publish_presence(task: Any) -> Iterator[None]:
    registry = get_registry(get_options(task).meter_provider)
    gauge = registry.register(_ProcessGauge, task.name)
    try:
        yield
    finally:
        registry.close(gauge)


def _explain_lifespan_error(error: BaseException, task: Runnable) -> BaseException:
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


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop factory of uvloop if it is installed; None selects asyncio's own."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return factory
