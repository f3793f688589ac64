"""The supervisor: N processes of one task. It replaces the dead, and has all of them stop.

It imports nothing of the user's, so nothing of his can end it or keep it. Processes are fresh
interpreters, not forks. They stay in the supervisor's process group: what a terminal does to the
group, Ctrl-Z included, is done to all of them, and each hears one stop however often it is told.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from signal import Signals
from threading import Lock, Thread
from typing import Any

from ergon_framework.runner.exits import Exit, worst
from ergon_framework.runner.health import STARTING, Health, together
from ergon_framework.runner.lifeline import reports
from ergon_framework.runner.process import Order
from ergon_framework.runner.settings import RunSettings
from ergon_framework.runner.signals import heard
from ergon_framework.runner.stages import Stage
from ergon_framework.runner.telling import Teller
from ergon_framework.runner.tokens import Tokens
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.report import End
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import registry_of
from ergon_framework.telemetry.names import LIBRARY, Event
from ergon_framework.telemetry.names import Field as Said
from ergon_framework.telemetry.sums import Sums

log = logging.getLogger(f"{LIBRARY}.runner")

#: How long after the grace a process is killed. By itself it is gone before; this is for one that cannot even leave.
KILL = 1.5
#: How long the last words of a process that is gone are waited for.
WORDS = 1.0

#: Ends that a process was meant to come to; it is not replaced.
_PLANNED = {End.EMPTY.value, End.LIMIT.value, End.TIMEOUT.value}

#: The command that runs process *number*, which has these two ends of its lifeline.
Command = Callable[[int, int, int], Sequence[str]]


@dataclass(slots=True)
class Worker:
    """The place of one process: whoever runs there now, and what was heard of him."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    orders: int | None = None
    since: float = 0.0
    heard: float = 0.0
    health: Health = STARTING
    drain: float | None = None
    ended: dict[str, Any] | None = None
    #: Whether the present process has fetched work.
    has_fetched: bool = False
    #: Deaths in a row, each soon after the start and before any work was fetched.
    deaths: int = 0
    #: When the next one is started.
    due: float = inf
    killed: bool = False
    #: The exit code with which this place is given up.
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run of several processes ended; *why* is there when it did not end by itself or by a signal."""

    exit: Exit
    reports: list[dict[str, Any]] = field(default_factory=list)
    restarts: int = 0
    why: str | None = None


@dataclass(frozen=True, slots=True)
class _Told:
    worker: Worker
    process: subprocess.Popen[bytes]
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Died:
    worker: Worker
    code: int


class Supervisor:
    """Runs *command* in ``settings.processes`` processes until all have ended, or signals end them."""

    def __init__(
        self, command: Command, settings: RunSettings, *, on_signal: Callable[[Signals, int, float], None] | None = None
    ) -> None:
        self._command = command
        self._settings = settings
        self._on_signal = on_signal
        self._tokens: Tokens[Signals | _Told | _Died] = Tokens()
        self._teller = Teller()
        self._lock = Lock()
        self._workers = [Worker(number) for number in range(1, settings.processes + 1)]
        self._reports: list[dict[str, Any]] = []
        self._restarts = 0
        self._signals = 0
        self._stopping = False
        #: Whether one of them was ever ready: then the task is as it should be, or was when the run began.
        self._proven = False
        self._kill = inf
        self._why: str | None = None
        self._verdict: Exit | None = None
        self._task = "unknown"
        #: What all of them have counted.
        self.sums = Sums()

    def run(self) -> Ran:
        """Run until everything has ended; to be called in the main thread, because only that hears signals."""
        with heard(self._tokens):
            try:
                # One goes ahead: a task that cannot be loaded is then told once, not N times.
                self._start(self._workers[0])
                while not all(worker.code is not None for worker in self._workers):
                    self._act(self._tokens.get(self._patience()))
            finally:
                self._leave_nobody()
        codes = [worker.code for worker in self._workers if worker.code is not None]
        return Ran(self._verdict or worst(codes), self._reports, self._restarts, self._why)

    def health(self) -> Health:
        """How they are, all in all; any thread may ask."""
        now = time.monotonic()
        with self._lock:
            whole = together({worker.number: self._seen(worker, now) for worker in self._workers})
            if not self._stopping:
                return whole
        return Health(whole.live, ready=False, reasons=("stopping", *whole.reasons))

    def _seen(self, worker: Worker, now: float) -> Health:
        if worker.code is not None:
            return Health(live=True, ready=True)
        if worker.process is None:
            return Health(live=True, ready=False, reasons=("starting" if worker.due == inf else "died, is replaced",))
        silence = now - worker.heard
        if silence > self._settings.probes.silent:
            return Health(live=False, ready=False, reasons=(f"has said nothing for {silence:.0f} s",))
        return worker.health

    # -- what happened --------------------------------------------------------------------------

    def _act(self, token: Signals | _Told | _Died | None) -> None:
        if isinstance(token, Signals):
            self._signalled(token)
        elif isinstance(token, _Told):
            self._told(token)
        elif isinstance(token, _Died):
            with self._lock:
                self._died(token.worker, token.code)
        now = time.monotonic()
        if now >= self._kill:
            self._kill = inf
            self._kill_all()
        for worker in self._workers:
            if worker.due <= now and not self._stopping:
                self._restarts += 1
                self._start(worker)

    def _patience(self) -> float | None:
        until = min(self._kill, *(worker.due for worker in self._workers))
        return None if until == inf else max(0.0, until - time.monotonic())

    def _signalled(self, signal: Signals) -> None:
        self._signals += 1
        if self._on_signal is not None:
            self._teller.tell(partial(self._on_signal, signal, self._signals, self._grace))
        self._stop(hurry=self._signals > 1)

    def _told(self, token: _Told) -> None:
        worker, report = token.worker, token.report
        if worker.process is not token.process:
            return
        kind = report.get("kind")
        with self._lock:
            worker.heard = time.monotonic()
            if kind == "health":
                worker.health = Health.heard(report)
                self._proven = self._proven or worker.health.ready
            elif kind == "ended":
                worker.ended = report
        if kind == "fetched":
            worker.has_fetched = True
        if kind == "metrics":
            self.sums.tell(worker.number, report)
        if kind == "loaded":
            self._task = str(report.get("task", self._task))
            drain = report.get("drain")
            worker.drain = float(drain) if isinstance(drain, int | float) else None
            for other in self._workers:
                if other.process is None and other.code is None and other.due == inf and not self._stopping:
                    self._start(other)

    def _died(self, worker: Worker, code: int) -> None:
        process, ended = worker.process, worker.ended or {}
        worker.process, worker.health = None, STARTING
        self.sums.gone(worker.number)
        if worker.orders is not None:
            os.close(worker.orders)
            worker.orders = None
        if worker.ended is not None:
            self._reports.append(worker.ended)
        if self._stopping or ended.get("end") in _PLANNED:
            worker.code = Exit.FORCED if worker.killed else code
        elif code == Exit.USAGE and not self._proven:
            self._give_up(worker, Exit.USAGE)
        else:
            self._replace(worker, code, pid=0 if process is None else process.pid)

    def _replace(self, worker: Worker, code: int, *, pid: int) -> None:
        restart, lived = self._settings.restart, time.monotonic() - worker.since
        # A process that had work may have been ended by it. The death has cost that work a delivery, so
        # `loop.max_deliveries` ends this, and the run must last until then.
        is_quick = lived < restart.steady and not worker.has_fetched
        worker.deaths = worker.deaths + 1 if is_quick else 0
        fields = {Said.NUMBER: worker.number, Said.PID: pid, Said.EXIT_CODE: _named(code).removeprefix("exit code ")}
        self._count_death()
        if worker.deaths >= restart.attempts:
            self._why = (
                f"process {worker.number} died {worker.deaths} times in a row, each time within {restart.steady:g} s "
                f"of its start and before it had fetched work, the last time with {_named(code)}; its own messages are "
                "above"
            )
            self._say(logging.ERROR, Event.PROCESS_DIED, fields)
            self._give_up(worker, Exit.FLAPPING)
            return
        delay = restart.delay(max(0, worker.deaths - 1))
        worker.due = time.monotonic() + delay
        self._say(logging.ERROR, Event.PROCESS_DIED, fields | {Said.DELAY: delay})

    def _count_death(self) -> None:
        registry = registry_of()
        counts = registry.counts(self._task, steps=(), everyday=("", ""))
        counts.add(names.PROCESSES_DIED)
        registry.open(counts)
        registry.close(counts)

    def _give_up(self, worker: Worker, code: Exit) -> None:
        worker.code = code
        self._verdict = code
        self._stop(hurry=False)

    # -- what is done ---------------------------------------------------------------------------

    def _start(self, worker: Worker) -> None:
        worker.has_fetched = False
        down, orders = os.pipe()
        up, reported = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter with our own words
                [*self._command(worker.number, down, reported)], pass_fds=(down, reported), stdin=subprocess.DEVNULL
            )
        except OSError:
            # No memory or no more processes at the moment: as if it had died at once.
            os.close(orders)
            os.close(up)
            worker.since = time.monotonic()
            self._replace(worker, Exit.FAILED, pid=0)
            return
        finally:
            os.close(down)
            os.close(reported)
        now = time.monotonic()
        with self._lock:
            worker.process, worker.orders, worker.ended, worker.health = process, orders, None, STARTING
            worker.since = worker.heard = now
            worker.due = inf
        reading = Thread(target=self._read, args=(worker, process, up), name="ergon-reports", daemon=True)
        reading.start()
        Thread(target=self._wait, args=(worker, process, reading), name="ergon-waiter", daemon=True).start()
        self._say(logging.INFO, Event.PROCESS_STARTED, {Said.NUMBER: worker.number, Said.PID: process.pid})

    def _stop(self, *, hurry: bool) -> None:
        if not self._stopping:
            self._stopping = True
            self._kill = time.monotonic() + self._grace + KILL
            self._say(logging.INFO, Event.PROCESS_STOPPING, {Said.STAGE: Stage.DRAINING.value, Said.PID: os.getpid()})
        if hurry:
            self._kill = min(self._kill, time.monotonic() + KILL)
        for worker in self._workers:
            if worker.process is not None and worker.orders is not None:
                _order(worker.orders, Order.HURRY if hurry else Order.STOP)
            elif worker.code is None:
                # Nobody runs there, and nobody will.
                worker.code, worker.due = Exit.OK, inf

    @property
    def _grace(self) -> float:
        """The longest that a process may drain; who has not said anything yet has nothing to drain."""
        told = [worker.drain for worker in self._workers if worker.drain is not None]
        fallback = self._settings.drain_timeout
        return max(told, default=ConsumerPolicy().loop.drain_timeout if fallback is None else fallback)

    def _kill_all(self) -> None:
        for worker in self._workers:
            if worker.process is not None:
                worker.killed = True
                fields = {Said.STAGE: Stage.KILLED.value, Said.NUMBER: worker.number, Said.PID: worker.process.pid}
                self._say(logging.ERROR, Event.PROCESS_STOPPING, fields)
                worker.process.kill()

    def _leave_nobody(self) -> None:
        """Whatever went wrong here: no process stays behind."""
        for worker in self._workers:
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait()

    def _say(self, level: int, event: str, fields: dict[str, Any]) -> None:
        self._teller.tell(partial(logs.say, level, event, fields, to=log))

    # -- threads of each process ----------------------------------------------------------------

    def _read(self, worker: Worker, process: subprocess.Popen[bytes], end: int) -> None:
        for report in reports(end):
            self._tokens.put(_Told(worker, process, report))

    def _wait(self, worker: Worker, process: subprocess.Popen[bytes], reading: Thread) -> None:
        code = process.wait()
        # Its last words first. Something that it started may hold the pipe open for longer.
        reading.join(WORDS)
        self._tokens.put(_Died(worker, code))


def _order(end: int, order: Order) -> None:
    # One that has just died hears nothing any more.
    with suppress(OSError):
        os.write(end, f"{order.value}\n".encode())


def _named(code: int) -> str:
    """An exit code, or the signal behind a negative one."""
    with suppress(ValueError):
        return Signals(-code).name if code < 0 else f"exit code {code}"
    return f"signal {-code}"
