"""Test harness for one task: it runs against an in-memory queue, in virtual time, with planned faults.

A worker is one run of the task's consume loop; a planned fault may kill it, and the next one continues. A place is a
kind of call that is recorded and can fail, such as ``process`` or ``bank.charge``. The recorder wraps these calls. For
each worker the harness sets three functions of it: the clock, how a call takes virtual time, and how the worker's loop
is ended when a fault kills the worker.
"""

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
from ergon_framework.connectors.dead_letters import DeadLetterRecord
from ergon_framework.engine.aio import AsyncioDriver
from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.process_state import replace_process_state
from ergon_framework.runner.queues import NamedQueue
from ergon_framework.task.base import Services
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.context import choose_policy
from ergon_framework.testing.faults import Fault, Plan, check_plan, list_methods
from ergon_framework.testing.recorder import (
    CallRecorder,
    FakeQueue,
    RecordedCall,
    RecordedSettlement,
    WorkerKilled,
)
from ergon_framework.testing.simulation import Simulation
from ergon_framework.testing.virtual_time import DeadlockError, VirtualLoop
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import FetchException, LoopStalled, LoopTimeout
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.report import Outcome, Report

#: Maximum number of worker starts before the queued transactions count as remaining.
MAX_WORKER_STARTS: Final = 100

