"""Worlds: environments in which the engine runs a plan and a record is written for the oracle.

`threads` and `asyncio` are the real drivers in virtual time, `simulation` is the simulated driver with
handlers of either variant, `real threads` and `real asyncio` are the real drivers in real time.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from ergon_framework import scope
from ergon_framework.connectors.base import (
    Ack,
    AsyncConnector,
    Capabilities,
    Connector,
    DeadLetter,
    Defer,
    Delivery,
    Release,
    SettleResult,
)
from ergon_framework.engine.aio import AsyncioDriver
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.errors import ConnectionLostError, ErgonError
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.testing.simulation import Simulation
from ergon_framework.testing.virtual_time import VirtualLoop, VirtualTime
from ergon_framework.transaction import Transaction
from ergon_framework.worker.consume import FLUSH_TIMEOUT_SECONDS
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from tests.properties import oracle
from tests.properties.plans import (
    OK,
    Behaviour,
    Call,
    DeliveryRecord,
    Fault,
    FetchRecord,
    Flavour,
    HandlerCallRecord,
    OutcomeRecord,
    Plan,
    RunRecord,
    SettlementRecord,
    TransactionPlan,
)

SOURCE = "plan"


# -- the recorder ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class HandlerCall:
    call: Call
    left: float = math.inf
    result: str = "running"
    #: Planned duration in seconds.
    takes: float = 0.0

    @property
    def late(self) -> float:
        return self.left - self.call.at - self.takes if math.isfinite(self.left) else 0.0


@dataclass(eq=False)
class DeliveryState:
    """A delivery, or a producer's run."""

    position: int
    transaction: TransactionPlan
    fetch: int | None = None
    bodies: list[HandlerCall] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class RunRecorder:
    """What user code and connector of one run do, and what they recorded; *now* is the world's clock."""

    def __init__(self, plan: Plan, now: Callable[[], float], *, slack: float = oracle.TOLERANCE_SECONDS) -> None:
        self.plan = plan
        self.now = now
        self._slack = slack
        self.lock = threading.Lock()
        self.deliveries: list[DeliveryState] = []
        self.starts: list[int] = []
        self.fetches: list[FetchRecord] = []
        self.settlements: list[SettlementRecord] = []
        self.outcomes: list[OutcomeRecord] = []
        self.problems: list[str] = []
        self.is_over = False
        self.began = now()
        self._calls: dict[int, Counter[str]] = {}
        self._runs: dict[int, int] = {}
        self._queue = [(self.began, n, t.attempts) for n, t in enumerate(plan.transactions)]

    # -- user code ---------------------------------------------------------------------------------

    def begin_call(self, step: str, transaction: Transaction, error: Any = None) -> tuple[HandlerCall, Behaviour]:
        current_scope = scope.current()
        category, still_running = (None, None) if error is None else (error.category.value, error.still_running)
        with self.lock:
            delivery_number = self._get_delivery_number(transaction)
            delivery = self.deliveries[delivery_number]
            if current_scope is None or (current_scope.step, current_scope.transaction) != (step, transaction):
                self.problems.append(f"{step} of {transaction.id} ran inside the scope {current_scope}")
            body = HandlerCall(
                Call(step, -1 if current_scope is None else current_scope.attempt, self.now(), category, still_running)
            )
            if not delivery.bodies:
                self.starts.append(delivery_number)
            delivery.bodies.append(body)
            behaviours = getattr(delivery.transaction, "process" if step == "produce" else step)
            behaviour = behaviours[delivery.counts[step]] if delivery.counts[step] < len(behaviours) else OK
            body.takes = behaviour.takes
            delivery.counts[step] += 1
            self._calls.setdefault(delivery.position, Counter())[step] += 1
            return body, behaviour

    def end_call(self, body: HandlerCall, behaviour: Behaviour, at: float) -> Any:
        error = behaviour.make_error()
        body.left, body.result = at, "ok" if error is None else "raised"
        if error is not None:
            raise error
        return _to_settlement(behaviour)

    def cancel_call(self, body: HandlerCall) -> None:
        body.left, body.result = self.now(), "cancelled"

    def check_result(self, transaction: Transaction, result: Any) -> None:
        if result != ("result of", transaction.payload):
            self.problems.append(f"the success handler of {transaction.id} was given {result!r}")

    def _get_delivery_number(self, transaction: Transaction) -> int:
        if self.plan.kind == "consume":
            return int(transaction.payload)
        position = int(transaction.payload)
        if position not in self._runs:
            self._runs[position] = len(self.deliveries)
            self.deliveries.append(DeliveryState(position, self.plan.transactions[position]))
        return self._runs[position]

    # -- the connector -------------------------------------------------------------------------------

    def begin_fetch(self, limit: int) -> tuple[int, Fault]:
        with self.lock:
            index = len(self.fetches)
            fault = self.plan.faults[index] if index < len(self.plan.faults) else "ok"
            self.fetches.append(FetchRecord(self.now(), limit, 0, fault))
        if fault == "error":
            raise RuntimeError("the broker is out of order")
        if fault == "lost_connection":
            raise ConnectionLostError("the broker has hung up")
        return index, fault

    def deliver(self, index: int, limit: int) -> list[Delivery]:
        with self.lock:
            if self.is_over:  # the loop has ended; in a real process not even this call would happen
                return []
            now = self.now()
            due = [entry for entry in self._queue if entry[0] <= now][:limit]
            self._queue = [entry for entry in self._queue if entry not in due]
            self.fetches[index] = replace(self.fetches[index], got=len(due))
            return [self._make_delivery(index, position, attempts) for _, position, attempts in due]

    def _make_delivery(self, index: int, position: int, attempts: int) -> Delivery:
        number, transaction_plan = len(self.deliveries), self.plan.transactions[position]
        call_counts = self._calls.get(position, Counter())
        self.deliveries.append(
            DeliveryState(position, transaction_plan.for_redelivery(call_counts, attempts=attempts), index)
        )
        transaction = Transaction(
            number, id=transaction_plan.id, source=SOURCE, key=transaction_plan.key, attempts=attempts
        )
        return Delivery(transaction, number)

    def settle(self, settlings: Any) -> list[SettleResult]:
        with self.lock:
            for delivery, settlement in settlings:
                number, now = delivery.receipt, self.now()
                position = self.deliveries[number].position
                self.settlements.append(SettlementRecord(number, now, _to_settlement_name(settlement)))
                if isinstance(settlement, Defer):
                    self._queue.append((now + settlement.delay, position, settlement.attempts))
                elif isinstance(settlement, Release):
                    self._queue.append((now, position, delivery.transaction.attempts))
        return [SettleResult.SETTLED] * len(settlings)

    # -- the record ----------------------------------------------------------------------------------

    def record_outcome(self, outcome: Any) -> None:
        with self.lock:
            self.outcomes.append(self._to_outcome_record(outcome, outcome.transaction.payload))

    def _to_outcome_record(self, outcome: Any, number: int | None) -> OutcomeRecord:
        bodies = [] if number is None else self.deliveries[number].bodies
        at = bodies[0].call.at + sum(outcome.durations.values()) if bodies else self.now()
        return OutcomeRecord(
            number,
            outcome.kind.value,
            at,
            None if outcome.category is None else outcome.category.value,
            outcome.attempts,
            outcome.processed,
            outcome.reason,
        )

    def make_transactions(self) -> list[Transaction]:
        """Return the input of a producer; a repeated id is the same transaction twice."""
        first_positions: dict[str, int] = {}
        return [
            Transaction(
                first_positions.setdefault(transaction_plan.id, position),
                id=transaction_plan.id,
                source=SOURCE,
                key=transaction_plan.key,
                attempts=transaction_plan.attempts,
            )
            for position, transaction_plan in enumerate(self.plan.transactions)
        ]

    def record_end(self, result: Any) -> LoopEnd:
        """Record that the loop has returned *result*, or raised it."""
        with self.lock:
            self.is_over = True
            raised = result if isinstance(result, BaseException) else None
            report = getattr(raised, "report", None) if raised is not None else result
            return LoopEnd(self.now(), report, None if raised is None else type(raised).__name__)

    def make_record(self, flavour: Flavour, ended: LoopEnd) -> RunRecord:
        report = ended.report
        outcomes = self.outcomes
        if self.plan.kind == "produce" and report is not None:
            outcomes = [
                self._to_outcome_record(one, self._runs.get(one.transaction.payload)) for one in report.outcomes
            ]
        if report is not None:
            self._check_report(report, ended, outcomes)
        return RunRecord(
            flavour=flavour,
            deliveries=tuple(
                DeliveryRecord(
                    one.position,
                    one.transaction,
                    one.fetch,
                    one.bodies[0].call.at if one.bodies else None,
                    tuple(HandlerCallRecord(body.call, body.left, body.result, body.late) for body in one.bodies),
                )
                for one in self.deliveries
            ),
            outcomes=tuple(outcomes),
            ended=ended.at,
            starts=tuple(self.starts),
            fetches=tuple(self.fetches),
            settlements=tuple(self.settlements),
            began=self.began,
            raised=ended.raised,
            reason=None if report is None or report.stop_reason is None else report.stop_reason.value,
        )

    def _check_report(self, report: Any, ended: LoopEnd, outcomes: list[OutcomeRecord]) -> None:
        """Check that the report matches the recorded events."""
        return_times = [max((body.left for body in one.bodies), default=-math.inf) for one in self.deliveries]
        if not any(abs(left - ended.at) < self._slack for left in return_times):
            abandoned = sum(left > ended.at for left in return_times)
            if report.still_running != abandoned:
                self.problems.append(
                    f"the report counts {report.still_running} abandoned bodies, there were {abandoned}"
                )
        if self.plan.kind == "consume":
            counts = Counter(one.outcome for one in outcomes)
            if {kind.value: n for kind, n in report.counts.items() if n} != dict(counts):
                self.problems.append(f"the report counts {report.counts}, there were {counts}")
            if report.fetches > len(self.fetches):
                self.problems.append(f"the report counts {report.fetches} fetches, there were {len(self.fetches)}")


