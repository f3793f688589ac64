"""Test harness for one task: it runs against an in-memory queue, in virtual time, with planned faults."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ergon_framework.connectors.base import Ack, DeadLetter, SettleResult
from ergon_framework.connectors.deadletters import DeadLetterRecord
from ergon_framework.engine.drivers.aio import AsyncioDriver
from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.memory import MemoryProviderState
from ergon_framework.providers.process_state import replace_process_state
from ergon_framework.runner.queues import NamedQueue
from ergon_framework.task.base import Services
from ergon_framework.task.defaults import choose_policy
from ergon_framework.task.exceptions import FetchException, LoopStalled, LoopTimeout
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.report import Outcome, Report
from ergon_framework.testing.mishaps import Fault, Plan, check_plan, methods_of
from ergon_framework.testing.scene import CallRecorder, FakeQueue, RecordedCall, RecordedSettlement, WorkerKilled
from ergon_framework.testing.simulation import Simulation
from ergon_framework.testing.virtual import Deadlock, VirtualLoop
from ergon_framework.transaction import Transaction

#: Maximum number of worker starts before the queued transactions count as remaining.
ROUNDS: Final = 100

_CONTRACT: Final = (
    "open",
    "close",
    "dispatch",
    "depth",
    "find_queued",
    "list_dead",
    "replay_dead",
    "discard_dead",
    "replace_dead",
)
_HANDLERS: Final = {
    "process_transaction": "process",
    "handle_transaction_success": "success",
    "handle_transaction_exception": "exception",
}


class FinalState(StrEnum):
    """Final states of a transaction."""

    ACKED = "acked"
    DEAD = "dead"
    LEFT = "left"


@dataclass(slots=True)
class Result:
    """The result of a harness run, as plain data for assertions."""

    #: Reports of workers that ended on their own; a killed worker has no report.
    reports: list[Report] = field(default_factory=list)
    #: In order of completion, one for each time that a transaction was handled to its end.
    outcomes: list[Outcome] = field(default_factory=list)
    settled: list[RecordedSettlement] = field(default_factory=list)
    dead: Sequence[DeadLetterRecord] = ()
    #: Ids that are still in the queue, with duplicates.
    left: list[str] = field(default_factory=list)
    #: Transactions dispatched by handlers, with the name of the queue.
    dispatched: list[tuple[str, Transaction]] = field(default_factory=list)
    #: All calls of the queue, of handlers and of services, in order.
    calls: list[RecordedCall] = field(default_factory=list)
    #: Number of workers killed by planned faults.
    deaths: int = 0
    #: Errors that ended loops early: failed fetch, all slots stalled, loop timeout.
    errors: list[FetchException | LoopStalled | LoopTimeout] = field(default_factory=list)
    #: Virtual seconds of the whole run.
    seconds: float = 0.0
    sent: list[str] = field(default_factory=list)
    #: Planned faults that were not raised, because no such call was made: place and number.
    unmet: list[tuple[str, int]] = field(default_factory=list)

    @property
    def acked(self) -> Counter[str]:
        """The number of acks per transaction; more than one is a defect."""
        return Counter(one.id for one in self.settled if _took(one) and isinstance(one.settlement, Ack))

    @property
    def dead_lettered(self) -> Counter[str]:
        """The number of dead-letterings per transaction."""
        return Counter(one.id for one in self.settled if _took(one) and isinstance(one.settlement, DeadLetter))

    @property
    def ends(self) -> dict[str, FinalState]:
        """The final state of each sent transaction; a lost transaction is missing."""
        acked, buried, left = self.acked, self.dead_lettered, set(self.left)
        where = {
            name: FinalState.LEFT
            if name in left
            else FinalState.DEAD
            if buried[name]
            else FinalState.ACKED
            if acked[name]
            else None
            for name in self.sent
        }
        return {name: end for name, end in where.items() if end is not None}

    @property
    def reasons(self) -> dict[str, str]:
        """The reason of each dead letter, by transaction id."""
        return {letter.id: letter.reason for letter in self.dead}

    @property
    def attempts(self) -> Counter[str]:
        """The number of handler calls per transaction."""
        return Counter(one.transaction for one in self.calls if one.place == "process" and one.transaction is not None)

    def calls_of(self, place: str) -> list[RecordedCall]:
        """Return the calls of one place: ``process``, ``settle``, ``bank.charge`` and so on."""
        return [one for one in self.calls if one.place == place]

    def payloads(self, queue: str) -> list[Any]:
        """Return the payloads that were dispatched to *queue*, in order."""
        return [transaction.payload for name, transaction in self.dispatched if name == queue]


def _took(one: RecordedSettlement) -> bool:
    return one.result is SettleResult.SETTLED


class TaskHarness:
    """Runs one consumer against an in-memory queue, in virtual time, without sleeping and without a server.

    Keyword arguments are services that replace the task's own. *lifespan* enters the task's lifespan, which is skipped
    by default because it would open real resources. Calls of the services' public methods are recorded, and of the
    objects in *watch*: providers, facts, global clients. *queues* are further queues that handlers dispatch to; they
    are in memory during the run. *faults* plans what fails at which call. A plain function takes no time unless a fault
    plans it; coroutines may sleep. Work on a handler's own threads or processes is not tracked.
    """

    def __init__(
        self,
        task: Any,
        *,
        policy: ConsumerPolicy | None = None,
        faults: Plan | None = None,
        queues: Collection[Any] = (),
        watch: Mapping[str, Any] | None = None,
        lifespan: bool = False,
        seed: int = 0,
        **services: Any,
    ) -> None:
        if not isinstance(task, ConsumerMixin | AsyncConsumerMixin):
            raise ConfigurationError(
                f"a trial is for a consumer, not for a {type(task).__name__}; give what @consumer made of your "
                "function, or an instance of your class"
            )
        _check_taken(task, services)
        self.seed = seed
        self._task: Any = task
        self._policy = policy
        self._others = {queue.name: queue for queue in queues}
        self._watched = {**services, **(watch or {})}
        self._services = services
        self._lifespan = lifespan
        for name, target in (watch or {}).items():
            if not methods_of(target):
                raise ConfigurationError(
                    f"{name!r} cannot be watched: a {type(target).__name__} has no methods on an object of its own; "
                    "give it to the task as a service, or watch the object that it belongs to"
                )
        check_plan(faults or {}, self._watched)
        self._scene = CallRecorder(faults or {})
        self._result = Result()
        self._now = 0.0
        self._books = MemoryProviderState()
        self._original: Any = task.connector
        self.queue = FakeQueue(self._original.name, self._scene)
        self._fakes = {name: FakeQueue(name, self._scene) for name in self._others}

    # -- setup ---------------------------------------------------------------------------------------

    def send(self, *transactions: Transaction) -> None:
        """Put transactions into the queue."""
        self.queue.send(transactions)
        self._result.sent += [transaction.id for transaction in transactions]

    @property
    def faults(self) -> Plan:
        """The plan of faults: what fails at which call."""
        return self._scene.plan

    @faults.setter
    def faults(self, plan: Plan) -> None:
        check_plan(plan, self._watched)
        self._scene.plan = plan

    @property
    def dead(self) -> bool:
        """Whether the running worker was killed; effects of its remaining code do not count."""
        return self._scene.dead

    # -- the run -------------------------------------------------------------------------------------

    def run(self, *, rounds: int = ROUNDS) -> Result:
        """Run workers, one after the other and at most *max_starts*, until nothing is left that will become due."""
        _refuse_another_loop()
        result, run = self._result, self._run_async if isinstance(self._task, AsyncConsumerMixin) else self._run_sync
        with ExitStack() as stack:
            self._set_up(stack)
            for number in range(rounds):
                self._scene.dead = False
                try:
                    report = run(self.seed + number)
                    result.reports.append(report)
                except WorkerKilled:
                    pass
                except (FetchException, LoopStalled, LoopTimeout) as error:
                    # These errors end a real worker too, and its supervisor starts another one.
                    result.errors.append(error)
                due = self._due()
                if due is None:
                    break
                # The next worker starts when the next transaction becomes due.
                self._now += due
        return self._concluded()

    def _due(self) -> float | None:
        """Return the seconds until a transaction becomes due; None if none ever will."""
        depth = self.queue.depth()
        return 0.0 if depth.ready else self.queue.next_due()

    def _concluded(self) -> Result:
        result, scene = self._result, self._scene
        result.settled, result.dispatched, result.calls = scene.settled, scene.dispatched, scene.calls
        result.dead, result.left = self.queue.dead_letters, self.queue.ids()
        result.deaths, result.seconds = scene.deaths, self._now
        result.unmet = [
            (place, number)
            for place, planned in scene.plan.items()
            for number in ([0] if isinstance(planned, Fault) else planned)
            if number >= scene.counts[place]
        ]
        return result

    def _run_sync(self, seed: int) -> Report:
        simulation = _KillableSimulation(self._scene, seed, start=self._now)
        self._scene.clock, self._scene.pass_by, self._scene.kill = simulation.clock, simulation.busy_for, _nothing
        task = self._task
        try:
            with self._opened_sync():
                return simulation.consume(task, self._rules(), on_outcome=self._result.outcomes.append)
        finally:
            self._leave(simulation.clock())

    def _run_async(self, seed: int) -> Report:
        loop = VirtualLoop(seed, start=self._now)
        self._scene.clock, self._scene.pass_by = loop.time, _refuse_to_block

        def kill() -> None:
            loop.call_soon(_end_loop)

        self._scene.kill = kill
        try:
            return loop.run_until_complete(self._consumed_async(loop))
        finally:
            now = loop.time()
            try:
                _cancel_all(loop)
            finally:
                loop.close()
                self._leave(now)

    async def _consumed_async(self, loop: VirtualLoop) -> Report:
        task = self._task
        async with self._opened_async():
            report: Report = await task.consume_transactions(
                self._rules(),
                on_outcome=self._result.outcomes.append,
                driver=lambda: AsyncioDriver(loop.senses),
            )
            return report

    def _leave(self, now: float) -> None:
        self._now = now
        self._scene.clock, self._scene.pass_by = (lambda: self._now), _refuse_to_block

    def _rules(self) -> ConsumerPolicy:
        policy = choose_policy(self._task, self._policy, ConsumerPolicy)
        # A streaming loop on an empty queue would never end, because no virtual time passes between its fetches.
        return policy.model_copy(update={"loop": policy.loop.model_copy(update={"streaming": False})})

    # -- replacements --------------------------------------------------------------------------------

    def _set_up(self, stack: ExitStack) -> None:
        task, scene = self._task, self._scene
        stack.enter_context(_replaced(task, "connector", self.queue))
        # The process-wide provider state may be a shared database, and has keys of other harness runs.
        stack.enter_context(replace_process_state(self._books))
        for queue, fake in (
            (self._original, self.queue),
            *((self._others[name], f) for name, f in self._fakes.items()),
        ):
            stack.enter_context(_stood_in_for(queue, fake))
        # Handlers without planned faults are not wrapped: the engine has a fast path for handlers that do nothing.
        handlers = {method: place for method, place in _HANDLERS.items() if place == "process" or place in scene.plan}
        stack.enter_context(scene.wrap_object(task, handlers))
        for name, target in self._watched.items():
            stack.enter_context(scene.wrap_object(target, {one: f"{name}.{one}" for one in methods_of(target)}))
        if isinstance(getattr(task, "services", None), Services):
            services = {**task.services, **self._services, **self._functions()}
            stack.enter_context(_replaced(task, "services", Services(services, owner=task.name)))

    def _functions(self) -> dict[str, Any]:
        """Return recorded replacements of services that are functions, which have no methods to wrap."""
        return {
            name: self._scene.wrap(given, name) for name, given in self._services.items() if inspect.isroutine(given)
        }

    @contextmanager
    def _opened_sync(self) -> Iterator[None]:
        if not self._lifespan:
            self._check_services()
            yield
            return
        with self._task.open(), self._given_last():
            yield

    def _opened_async(self) -> Any:
        return _AsyncOpened(self._task, self._given_last, self._check_services, lifespan=self._lifespan)

    def _check_services(self) -> None:
        given = getattr(self._task, "_merge_services", None)
        if given is not None:
            given(None)  # raises an error that lists the available services if one is missing

    @contextmanager
    def _given_last(self) -> Iterator[None]:
        """Override the services that the lifespan yields by those passed to the harness."""
        task = self._task
        services = {**task.services, **self._services, **self._functions()}
        with _replaced(task, "services", Services(services, owner=task.name)):
            yield


def _check_taken(task: Any, services: Collection[str]) -> None:
    """Reject a service that the task does not use: the task would call its own real service instead."""
    # A task class is not checked: it may look up any name in its services.
    taken: Any = getattr(task, "service_names", None)
    for name in services if isinstance(taken, frozenset) else ():
        if name not in taken and name not in task.services:
            there = ", ".join(sorted(taken)) or "none"
            raise ConfigurationError(f"{task.name} takes no service {name!r}; it takes: {there}")


class _AsyncOpened:
    """The lifespan of an async task, if it is enabled."""

    def __init__(self, task: Any, given: Callable[[], Any], check: Callable[[], None], *, lifespan: bool) -> None:
        self._task, self._given, self._check, self._lifespan = task, given, check, lifespan
        self._stack = ExitStack()
        self._opened: Any = None

    async def __aenter__(self) -> None:
        if self._lifespan:
            self._opened = self._task.open()
            await self._opened.__aenter__()
            self._stack.enter_context(self._given())
        else:
            self._check()

    async def __aexit__(self, *how: object) -> None:
        self._stack.close()
        if self._opened is not None:
            await self._opened.__aexit__(*how)


class _KillableSimulation(Simulation):
    """A simulation that ends immediately when its worker is killed."""

    def __init__(self, scene: CallRecorder, seed: int, *, start: float) -> None:
        super().__init__(seed, start=start)
        self._scene = scene

    def _step(self) -> bool:
        if self._scene.dead:
            raise WorkerKilled
        return super()._step()


def _end_loop() -> None:
    raise WorkerKilled


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all coroutines; abandon one that waits for something that never happens, as a killed process would."""
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        try:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        except WorkerKilled:
            continue  # the kill was scheduled when the loop had already ended
        except Deadlock:
            return


def _refuse_another_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigurationError("a trial runs in a loop of its own; call it from a plain function, not from a coroutine")


def _nothing(*_: Any) -> None:
    """Do nothing; there is nothing to notify."""


def _refuse_to_block(seconds: float) -> None:
    raise ConfigurationError(
        f"a plain function of a coroutine's cannot take {seconds:g} s without holding the event loop; plan it for what "
        "is awaited"
    )


@contextmanager
def _replaced(target: Any, attribute: str, value: Any) -> Iterator[None]:
    own = vars(target)
    was_there, before = attribute in own, own.get(attribute)
    own[attribute] = value
    try:
        yield
    finally:
        if was_there:
            own[attribute] = before
        else:
            del own[attribute]


@contextmanager
def _stood_in_for(queue: Any, fake: FakeQueue) -> Iterator[None]:
    """Redirect calls of *queue* to *fake*."""
    if isinstance(queue, NamedQueue):
        with _replaced(queue, "_connector", fake):
            yield
        return
    with ExitStack() as stack:
        for method in _CONTRACT:
            for name in (method, f"{method}_async"):
                if hasattr(queue, name) and hasattr(fake, name):
                    stack.enter_context(_replaced(queue, name, getattr(fake, name)))
        yield