#: Methods of a queue's own object that handlers may call; during a run they reach the queue in memory.
_REDIRECTED_METHODS: Final = (
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
_HANDLER_PLACES: Final = {
    "process_transaction": "process",
    "handle_transaction_success": "success",
    "handle_transaction_exception": "exception",
}


class FinalState(StrEnum):
    """Final states of a transaction."""

    ACKED = "acked"
    DEAD = "dead"
    #: Still in the queue.
    LEFT = "left"


@dataclass(slots=True)
class HarnessResult:
    """The result of a harness run, as plain data for assertions."""

    #: Reports of workers that ended on their own; a killed worker has no report.
    reports: list[Report] = field(default_factory=list)
    #: In order of completion, one for each delivery that was handled to its end.
    outcomes: list[Outcome] = field(default_factory=list)
    settled: list[RecordedSettlement] = field(default_factory=list)
    dead_letters: Sequence[DeadLetterRecord] = ()
    #: Ids that are still in the queue, with duplicates.
    remaining: list[str] = field(default_factory=list)
    #: Transactions dispatched by handlers, with the name of the queue.
    dispatched: list[tuple[str, Transaction]] = field(default_factory=list)
    #: All calls of the queue, of handlers and of services, in order.
    calls: list[RecordedCall] = field(default_factory=list)
    #: Number of workers killed by planned faults.
    killed_workers: int = 0
    #: Errors that ended loops early: failed fetch, all slots stalled, loop timeout.
    errors: list[FetchException | LoopStalled | LoopTimeout] = field(default_factory=list)
    #: Virtual seconds of the whole run.
    seconds: float = 0.0
    sent: list[str] = field(default_factory=list)
    #: Planned faults that were not raised, because no such call was made: place and number.
    unraised_faults: list[tuple[str, int]] = field(default_factory=list)

    @property
    def acked(self) -> Counter[str]:
        """The number of acks per transaction; more than one is a defect."""
        return Counter(
            record.id for record in self.settled if _was_settled(record) and isinstance(record.settlement, Ack)
        )

    @property
    def dead_lettered(self) -> Counter[str]:
        """The number of dead-letterings per transaction."""
        return Counter(
            record.id for record in self.settled if _was_settled(record) and isinstance(record.settlement, DeadLetter)
        )

    @property
    def final_states(self) -> dict[str, FinalState]:
        """The final state of each sent transaction; a lost transaction is missing."""
        acked, dead_lettered, remaining = self.acked, self.dead_lettered, set(self.remaining)
        states = {
            name: FinalState.LEFT
            if name in remaining
            else FinalState.DEAD
            if dead_lettered[name]
            else FinalState.ACKED
            if acked[name]
            else None
            for name in self.sent
        }
        return {name: state for name, state in states.items() if state is not None}

    @property
    def dead_letter_reasons(self) -> dict[str, str]:
        """The reason of each dead letter, by transaction id."""
        return {letter.id: letter.reason for letter in self.dead_letters}

    @property
    def attempts(self) -> Counter[str]:
        """The number of handler calls per transaction."""
        return Counter(
            call.transaction for call in self.calls if call.place == "process" and call.transaction is not None
        )

    def list_calls(self, place: str) -> list[RecordedCall]:
        """Return the calls of one place: ``process``, ``settle``, ``bank.charge`` and so on."""
        return [call for call in self.calls if call.place == place]

    def list_payloads(self, queue: str) -> list[Any]:
        """Return the payloads that were dispatched to *queue*, in order."""
        return [transaction.payload for name, transaction in self.dispatched if name == queue]


def _was_settled(record: RecordedSettlement) -> bool:
    return record.result is SettleResult.SETTLED


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
                f"the harness needs a consumer, got {type(task).__name__}; pass a function decorated with @consumer, "
                "or an instance of a consumer class"
            )
        _check_service_names(task, services)
        self.seed = seed
        self._task: Any = task
        self._policy = policy
        self._other_queues = {queue.name: queue for queue in queues}
        self._watched = {**services, **(watch or {})}
        self._services = services
        self._lifespan = lifespan
        for name, target in (watch or {}).items():
            if not list_methods(target):
                raise ConfigurationError(
                    f"{name!r} cannot be recorded: {type(target).__name__} is not an instance with public methods; "
                    "pass it to the task as a service, or pass its owner in watch="
                )
        check_plan(faults or {}, self._watched)
        self._recorder = CallRecorder(faults or {})
        self._result = HarnessResult()
        self._now = 0.0
        self._provider_state = MemoryProviderState()
        self._original_queue: Any = task.connector
        self.queue = FakeQueue(self._original_queue.name, self._recorder)
        self._fake_queues = {name: FakeQueue(name, self._recorder) for name in self._other_queues}

    # -- setup ---------------------------------------------------------------------------------------

    def send(self, *transactions: Transaction) -> None:
        """Put transactions into the queue."""
        self.queue.send(transactions)
        self._result.sent += [transaction.id for transaction in transactions]

    @property
    def faults(self) -> Plan:
        """The plan of faults: what fails at which call."""
        return self._recorder.plan

    @faults.setter
    def faults(self, plan: Plan) -> None:
        check_plan(plan, self._watched)
        self._recorder.plan = plan

    @property
    def is_killed(self) -> bool:
        """Whether the running worker was killed; effects of its remaining code do not count."""
        return self._recorder.is_killed

    # -- the run -------------------------------------------------------------------------------------

    def run(self, *, max_starts: int = MAX_WORKER_STARTS) -> HarnessResult:
        """Run workers, one after the other and at most *max_starts*, until nothing is left that will become due."""
        _reject_running_loop()
        result, run_worker = (
            self._result,
            self._run_async if isinstance(self._task, AsyncConsumerMixin) else self._run_sync,
        )
        with ExitStack() as stack:
            self._set_up(stack)
            for number in range(max_starts):
                self._recorder.is_killed = False
                try:
                    report = run_worker(self.seed + number)
                    result.reports.append(report)
                except WorkerKilled:
                    pass
                except (FetchException, LoopStalled, LoopTimeout) as error:
                    # These errors end a real worker too, and its supervisor starts another one.
                    result.errors.append(error)
                delay = self._get_next_delay()
                if delay is None:
                    break
                # The next worker starts when the next transaction becomes due.
                self._now += delay
        return self._build_result()

    def _get_next_delay(self) -> float | None:
        """Return the seconds until a transaction becomes due; None if none ever will."""
        depth = self.queue.depth()
        return 0.0 if depth.ready else self.queue.next_due()

    def _build_result(self) -> HarnessResult:
        result, recorder = self._result, self._recorder
        result.settled, result.dispatched, result.calls = recorder.settled, recorder.dispatched, recorder.calls
        result.dead_letters, result.remaining = self.queue.dead_letters, self.queue.list_ids()
        result.killed_workers, result.seconds = recorder.killed_workers, self._now
        result.unraised_faults = [
            (place, number)
            for place, planned in recorder.plan.items()
            for number in ([0] if isinstance(planned, Fault) else planned)
            if number >= recorder.counts[place]
        ]
        return result

    def _run_sync(self, seed: int) -> Report:
        """Run one worker of a sync task, in a simulation."""
        simulation = _KillableSimulation(self._recorder, seed, start=self._now)
        self._recorder.clock, self._recorder.add_duration, self._recorder.kill = (
            simulation.monotonic,
            simulation.busy_for,
            _do_nothing,
        )
        task = self._task
        try:
            with self._open_sync():
                return simulation.consume(task, self._build_policy(), on_outcome=self._result.outcomes.append)
        finally:
            self._freeze_clock(simulation.monotonic())

    def _run_async(self, seed: int) -> Report:
        """Run one worker of an async task, on an event loop in virtual time."""
        loop = VirtualLoop(seed, start=self._now)
        self._recorder.clock, self._recorder.add_duration = loop.time, _reject_blocking

        def kill() -> None:
            loop.call_soon(_end_loop)

        self._recorder.kill = kill
        try:
            return loop.run_until_complete(self._consume_async(loop))
        finally:
            now = loop.time()
            try:
                _cancel_all(loop)
            finally:
                loop.close()
                self._freeze_clock(now)

    async def _consume_async(self, loop: VirtualLoop) -> Report:
        task = self._task
        async with self._open_async():
            report: Report = await task.consume_transactions(
                self._build_policy(),
                on_outcome=self._result.outcomes.append,
                driver=lambda: AsyncioDriver(loop.time_source),
            )
            return report

    def _freeze_clock(self, now: float) -> None:
        """Stop the clock at *now*: between two workers no time passes, except the wait for the next due transaction."""
        self._now = now
        self._recorder.clock, self._recorder.add_duration = (lambda: self._now), _reject_blocking

    def _build_policy(self) -> ConsumerPolicy:
        policy = choose_policy(self._task, self._policy, ConsumerPolicy)
        # A streaming loop on an empty queue would never end, because no virtual time passes between its fetches.
        return policy.model_copy(update={"loop": policy.loop.model_copy(update={"streaming": False})})

    # -- replacements --------------------------------------------------------------------------------

    def _set_up(self, stack: ExitStack) -> None:
        """Replace queues, provider state and services, and record the calls of all of them, while *stack* is open."""
        task, recorder = self._task, self._recorder
        stack.enter_context(_replace_attribute(task, "connector", self.queue))
        # The process-wide provider state may be a shared database, and has keys of other harness runs.
        stack.enter_context(replace_process_state(self._provider_state))
        for queue, fake in (
            (self._original_queue, self.queue),
            *((self._other_queues[name], fake_queue) for name, fake_queue in self._fake_queues.items()),
        ):
            stack.enter_context(_redirect_to_fake(queue, fake))
        # Handlers without planned faults are not wrapped: the engine has a fast path for handlers that do nothing.
        handlers = {
            method: place for method, place in _HANDLER_PLACES.items() if place == "process" or place in recorder.plan
        }
        stack.enter_context(recorder.wrap_object(task, handlers))
        for name, target in self._watched.items():
            stack.enter_context(
                recorder.wrap_object(
                    target, {method_name: f"{name}.{method_name}" for method_name in list_methods(target)}
                )
            )
        if isinstance(getattr(task, "services", None), Services):
            services = {**task.services, **self._services, **self._wrap_functions()}
            stack.enter_context(_replace_attribute(task, "services", Services(services, owner=task.name)))

    def _wrap_functions(self) -> dict[str, Any]:
        """Return recorded replacements of services that are functions, which have no methods to wrap."""
        return {
            name: self._recorder.wrap(function, name)
            for name, function in self._services.items()
            if inspect.isroutine(function)
        }

    @contextmanager
    def _open_sync(self) -> Iterator[None]:
        if not self._lifespan:
            self._check_services()
            yield
            return
        with self._task.open(), self._override_services():
            yield

    def _open_async(self) -> Any:
        return _AsyncLifespan(self._task, self._override_services, self._check_services, lifespan=self._lifespan)

    def _check_services(self) -> None:
        merge_services = getattr(self._task, "_merge_services", None)
        if merge_services is not None:
            merge_services(None)  # raises an error that lists the available services if one is missing

    @contextmanager
    def _override_services(self) -> Iterator[None]:
        """Override the services that the lifespan yields by those passed to the harness."""
        task = self._task
        services = {**task.services, **self._services, **self._wrap_functions()}
        with _replace_attribute(task, "services", Services(services, owner=task.name)):
            yield


