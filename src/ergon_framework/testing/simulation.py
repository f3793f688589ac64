"""The simulated driver: no threads, no event loop, no real time; one seed always gives the same interleaving."""

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
from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.engine.effects import Call, R, Script
from ergon_framework.engine.outcome import CallResult, Err, Ok
from ergon_framework.engine.senses import Clock
from ergon_framework.engine.slots import Mailbox, Scheduler, Slot
from ergon_framework.errors import ErgonError
from ergon_framework.task.consume import ClaimsLost, ConnectorCalls, ConsumeLoop
from ergon_framework.task.defaults import choose_policy
from ergon_framework.task.gates import Gate
from ergon_framework.task.loops import running_loops
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.report import Outcome, ProduceReport, Report
from ergon_framework.testing.virtual import DAWN, Deadlock
from ergon_framework.transaction import Transaction

Action = Callable[[], object]


class SimulationError(ErgonError):
    """Simulated code used something that a simulation does not support."""

    code = "simulation"
    final = True


@dataclass(frozen=True, slots=True)
class SimulationEvent:
    """One event of a call: "begins", "returns", "raises", or "late" when a fenced call returned."""

    at: float
    what: str
    step: str
    transaction: str | None
    attempt: int | None

    def __str__(self) -> str:
        name = "" if self.transaction is None else f" {self.transaction}#{self.attempt}"
        return f"{self.at:10.3f} {self.step}{name} {self.what}"


class Simulation(Scheduler):
    """Runs a task's loops in one thread and in virtual time.

    Actions that are ready at the same time run in an order drawn from *seed*. Plain functions run in no virtual time;
    they report their duration with ``busy_for``. Coroutines await ``sleep``, and are cancelled as in asyncio.
    Connectors must use this ``clock`` and must not block: nothing else runs meanwhile.
    """

    def __init__(self, seed: int = 0, *, start: float = 0.0) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not a secret
        self._now = start
        super().__init__(Clock(monotonic=lambda: self._now, wall=lambda: DAWN + self._now, random=self._random.random))
        self.trace: list[SimulationEvent] = []
        self._context = copy_context()
        self._ready: list[Action] = []
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()
        self._result: tuple[Any, BaseException | None] | None = None
        self._taken: float | None = None

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
        consumption: ConsumeLoop = task._consume_transactions(  # noqa: SLF001 - name given by the source documents
            policy, self, _broker(task.connector, policy), gates=gates, on_outcome=on_outcome
        )
        unlisten = task.connector.listen(_ConnectorListener(self, consumption))
        try:
            with running_loops(task).track(consumption, self.stop):
                return self.run(consumption.run())
        finally:
            unlisten()
            consumption.report.fenced = self.late_results

    def produce(
        self, task: Any, transactions: Sequence[Transaction], policy: ProducerPolicy | None = None
    ) -> ProduceReport:
        """Run ``task.produce_transactions``, of either variant, in this simulation."""
        policy = choose_policy(task, policy, ProducerPolicy)
        production = task._produce_transactions(transactions, policy, self)  # noqa: SLF001 - as above
        with running_loops(task).track(production, self.stop):
            report: ProduceReport = self.run(production.run())
            return report

    def at(self, moment: float, action: Action) -> None:
        """Schedule *action* at *moment*, in seconds since the start of the simulation."""
        heapq.heappush(self._events, (moment, next(self._numbers), action))

    def busy_for(self, seconds: float) -> None:
        """Add *seconds* to the duration of the calling plain function; its result is delivered that much later."""
        if self._taken is None:
            raise SimulationError(
                "busy_for() belongs into a plain function run by this simulation; await sleep() instead"
            )
        self._taken += seconds

    def sleep(self, seconds: float) -> Awaitable[None]:
        """Return an awaitable that sleeps, for coroutines run by this simulation."""
        return _SimulatedSleep(seconds)

    def run_until_idle(self) -> None:
        """Let time pass until nothing is due, so that all calls that can exit have exited."""
        while self._step():
            pass

    # -- the driver ------------------------------------------------------------------------------

    def run(self, script: Script[R]) -> R:
        """Run *script* to its end."""
        self._closed, self._result = False, None
        self.start(script)
        while self._result is None:
            if not self._step():
                self.close()
                raise Deadlock(
                    f"at {self._now:.6f} virtual seconds every script waits and nothing is due; "
                    "somebody waits for what nobody will do"
                )
        self.close()
        value, error = self._result
        if error is not None:
            raise error
        result: R = value
        return result

    def stop(self) -> None:
        self.interrupt_root()

    def signal(self, mailbox: Mailbox, item: Any) -> None:
        mailbox.put(item, urgent=True)

    def resume(self, slot: Slot, answer: Any) -> None:
        if not self._closed:
            self._ready.append(partial(self._drive, slot, answer))

    def _reschedule_timer(self, until: float) -> None:
        """Do nothing: every step looks for due actions first."""

    def _finish(self, value: Any, error: BaseException | None) -> None:
        self._result = value, error

    def _step(self) -> bool:
        """Run one ready action, drawn at random, advancing the time if necessary; return False if none is left."""
        if not self._ready:
            due = min((slot.due for slot in self.live_slots), default=float("inf"))
            moment = min(due, self._events[0][0] if self._events else float("inf"))
            if moment == float("inf"):
                return False
            self._now = max(self._now, moment)
            if due <= self._now:
                self._ready.append(self.expire_due)
            while self._events and self._events[0][0] <= self._now:
                self._ready.append(heapq.heappop(self._events)[2])
        ready = self._ready
        chosen = int(self._random.random() * len(ready))
        ready[chosen], ready[-1] = ready[-1], ready[chosen]
        ready.pop()()
        return True

    def _drive(self, slot: Slot, answer: Any) -> None:
        call = self.step(slot, answer)
        if call is not None:
            self._tell(call, "begins")
            _Body(self, slot, call).begin(call.context or self._context.copy())

    def after(self, seconds: float, action: Action) -> None:
        """Schedule *action* after *seconds*; zero seconds schedules it at the current time, not immediately."""
        if seconds > 0:
            self.at(self._now + seconds, action)
        else:
            self._ready.append(action)

    def atomically(self, call: Call) -> tuple[Any, float]:
        """Run a plain function; return its result and its reported duration."""
        self._taken = 0.0
        try:
            scope.set_scope(call.scope)
            value = call.fn(*call.args)
        except BaseException as error:  # noqa: BLE001 - a result is data; the script classifies it
            value = Err(error)
        taken, self._taken = self._taken, None
        return value, taken

    def came_back(self, slot: Slot, call: Call, answer: CallResult) -> None:
        told = self.accept_result(slot, call, answer)
        if told is not answer:
            self._tell(call, "late")
        else:
            self._tell(call, "returns" if isinstance(answer, Ok) else "raises")
        if told is not None:
            self._drive(slot, told)

    def _tell(self, call: Call, what: str) -> None:
        inside = call.scope
        name, attempt = (None, None) if inside is None else (inside.transaction_id, inside.attempt)
        self.trace.append(SimulationEvent(self._now, what, call.step, name, attempt))


