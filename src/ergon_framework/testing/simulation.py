"""The simulated driver: no threads, no event loop, no real time; one seed always gives the same interleaving.

A script is a generator with the decisions of a loop or of a transaction's lifecycle; a driver performs the calls and
waits that it yields. A slot is one script in progress, and a mailbox is a queue of events for one script. The base
class Scheduler decides when a script continues: its ``step`` sends an answer to a script and returns the next call to
make, its ``accept_result`` returns the result for the script, and another value for a call that timed out or was
interrupted.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from ergon_framework import scope
from ergon_framework.clock import Clock
from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.engine.effects import Call, CallResult, Err, Ok, R, Script
from ergon_framework.engine.scheduler import Mailbox, Scheduler, Slot
from ergon_framework.errors import ErgonError
from ergon_framework.gates import Gate
from ergon_framework.task.context import choose_policy
from ergon_framework.testing.virtual_time import START_UNIX_SECONDS, DeadlockError
from ergon_framework.transaction import Transaction
from ergon_framework.worker.consume import ClaimsLost, ConnectorCalls, ConsumeLoop
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.worker.report import Outcome, ProduceReport, Report
from ergon_framework.worker.running import running_loops

Action = Callable[[], object]


class SimulationError(ErgonError):
    """Simulated code used something that a simulation does not support."""

    code = "simulation"
    final = True


@dataclass(frozen=True, slots=True)
class SimulationEvent:
    """One event of a call: "begins", "returns", "raises", or "late" when a call returned after its timeout."""

    at: float
    event: str
    step: str
    transaction: str | None
    attempt: int | None

    def __str__(self) -> str:
        label = "" if self.transaction is None else f" {self.transaction}#{self.attempt}"
        return f"{self.at:10.3f} {self.step}{label} {self.event}"


class Simulation(Scheduler):
    """Runs a task's loops in one thread and in virtual time.

    Actions that are ready at the same time run in an order drawn from *seed*. Plain functions run in no virtual time;
    they report their duration with ``busy_for``. Coroutines await ``sleep``, and are cancelled as in asyncio.
    Connectors must use its ``monotonic`` and must not block: nothing else runs meanwhile.
    """

    def __init__(self, seed: int = 0, *, start: float = 0.0) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not a secret
        self._now = start
        super().__init__(
            Clock(monotonic=lambda: self._now, wall=lambda: START_UNIX_SECONDS + self._now, random=self._random.random)
        )
        self.trace: list[SimulationEvent] = []
        self._context = copy_context()
        self._ready: list[Action] = []
        #: Actions by their time; the numbers keep the order of those that are scheduled for the same time.
        self._scheduled: list[tuple[float, int, Action]] = []
        self._sequence = itertools.count()
        #: The value or the error of the root script, once it has ended.
        self._result: tuple[Any, BaseException | None] | None = None
        #: Seconds that the running plain function has reported with busy_for(); None while none runs.
        self._reported_seconds: float | None = None

    # -- for tests -------------------------------------------------------------------------------

    def consume(
        self,
        task: Any,
        policy: ConsumerPolicy | None = None,
        *,
        gates: Sequence[Gate] | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> Report:
        """Run ``task.consume_transactions``, of either variant, in this simulation."""
        policy = choose_policy(task, policy, ConsumerPolicy)
        consumption: ConsumeLoop = task._consume_transactions(  # noqa: SLF001 - the part that both variants share
            policy, self, _connector_calls(task.connector, policy), gates=gates, on_outcome=on_outcome
        )
        unlisten = task.connector.listen(_ConnectorListener(self, consumption))
        try:
            with running_loops(task).track(consumption, self.stop):
                return self.run(consumption.run())
        finally:
            unlisten()
            consumption.report.late_results = self.late_results

    def produce(
        self, task: Any, transactions: Sequence[Transaction], policy: ProducerPolicy | None = None
    ) -> ProduceReport:
        """Run ``task.produce_transactions``, of either variant, in this simulation."""
        policy = choose_policy(task, policy, ProducerPolicy)
        production = task._produce_transactions(transactions, policy, self)  # noqa: SLF001 - the part that both variants share
        with running_loops(task).track(production, self.stop):
            report: ProduceReport = self.run(production.run())
            return report

    def call_at(self, moment: float, action: Action) -> None:
        """Schedule *action* at *moment*, in seconds since the start of the simulation."""
        heapq.heappush(self._scheduled, (moment, next(self._sequence), action))

    def busy_for(self, seconds: float) -> None:
        """Add *seconds* to the duration of the calling plain function; its result is delivered that much later."""
        if self._reported_seconds is None:
            raise SimulationError("busy_for() is for plain functions run by this simulation; await sleep() instead")
        self._reported_seconds += seconds

    def sleep(self, seconds: float) -> Awaitable[None]:
        """Return an awaitable that sleeps, for coroutines run by this simulation."""
        return _SimulatedSleep(seconds)

    def run_until_idle(self) -> None:
        """Let time pass until nothing is due, so that all calls that can exit have exited."""
        while self._run_next():
            pass

    # -- the driver ------------------------------------------------------------------------------

    def run(self, script: Script[R]) -> R:
        """Run *script* to its end."""
        self._closed, self._result = False, None
        self.start(script)
        while self._result is None:
            if not self._run_next():
                self.close()
                raise DeadlockError(
                    f"at {self._now:.6f} virtual seconds every script waits and nothing is due; "
                    "look for a wait that nothing ends"
                )
        self.close()
        value, error = self._result
        if error is not None:
            raise error
        result: R = value
        return result

    def stop(self) -> None:
        self.interrupt_root()

    def put_from_any_thread(self, mailbox: Mailbox, item: Any) -> None:
        mailbox.put(item, urgent=True)

    def resume(self, slot: Slot, answer: Any) -> None:
        if not self._closed:
            self._ready.append(partial(self._drive, slot, answer))

    def _reschedule_timer(self, until: float) -> None:
        """Do nothing: ``_run_next`` looks for the nearest deadline whenever no action is ready."""

    def _finish(self, value: Any, error: BaseException | None) -> None:
        self._result = value, error

    def _run_next(self) -> bool:
        """Run one ready action, drawn at random, advancing the time if necessary; return False if none is left."""
        if not self._ready:
            next_deadline = min((slot.due for slot in self.live_slots), default=float("inf"))
            next_time = min(next_deadline, self._scheduled[0][0] if self._scheduled else float("inf"))
            if next_time == float("inf"):
                return False
            self._now = max(self._now, next_time)
            if next_deadline <= self._now:
                self._ready.append(self.expire_due)
            while self._scheduled and self._scheduled[0][0] <= self._now:
                self._ready.append(heapq.heappop(self._scheduled)[2])
        ready = self._ready
        index = int(self._random.random() * len(ready))
        ready[index], ready[-1] = ready[-1], ready[index]
        ready.pop()()
        return True

    def _drive(self, slot: Slot, answer: Any) -> None:
        call = self.step(slot, answer)
        if call is not None:
            self._record_event(call, "begins")
            _RunningCall(self, slot, call).start(call.context or self._context.copy())

    def call_later(self, seconds: float, action: Action) -> None:
        """Schedule *action* after *seconds*; zero seconds schedules it at the current time, not immediately."""
        if seconds > 0:
            self.call_at(self._now + seconds, action)
        else:
            self._ready.append(action)

    def run_function(self, call: Call) -> tuple[Any, float]:
        """Run a plain function; return its result and its reported duration."""
        self._reported_seconds = 0.0
        try:
            scope.set_scope(call.scope)
            value = call.fn(*call.args)
        except BaseException as error:  # noqa: BLE001 - a result is data; the script classifies it
            value = Err(error)
        seconds, self._reported_seconds = self._reported_seconds, None
        return value, seconds

    def deliver_result(self, slot: Slot, call: Call, answer: CallResult) -> None:
        accepted = self.accept_result(slot, call, answer)
        if accepted is not answer:
            self._record_event(call, "late")
        else:
            self._record_event(call, "returns" if isinstance(answer, Ok) else "raises")
        if accepted is not None:
            self._drive(slot, accepted)

    def _record_event(self, call: Call, event: str) -> None:
        call_scope = call.scope
        name, attempt = (None, None) if call_scope is None else (call_scope.transaction_id, call_scope.attempt)
        self.trace.append(SimulationEvent(self._now, event, call.step, name, attempt))


class _SimulatedSleep:
    """The awaitable that a simulated coroutine sleeps with."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __await__(self) -> Generator[_SimulatedSleep, None, None]:
        yield self


