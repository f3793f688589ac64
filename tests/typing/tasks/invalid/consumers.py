"""Mistakes in declarations and calls of tasks."""

from dataclasses import dataclass

from ergon_framework import ConsumerPolicy, MemoryConnector, ProducerPolicy, Transaction, consumer, producer


@dataclass
class Order:
    id: str
    total: int = 0


class Payments:
    def charge(self, order: Order) -> int:
        return order.total


orders = MemoryConnector("orders")


@consumer(orders, services={"payments": Payments()})
def charge(order: Order, payments: Payments) -> int:
    return payments.charge(order)


@consumer(orders)
async def notify(order: Order) -> None: ...


@consumer(orders)
def handle(transaction: Transaction[Order], order: Order) -> None:
    print(transaction.payload.totall)  # E: "Order" has no attribute "totall"


consumer(orders, retires=5)  # E: Unexpected keyword argument "retires"
consumer(orders, retries="5")  # E: incompatible type "str"; expected "int
consumer(orders, timeout="30")  # E: incompatible type "str"; expected "float
consumer(orders, concurency=3)  # E: Unexpected keyword argument "concurency"
consumer(orders, paylod=Order)  # E: Unexpected keyword argument "paylod"
consumer(orders, polcy=ConsumerPolicy())  # E: Unexpected keyword argument "polcy"
consumer(orders, policy=ProducerPolicy())  # E: incompatible type "ProducerPolicy"; expected "ConsumerPolicy
consumer(orders, policy={"loop": {}})  # E: expected "ConsumerPolicy
consumer(orders, services=[Payments()])  # E: expected "Mapping\[str, Any\]
consumer(orders, payments=Payments())  # E: Unexpected keyword argument "payments"
consumer("orders")  # E: incompatible type "str"; expected "Connector
consumer(orders, lifespann=None)  # E: Unexpected keyword argument "lifespann"
consumer(orders, max_deliveries=1.5)  # E: incompatible type "float"; expected "int
producer(orders, policy=ConsumerPolicy())  # E: incompatible type "ConsumerPolicy"; expected "ProducerPolicy
producer(orders, max_deliveries=3)  # E: Unexpected keyword argument "max_deliveries"

charge.send("order-1")  # E: incompatible type "str"; expected "Order"
charge.send({"id": "1"})  # E: expected "Order"
charge.send(Transaction(Order("1"), id="1"))  # E: expected "Order"
charge.send(Order("1"), di="order-1")  # E: Unexpected keyword argument "di"
charge.send(Order("1"), delay="60")  # E: incompatible type "str"; expected
charge.send(Order("1"), priority="high")  # E: incompatible type "str"; expected "int"
charge.send(Order("1"), tenent="acme")  # E: Unexpected keyword argument "tenent"
charge.send(Order("1"), id=17)  # E: incompatible type "int"; expected "str"
charge.send()  # E: Missing positional argument "payload"
charge.send_many(Order("1"))  # E: expected "Iterable\[Order\]"
charge.send_many([{"id": "1"}])  # E: expected "Order"
charge("1", Payments())  # E: incompatible type "str"; expected "Order"
charge(Order("1"))  # E: Missing positional argument "payments"
charge(Order("1"), payments=None)  # E: incompatible type "None"; expected "Payments"
print(charge(Order("1"), Payments()).upper())  # E: "int" has no attribute "upper"
print(charge.nmae)  # E: has no attribute "nmae"
charge.on_error(print)  # E: has no attribute "on_error"


@notify.on_success  # E: cannot be|incompatible type
def notified(order: Order) -> None: ...


orders.transaction(Order("1"), tenent="acme")  # E: Unexpected keyword argument "tenent"
orders.transaction(Order("1"), delay=[1])  # E: expected "float
orders.dispatch(Transaction(Order("1"), id="1"))  # E: expected "Sequence\[Transaction
orders.dispatch([Order("1")])  # E: expected "Transaction
Transaction("7", {"total": 1})  # E: Too many positional arguments
Transaction({"total": 1})  # E: Missing named argument "id"
