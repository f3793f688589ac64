"""Worlds: places in which a plan is carried out by the engine and written down for the oracle.

`threads` and `asyncio` are the real drivers in virtual time, `simulation` is the simulated driver with
bodies of either flavour, `real threads` and `real asyncio` are the real drivers in real time.
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
    Delivery,
    Later,
    Release,
    SettleResult,
)
from ergon_framework.engine.drivers.aio import Asyncio
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.errors import ConnectionLost, ErgonError
from ergon_framework.task.consume import FLUSH
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.testing.simulation import Simulation
from ergon_framework.testing.virtual import VirtualLoop, VirtualTime
from ergon_framework.transaction import Transaction
from tests.properties import oracle
from tests.properties.plan import (
    OK,
    Behaviour,
    BodyRecord,
    Call,
    DeliveryRecord,
    Fault,
    FetchRecord,
    Flavour,
    OutcomeRecord,
    Plan,
    RunRecord,
    SettlementRecord,
    TransactionPlan,
)

SOURCE = "plan"


# -- the diary ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Body:
    call: Call
    left: float = math.inf
    result: str = "running"
    #: Seconds that it means to stay.
    takes: float = 0.0

    @property
    def late(self) -> float:
        return self.left - self.call.at - self.takes if math.isfinite(self.left) else 0.0


@dataclass(eq=False)
class Handed:
    """A delivery, or a producer's run."""

    position: int
    transaction: TransactionPlan
    fetch: int | None = None
    bodies: list[Body] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Diary:
    """What user code and connector of one run do, and what they saw; *now* is the world's clock."""

    def __init__(self, plan: Plan, now: Callable[[], float], *, slack: float = oracle.TOLERANCE) -> None:
        self.plan = plan
        self.now = now
        self._slack = slack
        self.lock = threading.Lock()
        self.handed: list[Handed] = []
        self.starts: list[int] = []
        self.fetches: list[FetchRecord] = []
        self.settlements: list[SettlementRecord] = []
        self.outcomes: list[OutcomeRecord] = []
        self.problems: list[str] = []
        self.over = False
        self.began = now()
        self._calls: dict[int, Counter[str]] = {}
        self._runs: dict[int, int] = {}
        self._queue = [(self.began, n, t.attempts) for n, t in enumerate(plan.transactions)]

    # -- user code ---------------------------------------------------------------------------------

    def enter(self, step: str, transaction: Transaction, told: Any = None) -> tuple[Body, Behaviour]:
        inside = scope.current()
        category, running = (None, None) if told is None else (told.category.value, told.still_running)
        with self.lock:
            number = self._number(transaction)
            handed = self.handed[number]
            if inside is None or (inside.step, inside.transaction) != (step, transaction):
                self.problems.append(f"{step} of {transaction.id} ran inside the scope {inside}")
            body = Body(Call(step, -1 if inside is None else inside.attempt, self.now(), category, running))
            if not handed.bodies:
                self.starts.append(number)
            handed.bodies.append(body)
            story = getattr(handed.transaction, "process" if step == "produce" else step)
            behaviour = story[handed.counts[step]] if handed.counts[step] < len(story) else OK
            body.takes = behaviour.takes
            handed.counts[step] += 1
            self._calls.setdefault(handed.position, Counter())[step] += 1
            return body, behaviour

    def leave(self, body: Body, behaviour: Behaviour, at: float) -> Any:
        error = behaviour.error()
        body.left, body.result = at, "ok" if error is None else "raised"
        if error is not None:
            raise error
        return _settlement(behaviour)

    def cancelled(self, body: Body) -> None:
        body.left, body.result = self.now(), "cancelled"

    def check_result(self, transaction: Transaction, result: Any) -> None:
        if result != ("result of", transaction.payload):
            self.problems.append(f"the success handler of {transaction.id} was given {result!r}")

    def _number(self, transaction: Transaction) -> int:
        if self.plan.kind == "consume":
            return int(transaction.payload)
        position = int(transaction.payload)
        if position not in self._runs:
            self._runs[position] = len(self.handed)
            self.handed.append(Handed(position, self.plan.transactions[position]))
        return self._runs[position]

    # -- the connector -------------------------------------------------------------------------------

    def fetch(self, asked: int) -> tuple[int, Fault]:
        with self.lock:
            index = len(self.fetches)
            fault = self.plan.faults[index] if index < len(self.plan.faults) else "ok"
            self.fetches.append(FetchRecord(self.now(), asked, 0, fault))
        if fault == "error":
            raise RuntimeError("the broker is out of order")
        if fault == "lost_connection":
            raise ConnectionLost("the broker has hung up")
        return index, fault

    def hand_over(self, index: int, asked: int) -> list[Delivery]:
        with self.lock:
            if self.over:  # nobody is there any more; in a real process not even this call
                return []
            now = self.now()
            due = [entry for entry in self._queue if entry[0] <= now][:asked]
            self._queue = [entry for entry in self._queue if entry not in due]
            self.fetches[index] = replace(self.fetches[index], got=len(due))
            return [self._delivery(index, position, attempts) for _, position, attempts in due]

    def _delivery(self, index: int, position: int, attempts: int) -> Delivery:
        number, planned = len(self.handed), self.plan.transactions[position]
        made = self._calls.get(position, Counter())
        self.handed.append(Handed(position, planned.redelivered(made, attempts=attempts), index))
        transaction = Transaction(planned.id, number, source=SOURCE, key=planned.key, attempts=attempts)
        return Delivery(transaction, number)

    def settle(self, settlings: Any) -> list[SettleResult]:
        with self.lock:
            for delivery, settlement in settlings:
                number, now = delivery.receipt, self.now()
                position = self.handed[number].position
                self.settlements.append(SettlementRecord(number, now, _word(settlement)))
                if isinstance(settlement, Later):
                    self._queue.append((now + settlement.delay, position, settlement.attempts))
                elif isinstance(settlement, Release):
                    self._queue.append((now, position, delivery.transaction.attempts))
        return [SettleResult.SETTLED] * len(settlings)

    # -- the record ----------------------------------------------------------------------------------

    def outcome(self, outcome: Any) -> None:
        with self.lock:
            self.outcomes.append(self._outcome(outcome, outcome.transaction.payload))

    def _outcome(self, outcome: Any, number: int | None) -> OutcomeRecord:
        bodies = [] if number is None else self.handed[number].bodies
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

    def transactions(self) -> list[Transaction]:
        """What a producer is given; an id that stands twice is the same transaction twice."""
        first: dict[str, int] = {}
        return [
            Transaction(
                planned.id,
                first.setdefault(planned.id, position),
                source=SOURCE,
                key=planned.key,
                attempts=planned.attempts,
            )
            for position, planned in enumerate(self.plan.transactions)
        ]

    def ended(self, result: Any) -> Ended:
        """The loop has returned *result*, or raised it."""
        with self.lock:
            self.over = True
            raised = result if isinstance(result, BaseException) else None
            report = getattr(raised, "report", None) if raised is not None else result
            return Ended(self.now(), report, None if raised is None else type(raised).__name__)

    def record(self, flavour: Flavour, ended: Ended) -> RunRecord:
        report = ended.report
        outcomes = self.outcomes
        if self.plan.kind == "produce" and report is not None:
            outcomes = [self._outcome(one, self._runs.get(one.transaction.payload)) for one in report.outcomes]
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
                    tuple(BodyRecord(body.call, body.left, body.result, body.late) for body in one.bodies),
                )
                for one in self.handed
            ),
            outcomes=tuple(outcomes),
            ended=ended.at,
            starts=tuple(self.starts),
            fetches=tuple(self.fetches),
            settlements=tuple(self.settlements),
            began=self.began,
            raised=ended.raised,
            reason=None if report is None or report.end is None else report.end.value,
        )

    def _check_report(self, report: Any, ended: Ended, outcomes: list[OutcomeRecord]) -> None:
        """The report says what happened."""
        lefts = [max((body.left for body in one.bodies), default=-math.inf) for one in self.handed]
        if not any(abs(left - ended.at) < self._slack for left in lefts):
            abandoned = sum(left > ended.at for left in lefts)
            if report.abandoned != abandoned:
                self.problems.append(f"the report counts {report.abandoned} abandoned bodies, there were {abandoned}")
        if self.plan.kind == "consume":
            counts = Counter(one.outcome for one in outcomes)
            if {kind.value: n for kind, n in report.counts.items() if n} != dict(counts):
                self.problems.append(f"the report counts {report.counts}, there were {counts}")
            if report.fetches > len(self.fetches):
                self.problems.append(f"the report counts {report.fetches} fetches, there were {len(self.fetches)}")