class _RunningCall:
    """One running handler call."""

    __slots__ = ("_call", "_context", "_coroutine", "_is_done", "_simulation", "_slot", "_wakeup_number")

    def __init__(self, simulation: Simulation, slot: Slot, call: Call) -> None:
        self._simulation = simulation
        self._slot = slot
        self._call = call
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._context: Context | None = None
        #: Number of the valid wakeup: a cancellation supersedes a sleep.
        self._wakeup_number = 0
        self._is_done = False

    def start(self, context: Context) -> None:
        value, seconds = context.run(self._simulation.run_function, self._call)
        if inspect.isawaitable(value):
            self._coroutine = value if inspect.iscoroutine(value) else _await_value(value)
            self._context = context
            self._call.cancel = self._cancel
            self._resume(self._coroutine.send, None)
            return
        answer = value if isinstance(value, Err) else Ok(value)
        self._simulation.call_later(seconds, partial(self._end, answer))

    def _resume(self, resume: Callable[[Any], Any], value: Any) -> None:
        """Run the coroutine up to its next await, and schedule its continuation."""
        assert self._context is not None  # noqa: S101 - set by start
        self._wakeup_number += 1
        try:
            awaited = self._context.run(resume, value)
        except StopIteration as stop:
            self._end(Ok(stop.value))
            return
        except BaseException as error:  # noqa: BLE001 - a result is data; the script classifies it
            self._end(Err(error))
            return
        assert self._coroutine is not None  # noqa: S101 - set by start
        if awaited is None or isinstance(awaited, _SimulatedSleep):
            seconds = 0.0 if awaited is None else awaited.seconds
            self._simulation.call_later(seconds, partial(self._wake, self._wakeup_number, self._coroutine.send, None))
            return
        unsupported = SimulationError(f"a simulated coroutine can only await the simulation's sleep(), got {awaited!r}")
        self._simulation.call_later(0.0, partial(self._wake, self._wakeup_number, self._coroutine.throw, unsupported))

    def _wake(self, wakeup_number: int, resume: Callable[[Any], Any], value: Any) -> None:
        if wakeup_number == self._wakeup_number and not self._is_done:
            self._resume(resume, value)

    def _cancel(self) -> None:
        if self._is_done or self._coroutine is None:
            return
        self._wakeup_number += 1
        self._simulation.call_later(
            0.0, partial(self._wake, self._wakeup_number, self._coroutine.throw, asyncio.CancelledError())
        )

    def _end(self, answer: CallResult) -> None:
        self._is_done = True
        self._simulation.deliver_result(self._slot, self._call, answer)


class _ConnectorListener:
    """Listens to the connector and notifies the consume loop."""

    def __init__(self, simulation: Simulation, consumption: ConsumeLoop) -> None:
        self._simulation = simulation
        self._consumption = consumption

    def wake(self) -> None:
        self._consumption.wake(self._simulation.put_from_any_thread)

    def on_lost(self, receipts: Sequence[Any]) -> None:
        self._simulation.put_from_any_thread(self._consumption.mailbox, ClaimsLost(tuple(receipts)))


def _connector_calls(connector: Connector | AsyncConnector, policy: ConsumerPolicy) -> ConnectorCalls:
    extra, capabilities = policy.steps.fetch.extra, connector.capabilities
    lease = capabilities.lease if capabilities.renewable else None
    if isinstance(connector, Connector):
        fetch = partial(connector.fetch_transactions, **extra)
        return ConnectorCalls(fetch=fetch, settle=connector.settle, extend=connector.extend, lease=lease)
    fetch_async = partial(connector.fetch_transactions_async, **extra)
    return ConnectorCalls(fetch=fetch_async, settle=connector.settle_async, extend=connector.extend_async, lease=lease)


async def _await_value(value: Awaitable[Any]) -> Any:
    return await value
