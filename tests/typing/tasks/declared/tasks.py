"""Declarations that type checkers accept and that cannot run: each function fails at the marked line."""

from dataclasses import dataclass
from typing import Any, Protocol

from ergon_framework import (
    ConsumerMixin,
    ConsumerPolicy,
    MemoryConnector,
    RawPayload,
    Task,
    Transaction,
    TransactionException,
    consumer,
)


@dataclass
class Order:
    id: str


@dataclass
class Receipt:
    number: int


class Stock(Protocol):
    def count(self) -> int: ...


orders = MemoryConnector("orders")


@consumer(orders, services={"shelf": 1})
def charge(order: Order) -> Receipt:
    return Receipt(1)


def wrong_service() -> None:
    def reserve(order: Order, shelv: int) -> None: ...

    consumer(orders, services={"shelf": 1})(reserve)  # D: 'shelv' of reserve is bound neither .* did you mean 'shelf'


def unknown_parameter() -> None:
    def reserve(order: Order, stock: int) -> None: ...

    consumer(orders)(reserve)  # D: pass a service with services=


def unreadable_payload() -> None:
    def count(stock: Stock) -> None: ...

    consumer(orders)(count)  # D: payload type of count cannot be read


def contradicting_payload() -> None:
    def pay(order: Order) -> None: ...

    consumer(orders, payload=Receipt)(pay)  # D: annotated Order, but payload= is Receipt


def positional_only() -> None:
    def pay(order: Order, /) -> None: ...

    consumer(orders)(pay)  # D: positional-only


def catch_all() -> None:
    def pay(order: Order, **services: Any) -> None: ...

    consumer(orders)(pay)  # D: declare each service


def wrong_result_type() -> None:
    def paid(order: Order, result: int) -> None: ...

    charge.on_success(paid)  # D: 'result' of paid is annotated int, but the result of charge is Receipt


def wrong_result_name() -> None:
    def paid(order: Order, number: int) -> None: ...

    charge.on_success(paid)  # D: 'number' of paid is bound neither


def wrong_payload_type() -> None:
    def refused(order: Receipt, error: Exception) -> None: ...

    charge.on_failure(refused)  # D: the payload of charge is Order; annotate it Order or RawPayload


def wrong_error_type() -> None:
    def refused(order: Order, error: ValueError) -> None: ...

    charge.on_failure(refused)  # D: a failure handler gets a TransactionException


def result_of_a_failure() -> None:
    def refused(order: Order, result: Receipt) -> None: ...

    charge.on_failure(refused)  # D: 'result' of refused is bound neither


def raw_and_typed_payload() -> None:
    def refused(raw: RawPayload, order: Order, error: TransactionException) -> None: ...

    charge.on_failure(refused)  # D: has no value if the payload does not fit


def two_payloads() -> None:
    def paid(order: Order, payload: Order) -> None: ...

    charge.on_success(paid)  # D: both get the payload


def async_handler() -> None:
    async def paid(order: Order) -> None: ...

    charge.on_success(paid)  # D: must be declared with def


def generator() -> None:
    def pay(order: Order) -> Any:
        yield order

    consumer(orders)(pay)  # D: is a generator function


def keyword_and_policy() -> None:
    def pay(order: Order) -> None: ...

    policy = ConsumerPolicy.load({"loop": {"concurrency": {"value": 1}}})
    consumer(orders, concurrency=1, policy=policy)(pay)  # D: set the same value


def negative_retries() -> None:
    def pay(order: Order) -> None: ...

    consumer(orders, retries=-1)(pay)  # D: at least 0, not -1


def unknown_class_option() -> None:
    class Charging(ConsumerMixin, Task):
        def process_transaction(self, transaction: Transaction[Order]) -> None: ...

    options: Any = {"polcy": None}
    Charging(orders, **options)  # D: Charging has no option 'polcy'; did you mean 'policy'


def send_to_no_outbox() -> None:
    charge.send(Order("1"), connection=object())  # D: cannot be written in a database transaction