@dataclass(frozen=True)
class LoopEnd:
    at: float
    report: Any
    raised: str | None


def _to_settlement_name(settlement: Any) -> str | tuple[str, float]:
    if isinstance(settlement, Defer):
        return ("later", settlement.delay)
    return {Ack: "ack", DeadLetter: "dead_letter", Release: "release"}[type(settlement)]


def _to_settlement(behaviour: Behaviour) -> Any:
    if isinstance(behaviour.settles, tuple):
        return Defer(behaviour.settles[1])
    return {None: None, "ack": Ack(), "dead_letter": DeadLetter("asked for")}[behaviour.settles]


# -- user code and connectors -----------------------------------------------------------------------------

_CAPABILITIES = Capabilities(
    mode="queue",
    renewable=False,
    lease=None,
    release_uncounted=True,
    delays=True,
    dead_letters=True,
    fenced_by="token",
    durable=False,
)


class PlannedQueue(Connector):
    name = SOURCE
    capabilities = _CAPABILITIES

    def __init__(self, diary: RunRecorder, sleep: Callable[[float], None]) -> None:
        self._diary = diary
        self._sleep = sleep

    def fetch_transactions(self, batch_size, **extra):
        index, fault = self._diary.begin_fetch(batch_size)
        if isinstance(fault, tuple):
            self._sleep(fault[1])
        return self._diary.deliver(index, batch_size)

    def settle(self, requests):
        return self._diary.settle(requests)

    def dispatch(self, transactions):
        raise NotImplementedError