class _SimulatedSleep:
    """The awaitable that a simulated coroutine sleeps with."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __await__(self) -> Generator[_SimulatedSleep, None, None]:
        yield self


class _Body:
    """One running handler call."""

    __slots__ = ("_call", "_context", "_coroutine", "_over", "_simulation", "_slot", "_turn")

    def __init__(self, simulation: Simulation, slot: Slot, call: Call) -> None:
        self._simulation = simulation
        self._slot = slot
        self._call = call
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._context: Context | None = None
        #: Number of the valid wakeup: a cancellation supersedes a sleep.
        self._turn = 0
        self._over = False

    def begin(self, context: Context) -> None:
        value, taken = context.run(self._simulation.atomically, self._call)
        if inspect.isawaitable(value):
            self._coroutine = value if inspect.iscoroutine(value) else _awaited(value)
            self._context = context
            self._call.cancel = self._cancel
            self._go_on(self._coroutine.send, None)
            return
        answer = value if isinstance(value, Err) else Ok(value)
        self._simulation.after(taken, partial(self._end, answer))

    def _go_on(self, step: Callable[[Any], Any], value: Any) -> None:
        assert self._context is not None  # noqa: S101 - set by begin
        self._turn += 1
        try:
            awaited = self._context.run(step, value)
        except StopIteration as stop:
            self._end(Ok(stop.value))
            return
        except BaseException as error:  # noqa: BLE001 - a result is data; the script classifies it
            self._end(Err(error))
            return
        assert self._coroutine is not None  # noqa: S101 - as above
        if awaited is None or isinstance(awaited, _SimulatedSleep):
            seconds = 0.0 if awaited is None else awaited.seconds
            self._simulation.after(seconds, partial(self._woken, self._turn, self._coroutine.send, None))
            return
        astray = SimulationError(f"a simulated coroutine can await the simulation's sleep only, not {awaited!r}")
        self._simulation.after(0.0, partial(self._woken, self._turn, self._coroutine.throw, astray))

    def _woken(self, turn: int, step: Callable[[Any], Any], value: Any) -> None:
        if turn == self._turn and not self._over:
            self._go_on(step, value)

    def _cancel(self) -> None:
        if self._over or self._coroutine is None:
            return
        self._turn += 1
        self._simulation.after(0.0, partial(self._woken, self._turn, self._coroutine.throw, asyncio.CancelledError()))

    def _end(self, answer: CallResult) -> None:
        self._over = True
        self._simulation.came_back(self._slot, self._call, answer)


class _ConnectorListener:
    """Listens to the connector and notifies the consume loop."""

    def __init__(self, simulation: Simulation, consumption: ConsumeLoop) -> None:
        self._simulation = simulation
        self._consumption = consumption

    def wake(self) -> None:
        self._consumption.wake(self._simulation.signal)

    def on_lost(self, receipts: Sequence[Any]) -> None:
        self._simulation.signal(self._consumption.mailbox, ClaimsLost(tuple(receipts)))


def _broker(connector: Connector | AsyncConnector, policy: ConsumerPolicy) -> ConnectorCalls:
    extra, able = policy.steps.fetch.extra, connector.capabilities
    lease = able.lease if able.renewable else None
    if isinstance(connector, Connector):
        fetch = partial(connector.fetch_transactions, **extra)
        return ConnectorCalls(fetch=fetch, settle=connector.settle, extend=connector.extend, lease=lease)
    fetch_async = partial(connector.fetch_transactions_async, **extra)
    return ConnectorCalls(fetch=fetch_async, settle=connector.settle_async, extend=connector.extend_async, lease=lease)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
