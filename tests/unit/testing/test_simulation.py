"""The simulated driver: the same engine without threads, tasks or time, one seed one interleaving."""

from __future__ import annotations

import asyncio

import pytest

from ergon_framework.connectors.base import AsyncConnector
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.engine.effects import wait
from ergon_framework.task.exceptions import LoopTimeout
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.task.report import End, Kind
from ergon_framework.testing.faults import Faults, business, lost, system
from ergon_framework.testing.simulation import Simulation, SimulationError
from ergon_framework.testing.virtual import Deadlock
from ergon_framework.transaction import Transaction


class Sync(ConsumerMixin, ProducerMixin):
    def __init__(self, simulation, seconds=1.0):
        self.simulation, self.seconds = simulation, seconds
        self.connector = MemoryConnector("orders", clock=simulation.clock)

    def process_transaction(self, transaction):
        self.simulation.takes(self.seconds)

    def produce_transaction(self, transaction):
        self.simulation.takes(self.seconds)
        return super().produce_transaction(transaction)


class Async(AsyncConsumerMixin, AsyncProducerMixin):
    def __init__(self, simulation, seconds=1.0):
        self.simulation, self.seconds = simulation, seconds
        self.connector = MemoryConnector("orders", clock=simulation.clock)
        self.cancelled = []

    async def process_transaction(self, transaction):
        try:
            await self.simulation.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(self.simulation.clock())
            raise

    async def produce_transaction(self, transaction):
        await self.simulation.sleep(self.seconds)
        return (await self.connector.dispatch_async([transaction]))[0]


both = pytest.mark.parametrize("variant", [Sync, Async])


def given(count):
    return [Transaction(f"t{n}", source="test") for n in range(count)]


def policy_of(limit=60.0, **loop):
    return ConsumerPolicy.load({"loop": loop, "steps": {"process": {"retry": {"timeout": limit, "max_attempts": 2}}}})


@both
def test_a_queue_is_consumed_in_virtual_time(variant):
    simulation = Simulation()
    task = variant(simulation, 600.0)
    task.connector.dispatch(given(4))
    report = simulation.consume(task, policy_of(3600.0, concurrency={"value": 2}))
    assert (report.end, report.counts[Kind.SUCCEEDED]) == (End.EMPTY, 4)
    assert 1200.0 <= simulation.clock() < 1201.0
    assert task.connector.depth().ready == 0


@both
def test_a_list_is_produced(variant):
    simulation = Simulation()
    task = variant(simulation)
    report = simulation.produce(task, given(3), ProducerPolicy.load({"loop": {"concurrency": {"value": 3}}}))
    assert [one.kind for one in report.outcomes] == [Kind.SUCCEEDED] * 3
    assert simulation.clock() == 1.0
    assert task.connector.depth().ready == 3


@both
def test_one_seed_is_one_interleaving(variant):
    def trace(seed):
        simulation = Simulation(seed)
        task = variant(simulation)
        task.connector.dispatch(given(6))
        simulation.consume(task, policy_of())
        return [str(moment) for moment in simulation.trace]

    assert trace(1) == trace(1)
    assert any(trace(1) != trace(seed) for seed in range(2, 6))


@both
def test_a_task_can_be_stopped_at_a_moment(variant):
    simulation = Simulation()
    task = variant(simulation, 10.0)
    task.connector.dispatch(given(2))
    simulation.at(3.0, task.stop)
    report = simulation.consume(task, policy_of(concurrency={"value": 1}, drain_timeout=20.0))
    assert (report.end, report.started, simulation.clock()) == (End.STOP, 1, 10.0)


def test_a_plain_body_that_hangs_is_abandoned_and_fenced():
    simulation = Simulation()
    task = Sync(simulation, 100.0)
    task.connector.dispatch(given(1))
    report = simulation.consume(task, policy_of(2.0))
    assert (report.counts[Kind.FAILED], report.abandoned, simulation.clock() < 10) == (1, 1, True)
    simulation.rest()
    assert (simulation.clock(), simulation.trace[-1].what) == (100.0, "late")


def test_a_coroutine_is_cancelled_at_its_deadline():
    simulation = Simulation()
    task = Async(simulation, 100.0)
    task.connector.dispatch(given(1))
    report = simulation.consume(task, policy_of(2.0))
    assert (report.counts[Kind.FAILED], report.abandoned) == (1, 0)
    assert task.cancelled == [2.0, 5.0]


