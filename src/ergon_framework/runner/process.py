"""Process: one task in one process. It hears signals, has the loop drain, and is over in time.

The task runs on a thread of its own. The main thread does nothing but wait, so a signal is heard
whatever the task is doing, and a task that never ends cannot keep the process.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import inf
from signal import Signals
from threading import Thread
from typing import Any, TypeAlias

from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.runner.exits import Exit, exit_of
from ergon_framework.runner.health import STARTING, Health
from ergon_framework.runner.measuring import measured, measured_async
from ergon_framework.runner.opening import Opening
from ergon_framework.runner.signals import heard
from ergon_framework.runner.stages import Stage
from ergon_framework.runner.stopping import Stopping
from ergon_framework.runner.telling import Teller
from ergon_framework.runner.tokens import Tokens
from ergon_framework.runner.watchdog import Watchdog
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.gates import Gate
from ergon_framework.task.loops import loops_of
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.report import End, Outcome, Report
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import Bound, Counts, Numbers, registry_of
from ergon_framework.telemetry.options import options_of
from ergon_framework.telemetry.redaction import masked

#: How long after the grace settlements, connector and lifespan may still take; with LAST it stays below one second.
MARGIN = 0.7
#: What a process that leaves without its task has for its last words.
LAST = 0.1

Runnable: TypeAlias = Task | AsyncTask


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: with a report, an error, both, or by force. *deadline* is when the process must be gone."""

    report: Report | None
    error: BaseException | None = None
    forced: bool = False
    deadline: float = inf

    @property
    def exit(self) -> Exit:
        return exit_of(self.report, self.error, forced=self.forced)

    @property
    def left_behind(self) -> bool:
        """Whether something still runs that the interpreter must not wait for."""
        return self.forced or (self.report is not None and self.report.abandoned > 0)


class Order(Enum):
    """What a parent asks of a process."""

    STOP = "stop"
    HURRY = "hurry"


@dataclass(frozen=True, slots=True)
class _Over:
    """The loop has ended; what was opened for it has not been closed yet."""

    report: Report | None