@dataclass(frozen=True)
class Ended:
    at: float
    report: Any
    raised: str | None


def _word(settlement: Any) -> str | tuple[str, float]:
    if isinstance(settlement, Later):
        return ("later", settlement.delay)
    return {Ack: "ack", DeadLetter: "dead_letter", Release: "release"}[type(settlement)]


def _settlement(behaviour: Behaviour) -> Any:
    if isinstance(behaviour.settles, tuple):
        return Later(behaviour.settles[1])
    return {None: None, "ack": Ack(), "dead_letter": DeadLetter("asked for")}[behaviour.settles]


# -- user code and connectors -----------------------------------------------------------------------------

_ABLE = Capabilities(
    mode="queue",
    renewable=False,
    lease=None,
    release_is_free=True,
    delays=True,
    dead_letters=True,
    fenced_by="token",
    durable=False,
)


class Queue(Connector):
    name = SOURCE
    capabilities = _ABLE

    def __init__(self, diary: Diary, sleep: Callable[[float], None]) -> None:
        self._diary = diary
        self._sleep = sleep

    def fetch_transactions(self, batch_size, **extra):
        index, fault = self._diary.fetch(batch_size)
        if isinstance(fault, tuple):
            self._sleep(fault[1])
        return self._diary.hand_over(index, batch_size)

    def settle(self, settlings):
        return self._diary.settle(settlings)

    def dispatch(self, transactions):
        raise NotImplementedError