class AsyncPlannedQueue(AsyncConnector):
    name = SOURCE
    capabilities = _CAPABILITIES

    def __init__(
        self, diary: RunRecorder, sleep: Callable[[float], Any], *, ignores_cancellation: bool = False
    ) -> None:
        self._diary = diary
        self._sleep = sleep
        self._ignores_cancellation = ignores_cancellation

    async def fetch_transactions_async(self, batch_size, **extra):
        index, fault = self._diary.begin_fetch(batch_size)
        if isinstance(fault, tuple):
            await _sleep_for(self._diary, self._sleep, fault[1], ignores_cancellation=self._ignores_cancellation)
        return self._diary.deliver(index, batch_size)

    async def settle_async(self, requests):
        return self._diary.settle(requests)

    async def dispatch_async(self, transactions):
        raise NotImplementedError


async def _sleep_for(
    diary: RunRecorder, sleep: Callable[[float], Any], seconds: float, *, ignores_cancellation: bool
) -> None:
    deadline = diary.now() + seconds
    while (remaining := deadline - diary.now()) > 0:
        try:
            await sleep(remaining)
        except asyncio.CancelledError:
            if not ignores_cancellation:
                raise


class SyncTask(ConsumerMixin, ProducerMixin):
    """*spend* takes the planned time and returns when the call ends."""

    def __init__(self, diary: RunRecorder, connector: Any, spend: Callable[[float], float]) -> None:
        self.diary = diary
        self.connector = connector
        self._spend = spend

    def _run_step(self, step, transaction, error=None):
        body, behaviour = self.diary.begin_call(step, transaction, error)
        return self.diary.end_call(body, behaviour, self._spend(behaviour.takes))

    def process_transaction(self, transaction):
        self._run_step("process", transaction)
        return "result of", transaction.payload

    def handle_transaction_success(self, transaction, result):
        self.diary.check_result(transaction, result)
        return self._run_step("success", transaction)

    def handle_transaction_exception(self, transaction, exc):
        return self._run_step("exception", transaction, exc)

    def produce_transaction(self, transaction):
        self._run_step("produce", transaction)
        return "result of", transaction.payload

    handle_produce_success = handle_transaction_success
    handle_produce_exception = handle_transaction_exception


