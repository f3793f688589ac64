"""The simulated driver: the same engine without threads, tasks or time, one seed one interleaving."""

from __future__ import annotations

import asyncio

import pytest

from ergon_framework.connectors.base import AsyncConnector
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.engine.effects import wait
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.testing.faults import Faults, business, connection_lost, system
from ergon_framework.testing.simulation import Simulation, SimulationError
from ergon_framework.testing.virtual_time import DeadlockError
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import LoopTimeout
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.worker.report import OutcomeKind, StopReason


class SyncTask(ConsumerMixin, ProducerMixin):
    def __init__(self, simulation, seconds=1.0):
        self.simulation, self.seconds = simulation, seconds
        self.connector = MemoryConnector("orders", clock=simulation.monotonic)

    def process_transaction(self, transaction):
        self.simulation.busy_for(self.seconds)

    def produce_transaction(self, transaction):
        self.simulation.busy_for(self.seconds)
        return super().produce_transaction(transaction)


class AsyncTask(AsyncConsumerMixin, AsyncProducerMixin):
    def __init__(self, simulation, seconds=1.0):
        self.simulation, self.seconds = simulation, seconds
        self.connector = MemoryConnector("orders", clock=simulation.monotonic)
        self.cancelled = []

    async def process_transaction(self, transaction):
        try:
            await self.simulation.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(self.simulation.monotonic())
            raise

    async def produce_transaction(self, transaction):
        await self.simulation.sleep(self.seconds)
        return (await self.connector.dispatch_async([transaction]))[0]


both_variants = pytest.mark.parametrize("variant", [SyncTask, AsyncTask])


def make_transactions(count):
    return [Transaction(id=f"t{n}", source="test") for n in range(count)]


def make_policy(limit=60.0, **loop):
    return ConsumerPolicy.load({"loop": loop, "steps": {"process": {"retry": {"timeout": limit, "max_attempts": 2}}}})


@both_variants
def test_a_queue_is_consumed_in_virtual_time(variant):
    simulation = Simulation()
    task = variant(simulation, 600.0)
    task.connector.dispatch(make_transactions(4))
    report = simulation.consume(task, make_policy(3600.0, concurrency={"value": 2}))
    assert (report.stop_reason, report.counts[OutcomeKind.SUCCEEDED]) == (StopReason.EMPTY, 4)
    assert 1200.0 <= simulation.monotonic() < 1201.0
    assert task.connector.depth().ready == 0


@both_variants
def test_a_list_is_produced(variant):
    simulation = Simulation()
    task = variant(simulation)
    report = simulation.produce(
        task, make_transactions(3), ProducerPolicy.load({"loop": {"concurrency": {"value": 3}}})
    )
    assert [outcome.kind for outcome in report.outcomes] == [OutcomeKind.SUCCEEDED] * 3
    assert simulation.monotonic() == 1.0
    assert task.connector.depth().ready == 3


@both_variants
def test_one_seed_is_one_interleaving(variant):
    def trace(seed):
        simulation = Simulation(seed)
        task = variant(simulation)
        task.connector.dispatch(make_transactions(6))
        simulation.consume(task, make_policy())
        return [str(event) for event in simulation.trace]

    assert trace(1) == trace(1)
    assert any(trace(1) != trace(seed) for seed in range(2, 6))


@both_variants
def test_a_task_can_be_stopped_at_a_moment(variant):
    simulation = Simulation()
    task = variant(simulation, 10.0)
    task.connector.dispatch(make_transactions(2))
    simulation.call_at(3.0, task.stop)
    report = simulation.consume(task, make_policy(concurrency={"value": 1}, drain_timeout=20.0))
    assert (report.stop_reason, report.started, simulation.monotonic()) == (StopReason.STOP, 1, 10.0)


def test_a_sync_handler_call_that_hangs_is_abandoned_and_fenced():
    simulation = Simulation()
    task = SyncTask(simulation, 100.0)
    task.connector.dispatch(make_transactions(1))
    report = simulation.consume(task, make_policy(2.0))
    assert (report.counts[OutcomeKind.FAILED], report.still_running, simulation.monotonic() < 10) == (1, 1, True)
    simulation.run_until_idle()
    assert (simulation.monotonic(), simulation.trace[-1].event) == (100.0, "late")


def test_a_coroutine_is_cancelled_at_its_deadline():
    simulation = Simulation()
    task = AsyncTask(simulation, 100.0)
    task.connector.dispatch(make_transactions(1))
    report = simulation.consume(task, make_policy(2.0))
    assert (report.counts[OutcomeKind.FAILED], report.still_running) == (1, 0)
    assert task.cancelled == [2.0, 5.0]