class AsyncQueue(AsyncConnector):
    name = SOURCE
    capabilities = _ABLE

    def __init__(self, diary: Diary, sleep: Callable[[float], Any], *, ignores: bool = False) -> None:
        self._diary = diary
        self._sleep = sleep
        self._ignores = ignores

    async def fetch_transactions_async(self, batch_size, **extra):
        index, fault = self._diary.fetch(batch_size)
        if isinstance(fault, tuple):
            await _spend(self._diary, self._sleep, fault[1], ignores=self._ignores)
        return self._diary.hand_over(index, batch_size)

    async def settle_async(self, settlings):
        return self._diary.settle(settlings)

    async def dispatch_async(self, transactions):
        raise NotImplementedError


async def _spend(diary: Diary, sleep: Callable[[float], Any], seconds: float, *, ignores: bool) -> None:
    until = diary.now() + seconds
    while (left := until - diary.now()) > 0:
        try:
            await sleep(left)
        except asyncio.CancelledError:
            if not ignores:
                raise


class SyncTask(ConsumerMixin, ProducerMixin):
    """*spend* takes its time and says when the body leaves."""

    def __init__(self, diary: Diary, connector: Any, spend: Callable[[float], float]) -> None:
        self.diary = diary
        self.connector = connector
        self._spend = spend

    def _play(self, step, transaction, told=None):
        body, behaviour = self.diary.enter(step, transaction, told)
        return self.diary.leave(body, behaviour, self._spend(behaviour.takes))

    def process_transaction(self, transaction):
        self._play("process", transaction)
        return "result of", transaction.payload

    def handle_transaction_success(self, transaction, result):
        self.diary.check_result(transaction, result)
        return self._play("success", transaction)

    def handle_transaction_exception(self, transaction, exc):
        return self._play("exception", transaction, exc)

    def produce_transaction(self, transaction):
        self._play("produce", transaction)
        return "result of", transaction.payload

    handle_produce_success = handle_transaction_success
    handle_produce_exception = handle_transaction_exception


class AsyncTask(AsyncConsumerMixin, AsyncProducerMixin):
    def __init__(self, diary: Diary, connector: Any, sleep: Callable[[float], Any]) -> None:
        self.diary = diary
        self.connector = connector
        self._sleep = sleep

    async def _play(self, step, transaction, told=None):
        body, behaviour = self.diary.enter(step, transaction, told)
        try:
            await _spend(self.diary, self._sleep, behaviour.takes, ignores=behaviour.on_cancel == "ignores")
        except asyncio.CancelledError:
            self.diary.cancelled(body)
            raise
        return self.diary.leave(body, behaviour, self.diary.now())

    async def process_transaction(self, transaction):
        await self._play("process", transaction)
        return "result of", transaction.payload

    async def handle_transaction_success(self, transaction, result):
        self.diary.check_result(transaction, result)
        return await self._play("success", transaction)

    async def handle_transaction_exception(self, transaction, exc):
        return await self._play("exception", transaction, exc)

    async def produce_transaction(self, transaction):
        await self._play("produce", transaction)
        return "result of", transaction.payload

    handle_produce_success = handle_transaction_success
    handle_produce_exception = handle_transaction_exception