class AsyncTask(AsyncConsumerMixin, AsyncProducerMixin):
    def __init__(self, diary: RunRecorder, connector: Any, sleep: Callable[[float], Any]) -> None:
        self.diary = diary
        self.connector = connector
        self._sleep = sleep

    async def _run_step(self, step, transaction, error=None):
        body, behaviour = self.diary.begin_call(step, transaction, error)
        try:
            await _sleep_for(
                self.diary, self._sleep, behaviour.takes, ignores_cancellation=behaviour.on_cancel == "ignores"
            )
        except asyncio.CancelledError:
            self.diary.cancel_call(body)
            raise
        return self.diary.end_call(body, behaviour, self.diary.now())

    async def process_transaction(self, transaction):
        await self._run_step("process", transaction)
        return "result of", transaction.payload

    async def handle_transaction_success(self, transaction, result):
        self.diary.check_result(transaction, result)
        return await self._run_step("success", transaction)

    async def handle_transaction_exception(self, transaction, exc):
        return await self._run_step("exception", transaction, exc)

    async def produce_transaction(self, transaction):
        await self._run_step("produce", transaction)
        return "result of", transaction.payload

    handle_produce_success = handle_transaction_success
    handle_produce_exception = handle_transaction_exception


# -- running a plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A plan, its record, and the problems detected during the run."""

    plan: Plan
    record: RunRecord
    problems: tuple[str, ...]


def run_in_threads(plan: Plan) -> Run:
    """Run *plan* on real threads, in virtual time."""
    virtual = VirtualTime(plan.seed)
    diary = RunRecorder(plan, virtual.clock)

    def spend(seconds: float) -> float:
        if seconds > 0:
            virtual.sleep(seconds)
        return virtual.clock()

    task = SyncTask(diary, PlannedQueue(diary, virtual.sleep), spend)
    if plan.stop_at is not None:
        virtual.call_at(plan.stop_at, task.stop)
    ended = _run_sync_task(task, partial(ThreadDriver, waiting=virtual))
    virtual.run_until_idle()
    return Run(plan, diary.make_record("threads", ended), tuple(diary.problems))


def _run_sync_task(task: SyncTask, driver: Any) -> LoopEnd:
    diary, plan = task.diary, task.diary.plan
    try:
        if plan.kind == "consume":
            policy = ConsumerPolicy.load(plan.policy)
            return diary.record_end(task.consume_transactions(policy, on_outcome=diary.record_outcome, driver=driver))
        producer_policy = ProducerPolicy.load(plan.policy)
        return diary.record_end(task.produce_transactions(diary.make_transactions(), producer_policy, driver=driver))
    except ErgonError as error:
        return diary.record_end(error)


async def _run_async_task(task: AsyncTask, driver: Any) -> LoopEnd:
    diary, plan = task.diary, task.diary.plan
    try:
        if plan.kind == "consume":
            policy = ConsumerPolicy.load(plan.policy)
            return diary.record_end(
                await task.consume_transactions(policy, on_outcome=diary.record_outcome, driver=driver)
            )
        producer_policy = ProducerPolicy.load(plan.policy)
        return diary.record_end(
            await task.produce_transactions(diary.make_transactions(), producer_policy, driver=driver)
        )
    except ErgonError as error:
        return diary.record_end(error)