def _check_service_names(task: Any, services: Collection[str]) -> None:
    """Reject a service that the task does not use: the task would call its own real service instead."""
    # A task class is not checked: it may look up any name in its services.
    accepted: Any = getattr(task, "service_names", None)
    for name in services if isinstance(accepted, frozenset) else ():
        if name not in accepted and name not in task.services:
            accepted_names = ", ".join(sorted(accepted)) or "none"
            raise ConfigurationError(f"{task.name} uses no service {name!r}; it uses: {accepted_names}")


class _AsyncLifespan:
    """The lifespan of an async task, if it is enabled."""

    def __init__(
        self, task: Any, override_services: Callable[[], Any], check_services: Callable[[], None], *, lifespan: bool
    ) -> None:
        self._task, self._override_services, self._check_services, self._lifespan = (
            task,
            override_services,
            check_services,
            lifespan,
        )
        self._stack = ExitStack()
        self._open_task: Any = None

    async def __aenter__(self) -> None:
        if self._lifespan:
            self._open_task = self._task.open()
            await self._open_task.__aenter__()
            self._stack.enter_context(self._override_services())
        else:
            self._check_services()

    async def __aexit__(self, *exc_info: object) -> None:
        self._stack.close()
        if self._open_task is not None:
            await self._open_task.__aexit__(*exc_info)


