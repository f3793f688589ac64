"""The supervisor of N processes of one task: it replaces processes that exit, and stops all of them.

It imports no user code, so user code can neither end nor block it. Processes are fresh interpreters, not forks. They
stay in the supervisor's process group: a terminal's signal to the group, Ctrl-Z included, reaches all of them, and each
process gets one stop, however many are sent.

Each process has two pipes, one for the commands that it gets and one for its reports. A report is a mapping with a
kind: ``loaded`` (the task was imported; with its name and drain timeout), ``health`` (repeated at an interval, so
silence means a stuck process), ``fetched`` (the first work was fetched), ``metrics`` and ``ended`` (how the loop
ended).
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from signal import Signals
from threading import Lock, Thread
from typing import Any

from ergon_framework.runner.child_pipe import read_reports
from ergon_framework.runner.exit import RunExit, most_severe
from ergon_framework.runner.probes import STARTING, ProcessHealth, combine_health
from ergon_framework.runner.process import ParentCommand, ShutdownStage
from ergon_framework.runner.settings import RunSettings
from ergon_framework.runner.signals import BackgroundCaller, SignalQueue, handle_signals
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.telemetry.multiprocess import MultiprocessMetrics
from ergon_framework.telemetry.names import LIBRARY, Event
from ergon_framework.telemetry.names import Field as LogField
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.report import StopReason

log = logging.getLogger(f"{LIBRARY}.runner")

#: Seconds after the grace until a process is killed. It normally exits before; this is for one that cannot exit.
KILL_DELAY_SECONDS = 1.5
#: Maximum seconds to wait for the last reports of an exited process.
REPORT_TIMEOUT_SECONDS = 1.0

#: Planned ends of a process; it is not replaced.
_PLANNED_ENDS = {StopReason.EMPTY.value, StopReason.LIMIT.value, StopReason.TIMEOUT.value}

#: Returns the command of process *number* from its number and its ends of the two pipes.
BuildCommand = Callable[[int, int, int], Sequence[str]]


@dataclass(slots=True)
class WorkerProcess:
    """One process slot: the process that runs there now, and the state that it has reported."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    command_pipe: int | None = None
    started_at: float = 0.0
    last_report_at: float = 0.0
    health: ProcessHealth = STARTING
    drain_timeout: float | None = None
    end_report: dict[str, Any] | None = None
    #: Whether the present process has fetched work.
    has_fetched: bool = False
    #: Quick exits in a row, each soon after the start and before any work was fetched.
    quick_exits: int = 0
    #: When the next process is started.
    restart_at: float = inf
    was_killed: bool = False
    #: The final exit code, after which the slot gets no new process.
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class SupervisorResult:
    """How a run of several processes ended; *reason* is set if neither the work nor a signal ended it."""

    exit: RunExit
    reports: list[dict[str, Any]] = field(default_factory=list)
    restarts: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class _ReportReceived:
    worker: WorkerProcess
    process: subprocess.Popen[bytes]
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _ProcessExited:
    worker: WorkerProcess
    exit_code: int