# -- carrying a plan out ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A plan, what became of it, and what was odd about it on the spot."""

    plan: Plan
    record: RunRecord
    problems: tuple[str, ...]


def in_threads(plan: Plan) -> Run:
    """On real threads, in virtual time."""
    virtual = VirtualTime(plan.seed)
    diary = Diary(plan, virtual.clock)

    def spend(seconds: float) -> float:
        if seconds > 0:
            virtual.sleep(seconds)
        return virtual.clock()

    task = SyncTask(diary, Queue(diary, virtual.sleep), spend)
    if plan.stop_at is not None:
        virtual.at(plan.stop_at, task.stop)
    ended = _sync_run(task, partial(Threads, waiting=virtual))
    virtual.rest()
    return Run(plan, diary.record("threads", ended), tuple(diary.problems))


def _sync_run(task: SyncTask, driver: Any) -> Ended:
    diary, plan = task.diary, task.diary.plan
    try:
        if plan.kind == "consume":
            policy = ConsumerPolicy.load(plan.policy)
            return diary.ended(task.consume_transactions(policy, on_outcome=diary.outcome, driver=driver))
        produced = ProducerPolicy.load(plan.policy)
        return diary.ended(task.produce_transactions(diary.transactions(), produced, driver=driver))
    except ErgonError as error:
        return diary.ended(error)


async def _async_run(task: AsyncTask, driver: Any) -> Ended:
    diary, plan = task.diary, task.diary.plan
    try:
        if plan.kind == "consume":
            policy = ConsumerPolicy.load(plan.policy)
            return diary.ended(await task.consume_transactions(policy, on_outcome=diary.outcome, driver=driver))
        produced = ProducerPolicy.load(plan.policy)
        return diary.ended(await task.produce_transactions(diary.transactions(), produced, driver=driver))
    except ErgonError as error:
        return diary.ended(error)


def in_asyncio(plan: Plan, loop: VirtualLoop | None = None) -> Run:
    """On the asyncio driver, in virtual time; a loop that is handed in can be used again."""
    if loop is not None:
        return loop.run_until_complete(_on_loop(plan, loop))
    loop = VirtualLoop(plan.seed)
    try:
        return loop.run_until_complete(_on_loop(plan, loop))
    finally:
        loop.close()


async def _on_loop(plan: Plan, loop: VirtualLoop) -> Run:
    diary = Diary(plan, loop.time)
    task = AsyncTask(diary, AsyncQueue(diary, asyncio.sleep), asyncio.sleep)
    stop = None if plan.stop_at is None else loop.call_at(diary.began + plan.stop_at, task.stop)
    ended = await _async_run(task, partial(Asyncio, loop.senses))
    if stop is not None:
        stop.cancel()
    await asyncio.sleep(LONG)
    return Run(plan, diary.record("asyncio", ended), tuple(diary.problems))


#: Longer than any body.
LONG = 1000.0


def in_simulation(plan: Plan, flavour: Flavour) -> Run:
    """On the simulated driver, with bodies of either flavour."""
    simulation = Simulation(plan.seed)
    diary = Diary(plan, simulation.clock)
    queue = AsyncQueue(diary, simulation.sleep, ignores=flavour == "threads")

    def spend(seconds: float) -> float:
        simulation.takes(seconds)
        return simulation.clock() + seconds

    task: Any = SyncTask(diary, queue, spend) if flavour == "threads" else AsyncTask(diary, queue, simulation.sleep)
    if plan.stop_at is not None:
        simulation.at(plan.stop_at, task.stop)
    try:
        if plan.kind == "consume":
            policy = ConsumerPolicy.load(plan.policy)
            ended = diary.ended(simulation.consume(task, policy, on_outcome=diary.outcome))
        else:
            produced = ProducerPolicy.load(plan.policy)
            ended = diary.ended(simulation.produce(task, diary.transactions(), produced))
    except ErgonError as error:
        ended = diary.ended(error)
    simulation.rest()
    return Run(plan, diary.record(flavour, ended), tuple(diary.problems))