def run_in_asyncio(plan: Plan, loop: VirtualLoop | None = None) -> Run:
    """Run *plan* on the asyncio driver, in virtual time; a passed loop can be used again."""
    if loop is not None:
        return loop.run_until_complete(_run_on_loop(plan, loop))
    loop = VirtualLoop(plan.seed)
    try:
        return loop.run_until_complete(_run_on_loop(plan, loop))
    finally:
        loop.close()


async def _run_on_loop(plan: Plan, loop: VirtualLoop) -> Run:
    diary = RunRecorder(plan, loop.time)
    task = AsyncTask(diary, AsyncPlannedQueue(diary, asyncio.sleep), asyncio.sleep)
    stop = None if plan.stop_at is None else loop.call_at(diary.began + plan.stop_at, task.stop)
    ended = await _run_async_task(task, partial(AsyncioDriver, loop.time_source))
    if stop is not None:
        stop.cancel()
    await asyncio.sleep(MAX_CALL_SECONDS)
    return Run(plan, diary.make_record("asyncio", ended), tuple(diary.problems))


#: Longer than any handler call.
MAX_CALL_SECONDS = 1000.0


def run_in_simulation(plan: Plan, flavour: Flavour) -> Run:
    """Run *plan* on the simulated driver, with handlers of either variant."""
    simulation = Simulation(plan.seed)
    diary = RunRecorder(plan, simulation.monotonic)
    queue = AsyncPlannedQueue(diary, simulation.sleep, ignores_cancellation=flavour == "threads")

    def spend(seconds: float) -> float:
        simulation.busy_for(seconds)
        return simulation.monotonic() + seconds

    task: Any = SyncTask(diary, queue, spend) if flavour == "threads" else AsyncTask(diary, queue, simulation.sleep)
    if plan.stop_at is not None:
        simulation.call_at(plan.stop_at, task.stop)
    try:
        if plan.kind == "consume":
            policy = ConsumerPolicy.load(plan.policy)
            ended = diary.record_end(simulation.consume(task, policy, on_outcome=diary.record_outcome))
        else:
            producer_policy = ProducerPolicy.load(plan.policy)
            ended = diary.record_end(simulation.produce(task, diary.make_transactions(), producer_policy))
    except ErgonError as error:
        ended = diary.record_end(error)
    simulation.run_until_idle()
    return Run(plan, diary.make_record(flavour, ended), tuple(diary.problems))


class UnreliableQueue(AsyncPlannedQueue):
    """A broker that fails, delays, loses answers and claims at random; *dice* is the random source."""

    capabilities = replace(_CAPABILITIES, renewable=True, lease=0.9)

    def __init__(
        self, diary: RunRecorder, sleep: Callable[[float], Any], *, ignores_cancellation: bool, dice: Random
    ) -> None:
        super().__init__(diary, sleep, ignores_cancellation=ignores_cancellation)
        self._random = dice.random

    async def fetch_transactions_async(self, batch_size, **extra):
        deliveries = await super().fetch_transactions_async(batch_size)
        for delivery in deliveries:
            delivery.lease_until = self._diary.now() + 0.9
        return deliveries

    async def extend_async(self, deliveries):
        await self._delay_or_fail(4.0)
        return [None if self._random() < 0.05 else self._diary.now() + 0.9 for _ in deliveries]

    async def settle_async(self, requests):
        await self._delay_or_fail(6.0)
        if self._random() < 0.05:
            return []
        results = [self._draw_result() for _ in requests]
        self._diary.settle([one for one, how in zip(requests, results, strict=True) if how is SettleResult.SETTLED])
        return results

    def _draw_result(self) -> SettleResult:
        choice = self._random()
        return SettleResult.FAILED if choice < 0.1 else SettleResult.LOST if choice < 0.2 else SettleResult.SETTLED

    async def _delay_or_fail(self, max_delay: float) -> None:
        choice = self._random()
        if choice < 0.1:
            raise RuntimeError("the broker is out of order")
        if choice < 0.2:
            await self._sleep(self._random() * max_delay)