class Supervisor:
    """Runs *command* in ``settings.processes`` processes until all have ended, or signals end them."""

    def __init__(
        self,
        build_command: BuildCommand,
        settings: RunSettings,
        *,
        on_signal: Callable[[Signals, int, float], None] | None = None,
    ) -> None:
        self._build_command = build_command
        self._settings = settings
        self._on_signal = on_signal
        self._events: SignalQueue[Signals | _ReportReceived | _ProcessExited] = SignalQueue()
        self._background = BackgroundCaller()
        self._lock = Lock()
        self._workers = [WorkerProcess(number) for number in range(1, settings.processes + 1)]
        self._reports: list[dict[str, Any]] = []
        self._restarts = 0
        self._signals = 0
        self._stopping = False
        #: Whether a process was ever ready: then the task is valid, or was when the run began.
        self._was_ready = False
        self._kill_at = inf
        self._reason: str | None = None
        self._exit: RunExit | None = None
        self._task = "unknown"
        #: The combined metrics of all processes.
        self.metrics = MultiprocessMetrics()

    def run(self) -> SupervisorResult:
        """Run until all processes have ended; only to be called in the main thread, because only that gets signals."""
        with handle_signals(self._events):
            try:
                # One process starts first: a task that cannot be loaded is then reported once, not N times.
                self._start(self._workers[0])
                while not all(worker.exit_code is not None for worker in self._workers):
                    self._handle_event(self._events.get(self._wait_seconds()))
            finally:
                self._kill_remaining()
        codes = [worker.exit_code for worker in self._workers if worker.exit_code is not None]
        return SupervisorResult(self._exit or most_severe(codes), self._reports, self._restarts, self._reason)

    def health(self) -> ProcessHealth:
        """Return the combined health of all processes; thread-safe."""
        now = time.monotonic()
        with self._lock:
            combined = combine_health({worker.number: self._worker_health(worker, now) for worker in self._workers})
            if not self._stopping:
                return combined
        return ProcessHealth(combined.live, ready=False, reasons=("stopping", *combined.reasons))

    def _worker_health(self, worker: WorkerProcess, now: float) -> ProcessHealth:
        """Return the health of one slot: the last report of its process, unless that is missing or too old."""
        if worker.exit_code is not None:
            # It ended as planned, or the run is stopping: it must not make the other processes unready.
            return ProcessHealth(live=True, ready=True)
        if worker.process is None:
            return ProcessHealth(
                live=True, ready=False, reasons=("starting" if worker.restart_at == inf else "exited, is replaced",)
            )
        silence = now - worker.last_report_at
        if silence > self._settings.probes.heartbeat_timeout:
            return ProcessHealth(live=False, ready=False, reasons=(f"no report for {silence:.0f} s",))
        return worker.health

    # -- events ---------------------------------------------------------------------------------

    def _handle_event(self, event: Signals | _ReportReceived | _ProcessExited | None) -> None:
        """Handle *event*, then everything that is due: the kill after the grace, and restarts."""
        if isinstance(event, Signals):
            self._handle_signal(event)
        elif isinstance(event, _ReportReceived):
            self._handle_report(event)
        elif isinstance(event, _ProcessExited):
            with self._lock:
                self._handle_exit(event.worker, event.exit_code)
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill_at = inf
            self._kill_all()
        for worker in self._workers:
            if worker.restart_at <= now and not self._stopping:
                self._restarts += 1
                self._start(worker)

    def _wait_seconds(self) -> float | None:
        deadline = min(self._kill_at, *(worker.restart_at for worker in self._workers))
        return None if deadline == inf else max(0.0, deadline - time.monotonic())

    def _handle_signal(self, signal: Signals) -> None:
        self._signals += 1
        if self._on_signal is not None:
            self._background.call(partial(self._on_signal, signal, self._signals, self._grace))
        self._stop(immediately=self._signals > 1)

    def _handle_report(self, event: _ReportReceived) -> None:
        """Store the state that a process reports; after the first ``loaded``, start the other processes."""
        worker, report = event.worker, event.report
        if worker.process is not event.process:
            return  # a late report of a process that was replaced
        kind = report.get("kind")
        with self._lock:
            worker.last_report_at = time.monotonic()
            if kind == "health":
                worker.health = ProcessHealth.from_dict(report)
                self._was_ready = self._was_ready or worker.health.ready
            elif kind == "ended":
                worker.end_report = report
        if kind == "fetched":
            worker.has_fetched = True
        if kind == "metrics":
            self.metrics.update(worker.number, report)
        if kind == "loaded":
            self._task = str(report.get("task", self._task))
            drain = report.get("drain")
            worker.drain_timeout = float(drain) if isinstance(drain, int | float) else None
            for other in self._workers:
                if other.process is None and other.exit_code is None and other.restart_at == inf and not self._stopping:
                    self._start(other)

    def _handle_exit(self, worker: WorkerProcess, exit_code: int) -> None:
        """Decide what follows the exit of a process: nothing, the end of the run, or a new process."""
        process, end_report = worker.process, worker.end_report or {}
        worker.process, worker.health = None, STARTING
        self.metrics.remove(worker.number)
        if worker.command_pipe is not None:
            os.close(worker.command_pipe)
            worker.command_pipe = None
        if worker.end_report is not None:
            self._reports.append(worker.end_report)
        if self._stopping or _ended_as_planned(end_report):
            worker.exit_code = RunExit.FORCED if worker.was_killed else exit_code
        # The task cannot be loaded, or an option is wrong: a new process would fail in the same way.
        elif exit_code == RunExit.USAGE and not self._was_ready:
            self._give_up(worker, RunExit.USAGE)
        else:
            self._replace(worker, exit_code, pid=0 if process is None else process.pid)

    def _replace(self, worker: WorkerProcess, exit_code: int, *, pid: int) -> None:
        """Schedule the next process of *worker*, or give up after too many quick exits in a row."""
        restart, lifetime = self._settings.restart, time.monotonic() - worker.started_at
        # A transaction may have killed the process. Each such exit uses up one of its deliveries, so it becomes a dead
        # letter after `loop.max_deliveries` exits; the run must not end before, so such exits are not counted as quick.
        is_quick = lifetime < restart.stable_after and not worker.has_fetched
        worker.quick_exits = worker.quick_exits + 1 if is_quick else 0
        fields = {
            LogField.NUMBER: worker.number,
            LogField.PID: pid,
            LogField.EXIT_CODE: _describe_exit(exit_code).removeprefix("exit code "),
        }
        self._count_exit()
        if worker.quick_exits >= restart.attempts:
            self._reason = (
                f"process {worker.number} exited {worker.quick_exits} times in a row, each time within "
                f"{restart.stable_after:g} s of its start and before it had fetched work, the last time with "
                f"{_describe_exit(exit_code)}; its own messages are above"
            )
            self._log(logging.ERROR, Event.PROCESS_EXITED, fields)
            self._give_up(worker, RunExit.FLAPPING)
            return
        delay = restart.delay(max(0, worker.quick_exits - 1))
        worker.restart_at = time.monotonic() + delay
        self._log(logging.ERROR, Event.PROCESS_EXITED, fields | {LogField.DELAY: delay})

    def _count_exit(self) -> None:
        registry = get_registry()
        # Closing metrics adds their counters to the totals of the process.
        counts = registry.new_loop_metrics(self._task, steps=(), success_steps=("", ""))
        counts.add(names.PROCESSES_DIED)
        registry.open(counts)
        registry.close(counts)

    def _give_up(self, worker: WorkerProcess, exit_code: RunExit) -> None:
        worker.exit_code = exit_code
        self._exit = exit_code
        self._stop(immediately=False)

    # -- actions --------------------------------------------------------------------------------

    def _start(self, worker: WorkerProcess) -> None:
        """Start a process of *worker*, and the threads that read its reports and wait for its exit."""
        worker.has_fetched = False
        command_read, command_write = os.pipe()
        report_read, report_write = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603 - the framework's own interpreter and arguments
                [*self._build_command(worker.number, command_read, report_write)],
                pass_fds=(command_read, report_write),
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            # Out of memory or processes at the moment: handled like an immediate exit.
            os.close(command_write)
            os.close(report_read)
            worker.started_at = time.monotonic()
            self._replace(worker, RunExit.FAILED, pid=0)
            return
        finally:
            os.close(command_read)
            os.close(report_write)
        now = time.monotonic()
        with self._lock:
            worker.process, worker.command_pipe, worker.end_report, worker.health = (
                process,
                command_write,
                None,
                STARTING,
            )
            worker.started_at = worker.last_report_at = now
            worker.restart_at = inf
        reader = Thread(
            target=self._read_reports, args=(worker, process, report_read), name="ergon-reports", daemon=True
        )
        reader.start()
        Thread(target=self._wait_for_exit, args=(worker, process, reader), name="ergon-waiter", daemon=True).start()
        self._log(logging.INFO, Event.PROCESS_STARTED, {LogField.NUMBER: worker.number, LogField.PID: process.pid})

    def _stop(self, *, immediately: bool) -> None:
        """Send a stop to every process, plan the kill of those that do not exit, and start no process any more."""
        if not self._stopping:
            self._stopping = True
            self._kill_at = time.monotonic() + self._grace + KILL_DELAY_SECONDS
            self._log(
                logging.INFO,
                Event.PROCESS_STOPPING,
                {LogField.STAGE: ShutdownStage.DRAINING.value, LogField.PID: os.getpid()},
            )
        if immediately:
            self._kill_at = min(self._kill_at, time.monotonic() + KILL_DELAY_SECONDS)
        for worker in self._workers:
            if worker.process is not None and worker.command_pipe is not None:
                _send_command(worker.command_pipe, ParentCommand.STOP_NOW if immediately else ParentCommand.STOP)
            elif worker.exit_code is None:
                # No process runs there, and none will.
                worker.exit_code, worker.restart_at = RunExit.OK, inf

    @property
    def _grace(self) -> float:
        """The longest drain timeout of any process; one that has not reported its timeout has nothing to drain."""
        timeouts = [worker.drain_timeout for worker in self._workers if worker.drain_timeout is not None]
        fallback = self._settings.drain_timeout
        return max(timeouts, default=ConsumerPolicy().loop.drain_timeout if fallback is None else fallback)

    def _kill_all(self) -> None:
        for worker in self._workers:
            if worker.process is not None:
                worker.was_killed = True
                fields = {
                    LogField.STAGE: ShutdownStage.KILLED.value,
                    LogField.NUMBER: worker.number,
                    LogField.PID: worker.process.pid,
                }
                self._log(logging.ERROR, Event.PROCESS_STOPPING, fields)
                worker.process.kill()

    def _kill_remaining(self) -> None:
        """Kill all remaining processes, whatever error occurred here."""
        for worker in self._workers:
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait()

    def _log(self, level: int, event: str, fields: dict[str, Any]) -> None:
        self._background.call(partial(logs.log_event, level, event, fields, to=log))

    # -- threads of each process ----------------------------------------------------------------

    def _read_reports(self, worker: WorkerProcess, process: subprocess.Popen[bytes], pipe: int) -> None:
        for report in read_reports(pipe):
            self._events.put(_ReportReceived(worker, process, report))

    def _wait_for_exit(self, worker: WorkerProcess, process: subprocess.Popen[bytes], reader: Thread) -> None:
        exit_code = process.wait()
        # The last reports of the process come before its exit. One of its children may hold the pipe open for longer.
        reader.join(REPORT_TIMEOUT_SECONDS)
        self._events.put(_ProcessExited(worker, exit_code))


def _send_command(pipe: int, command: ParentCommand) -> None:
    # A process that has just exited reads nothing any more.
    with suppress(OSError):
        os.write(pipe, f"{command.value}\n".encode())


def _ended_as_planned(end_report: Mapping[str, Any]) -> bool:
    """Return whether every task of a process reported a planned end."""
    tasks = end_report.get("tasks") or []
    return bool(tasks) and all(task.get("stop_reason") in _PLANNED_ENDS for task in tasks)


def _describe_exit(code: int) -> str:
    """Return the description of an exit code, or of the signal of a negative one."""
    with suppress(ValueError):
        return Signals(-code).name if code < 0 else f"exit code {code}"
    return f"signal {-code}"