class Unreliable(AsyncQueue):
    """A broker that fails, dawdles, forgets and loses claims; *dice* say when."""

    capabilities = replace(_ABLE, renewable=True, lease=0.9)

    def __init__(self, diary: Diary, sleep: Callable[[float], Any], *, ignores: bool, dice: Random) -> None:
        super().__init__(diary, sleep, ignores=ignores)
        self._dice = dice.random

    async def fetch_transactions_async(self, batch_size, **extra):
        fetched = await super().fetch_transactions_async(batch_size)
        for delivery in fetched:
            delivery.lease_until = self._diary.now() + 0.9
        return fetched

    async def extend_async(self, deliveries):
        await self._misbehave(4.0)
        return [None if self._dice() < 0.05 else self._diary.now() + 0.9 for _ in deliveries]

    async def settle_async(self, settlings):
        await self._misbehave(6.0)
        if self._dice() < 0.05:
            return []
        results = [self._result() for _ in settlings]
        self._diary.settle([one for one, how in zip(settlings, results, strict=True) if how is SettleResult.SETTLED])
        return results

    def _result(self) -> SettleResult:
        lot = self._dice()
        return SettleResult.FAILED if lot < 0.1 else SettleResult.LOST if lot < 0.2 else SettleResult.SETTLED

    async def _misbehave(self, longest: float) -> None:
        lot = self._dice()
        if lot < 0.1:
            raise RuntimeError("the broker is out of order")
        if lot < 0.2:
            await self._sleep(self._dice() * longest)


@dataclass(frozen=True)
class Unreliably:
    """A run with an unreliable broker, and when the operator asked a second time."""

    run: Run
    second_stop: float | None


def with_unreliable_broker(plan: Plan) -> Unreliably:
    """A consumer's plan in the simulation; what the broker does is nobody's prediction, only the promises count."""
    dice, simulation = Random(plan.seed), Simulation(plan.seed)
    flavour: Flavour = "threads" if dice.random() < 0.5 else "asyncio"
    diary = Diary(plan, simulation.clock)
    queue = Unreliable(diary, simulation.sleep, ignores=flavour == "threads", dice=dice)

    def spend(seconds: float) -> float:
        simulation.takes(seconds)
        return simulation.clock() + seconds

    task: Any = SyncTask(diary, queue, spend) if flavour == "threads" else AsyncTask(diary, queue, simulation.sleep)
    second = None
    if plan.stop_at is not None:
        simulation.at(plan.stop_at, task.stop)
        if dice.random() < 0.4:
            second = plan.stop_at + dice.random() * 2
            simulation.at(second, task.stop)
    loop = {**plan.policy["loop"], "prefetch": int(dice.random() * 3)}
    try:
        policy = ConsumerPolicy.load({**plan.policy, "loop": loop})
        ended = diary.ended(simulation.consume(task, policy, on_outcome=diary.outcome))
    except ErgonError as error:
        ended = diary.ended(error)
    simulation.rest()
    return Unreliably(Run(plan, diary.record(flavour, ended), tuple(diary.problems)), second)


def judge_promises(seen: Unreliably) -> list[str]:
    """What holds whatever a broker does: one outcome each, bodies apart, and an end in time."""
    plan, record = seen.run.plan, seen.run.record
    found = [one for one in seen.run.problems if "fetches" not in one]
    broken = oracle.check_run(plan, record)
    found += [one for one in broken if any(words in one for words in _PROMISES)]
    if record.raised == "Deadlock":
        found.append("nobody would ever have gone on")
    ends = [end for end in (plan.stop_at, plan.policy["loop"].get("timeout")) if end is not None]
    if ends and min(ends) <= record.ended:
        due = oracle.drain_end_of(plan)
        if seen.second_stop is not None:
            due = min(due, max(seen.second_stop, min(ends)))
        if record.ended > due + FLUSH + oracle.TOLERANCE:
            found.append(f"the loop ended at {record.ended}, due was {due} and a moment for settling")
    return found