@dataclass(frozen=True)
class UnreliableRun:
    """A run with an unreliable broker, and the time of the operator's second stop."""

    run: Run
    second_stop: float | None


def run_with_unreliable_broker(plan: Plan) -> UnreliableRun:
    """Run a consumer's plan in the simulation; the broker is unpredictable, so only the general rules are checked."""
    dice, simulation = Random(plan.seed), Simulation(plan.seed)
    flavour: Flavour = "threads" if dice.random() < 0.5 else "asyncio"
    diary = RunRecorder(plan, simulation.monotonic)
    queue = UnreliableQueue(diary, simulation.sleep, ignores_cancellation=flavour == "threads", dice=dice)

    def spend(seconds: float) -> float:
        simulation.busy_for(seconds)
        return simulation.monotonic() + seconds

    task: Any = SyncTask(diary, queue, spend) if flavour == "threads" else AsyncTask(diary, queue, simulation.sleep)
    second_stop = None
    if plan.stop_at is not None:
        simulation.call_at(plan.stop_at, task.stop)
        if dice.random() < 0.4:
            second_stop = plan.stop_at + dice.random() * 2
            simulation.call_at(second_stop, task.stop)
    loop = {**plan.policy["loop"], "prefetch": int(dice.random() * 3)}
    try:
        policy = ConsumerPolicy.load({**plan.policy, "loop": loop})
        ended = diary.record_end(simulation.consume(task, policy, on_outcome=diary.record_outcome))
    except ErgonError as error:
        ended = diary.record_end(error)
    simulation.run_until_idle()
    return UnreliableRun(Run(plan, diary.make_record(flavour, ended), tuple(diary.problems)), second_stop)


def check_general_rules(unreliable_run: UnreliableRun) -> list[str]:
    """Check what holds whatever a broker does: one outcome each, calls that do not overlap, and an end in time."""
    plan, record = unreliable_run.run.plan, unreliable_run.run.record
    problems = [one for one in unreliable_run.run.problems if "fetches" not in one]
    broken_rules = oracle.check_run(plan, record)
    problems += [one for one in broken_rules if any(words in one for words in _GENERAL_RULES)]
    if record.raised == "Deadlock":
        problems.append("every task waited forever")
    ends = [end for end in (plan.stop_at, plan.policy["loop"].get("timeout")) if end is not None]
    if ends and min(ends) <= record.ended:
        latest_end = oracle.drain_end_of(plan)
        if unreliable_run.second_stop is not None:
            latest_end = min(latest_end, max(unreliable_run.second_stop, min(ends)))
        if record.ended > latest_end + FLUSH_TIMEOUT_SECONDS + oracle.TOLERANCE_SECONDS:
            problems.append(f"the loop ended at {record.ended}, due was {latest_end} and a moment for settling")
    return problems


_GENERAL_RULES = (
    "outcomes",
    "while",
    "running body",
    "steps ran out of order",
    "after the loop had ended",
    "a handler ran",
)


# -- comparing --------------------------------------------------------------------------------------------


def compare_run(run: Run, *, slack: float = oracle.TOLERANCE_SECONDS, counts: Counter[str] | None = None) -> list[str]:
    """Return every difference between the oracle's predictions and the record; [] means none.

    *counts* receives the number of compared deliveries and of those whose times were too close.
    """
    plan, record = run.plan, run.record
    problems = [*run.problems, *oracle.check_run(plan, record, slack=slack)]
    if slack > oracle.TOLERANCE_SECONDS:
        problems = [one for one in problems if not _is_too_close(run, one, slack)]
    outcomes = {one.delivery: one for one in record.outcomes}
    for number, delivery in enumerate(record.deliveries):
        outcome = outcomes.get(number)
        if outcome is None:
            continue
        if delivery.started is None:
            problems += _check_unstarted(run, number, outcome)
            continue
        prediction = predict_delivery(run, number, slack=slack)
        if counts is not None:
            counts["too_close" if prediction.ambiguous else "compared"] += 1
        if prediction.ambiguous:
            continue
        name = f"delivery {number} (id {delivery.transaction.id!r})"
        problems += [f"{name}: {one}" for one in oracle.differences(prediction, delivery, outcome, slack=slack)]
        problems += [f"{name}: {one}" for one in _check_settlement(run, number, prediction, slack)]
    return problems


