"""The policy and the gates of a task apply in every entry point, and an explicit argument takes precedence: DX-01."""

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


def make_retry(number: int) -> dict[str, Any]:
    return {"retry": {"max_attempts": number, "backoff": 0.0}}


def make_producer_policy(number: int, **loop: Any) -> ProducerPolicy:
    return ProducerPolicy.load({"loop": loop, "steps": {"produce": make_retry(number)}})


def make_consumer_policy(number: int, **loop: Any) -> ConsumerPolicy:
    return ConsumerPolicy.load({"loop": loop, "steps": {"process": make_retry(number)}})


def run_to_end(outcome: Any) -> Any:
    async def wait() -> Any:
        return await outcome

    return asyncio.run(wait()) if inspect.isawaitable(outcome) else outcome


class FailingHandlers:
    """Handlers that fail each time and count their calls, in both variants."""

    def __init__(self) -> None:
        self.count = 0

    def fail(self, transaction: Transaction) -> Any:
        self.count += 1
        raise OSError(f"no answer for {transaction.id}")

    async def fail_async(self, transaction: Transaction) -> Any:
        self.fail(transaction)


def make_producer(variant: str, form: str, policy: ProducerPolicy, handlers: FailingHandlers) -> Any:
    queue = MemoryConnector("orders")
    threads = variant == "threads"
    if form == "function":
        return producer(queue, policy=policy)(handlers.fail if threads else handlers.fail_async)
    bases = (ProducerMixin, Task) if threads else (AsyncProducerMixin, AsyncTask)
    body: dict[str, Any] = {"produce_transaction": staticmethod(handlers.fail if threads else handlers.fail_async)}
    if form == "class attribute":
        return type("Ship", bases, {**body, "policy": policy})(queue)
    return type("Ship", bases, body)(queue, policy=policy)


def make_consumer(
    variant: str, form: str, handlers: FailingHandlers, *, policy: ConsumerPolicy | None = None, gates=()
) -> Any:
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction({}, id="t1")])
    threads = variant == "threads"
    if form == "function":
        return consumer(queue, policy=policy, gates=gates)(handlers.fail if threads else handlers.fail_async)
    bases = (ConsumerMixin, Task) if threads else (AsyncConsumerMixin, AsyncTask)
    body: dict[str, Any] = {"process_transaction": staticmethod(handlers.fail if threads else handlers.fail_async)}
    if form == "class attribute":
        return type("Charge", bases, {**body, "policy": policy, "gates": gates})(queue)
    return type("Charge", bases, body)(queue, policy=policy, gates=gates)


@pytest.mark.parametrize("form", FORMS)
def test_a_producer_applies_its_own_policy(variant, form):
    handlers = FailingHandlers()
    task = make_producer(variant, form, make_producer_policy(5), handlers)

    report = run_to_end(task.produce_transactions([Transaction({}, id="t1")]))

    assert (handlers.count, report.outcomes[0].attempts) == (5, 5)


@pytest.mark.parametrize("form", FORMS)
def test_a_policy_passed_to_produce_takes_precedence(variant, form):
    handlers = FailingHandlers()
    task = make_producer(variant, form, make_producer_policy(5), handlers)

    run_to_end(task.produce_transactions([Transaction({}, id="t1")], make_producer_policy(2)))

    assert handlers.count == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", ["consume_transactions", "run"])
def test_a_consumer_applies_its_own_policy(variant, form, entry):
    handlers = FailingHandlers()
    task = make_consumer(variant, form, handlers, policy=make_consumer_policy(5))

    run_to_end(getattr(task, entry)())

    assert handlers.count == 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", ["consume_transactions", "run"])
def test_a_policy_passed_to_consume_takes_precedence(variant, form, entry):
    handlers = FailingHandlers()
    task = make_consumer(variant, form, handlers, policy=make_consumer_policy(5))

    run_to_end(getattr(task, entry)(make_consumer_policy(2)))

    assert handlers.count == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", ["consume_transactions", "run"])
def test_a_gate_of_the_task_pauses_its_loop(variant, form, entry):
    handlers = FailingHandlers()
    task: Any = None

    def gate() -> Pause:
        task.stop()
        return Pause("the bank is closed", 0.01)

    task = make_consumer(variant, form, handlers, gates=(gate,))

    report = run_to_end(getattr(task, entry)())

    assert (handlers.count, report.paused) == (0, "the bank is closed")


@pytest.mark.parametrize("form", FORMS)
def test_gates_passed_to_consume_take_precedence(variant, form):
    handlers = FailingHandlers()
    task = make_consumer(
        variant, form, handlers, policy=make_consumer_policy(1), gates=(lambda: Pause("closed", 0.01),)
    )

    run_to_end(task.consume_transactions(gates=()))

    assert handlers.count == 1


@pytest.mark.parametrize("producer_class", [FactProducer, AsyncFactProducer])
def test_a_fact_producer_has_no_entry_point_of_its_own(producer_class):
    assert "produce_transactions" not in vars(producer_class)
    assert isinstance(producer_class.policy, FactProducerPolicy)


def test_a_task_that_consumes_and_produces_applies_its_policy_to_the_matching_side(variant):
    handlers = FailingHandlers()
    threads = variant == "threads"
    bases: Any = (
        (ConsumerMixin, ProducerMixin, Task) if threads else (AsyncConsumerMixin, AsyncProducerMixin, AsyncTask)
    )
    fail = staticmethod(handlers.fail if threads else handlers.fail_async)
    task_class = type("Both", bases, {"process_transaction": fail, "produce_transaction": fail})
    queue = MemoryConnector("orders")
    task: Any = task_class(queue, policy=make_consumer_policy(4))
    queue.dispatch([Transaction({}, id="t1")])

    run_to_end(task.consume_transactions())
    consume_count = handlers.count
    run_to_end(task.produce_transactions([Transaction({}, id="t2")], make_producer_policy(2)))

    assert (consume_count, handlers.count) == (4, 6)
    task.policy = make_producer_policy(3)
    run_to_end(task.produce_transactions([Transaction({}, id="t3")]))
    assert handlers.count == 9


def test_the_simulation_applies_the_policy_and_the_gates_of_the_task(variant):
    handlers = FailingHandlers()
    simulation = Simulation()
    task = make_producer(variant, "function", make_producer_policy(5), handlers)
    simulation.produce(task, [Transaction({}, id="t1")])
    assert handlers.count == 5

    queue = MemoryConnector("orders", clock=simulation.monotonic)
    pauses: list[Pause] = []

    def gate() -> Pause | None:
        if pauses:
            return None
        pauses.append(Pause("closed", 1.0))
        return pauses[0]

    charge = consumer(queue, policy=make_consumer_policy(4), gates=(gate,))(
        handlers.fail if variant == "threads" else handlers.fail_async
    )
    queue.dispatch([Transaction({}, id="t2")])
    simulation.consume(charge)
    assert (handlers.count, len(pauses), simulation.monotonic() >= 1.0) == (9, 1, True)
