"""How the parameters of a plain function are filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import PydanticCustomError

from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.task.handler import HandlerFunction
from ergon_framework.task.payload import PayloadReader
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException

if TYPE_CHECKING:
    from decimal import Decimal


class OrderModel(BaseModel):
    id: str
    total: int


TRANSACTION = Transaction("7", {"id": "7", "total": 3})


def test_the_payload_is_read_as_its_type() -> None:
    def handle(order: OrderModel) -> OrderModel:
        return order

    assert HandlerFunction(handle, PayloadReader(OrderModel)).call(TRANSACTION, {}) == OrderModel(id="7", total=3)
    assert HandlerFunction(handle, PayloadReader()).call(TRANSACTION, {}) == {"id": "7", "total": 3}


@pytest.mark.spec("CON-44")
def test_an_invalid_payload_is_a_business_failure_that_shows_no_value() -> None:
    with pytest.raises(TransactionException, match=r"total: Input should be a valid integer") as caught:
        PayloadReader(OrderModel).read(Transaction("7", {"id": "7", "total": "secret-value"}))
    error = caught.value
    assert (error.category, error.final, error.code) == (Category.BUSINESS, True, "invalid_payload")
    assert "secret-value" not in str(error)
    with pytest.raises(TransactionException, match="payload: Input should be a valid"):
        PayloadReader(OrderModel).read(Transaction("7", 5))


class Card(BaseModel):
    kind: Literal["card"]


class Cash(BaseModel):
    kind: Literal["cash"]


def reject(value: str) -> str:
    raise ValueError(f"{value} is not a code")


def reject_with_custom_error(value: str) -> str:
    raise PydanticCustomError("no_code", "{value} is not a code", {"value": value})


@pytest.mark.spec("DX-18")
@pytest.mark.parametrize(
    "model, value, expected",
    [
        (Annotated[str, AfterValidator(reject)], "secret-value", "payload: value_error"),
        (Annotated[str, AfterValidator(reject_with_custom_error)], "secret-value", "payload: no_code"),
        (
            Annotated[Card | Cash, Field(discriminator="kind")],
            {"kind": "secret-value"},
            "payload: union_tag_invalid",
        ),
    ],
)
def test_a_message_that_may_quote_the_payload_is_replaced_by_its_type(model: Any, value: Any, expected: str) -> None:
    with pytest.raises(TransactionException) as caught:
        PayloadReader(model).read(Transaction("7", value))
    assert str(caught.value) == f"payload is invalid: {expected}"


@pytest.mark.spec("CON-40")
def test_services_are_passed_by_name_and_the_transaction_by_type() -> None:
    def handle(order: Any, transaction: Transaction, db: str, cache: str = "none") -> tuple[Any, ...]:
        return order["id"], transaction.id, db, cache

    function = HandlerFunction(handle, PayloadReader())
    assert function.call(TRANSACTION, {"db": "D", "unused": 1}) == ("7", "7", "D", "none")
    assert function.call(TRANSACTION, {"db": "D", "cache": "C"}) == ("7", "7", "D", "C")
    assert function.list_missing({}) == ["db"]
    assert function.list_missing({"db": 1}) == []


def test_handlers_get_the_payload_and_the_result() -> None:
    def describe_failure(order: Any, error: Exception, transaction: Transaction, db: str) -> tuple[Any, ...]:
        return order["id"], str(error), transaction.id, db

    function = HandlerFunction(describe_failure, PayloadReader(), positional=2)
    assert function.call(TRANSACTION, {"db": "D"}, ValueError("no")) == ("7", "no", "7", "D")


def test_a_function_without_parameters_is_just_called() -> None:
    assert HandlerFunction(lambda: "ran", PayloadReader()).call(TRANSACTION, {}) == "ran"


def test_annotations_that_only_exist_for_type_checkers_are_allowed() -> None:
    def handle(order: Decimal, transaction: Transaction) -> tuple[Any, str]:
        return order, transaction.id

    assert HandlerFunction(handle, PayloadReader()).call(TRANSACTION, {}) == (TRANSACTION.payload, "7")


@pytest.mark.parametrize("fn", [lambda *things: None, lambda **things: None])
def test_catch_all_parameters_are_rejected(fn: Any) -> None:
    with pytest.raises(ConfigurationError, match="declare each service"):
        HandlerFunction(fn, PayloadReader())