def _is_too_close(run: Run, sentence: str, slack: float) -> bool:
    """Return whether *sentence* is about a delivery whose order of events real time cannot decide."""
    return any(
        sentence.startswith(f"delivery {number} (") and predict_delivery(run, number, slack=slack).ambiguous
        for number, delivery in enumerate(run.record.deliveries)
        if delivery.started is not None
    )


def predict_delivery(run: Run, number: int, *, slack: float = oracle.TOLERANCE_SECONDS) -> oracle.Prediction:
    """Return the oracle's prediction for one delivery that was started."""
    plan, record = run.plan, run.record
    delivery = record.deliveries[number]
    ends = [end for end in (plan.stop_at, plan.policy["loop"].get("timeout")) if end is not None]
    stop: float | None = record.began + min(ends) if ends else None
    drain_end = oracle.drain_end_of(plan, began=record.began)
    if stop is not None and stop > record.ended + slack:
        stop = drain_end = None
    # A loop that ended on its own did not wait for abandoned calls.
    has_running_calls = drain_end is None and any(body.left > record.ended + slack for body in delivery.bodies)
    if has_running_calls or record.raised == "LoopStalled":
        drain_end = record.ended
    # A call that returned just after that end might have returned before it: the expected order is unknown.
    is_close = drain_end is None and any(record.ended < body.left <= record.ended + slack for body in delivery.bodies)
    prediction = oracle.predict(
        delivery.transaction,
        plan.policy,
        flavour=record.flavour,
        kind=plan.kind,
        started=delivery.started or 0.0,
        stop_at=stop,
        drain_end=drain_end,
        tolerance=slack,
    )
    return replace(prediction, ambiguous=True) if is_close else prediction


def _check_unstarted(run: Run, number: int, outcome: OutcomeRecord) -> list[str]:
    sent = [one.what for one in run.record.settlements if one.delivery == number]
    delay = run.plan.policy["loop"].get("duplicate_delay", 1.0)
    expected = {"released": "release", "deferred": ("later", delay)}.get(outcome.outcome)
    problems = (
        [] if sent == [expected] else [f"delivery {number} never started, is {outcome.outcome}, but was settled {sent}"]
    )
    carried_attempts = run.record.deliveries[number].transaction.attempts
    if outcome.attempts != carried_attempts:
        problems.append(
            f"delivery {number} never started, but has {outcome.attempts} attempts instead of {carried_attempts}"
        )
    return problems


def _check_settlement(run: Run, number: int, prediction: oracle.Prediction, slack: float) -> list[str]:
    if run.plan.kind == "produce":
        return []
    sent = [one for one in run.record.settlements if one.delivery == number]
    if prediction.settlement == "kept":
        return [] if not sent else [f"settled {sent}, though its claim should have been kept"]
    if [one.what for one in sent] != [prediction.settlement]:
        return [f"settled {[one.what for one in sent]}, foretold was {prediction.settlement!r}"]
    due = prediction.ended
    if isinstance(prediction.settlement, tuple) or prediction.settlement == "release":
        due = max(due, prediction.free)
    # The loop may have ended meanwhile, which flushes immediately; after the linger nothing is sent.
    if not due - slack <= sent[0].at <= due + LINGER_SECONDS + slack:
        return [f"settled at {sent[0].at}, due was {due}"]
    return []


#: How long settlements wait for others by default.
LINGER_SECONDS = 0.002


def explain(run: Run, problems: list[str], world: str) -> str:
    """Return everything needed to understand and repeat a difference."""
    plan, record = run.plan, run.record
    lines = [f"seed {plan.seed} in {world} ({record.flavour}):", *(f"  - {one}" for one in problems), "plan:"]
    lines += [f"  {plan.kind} stop_at={plan.stop_at} faults={plan.faults}", f"  {plan.policy}"]
    lines += [f"  {number}: {one}" for number, one in enumerate(plan.transactions)]
    lines.append("foretold:")
    for number, delivery in enumerate(record.deliveries):
        if delivery.started is not None:
            lines.append(f"  {number}: {predict_delivery(run, number)}")
    lines += ["happened:", f"  ended={record.ended} raised={record.raised} reason={record.reason}"]
    lines += [f"  delivery {number}: {one}" for number, one in enumerate(record.deliveries)]
    for name in ("outcomes", "settlements", "fetches"):
        lines += [f"  {one}" for one in getattr(record, name)]
    return "\n".join(lines)