def test_an_error_of_the_loop_is_raised():
    simulation = Simulation()
    task = SyncTask(simulation, 100.0)
    task.connector.dispatch(make_transactions(1))
    with pytest.raises(LoopTimeout):
        simulation.consume(task, make_policy(1000.0, timeout=5.0))


def test_a_script_that_waits_for_nothing_is_a_deadlock():
    simulation = Simulation()

    def script():
        yield from wait(simulation.create_mailbox())

    with pytest.raises(DeadlockError, match="every script waits"):
        simulation.run(script())


def test_busy_for_outside_of_a_handler_is_an_error():
    with pytest.raises(SimulationError, match="plain function"):
        Simulation().busy_for(1.0)


def test_awaiting_an_object_of_another_loop_is_an_error():
    simulation = Simulation()

    class ForeignAwaitTask(AsyncTask):
        async def process_transaction(self, transaction):
            await asyncio.sleep(0)  # yields control, which a simulation can follow
            await ForeignAwaitable()

    class ForeignAwaitable:
        def __await__(self):
            yield "a promise of another loop"

    task = ForeignAwaitTask(simulation)
    task.connector.dispatch(make_transactions(1))
    report = simulation.consume(task, make_policy())
    assert isinstance(report.failures[0].error, SimulationError | Exception)
    assert "another loop" in str(report.failures[0].error)


def test_an_async_connector_serves_a_sync_task():
    class AsyncOnlyConnector(AsyncConnector):
        name = "half"
        capabilities = MemoryConnector("half").capabilities

        def __init__(self, inner):
            self.inner = inner

        async def fetch_transactions_async(self, batch_size, **extra):
            await simulation.sleep(0.5)
            return await self.inner.fetch_transactions_async(batch_size)

        async def settle_async(self, requests):
            return await self.inner.settle_async(requests)

        async def extend_async(self, deliveries):
            return await self.inner.extend_async(deliveries)

        async def dispatch_async(self, transactions):
            return await self.inner.dispatch_async(transactions)

    simulation = Simulation()
    task = SyncTask(simulation, 100.0)
    task.connector.dispatch(make_transactions(1))
    task.connector = AsyncOnlyConnector(task.connector)
    report = simulation.consume(task, make_policy(1000.0))
    assert report.counts[OutcomeKind.SUCCEEDED] == 1


def test_an_arrival_wakes_a_streaming_loop():
    simulation = Simulation()
    task = SyncTask(simulation)
    simulation.call_at(100.0, lambda: task.connector.dispatch(make_transactions(1)))
    simulation.call_at(150.0, task.stop)
    settings = {"streaming": True, "empty_queue": {"backoff": 1000.0, "cap": 1000.0}}
    report = simulation.consume(task, make_policy(**settings))
    assert report.counts[OutcomeKind.SUCCEEDED] == 1
    assert next(event.at for event in simulation.trace if event.step == "process") == 100.0


@both_variants
def test_faults_are_raised_in_the_order_of_the_plan(variant):
    simulation = Simulation()
    faults = Faults({"process": [system, business], "fetch": [connection_lost]})
    task = faults.patch(variant(simulation))
    faults.patch(task.connector)
    MemoryConnector.dispatch(task.connector, make_transactions(1))
    report = simulation.consume(task, make_policy())
    assert report.counts[OutcomeKind.FAILED] == 1
    assert [step for step in faults.steps if step in ("process", "success", "exception")] == [
        "process",
        "process",
        "exception",
    ]
    assert faults.calls["fetch"] == 3


def test_a_fault_of_an_unknown_step_is_rejected():
    with pytest.raises(ValueError, match="unknown step 'proces'"):
        Faults({"proces": []})


class HangingConnector(MemoryConnector):
    """A broker whose settlement takes 50 s."""

    def settle(self, requests):
        self.simulation.busy_for(50.0)
        return super().settle(requests)


@pytest.mark.spec("CON-36")
@pytest.mark.parametrize("loop", [{"drain_timeout": 0.5}, {"timeout_drain": 0.5, "timeout": 1.0}])
def test_a_broker_that_hangs_does_not_delay_the_end_of_a_loop(loop):
    simulation = Simulation()
    task = SyncTask(simulation, 0.0)
    task.connector = HangingConnector("orders", clock=simulation.monotonic)
    task.connector.simulation = simulation
    task.connector.dispatch(make_transactions(3))
    steps = {"settle": {"batch_size": 1, "linger": 0.0}}
    settings = {"loop": {**loop, "streaming": "timeout" not in loop}, "steps": steps}
    if "timeout" not in loop:
        simulation.call_at(1.0, task.stop)
    outcomes = []
    simulation.consume(task, ConsumerPolicy.load(settings), on_outcome=outcomes.append)
    assert simulation.monotonic() == 2.0
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.RELEASED] * 3