_PROMISES = ("outcomes", "while", "running body", "steps ran out of order", "after the loop had ended", "a handler ran")


# -- judging ----------------------------------------------------------------------------------------------


def judge(run: Run, *, slack: float = oracle.TOLERANCE, counts: Counter[str] | None = None) -> list[str]:
    """Every difference between what the oracle says and what happened; [] is what we want.

    *counts* is told how many deliveries were compared, and how many were a photo finish.
    """
    plan, record = run.plan, run.record
    found = [*run.problems, *oracle.check_run(plan, record, slack=slack)]
    if slack > oracle.TOLERANCE:
        found = [one for one in found if not _too_close(run, one, slack)]
    outcomes = {one.delivery: one for one in record.outcomes}
    for number, delivery in enumerate(record.deliveries):
        outcome = outcomes.get(number)
        if outcome is None:
            continue
        if delivery.started is None:
            found += _unstarted(run, number, outcome)
            continue
        prediction = foretold(run, number, slack=slack)
        if counts is not None:
            counts["too_close" if prediction.ambiguous else "compared"] += 1
        if prediction.ambiguous:
            continue
        name = f"delivery {number} (id {delivery.transaction.id!r})"
        found += [f"{name}: {one}" for one in oracle.differences(prediction, delivery, outcome, slack=slack)]
        found += [f"{name}: {one}" for one in _settled(run, number, prediction, slack)]
    return found


def _too_close(run: Run, sentence: str, slack: float) -> bool:
    """Whether *sentence* is about a delivery of which real time cannot tell what came first."""
    return any(
        sentence.startswith(f"delivery {number} (") and foretold(run, number, slack=slack).ambiguous
        for number, delivery in enumerate(run.record.deliveries)
        if delivery.started is not None
    )


def foretold(run: Run, number: int, *, slack: float = oracle.TOLERANCE) -> oracle.Prediction:
    """What the oracle says of one delivery that was started."""
    plan, record = run.plan, run.record
    delivery = record.deliveries[number]
    ends = [end for end in (plan.stop_at, plan.policy["loop"].get("timeout")) if end is not None]
    stop: float | None = record.began + min(ends) if ends else None
    drain_end = oracle.drain_end_of(plan, began=record.began)
    if stop is not None and stop > record.ended + slack:
        stop = drain_end = None
    # A loop that ended by itself did not wait for bodies that had been given up.
    stayed = drain_end is None and any(body.left > record.ended + slack for body in delivery.bodies)
    if stayed or record.raised == "LoopStalled":
        drain_end = record.ended
    # One that left a moment after that end might have left before it: nobody can say which was due.
    close = drain_end is None and any(record.ended < body.left <= record.ended + slack for body in delivery.bodies)
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
    return replace(prediction, ambiguous=True) if close else prediction


def _unstarted(run: Run, number: int, outcome: OutcomeRecord) -> list[str]:
    sent = [one.what for one in run.record.settlements if one.delivery == number]
    delay = run.plan.policy["loop"].get("identity_delay", 1.0)
    due = {"released": "release", "deferred": ("later", delay)}.get(outcome.outcome)
    found = [] if sent == [due] else [f"delivery {number} never started, is {outcome.outcome}, but was settled {sent}"]
    carried = run.record.deliveries[number].transaction.attempts
    if outcome.attempts != carried:
        found.append(f"delivery {number} never started, but has {outcome.attempts} attempts instead of {carried}")
    return found


def _settled(run: Run, number: int, prediction: oracle.Prediction, slack: float) -> list[str]:
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
    # The loop may have ended meanwhile, which flushes at once; later than the linger nothing is sent.
    if not due - slack <= sent[0].at <= due + LINGER + slack:
        return [f"settled at {sent[0].at}, due was {due}"]
    return []


#: How long settlements may wait for company by default.
LINGER = 0.002