# -- real time --------------------------------------------------------------------------------------------

#: In real time events closer than this may come in either order, and times may be off by as much: it is
#: several times what an idle machine needs to wake a thread, and small against the scaled times of a plan.
REAL_SLACK_SECONDS = 0.06

#: In real time no handler call runs longer than this many planned seconds: a hang of minutes would delay the tests.
MAX_HANG_SECONDS = 15.0


def scale_plan(plan: Plan, scale: float) -> Plan:
    """Return *plan* with all its times multiplied, and its longest hangs cut to ``MAX_HANG_SECONDS``."""
    loop, steps = plan.policy["loop"], plan.policy["steps"]
    policy = {
        "loop": {name: value * scale if name in _LOOP_TIME_FIELDS else value for name, value in loop.items()},
        "steps": {
            name: {**step, **({"retry": _scale_retry(step["retry"], scale)} if "retry" in step else {})}
            for name, step in steps.items()
        },
    }
    if plan.kind == "consume":
        policy["loop"]["empty_queue"] = {"backoff": 0.5 * scale, "cap": 5.0 * scale}
    transactions = tuple(
        replace(
            one, **{step: _scale_behaviours(getattr(one, step), scale) for step in ("process", "success", "exception")}
        )
        for one in plan.transactions
    )
    faults = tuple(("slow", one[1] * scale) if isinstance(one, tuple) else one for one in plan.faults)
    stop_at = None if plan.stop_at is None else plan.stop_at * scale
    return replace(plan, policy=policy, transactions=transactions, stop_at=stop_at, faults=faults)


_LOOP_TIME_FIELDS = {"drain_timeout", "timeout_drain", "transaction_timeout", "timeout", "duplicate_delay"}
_RETRY_TIME_FIELDS = {"timeout", "backoff", "cap", "max_inline_delay", "exit_grace"}


def _scale_retry(retry: dict[str, Any], scale: float) -> dict[str, Any]:
    return {name: value * scale if name in _RETRY_TIME_FIELDS else value for name, value in retry.items()}


def _scale_behaviours(behaviours: tuple[Behaviour, ...], scale: float) -> tuple[Behaviour, ...]:
    return tuple(
        replace(
            one,
            takes=min(one.takes, MAX_HANG_SECONDS) * scale,
            retry_after=None if one.retry_after is None else one.retry_after * scale,
            settles=("later", one.settles[1] * scale) if isinstance(one.settles, tuple) else one.settles,
        )
        for one in behaviours
    )


def run_in_real_threads(plan: Plan) -> Run:
    """Run *plan* on real threads in real time."""
    diary = RunRecorder(plan, time.monotonic, slack=REAL_SLACK_SECONDS)

    def spend(seconds: float) -> float:
        if seconds > 0:
            time.sleep(seconds)
        return time.monotonic()

    task = SyncTask(diary, PlannedQueue(diary, time.sleep), spend)
    stop = None if plan.stop_at is None else threading.Timer(plan.stop_at, task.stop)
    if stop is not None:
        stop.start()
    ended = _run_sync_task(task, ThreadDriver)
    if stop is not None:
        stop.cancel()
    while any(body.left == math.inf for one in diary.deliveries for body in one.bodies):
        time.sleep(0.01)
    return Run(plan, diary.make_record("threads", ended), tuple(diary.problems))


async def run_in_real_asyncio(plan: Plan) -> Run:
    """Run *plan* on asyncio in real time; many of these share a loop."""
    loop = asyncio.get_running_loop()
    diary = RunRecorder(plan, loop.time, slack=REAL_SLACK_SECONDS)
    task = AsyncTask(diary, AsyncPlannedQueue(diary, asyncio.sleep), asyncio.sleep)
    stop = None if plan.stop_at is None else loop.call_at(diary.began + plan.stop_at, task.stop)
    ended = await _run_async_task(task, AsyncioDriver)
    if stop is not None:
        stop.cancel()
    while any(body.left == math.inf for one in diary.deliveries for body in one.bodies):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)
    return Run(plan, diary.make_record("asyncio", ended), tuple(diary.problems))