class _KillableSimulation(Simulation):
    """A simulation that ends immediately when its worker is killed."""

    def __init__(self, recorder: CallRecorder, seed: int, *, start: float) -> None:
        super().__init__(seed, start=start)
        self._recorder = recorder

    def _run_next(self) -> bool:
        if self._recorder.is_killed:
            raise WorkerKilled
        return super()._run_next()


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
        except DeadlockError:
            return


def _reject_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigurationError("the harness runs its own event loop; call it from a plain function, not from a coroutine")


def _do_nothing(*_: Any) -> None:
    """Do nothing; there is nothing to notify."""


def _reject_blocking(seconds: float) -> None:
    raise ConfigurationError(
        f"a plain function called by a coroutine cannot take {seconds:g} s without blocking the event loop; plan the "
        "delay for an awaited call"
    )


@contextmanager
def _replace_attribute(target: Any, attribute: str, value: Any) -> Iterator[None]:
    attributes = vars(target)
    existed, original = attribute in attributes, attributes.get(attribute)
    attributes[attribute] = value
    try:
        yield
    finally:
        if existed:
            attributes[attribute] = original
        else:
            del attributes[attribute]


@contextmanager
def _redirect_to_fake(queue: Any, fake: FakeQueue) -> Iterator[None]:
    """Redirect calls of *queue* to *fake*."""
    if isinstance(queue, NamedQueue):
        with _replace_attribute(queue, "_connector", fake):
            yield
        return
    with ExitStack() as stack:
        for method in _REDIRECTED_METHODS:
            for name in (method, f"{method}_async"):
                if hasattr(queue, name) and hasattr(fake, name):
                    stack.enter_context(_replace_attribute(queue, name, getattr(fake, name)))
        yield
