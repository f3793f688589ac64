"""The policy and the gates of a task hold in every entry point, and an explicit argument wins: DX-01."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from ergon_framework import (
    AsyncConsumerMixin,
    AsyncProducerMixin,
    AsyncTask,
    ConsumerMixin,
    ConsumerPolicy,
    MemoryConnector,
    Pause,
    ProducerMixin,
    ProducerPolicy,
    Task,
    Transaction,
    consumer,
    producer,
)
from ergon_framework.facts.policy import FactProducerPolicy
from ergon_framework.facts.producer import AsyncFactProducer, FactProducer
from ergon_framework.testing.simulation import Simulation

pytestmark = pytest.mark.spec("DX-01")

FORMS = ("function", "class attribute", "argument of the class")


def attempts(number: int) -> dict[str, Any]:
    return {"retry": {"max_attempts": number, "backoff": 0.0}}


def producing(number: int, **loop: Any) -> ProducerPolicy:
    return ProducerPolicy.load({"loop": loop, "steps": {"produce": attempts(number)}})


def consuming(number: int, **loop: Any) -> ConsumerPolicy:
    return ConsumerPolicy.load({"loop": loop, "steps": {"process": attempts(number)}})


def called(outcome: Any) -> Any:
    async def wait() -> Any:
        return await outcome

    return asyncio.run(wait()) if inspect.isawaitable(outcome) else outcome


class Calls:
    """A body that fails each time, in both variants, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def fail(self, transaction: Transaction) -> Any:
        self.count += 1
        raise OSError(f"no answer for {transaction.id}")

    async def fail_async(self, transaction: Transaction) -> Any:
        self.fail(transaction)


def make_producer(flavour: str, form: str, policy: ProducerPolicy, calls: Calls) -> Any:
    queue = MemoryConnector("orders")
    threads = flavour == "threads"
    if form == "function":
        return producer(queue, policy=policy)(calls.fail if threads else calls.fail_async)
    bases = (ProducerMixin, Task) if threads else (AsyncProducerMixin, AsyncTask)
    body: dict[str, Any] = {"produce_transaction": staticmethod(calls.fail if threads else calls.fail_async)}
    if form == "class attribute":
        return type("Ship", bases, {**body, "policy": policy})(queue)
    return type("Ship", bases, body)(queue, policy=policy)


def make_consumer(flavour: str, form: str, calls: Calls, *, policy: ConsumerPolicy | None = None, gates=()) -> Any:
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("t1", {})])
    threads = flavour == "threads"
    if form == "function":
        return consumer(queue, policy=policy, gates=gates)(calls.fail if threads else calls.fail_async)
    bases = (ConsumerMixin, Task) if threads else (AsyncConsumerMixin, AsyncTask)
    body: dict[str, Any] = {"process_transaction": staticmethod(calls.fail if threads else calls.fail_async)}
    if form == "class attribute":
        return type("Charge", bases, {**body, "policy": policy, "gates": gates})(queue)
    return type("Charge", bases, body)(queue, policy=policy, gates=gates)


@pytest.mark.parametrize("form", FORMS)
def test_a_producer_obeys_its_own_policy(flavour, form):
    calls = Calls()
    task = make_producer(flavour, form, producing(5), calls)

    report = called(task.produce_transactions([Transaction("t1", {})]))

    assert (calls.count, report.outcomes[0].attempts) == (5, 5)


@pytest.mark.parametrize("form", FORMS)
def test_a_policy_given_to_produce_wins(flavour, form):
    calls = Calls()
    task = make_producer(flavour, form, producing(5), calls)

    called(task.produce_transactions([Transaction("t1", {})], producing(2)))

    assert calls.count == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", ["consume_transactions", "run"])
def test_a_consumer_obeys_its_own_policy(flavour, form, entry):
    calls = Calls()
    task = make_consumer(flavour, form, calls, policy=consuming(5))

    called(getattr(task, entry)())

    assert calls.count == 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", ["consume_transactions", "run"])
def test_a_policy_given_to_consume_wins(flavour, form, entry):
    calls = Calls()
    task = make_consumer(flavour, form, calls, policy=consuming(5))

    called(getattr(task, entry)(consuming(2)))

    assert calls.count == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", ["consume_transactions", "run"])
def test_a_gate_of_the_task_holds_its_loop(flavour, form, entry):
    calls = Calls()
    task: Any = None

    def gate() -> Pause:
        task.stop()
        return Pause("the bank is closed", 0.01)

    task = make_consumer(flavour, form, calls, gates=(gate,))

    report = called(getattr(task, entry)())

    assert (calls.count, report.paused) == (0, "the bank is closed")


@pytest.mark.parametrize("form", FORMS)
def test_gates_given_to_consume_win(flavour, form):
    calls = Calls()
    task = make_consumer(flavour, form, calls, policy=consuming(1), gates=(lambda: Pause("closed", 0.01),))

    called(task.consume_transactions(gates=()))

    assert calls.count == 1


@pytest.mark.parametrize("kind", [FactProducer, AsyncFactProducer])
def test_a_producer_of_facts_needs_no_entry_point_of_its_own(kind):
    assert "produce_transactions" not in vars(kind)
    assert isinstance(kind.policy, FactProducerPolicy)


def test_a_task_that_consumes_and_produces_obeys_its_policy_where_it_fits(flavour):
    calls = Calls()
    threads = flavour == "threads"
    bases: Any = (
        (ConsumerMixin, ProducerMixin, Task) if threads else (AsyncConsumerMixin, AsyncProducerMixin, AsyncTask)
    )
    fail = staticmethod(calls.fail if threads else calls.fail_async)
    kind = type("Both", bases, {"process_transaction": fail, "produce_transaction": fail})
    queue = MemoryConnector("orders")
    task: Any = kind(queue, policy=consuming(4))
    queue.dispatch([Transaction("t1", {})])

    called(task.consume_transactions())
    consumed = calls.count
    called(task.produce_transactions([Transaction("t2", {})], producing(2)))

    assert (consumed, calls.count) == (4, 6)
    task.policy = producing(3)
    called(task.produce_transactions([Transaction("t3", {})]))
    assert calls.count == 9


def test_the_simulation_obeys_the_policy_and_the_gates_of_the_task(flavour):
    calls = Calls()
    simulation = Simulation()
    task = make_producer(flavour, "function", producing(5), calls)
    simulation.produce(task, [Transaction("t1", {})])
    assert calls.count == 5

    queue = MemoryConnector("orders", clock=simulation.clock)
    held: list[Pause] = []

    def gate() -> Pause | None:
        if held:
            return None
        held.append(Pause("closed", 1.0))
        return held[0]

    charge = consumer(queue, policy=consuming(4), gates=(gate,))(
        calls.fail if flavour == "threads" else calls.fail_async
    )
    queue.dispatch([Transaction("t2", {})])
    simulation.consume(charge)
    assert (calls.count, len(held), simulation.clock() >= 1.0) == (9, 1, True)