class Process:
    """Runs *task* until it ends, or until signals or orders end it.

    With a parent (*supervised*), a second signal hurries nobody: whoever signals a whole group
    reaches parent and child alike, so only the parent's order to hurry is meant for sure.
    *blocked* is how long something may hold the event loop before the process is not live, and every
    *depth* seconds somebody looks how full the queue is; None: nobody does. *gates* are asked before the
    task's own. *on_outcome* is called with each outcome, *on_first_fetch* once, before the first transaction starts.
    """

    def __init__(
        self,
        task: Runnable,
        policy: ConsumerPolicy | ProducerPolicy,
        *,
        on_signal: Callable[[Signals, int], None] | None = None,
        on_stage: Callable[[Stage], None] | None = None,
        supervised: bool = False,
        blocked: float | None = None,
        depth: float | None = None,
        gates: Sequence[Gate] = (),
        on_outcome: Callable[[Outcome], None] | None = None,
        on_first_fetch: Callable[[], None] | None = None,
    ) -> None:
        consumer: Any = task
        loops_of(consumer).on_first_fetch = on_first_fetch
        self._task = consumer
        self._policy = policy
        self._on_signal = on_signal
        self._on_stage = on_stage
        self._supervised = supervised
        self._blocked = blocked
        self._depth = depth
        self._more_gates = gates
        # Left out where nobody wants it: a task of one's own may not know it.
        self._told: dict[str, Any] = {} if on_outcome is None else {"on_outcome": on_outcome}
        self._watchdog: Watchdog | None = None
        self._teller = Teller()
        self._stage: Stage | None = None
        self._drained = inf
        self._stopping = Stopping(consumer)
        self._opening = Opening(consumer, policy)
        self._tokens: Tokens[Signals | Order | _Over | Ended] = Tokens()
        self._report: Report | None = None
        self._left = 0
        self._signals = 0
        self._deadline = inf

    def run(self) -> Ended:
        """Run the task; to be called in the main thread, because only that hears signals."""
        with heard(self._tokens), _present(self._task):
            Thread(target=self._work, name="ergon-task", daemon=True).start()
            return self._watch()

    def order(self, order: Order) -> None:
        """Have it stop, or hurry; any thread may ask."""
        self._tokens.put(order)

    def health(self) -> Health:
        """How it is; any thread may ask."""
        loops = loops_of(self._task)
        blocked = None if self._watchdog is None else self._watchdog.blocked
        stuck = [] if blocked is None else [blocked]
        if not loops.live:
            stuck.append("every slot is held by a handler that timed out and did not leave")
        troubles = loops.troubles
        if self._stage is not None:
            return Health(not stuck, ready=False, reasons=(*stuck, f"stopping: {self._stage.value}"))
        if troubles is None:
            unopened = self._opening.trouble
            reasons = STARTING.reasons if unopened is None else (masked(unopened),)
            return Health(not stuck, ready=False, reasons=(*stuck, *reasons))
        return Health(not stuck, not stuck and not troubles, (*stuck, *map(masked, troubles)))

    # -- the main thread ------------------------------------------------------------------------

    def _watch(self) -> Ended:
        while True:
            token = self._tokens.get(self._patience())
            if token is None and time.monotonic() < self._deadline:
                self._drained = inf
                self._enter(Stage.RELEASING)
            elif token is None:
                self._enter(Stage.KILLED)
                return Ended(self._report, forced=True, deadline=time.monotonic() + LAST)
            elif isinstance(token, Ended):
                self._shorten(self._grace)
                return Ended(token.report or self._report, token.error, deadline=self._deadline)
            elif isinstance(token, _Over):
                self._report = token.report
                self._drained = inf
                self._shorten(self._grace)
                self._enter(Stage.LEAVING)
            elif isinstance(token, Order):
                self._stop(hurry=token is Order.HURRY)
            else:
                self._signalled(token)

    def _patience(self) -> float | None:
        until = min(self._deadline, self._drained)
        return None if until == inf else max(0.0, until - time.monotonic())

    def _signalled(self, signal: Signals) -> None:
        self._signals += 1
        self._stop(hurry=self._signals > 1 and not self._supervised)
        if self._on_signal is not None:
            # Elsewhere: what it writes to may be blocked, and this thread keeps the time.
            Thread(target=self._on_signal, args=(signal, self._signals), daemon=True).start()

    def _stop(self, *, hurry: bool) -> None:
        if self._stage is None:
            self._shorten(self._grace)
            self._drained = time.monotonic() + self._grace
            self._stopping.ask()
            self._opening.stop()
            self._enter(Stage.DRAINING)
        if hurry:
            # That ends the drain; what is left then is to settle and to close.
            self._shorten(0.0)
            self._drained = inf
            self._stopping.ask()
            self._enter(Stage.RELEASING)

    def _enter(self, stage: Stage) -> None:
        if stage.follows(self._stage):
            self._stage = stage
            if self._on_stage is not None:
                # Elsewhere, for the same reason as above.
                self._teller.tell(partial(self._on_stage, stage))

    @property
    def _grace(self) -> float:
        return self._policy.loop.drain_timeout

    def _shorten(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds + MARGIN)

    # -- the task's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            report = self._work_async() if isinstance(self._task, AsyncTask) else self._consume()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread; it is handed on as data
            ended = Ended(getattr(error, "report", None), _worded(error, self._task))
        else:
            ended = Ended(report)
        self._tokens.put(ended)

    def _consume(self) -> Report:
        while True:
            try:
                with self._task.opened(), measured(self._task, self._depth):
                    self._opening.note_success()
                    try:
                        report: Report = self._task.consume_transactions(self._policy, gates=self._gates, **self._told)
                    except BaseException as error:
                        self._over(getattr(error, "report", None))
                        raise
                    self._over(report)
                    return report
            except ConnectionLost as error:
                if self._opening.wait(self._opening.note_failure(error)):
                    return Report(end=End.STOP)

    def _work_async(self) -> Report:
        runner = asyncio.Runner(loop_factory=_loop_factory())
        try:
            return runner.run(self._consume_async())
        finally:
            # Closing waits for every task; one that ignores its cancellation would be waited for in vain.
            if self._left == 0:
                runner.close()

    async def _consume_async(self) -> Report:
        if self._blocked is not None:
            self._watchdog = Watchdog(self._task, self._blocked).start()
        try:
            while True:
                try:
                    async with self._task.opened(), measured_async(self._task, self._depth):
                        self._opening.note_success()
                        try:
                            report: Report = await self._task.consume_transactions(
                                self._policy, gates=self._gates, **self._told
                            )
                        except BaseException as error:
                            self._over(getattr(error, "report", None))
                            raise
                        self._over(report)
                        return report
                except ConnectionLost as error:
                    delay = self._opening.note_failure(error)
                    if await asyncio.to_thread(self._opening.wait, delay):
                        return Report(end=End.STOP)
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()

    def _over(self, report: Report | None) -> None:
        self._left = 0 if report is None else report.abandoned
        self._tokens.put(_Over(report))

    @property
    def _gates(self) -> tuple[Any, ...]:
        return self._stopping.gate, *self._more_gates, *self._task.gates


class _Presence(Counts):
    """That a process is there."""

    def __init__(self, task: str, *, bound: Bound) -> None:
        super().__init__(task, steps=(), everyday=("", ""), bound=bound)

    def gauged(self) -> Numbers:
        return {(names.PROCESSES.name, ()): 1}


@contextmanager
def _present(task: Any) -> Iterator[None]:
    registry = registry_of(options_of(task).meter_provider)
    presence = registry.join(_Presence, task.name)
    try:
        yield
    finally:
        registry.close(presence)


def _worded(error: BaseException, task: Runnable) -> BaseException:
    """*error*; a lifespan of the other flavour is told in words, because Python's own do not say what to do."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    opening = trace is not None and trace.tb_frame.f_code is inspect.unwrap(type(task).opened).__code__
    if not (opening and isinstance(error, TypeError)):
        return error
    wanted, given = ("@asynccontextmanager", "sync") if isinstance(task, AsyncTask) else ("@contextmanager", "async")
    said = f"the lifespan of {task.name} is {given} and its handlers are not; declare it with {wanted}"
    worded = ConfigurationError(said)
    worded.__cause__ = error
    return worded


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The factory of uvloop if it is installed; None means asyncio's own."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return factory
