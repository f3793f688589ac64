"""Sending payloads to the queue of a task."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ergon_framework import ConfigurationError, ConsumerPolicy, MemoryConnector, Transaction, consumer
from ergon_framework.connectors.base import Confirmation


@dataclass
class Order:
    id: str
    total: int = 0


class OutboxConnector(MemoryConnector):
    """A queue that can be written on a connection of the caller."""

    def __init__(self) -> None:
        super().__init__("orders")
        self.written: list[Any] = []

    def dispatch_on(self, connection: Any, transactions: Any) -> list[Confirmation]:
        self.written.append((connection, [transaction.payload for transaction in transactions]))
        return [Confirmation(transaction.id) for transaction in transactions]

    async def dispatch_on_async(self, connection: Any, transactions: Any) -> list[Confirmation]:
        return self.dispatch_on(connection, transactions)


@pytest.fixture
def queue() -> MemoryConnector:
    return MemoryConnector("orders")


def make_task(queue: MemoryConnector) -> Any:
    @consumer(queue)
    def charge(order: Order) -> None: ...

    return charge


def fetch(queue: MemoryConnector) -> list[Transaction]:
    return [delivery.transaction for delivery in queue.fetch_transactions(10)]


@pytest.mark.parametrize("variant", ["sync", "async"])
def test_a_payload_becomes_a_transaction_with_its_envelope(queue: MemoryConnector, variant: str) -> None:
    task = make_task(queue)
    fields = {"id": "order-1", "key": "customer-3", "tenant": "acme"}
    if variant == "sync":
        confirmation = task.send(Order("1"), **fields)
    else:
        confirmation = asyncio.run(task.send_async(Order("1"), **fields))
    assert confirmation.transaction_id == "order-1"
    (transaction,) = fetch(queue)
    assert (transaction.id, transaction.key, transaction.tenant) == ("order-1", "customer-3", "acme")
    assert (transaction.source, task.read_payload(transaction)) == ("orders", Order("1"))


def test_without_an_id_each_transaction_gets_one(queue: MemoryConnector) -> None:
    task = make_task(queue)
    task.send(Order("1"))
    task.send(Order("1"))
    first, second = fetch(queue)
    assert first.id != second.id


@pytest.mark.parametrize("variant", ["sync", "async"])
def test_many_payloads_are_sent_in_one_call(queue: MemoryConnector, variant: str) -> None:
    task = make_task(queue)
    orders = [Order("1"), Order("2")]
    options: Any = {"id": lambda order: f"order-{order.id}", "key": lambda order: "k" + order.id, "tenant": "acme"}
    if variant == "sync":
        confirmations = task.send_many(orders, **options)
    else:
        confirmations = asyncio.run(task.send_many_async(orders, **options))
    assert [confirmation.transaction_id for confirmation in confirmations] == ["order-1", "order-2"]
    assert [(each.id, each.key, each.tenant) for each in fetch(queue)] == [
        ("order-1", "k1", "acme"),
        ("order-2", "k2", "acme"),
    ]


@pytest.mark.spec("CON-48")
def test_what_a_handler_sends_has_the_same_ids_at_every_run(queue: MemoryConnector) -> None:
    invoices = MemoryConnector("invoices")
    sent: list[list[str]] = []

    @consumer(invoices)
    def bill(order: Order) -> None: ...

    @consumer(queue, retries=1, backoff=0)
    def charge(order: Order) -> None:
        confirmations = [bill.send(order), bill.send(order, name="copy"), *bill.send_many([order, order])]
        sent.append([confirmation.transaction_id for confirmation in confirmations])
        if len(sent) == 1:
            raise ValueError("once")

    charge.send(Order("1"), id="order-1", tenant="acme")
    charge.run()
    first, second = sent
    assert first == second
    assert len(set(first)) == 4
    assert {transaction.tenant for transaction in fetch(invoices)} == {"acme"}


def test_a_transaction_can_be_delayed(queue: MemoryConnector) -> None:
    task = make_task(queue)
    task.send(Order("1"), delay=60)
    task.send(Order("2"), at=datetime.now(UTC) + timedelta(hours=1))
    task.send(Order("3"), at=datetime.now(UTC) - timedelta(hours=1))
    assert (queue.depth().ready, queue.depth().delayed) == (1, 2)


@pytest.mark.parametrize("variant", ["sync", "async"])
def test_with_a_connection_it_is_written_in_the_callers_database_transaction(variant: str) -> None:
    queue, connection = OutboxConnector(), object()
    task = make_task(queue)
    if variant == "sync":
        task.send(Order("1"), connection=connection)
    else:
        asyncio.run(task.send_async(Order("1"), connection=connection))
    assert queue.written == [(connection, [Order("1")])]
    assert queue.depth().ready == 0


def test_a_queue_outside_the_database_is_refused_as_an_outbox(queue: MemoryConnector) -> None:
    with pytest.raises(ConfigurationError, match=r"'orders' cannot be written in a database transaction: .* relay"):
        make_task(queue).send(Order("1"), connection=object())


def test_sending_is_refused_where_it_would_block_the_event_loop(queue: MemoryConnector) -> None:
    task = make_task(queue)

    async def main() -> None:
        with pytest.raises(ConfigurationError, match=r"block the event loop; in async code: await send_async\(...\)"):
            task.send(Order("1"))
        with pytest.raises(ConfigurationError, match=r"await send_many_async\(...\)"):
            task.send_many([Order("1")])

    asyncio.run(main())
    assert queue.depth().ready == 0


@pytest.mark.spec("DX-18")
def test_a_misspelt_option_names_the_nearest_one(queue: MemoryConnector) -> None:
    with pytest.raises(ConfigurationError, match=r"sending has no option 'tenent'; did you mean 'tenant'\?"):
        make_task(queue).send(Order("1"), tenent="acme")
    with pytest.raises(ConfigurationError, match="has no option 'zzzz'; the options are: name, delay"):
        make_task(queue).send(Order("1"), zzzz=1)


def test_an_async_task_sends_too(queue: MemoryConnector) -> None:
    seen: list[Order] = []

    @consumer(queue)
    async def charge(order: Order) -> None:
        seen.append(order)

    charge.send(Order("1"))
    asyncio.run(charge.run(ConsumerPolicy()))
    assert seen == [Order("1")]


@pytest.mark.spec("DX-18")
@pytest.mark.parametrize(
    "argument, message",
    [
        (Transaction(id="1"), r"dispatch takes a sequence of transactions: pass \[transaction\]"),
        ([{"a": 1}], r"dispatch takes transactions, not dict: send a payload with send\(payload\) of its task"),
        ([Transaction(id="1"), Order("2")], "dispatch takes transactions, not Order"),
    ],
)
def test_dispatch_refuses_everything_but_transactions(queue: MemoryConnector, argument: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        queue.dispatch(argument)
    with pytest.raises(TypeError, match="dispatch_async" + message.removeprefix("dispatch")):
        asyncio.run(queue.dispatch_async(argument))
    with pytest.raises(TypeError, match=message):
        queue.dispatch(transactions=argument)
    assert queue.depth().ready == 0