def explain(run: Run, found: list[str], world: str) -> str:
    """Everything needed to understand, and to repeat, a difference."""
    plan, record = run.plan, run.record
    lines = [f"seed {plan.seed} in {world} ({record.flavour}):", *(f"  - {one}" for one in found), "plan:"]
    lines += [f"  {plan.kind} stop_at={plan.stop_at} faults={plan.faults}", f"  {plan.policy}"]
    lines += [f"  {number}: {one}" for number, one in enumerate(plan.transactions)]
    lines.append("foretold:")
    for number, delivery in enumerate(record.deliveries):
        if delivery.started is not None:
            lines.append(f"  {number}: {foretold(run, number)}")
    lines += ["happened:", f"  ended={record.ended} raised={record.raised} reason={record.reason}"]
    lines += [f"  delivery {number}: {one}" for number, one in enumerate(record.deliveries)]
    for name in ("outcomes", "settlements", "fetches"):
        lines += [f"  {one}" for one in getattr(record, name)]
    return "\n".join(lines)


# -- real time --------------------------------------------------------------------------------------------

#: In real time instants closer than this may come in either order, and times may be off by as much: it is
#: several times what an idle machine needs to wake a thread, and small against the scaled times of a plan.
REAL_SLACK = 0.06

#: In real time no body outlives this many planned seconds: nobody wants to wait for a hang of minutes.
HANG = 15.0


def scaled(plan: Plan, scale: float) -> Plan:
    """*plan* with all its times multiplied, and its longest hangs cut to ``HANG``."""
    loop, steps = plan.policy["loop"], plan.policy["steps"]
    policy = {
        "loop": {name: value * scale if name in _LOOP_TIMES else value for name, value in loop.items()},
        "steps": {
            name: {**step, **({"retry": _scaled_retry(step["retry"], scale)} if "retry" in step else {})}
            for name, step in steps.items()
        },
    }
    if plan.kind == "consume":
        policy["loop"]["empty_queue"] = {"backoff": 0.5 * scale, "cap": 5.0 * scale}
    transactions = tuple(
        replace(one, **{step: _scaled_story(getattr(one, step), scale) for step in ("process", "success", "exception")})
        for one in plan.transactions
    )
    faults = tuple(("slow", one[1] * scale) if isinstance(one, tuple) else one for one in plan.faults)
    stop_at = None if plan.stop_at is None else plan.stop_at * scale
    return replace(plan, policy=policy, transactions=transactions, stop_at=stop_at, faults=faults)


_LOOP_TIMES = {"drain_timeout", "timeout_drain", "transaction_timeout", "timeout", "identity_delay"}
_RETRY_TIMES = {"timeout", "backoff", "cap", "hold", "abandon_grace"}


def _scaled_retry(retry: dict[str, Any], scale: float) -> dict[str, Any]:
    return {name: value * scale if name in _RETRY_TIMES else value for name, value in retry.items()}


def _scaled_story(story: tuple[Behaviour, ...], scale: float) -> tuple[Behaviour, ...]:
    return tuple(
        replace(
            one,
            takes=min(one.takes, HANG) * scale,
            retry_after=None if one.retry_after is None else one.retry_after * scale,
            settles=("later", one.settles[1] * scale) if isinstance(one.settles, tuple) else one.settles,
        )
        for one in story
    )


def in_real_threads(plan: Plan) -> Run:
    """On real threads in real time."""
    diary = Diary(plan, time.monotonic, slack=REAL_SLACK)

    def spend(seconds: float) -> float:
        if seconds > 0:
            time.sleep(seconds)
        return time.monotonic()

    task = SyncTask(diary, Queue(diary, time.sleep), spend)
    stop = None if plan.stop_at is None else threading.Timer(plan.stop_at, task.stop)
    if stop is not None:
        stop.start()
    ended = _sync_run(task, Threads)
    if stop is not None:
        stop.cancel()
    while any(body.left == math.inf for one in diary.handed for body in one.bodies):
        time.sleep(0.01)
    return Run(plan, diary.record("threads", ended), tuple(diary.problems))


async def in_real_asyncio(plan: Plan) -> Run:
    """On asyncio in real time; many of these share a loop."""
    loop = asyncio.get_running_loop()
    diary = Diary(plan, loop.time, slack=REAL_SLACK)
    task = AsyncTask(diary, AsyncQueue(diary, asyncio.sleep), asyncio.sleep)
    stop = None if plan.stop_at is None else loop.call_at(diary.began + plan.stop_at, task.stop)
    ended = await _async_run(task, Asyncio)
    if stop is not None:
        stop.cancel()
    while any(body.left == math.inf for one in diary.handed for body in one.bodies):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    return Run(plan, diary.record("asyncio", ended), tuple(diary.problems))
