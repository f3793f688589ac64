"""How the parameters of a plain function are filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import PydanticCustomError

from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.functions import Function, Payload
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:
    from decimal import Decimal


class Order(BaseModel):
    id: str
    total: int


TX = Transaction("7", {"id": "7", "total": 3})


def test_the_payload_is_read_as_its_type() -> None:
    def handle(order: Order) -> Order:
        return order

    assert Function(handle, Payload(Order)).call(TX, {}) == Order(id="7", total=3)
    assert Function(handle, Payload()).call(TX, {}) == {"id": "7", "total": 3}


@pytest.mark.spec("CON-44")
def test_a_payload_that_does_not_fit_is_a_business_failure_that_shows_no_value() -> None:
    with pytest.raises(TransactionException, match=r"total: Input should be a valid integer") as caught:
        Payload(Order).read(Transaction("7", {"id": "7", "total": "secret-value"}))
    error = caught.value
    assert (error.category, error.final, error.code) == (Category.BUSINESS, True, "invalid_payload")
    assert "secret-value" not in str(error)
    with pytest.raises(TransactionException, match="payload: Input should be a valid"):
        Payload(Order).read(Transaction("7", 5))


class Card(BaseModel):
    kind: Literal["card"]


class Cash(BaseModel):
    kind: Literal["cash"]


def refuse(value: str) -> str:
    raise ValueError(f"{value} is no code")


def refuse_in_own_words(value: str) -> str:
    raise PydanticCustomError("no_code", "{value} is no code", {"value": value})


@pytest.mark.spec("DX-18")
@pytest.mark.parametrize(
    "model, value, expected",
    [
        (Annotated[str, AfterValidator(refuse)], "secret-value", "payload: value_error"),
        (Annotated[str, AfterValidator(refuse_in_own_words)], "secret-value", "payload: no_code"),
        (
            Annotated[Card | Cash, Field(discriminator="kind")],
            {"kind": "secret-value"},
            "payload: union_tag_invalid",
        ),
    ],
)
def test_a_message_that_may_quote_the_payload_is_replaced_by_its_type(model: Any, value: Any, expected: str) -> None:
    with pytest.raises(TransactionException) as caught:
        Payload(model).read(Transaction("7", value))
    assert str(caught.value) == f"the payload does not fit: {expected}"


@pytest.mark.spec("CON-40")
def test_services_come_by_name_and_the_transaction_by_its_type() -> None:
    def handle(order: Any, transaction: Transaction, db: str, cache: str = "none") -> tuple[Any, ...]:
        return order["id"], transaction.id, db, cache

    function = Function(handle, Payload())
    assert function.call(TX, {"db": "D", "unused": 1}) == ("7", "7", "D", "none")
    assert function.call(TX, {"db": "D", "cache": "C"}) == ("7", "7", "D", "C")
    assert function.missing({}) == ["db"]
    assert function.missing({"db": 1}) == []


def test_handlers_get_the_payload_and_what_it_came_to() -> None:
    def failed(order: Any, error: Exception, transaction: Transaction, db: str) -> tuple[Any, ...]:
        return order["id"], str(error), transaction.id, db

    function = Function(failed, Payload(), positional=2)
    assert function.call(TX, {"db": "D"}, ValueError("no")) == ("7", "no", "7", "D")


def test_a_function_without_parameters_is_just_called() -> None:
    assert Function(lambda: "ran", Payload()).call(TX, {}) == "ran"


def test_names_that_only_the_type_checker_knows_do_no_harm() -> None:
    def handle(order: Decimal, transaction: Transaction) -> tuple[Any, str]:
        return order, transaction.id

    assert Function(handle, Payload()).call(TX, {}) == (TX.payload, "7")


@pytest.mark.parametrize("fn", [lambda *things: None, lambda **things: None])
def test_catch_all_parameters_are_refused(fn: Any) -> None:
    with pytest.raises(ConfigurationError, match="name each service"):
        Function(fn, Payload())
