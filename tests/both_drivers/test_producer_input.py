"""What a produce call rejects before it sends anything: DX-07, DX-14, PRO-13."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from ergon_framework import (
    AsyncConsumerMixin,
    AsyncProducerMixin,
    AsyncTask,
    ConfigurationError,
    ConsumerMixin,
    ConsumerPolicy,
    MemoryConnector,
    ProducerMixin,
    ProducerPolicy,
    Task,
    Transaction,
    producer,
)


class Ship(ProducerMixin, Task): ...


class ShipAsync(AsyncProducerMixin, AsyncTask): ...


@pytest.fixture
def queue() -> MemoryConnector:
    return MemoryConnector("shipments")


@pytest.fixture
def ship(variant, queue) -> Any:
    return Ship(queue) if variant == "threads" else ShipAsync(queue)


def run_to_end(answer: Any) -> Any:
    async def wait() -> Any:
        return await answer

    return asyncio.run(wait()) if inspect.isawaitable(answer) else answer


def produce(task: Any, *arguments: Any) -> Any:
    return run_to_end(task.produce_transactions(*arguments))


# -- one id, two transactions ----------------------------------------------------------------------


@pytest.mark.spec("DX-07", "PRO-13")
@pytest.mark.parametrize(
    "second",
    [
        Transaction({"item": "ink"}, id="order-7"),
        Transaction({"item": "pen"}, id="order-7", tenant="acme"),
        Transaction({"item": "pen"}, id="order-7", key="ada"),
        Transaction({"item": "pen"}, id="order-7", type="refund"),
        Transaction({"item": "pen"}, id="order-7", schema_version=2),
    ],
)
def test_two_different_transactions_with_the_same_id_are_rejected_before_anything_is_sent(ship, queue, second):
    transactions = [Transaction({}, id="order-1"), Transaction({"item": "pen"}, id="order-7"), second]

    with pytest.raises(ConfigurationError, match=r"'order-7'.*positions 1 and 2"):
        produce(ship, transactions)

    assert queue.depth().ready == 0


@pytest.mark.spec("DX-07", "PRO-13")
def test_payloads_that_cannot_be_compared_count_as_different(ship, queue):
    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise ValueError("ambiguous")

        __hash__ = None

    with pytest.raises(ConfigurationError, match="'order-7'"):
        produce(ship, [Transaction(Incomparable(), id="order-7"), Transaction(Incomparable(), id="order-7")])
    assert queue.depth().ready == 0


@pytest.mark.spec("DX-07", "PRO-13")
def test_a_repeated_transaction_is_sent_once_and_its_outcome_is_at_every_position(ship, queue):
    first = Transaction({"item": "pen"}, id="order-7", created_at=1.0)
    equal = Transaction({"item": "pen"}, id="order-7", created_at=2.0)

    report = produce(ship, [first, equal, first])

    assert queue.depth().ready == 1
    assert report.outcomes[0] is report.outcomes[1] is report.outcomes[2]


@pytest.mark.spec("DX-07", "PRO-13")
def test_the_same_id_from_two_sources_means_two_transactions(ship, queue):
    produce(ship, [Transaction({"n": 1}, id="7", source="shop"), Transaction({"n": 2}, id="7", source="till")])

    assert queue.depth().ready == 2


# -- mistakes with a helpful message ---------------------------------------------------------------


@pytest.mark.spec("DX-14")
@pytest.mark.parametrize(
    "items, message",
    [
        ([Transaction({}, id="order-1"), {"item": "pen"}], r"position 1 is a dict.*Transaction\(id, payload\)"),
        ({"item": "pen"}, "position 0 is a str"),
        (Transaction({}, id="order-1"), r"is a Transaction.*pass a list"),
        (None, r"is a NoneType.*pass a list"),
    ],
)
def test_an_item_that_is_not_a_transaction_is_rejected_before_anything_is_sent(ship, queue, items, message):
    with pytest.raises(ConfigurationError, match=message):
        produce(ship, items)

    assert queue.depth().ready == 0


@pytest.mark.spec("DX-14")
@pytest.mark.parametrize("policy", [{"loop": {}}, ConsumerPolicy(), 5])
def test_a_policy_of_the_wrong_type_is_rejected(ship, queue, policy):
    with pytest.raises(ConfigurationError, match=r"pass a ProducerPolicy, built from a mapping"):
        produce(ship, [Transaction({}, id="order-1")], policy)
    with pytest.raises(ConfigurationError, match=rf"policy of {ship.name} is invalid: it is a {type(policy).__name__}"):
        type(ship)(queue, policy=policy)
    with pytest.raises(ConfigurationError, match="pass a ProducerPolicy"):
        producer(queue, policy=policy)(lambda order: None)


@pytest.mark.spec("DX-14")
def test_a_consumer_rejects_the_policy_of_a_producer(variant, queue):
    def process(self, transaction):
        raise AssertionError("nothing is fetched")

    async def process_async(self, transaction):
        process(self, transaction)

    bases: Any = (ConsumerMixin, Task) if variant == "threads" else (AsyncConsumerMixin, AsyncTask)
    body = process if variant == "threads" else process_async
    task_class: Any = type("Charge", bases, {"process_transaction": body})
    with pytest.raises(ConfigurationError, match="pass a ConsumerPolicy"):
        task_class(queue, policy=ProducerPolicy())
    with pytest.raises(ConfigurationError, match="pass a ConsumerPolicy"):
        run_to_end(task_class(queue).consume_transactions(ProducerPolicy()))


@pytest.mark.spec("DX-14")
def test_run_on_a_producer_names_the_method_to_call(ship):
    with pytest.raises(ConfigurationError, match=r"does not consume.*produce_transactions\(.*ergon run"):
        run_to_end(ship.run())


@pytest.mark.spec("DX-14")
def test_a_producer_reports_its_own_step(ship):
    report = produce(ship, [Transaction({}, id="order-1")])

    assert report.outcomes[0].succeeded_steps == ("produce", "success")