def test_what_the_loop_raises_is_raised():
    simulation = Simulation()
    task = Sync(simulation, 100.0)
    task.connector.dispatch(given(1))
    with pytest.raises(LoopTimeout):
        simulation.consume(task, policy_of(1000.0, timeout=5.0))


def test_a_script_that_waits_for_nothing_is_a_deadlock():
    simulation = Simulation()

    def script():
        yield from wait(simulation.mailbox())

    with pytest.raises(Deadlock, match="every script waits"):
        simulation.run(script())


def test_takes_outside_of_a_body_is_an_error():
    with pytest.raises(SimulationError, match="plain function"):
        Simulation().takes(1.0)


def test_a_coroutine_that_awaits_something_else_is_told():
    simulation = Simulation()

    class Astray(Async):
        async def process_transaction(self, transaction):
            await asyncio.sleep(0)  # gives way, which a simulation can follow
            await Foreign()

    class Foreign:
        def __await__(self):
            yield "a promise of another loop"

    task = Astray(simulation)
    task.connector.dispatch(given(1))
    report = simulation.consume(task, policy_of())
    assert isinstance(report.failures[0].error, SimulationError | Exception)
    assert "another loop" in str(report.failures[0].error)


def test_an_async_connector_serves_a_sync_task():
    class Half(AsyncConnector):
        name = "half"
        capabilities = MemoryConnector("half").capabilities

        def __init__(self, inner):
            self.inner = inner

        async def fetch_transactions_async(self, batch_size, **extra):
            await simulation.sleep(0.5)
            return await self.inner.fetch_transactions_async(batch_size)

        async def settle_async(self, settlings):
            return await self.inner.settle_async(settlings)

        async def extend_async(self, deliveries):
            return await self.inner.extend_async(deliveries)

        async def dispatch_async(self, transactions):
            return await self.inner.dispatch_async(transactions)

    simulation = Simulation()
    task = Sync(simulation, 100.0)
    task.connector.dispatch(given(1))
    task.connector = Half(task.connector)
    report = simulation.consume(task, policy_of(1000.0))
    assert report.counts[Kind.SUCCEEDED] == 1


def test_an_arrival_wakes_a_streaming_loop():
    simulation = Simulation()
    task = Sync(simulation)
    simulation.at(100.0, lambda: task.connector.dispatch(given(1)))
    simulation.at(150.0, task.stop)
    settings = {"streaming": True, "empty_queue": {"backoff": 1000.0, "cap": 1000.0}}
    report = simulation.consume(task, policy_of(**settings))
    assert report.counts[Kind.SUCCEEDED] == 1
    assert next(one.at for one in simulation.trace if one.step == "process") == 100.0


@both
def test_faults_are_met_in_the_order_of_the_plan(variant):
    simulation = Simulation()
    faults = Faults({"process": [system, business], "fetch": [lost]})
    task = faults.plague(variant(simulation))
    faults.plague(task.connector)
    MemoryConnector.dispatch(task.connector, given(1))
    report = simulation.consume(task, policy_of())
    assert report.counts[Kind.FAILED] == 1
    assert [step for step in faults.steps if step in ("process", "success", "exception")] == [
        "process",
        "process",
        "exception",
    ]
    assert faults.calls["fetch"] == 3


def test_a_fault_of_an_unknown_step_is_refused():
    with pytest.raises(ValueError, match="no step is called 'proces'"):
        Faults({"proces": []})


class Hanging(MemoryConnector):
    """A broker that takes its time to settle."""

    def settle(self, settlings):
        self.simulation.takes(50.0)
        return super().settle(settlings)


@pytest.mark.spec("CON-36")
@pytest.mark.parametrize("loop", [{"drain_timeout": 0.5}, {"timeout_drain": 0.5, "timeout": 1.0}])
def test_a_broker_that_hangs_does_not_hold_up_the_end_of_a_loop(loop):
    simulation = Simulation()
    task = Sync(simulation, 0.0)
    task.connector = Hanging("orders", clock=simulation.clock)
    task.connector.simulation = simulation
    task.connector.dispatch(given(3))
    settings = {"loop": {**loop, "streaming": "timeout" not in loop}, "steps": {"settle": {"group": 1, "linger": 0.0}}}
    if "timeout" not in loop:
        simulation.at(1.0, task.stop)
    outcomes = []
    simulation.consume(task, ConsumerPolicy.load(settings), on_outcome=outcomes.append)
    assert simulation.clock() == 2.0
    assert [one.kind for one in outcomes] == [Kind.RELEASED] * 3
