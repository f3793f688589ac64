"""How the parameters of a plain function are filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypedDict

import pytest
from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import PydanticCustomError

from ergon_framework import BusinessError, DeadLetter, RawPayload, TransactionException
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.task.handler import (
    HandlerFunction,
    HandlerKind,
    TaskServices,
    bind_handler,
    bind_work,
)
from ergon_framework.task.payload import PayloadReader, convert_payload, read_payload_type
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:
    from decimal import Decimal


class OrderModel(BaseModel):
    id: str
    total: int


@dataclass
class Receipt:
    number: int


class Stock(Protocol):
    def count(self) -> int: ...


TRANSACTION = Transaction({"id": "7", "total": 3}, id="7")
ORDER = OrderModel(id="7", total=3)
INVALID = Transaction({"id": "8"}, id="8")
SERVICES = TaskServices({"db", "cache"})


def charge(order: OrderModel, db: str = "none") -> Receipt:
    return Receipt(order.total)


def bind(fn: Any, kind: HandlerKind, work: Any = charge, task: TaskServices = SERVICES) -> HandlerFunction:
    return bind_handler(fn, kind, work=bind_work(work, task=task), task=task)


def call_success(fn: Any, work: Any = charge) -> Any:
    return bind(fn, HandlerKind.SUCCESS, work).call(TRANSACTION, {"db": "D"}, "the result")


def call_failure(fn: Any, work: Any = charge, transaction: Transaction = TRANSACTION) -> Any:
    return bind(fn, HandlerKind.FAILURE, work).call(transaction, {"db": "D"}, BusinessError("no"))


# -- the payload ----------------------------------------------------------------------------------


def test_the_payload_is_read_as_its_annotation_unless_the_task_declares_another_type() -> None:
    def handle(order: OrderModel) -> Any:
        return order

    def handle_any(order: Any) -> Any:
        return order

    def handle_untyped(order):  # type: ignore[no-untyped-def]
        return order

    assert bind_work(handle).call(TRANSACTION, {}) == ORDER
    assert bind_work(handle_any, payload=OrderModel).call(TRANSACTION, {}) == ORDER
    for fn in (handle_any, handle_untyped):
        assert bind_work(fn).call(TRANSACTION, {}) == {"id": "7", "total": 3}


def test_a_local_type_is_found_where_the_function_is_declared() -> None:
    class Local(BaseModel):
        total: int

    def handle(order: Local) -> Any:
        return order

    assert bind_work(handle, names=locals()).call(TRANSACTION, {}) == Local(total=3)


@pytest.mark.spec("CON-44")
def test_an_invalid_payload_is_a_business_failure_that_shows_no_value() -> None:
    with pytest.raises(TransactionException, match=r"total: Input should be a valid integer") as caught:
        PayloadReader(OrderModel).read(Transaction({"id": "7", "total": "secret-value"}, id="7"))
    error = caught.value
    assert (error.category, error.final, error.code) == (Category.BUSINESS, True, "invalid_payload")
    assert "secret-value" not in str(error)
    with pytest.raises(TransactionException, match="payload: Input should be a valid"):
        PayloadReader(OrderModel).read(Transaction(5, id="7"))


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
        PayloadReader(model).read(Transaction(value, id="7"))
    assert str(caught.value) == f"payload is invalid: {expected}"


def test_a_type_that_no_message_can_have_is_rejected() -> None:
    def handle(stock: Stock) -> None: ...

    with pytest.raises(ConfigurationError, match=r"payload type of handle cannot be read .*; annotate the payload"):
        bind_work(handle)


def test_an_annotation_that_only_exists_for_type_checkers_is_rejected_unless_the_type_is_passed() -> None:
    def handle(order: Decimal, transaction: Transaction) -> tuple[Any, str]:
        return order, transaction.id

    with pytest.raises(ConfigurationError, match=r"annotation 'Decimal' of 'order' of handle cannot be resolved"):
        bind_work(handle)
    assert bind_work(handle, payload=OrderModel).call(TRANSACTION, {}) == (ORDER, "7")


def test_a_declared_type_that_contradicts_the_annotation_is_rejected() -> None:
    def handle(order: Receipt) -> None: ...

    def handle_protocol(order: Stock) -> Any:
        return order

    def handle_mapping(order: Mapping[str, Any]) -> Any:
        return order

    with pytest.raises(ConfigurationError, match=r"'order' of handle is annotated Receipt, but payload= is OrderModel"):
        bind_work(handle, payload=OrderModel)
    assert bind_work(handle_protocol, payload=OrderModel).call(TRANSACTION, {}) == ORDER

    def handle_order(order: OrderModel) -> Any:
        return order

    def handle_text(word: str) -> Any:
        return word

    assert bind_work(handle_order, payload=Annotated[OrderModel, Field()]).call(TRANSACTION, {}) == ORDER
    assert bind_work(handle_order, payload=OrderModel | Card).call(TRANSACTION, {}) == ORDER
    assert bind_work(handle_text, payload=Literal["a"]).call(Transaction("a", id="1"), {}) == "a"
    assert bind_work(handle_mapping, payload=dict[str, Any]).call(TRANSACTION, {}) == TRANSACTION.payload


def test_the_declared_type_chooses_the_payload_parameter() -> None:
    def handle(client: str, order: OrderModel) -> Any:
        return client, order

    task = TaskServices(has_lifespan=True)
    assert bind_work(handle, task=task, payload=OrderModel).call(TRANSACTION, {"client": "C"}) == ("C", ORDER)


# -- the work -------------------------------------------------------------------------------------


@pytest.mark.spec("CON-40")
def test_services_are_passed_by_name_and_the_transaction_by_annotation() -> None:
    def handle(db: str, transaction: Transaction, order: OrderModel, cache: str = "none") -> tuple[Any, ...]:
        return order.id, transaction.id, db, cache

    function = bind_work(handle, task=SERVICES)
    assert function.call(TRANSACTION, {"db": "D", "unused": 1}) == ("7", "7", "D", "none")
    assert function.call(TRANSACTION, {"db": "D", "cache": "C"}) == ("7", "7", "D", "C")
    assert function.list_missing({}) == ["db"]
    assert function.list_missing({"db": 1}) == []
    assert function.services == {"db", "cache"}


def test_the_payload_of_a_transaction_is_read_as_its_parameter_says() -> None:
    def handle(transaction: Transaction[OrderModel]) -> Any:
        return transaction.id, transaction.payload

    def handle_both(order: OrderModel, transaction: Transaction[OrderModel]) -> Any:
        return order is transaction.payload

    def handle_plain(transaction: Transaction[Any]) -> Any:
        return transaction

    assert bind_work(handle).call(TRANSACTION, {}) == ("7", ORDER)
    assert bind_work(handle_both).call(TRANSACTION, {}) is True
    assert bind_work(handle_plain).call(TRANSACTION, {}) is TRANSACTION


def test_a_transaction_can_be_recognized_by_its_name_or_by_an_unresolved_annotation() -> None:
    def by_name(transaction):  # type: ignore[no-untyped-def]
        return transaction

    def by_text(received: Transaction[Decimal]) -> Any:
        return received

    def as_service(order: Any, transaction: str) -> Any:
        return transaction

    task = TaskServices({"transaction"})
    assert bind_work(by_name).call(TRANSACTION, {}) is TRANSACTION
    assert bind_work(by_text).call(TRANSACTION, {}) is TRANSACTION
    assert bind_work(as_service, task=task).call(TRANSACTION, {"transaction": "S"}) == "S"


def test_a_function_without_parameters_is_just_called() -> None:
    assert bind_work(lambda: "ran").call(TRANSACTION, {}) == "ran"


def test_work_can_take_the_payload_as_it_arrived() -> None:
    def handle(raw: RawPayload) -> Any:
        return raw

    def handle_both(raw: RawPayload, order: OrderModel) -> Any:
        return raw, order

    assert bind_work(handle).call(INVALID, {}) == {"id": "8"}
    assert bind_work(handle_both).call(TRANSACTION, {}) == (TRANSACTION.payload, ORDER)
    with pytest.raises(TransactionException, match="payload is invalid"):
        bind_work(handle_both).call(INVALID, {})


def test_an_object_and_a_partial_function_are_called_like_a_function() -> None:
    class Charge:
        def __call__(self, order: OrderModel) -> Any:
            return order

    def multiply(order: OrderModel, rate: int) -> Any:
        return order.total * rate

    assert bind_work(Charge()).call(TRANSACTION, {}) == ORDER
    assert bind_work(partial(multiply, rate=3)).call(TRANSACTION, {}) == 9


@pytest.mark.parametrize("fn", [lambda *things: None, lambda **things: None])
def test_catch_all_parameters_are_rejected(fn: Any) -> None:
    with pytest.raises(ConfigurationError, match="declare each service"):
        bind_work(fn)


def test_a_positional_only_parameter_is_rejected() -> None:
    def by_position(order: Any, /) -> Any:
        return order

    with pytest.raises(ConfigurationError, match="order of by_position is positional-only"):
        bind_work(by_position)


def test_an_unknown_parameter_is_rejected_with_the_nearest_name() -> None:
    def misspelt(order: OrderModel, dbb: str) -> None: ...

    def unknown(order: OrderModel, stock: str) -> None: ...

    with pytest.raises(ConfigurationError, match=r"'dbb' of misspelt is bound neither .*; did you mean 'db'\?"):
        bind_work(misspelt, task=SERVICES)
    with pytest.raises(ConfigurationError, match=r"known names: .*; pass a service with services=\{\"stock\": ...\}"):
        bind_work(unknown)


# -- success and failure handlers -----------------------------------------------------------------


def test_parameters_are_bound_by_annotation_whatever_their_names_and_order() -> None:
    def paid(number: Receipt, what: OrderModel, tx: Transaction) -> tuple[Any, ...]:
        return number, what, tx.id

    def refused(problem: Exception, what: OrderModel) -> tuple[Any, ...]:
        return str(problem), what

    assert call_success(paid) == ("the result", ORDER, "7")
    assert call_failure(refused) == ("no", ORDER)


def test_parameters_without_a_type_are_bound_by_name() -> None:
    def paid(result, order, transaction, db):  # type: ignore[no-untyped-def]
        return result, order, transaction.id, db

    def refused(error: Any, payload: Any) -> tuple[Any, ...]:
        return str(error), payload

    def refused_as_in_a_class(exc, order):  # type: ignore[no-untyped-def]
        return str(exc), order

    assert call_success(paid) == ("the result", ORDER, "7", "D")
    assert call_failure(refused) == ("no", ORDER)
    assert call_failure(refused_as_in_a_class) == ("no", ORDER)


def test_an_annotation_that_cannot_be_resolved_leaves_the_name() -> None:
    def refused(error: Decimal, order: Decimal) -> Any:
        return str(error), order

    assert call_failure(refused) == ("no", ORDER)


def test_a_union_is_bound_by_each_of_its_members() -> None:
    def work(order: OrderModel | Card) -> Receipt | DeadLetter | None:
        return None

    def paid(number: Receipt, order: OrderModel | Card) -> Any:
        return number, order

    assert call_success(paid, work) == ("the result", ORDER)


def test_a_name_decides_where_payload_and_result_have_one_type() -> None:
    def work(order: OrderModel) -> OrderModel:
        return order

    def by_name(result: OrderModel, order: OrderModel) -> Any:
        return result, order

    def by_no_name(first: OrderModel, order: OrderModel) -> Any: ...

    assert call_success(by_name, work) == ("the result", ORDER)
    with pytest.raises(ConfigurationError, match="'first' of by_no_name is bound neither"):
        call_success(by_no_name, work)


def handle_two_payloads(order: OrderModel, payload: OrderModel) -> None: ...
def handle_two_results(result: Receipt, receipt: Receipt) -> None: ...
def handle_wrong_payload(order: Receipt) -> None: ...
def handle_wrong_result(result: OrderModel | Card, order: Any) -> None: ...
def handle_other_name(order: OrderModel, left: int) -> None: ...
def handle_specific_error(error: ValueError) -> None: ...
def handle_wrong_error(order: OrderModel, error: int) -> None: ...
def handle_result_of_a_failure(order: OrderModel, result: Any) -> None: ...
def handle_raw_and_payload(raw: RawPayload, order: OrderModel) -> None: ...
def handle_raw_and_transaction(raw: RawPayload, transaction: Transaction[OrderModel]) -> None: ...


@pytest.mark.spec("DX-18")
@pytest.mark.parametrize(
    "kind, fn, message",
    [
        ("success", handle_two_payloads, "'order' and 'payload' of handle_two_payloads both get the payload"),
        ("success", handle_two_results, "'result' and 'receipt' of handle_two_results both get the result"),
        ("success", handle_other_name, "'left' of handle_other_name is bound neither"),
        (
            "failure",
            handle_wrong_payload,
            "is annotated Receipt, but the payload of charge is OrderModel; annotate it ",
        ),
        ("failure", handle_specific_error, "is annotated ValueError, but a failure handler gets a TransactionExceptio"),
        ("failure", handle_wrong_error, "'error' of handle_wrong_error is annotated int, but a failure handler gets"),
        ("failure", handle_result_of_a_failure, "'result' of handle_result_of_a_failure is bound neither"),
        ("failure", handle_raw_and_payload, "'order' of handle_raw_and_payload has no value if the payload does not"),
        ("failure", handle_raw_and_transaction, "'transaction' of handle_raw_and_transaction has no value"),
    ],
)
def test_a_handler_whose_parameters_do_not_fit_is_rejected(kind: str, fn: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        bind(fn, HandlerKind[kind.upper()])


def test_a_result_of_another_type_is_rejected() -> None:
    def paid(result: str) -> None: ...

    with pytest.raises(ConfigurationError, match="'result' of paid is annotated str, but the result of charge is Rece"):
        call_success(paid)


def test_a_failure_handler_with_the_raw_payload_is_called_whether_or_not_the_payload_fits() -> None:
    def refused(raw: RawPayload, order: OrderModel | None) -> Any:
        return raw, order

    def refused_by_text(raw: RawPayload, anything: Decimal | None = None) -> Any:
        return raw

    assert call_failure(refused) == (TRANSACTION.payload, ORDER)
    assert call_failure(refused, transaction=INVALID) == (INVALID.payload, None)
    assert bind(refused, HandlerKind.FAILURE).takes_raw_payload
    assert call_failure(refused_by_text, transaction=INVALID) == INVALID.payload


# -- methods --------------------------------------------------------------------------------------


class Methods:
    def untyped(self, transaction: Transaction) -> Any: ...

    def nothing(self) -> Any: ...

    def typed(self, transaction: Transaction[OrderModel], result: Any = None) -> Any:
        return transaction.payload, result

    async def typed_async(self, transaction: Transaction[OrderModel], exc: Any = None) -> Any:
        return transaction.payload, exc


def test_a_method_gets_the_payload_that_its_transaction_declares() -> None:
    methods = Methods()
    for method in (methods.untyped, methods.nothing):
        assert read_payload_type(method) is None
        assert convert_payload(method, None) == method
    typed = convert_payload(methods.typed, read_payload_type(methods.typed))
    assert typed(TRANSACTION, "R") == (ORDER, "R")
    with pytest.raises(TransactionException, match="payload is invalid"):
        typed(INVALID)


def test_a_failure_method_is_not_called_for_a_payload_that_does_not_fit() -> None:
    methods = Methods()
    reader = read_payload_type(methods.typed)
    assert convert_payload(methods.typed, reader, is_failure=True)(INVALID, "E") == DeadLetter("undecodable")
    call_async = convert_payload(methods.typed_async, reader, is_failure=True)
    for transaction, expected in ((INVALID, DeadLetter("undecodable")), (TRANSACTION, (ORDER, "E"))):
        with pytest.raises(StopIteration) as stop:
            call_async(transaction, "E").send(None)
        assert stop.value.value == expected


class Address(TypedDict):
    city: str


def test_a_typed_dict_of_an_older_python_names_the_remedy() -> None:
    def handle(address: Address) -> Any:
        return address

    try:
        function = bind_work(handle)
    except ConfigurationError as error:
        assert "typing_extensions.TypedDict" in str(error)  # noqa: PT017 - depends on the version of Python
    else:
        assert function.call(Transaction({"city": "Graz"}, id="1"), {}) == {"city": "Graz"}
