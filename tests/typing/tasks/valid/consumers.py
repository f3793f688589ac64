"""Programs as users write them: everything keeps its type."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from ergon_framework import (
    AsyncConsumer,
    BusinessError,
    Consumer,
    ConsumerMixin,
    DeadLetter,
    MemoryConnector,
    RawPayload,
    Task,
    Transaction,
    TransactionException,
    consumer,
    producer,
)
from ergon_framework.connectors.base import Confirmation


@dataclass
class Order:
    id: str
    total: int = 0


@dataclass
class Receipt:
    number: int


class Payments:
    def charge(self, order: Order) -> Receipt:
        return Receipt(order.total)


orders = MemoryConnector("orders")


@consumer(
    orders, retries=5, timeout=30, backoff=0.5, concurrency=20, max_deliveries=7, services={"payments": Payments()}
)
def charge(order: Order, payments: Payments) -> Receipt:
    return payments.charge(order)


@charge.on_success
def charged(order: Order, receipt: Receipt) -> None:
    print(order.id, receipt.number)


@charge.on_failure
def refused(order: Order, error: TransactionException, transaction: Transaction[Order]) -> DeadLetter | None:
    return DeadLetter(error.code) if error.code else None


@consumer(orders)
async def notify(order: Order) -> None:
    raise BusinessError(order.id)


@notify.on_failure
async def notify_failed(raw: RawPayload, order: Order | None, error: Exception) -> None: ...


@consumer(orders)
def handle(transaction: Transaction[Order], order: Order) -> None: ...


@consumer(orders)
def handle_transaction(transaction: Transaction[Order]) -> str:
    return transaction.payload.id


@consumer(orders)
def tick() -> None: ...


@consumer(orders, name="plain")
def plain(order: dict[str, Any]) -> None: ...


@producer(orders, retries=1)
def produce(order: Order, transaction: Transaction) -> Transaction[Receipt]:
    return orders.transaction(Receipt(order.total), id=order.id)


class Charging(ConsumerMixin, Task):
    def process_transaction(self, transaction: Transaction[Order]) -> int:
        return transaction.payload.total

    def handle_transaction_success(self, transaction: Transaction[Order], result: int) -> None: ...


charging = Charging(orders, services={"payments": Payments()})
assert_type(charge(Order("1"), Payments()), Receipt)
assert_type(charge.send(Order("1")), Confirmation)
charge.send(Order("1"), id="order-1", key="customer-3", delay=60, priority=5, tenant="acme", name="second")
charge.send(Order("1"), delay=timedelta(minutes=1))
charge.send(Order("1"), at=datetime(2030, 1, 1, tzinfo=UTC))
charge.send_many([Order("1"), Order("2")], id=lambda order: order.id, tenant="acme")
handle.send(Order("1"))
handle_transaction.send(Order("1"))
tick.send()
plain.send({"id": "1"})
assert_type(orders.transaction(Order("1")), Transaction[Order])


async def main() -> None:
    assert_type(await notify.send_async(Order("1"), id="order-1"), Confirmation)
    await charge.send_many_async([Order("1")], key=lambda order: order.id)
    await notify(Order("1"))
    report = await notify.run()
    print(report.stop_reason)


def keep(sync_task: Consumer[[Order], None], async_task: AsyncConsumer[[Order], None]) -> None:
    sync_task(Order("1"))
    sync_task.stop()
    print(async_task.name)


print(charge.run().stop_reason, charge.name, charge.live)
