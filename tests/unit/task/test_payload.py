"""Payloads of every declared type are read back as they were sent."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import pytest
from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    Tag,
    TypeAdapter,
)
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.payload_json import encode_payload
from ergon_framework.errors import Category
from ergon_framework.task.decorators import consumer
from ergon_framework.task.payload import PayloadReader
from ergon_framework.testing.harness import TaskHarness
from ergon_framework.testing.memory_log import MemoryLog
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException
from tests.payload_types import draw_payload, rebuild

CODEC = JsonCodec()


def carry(payload: Any) -> Transaction:
    """Return a transaction with *payload* as a consumer receives it."""
    return CODEC.decode(*CODEC.encode(Transaction(payload, id="order-7")))


def carry_as(payload_type: Any, payload: Any) -> Any:
    return PayloadReader(payload_type).read(carry(payload))


@pytest.mark.spec("CNN-03", "CON-44")
@pytest.mark.parametrize("block", range(10))
def test_payloads_of_generated_types_are_read_back_and_have_one_encoding(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        payload_type, payload = draw_payload(seed)
        body = encode_payload(payload)
        read = carry_as(payload_type, payload)
        assert read == payload, seed
        assert encode_payload(read) == body, seed
        assert rebuild(payload) == payload, seed
        assert encode_payload(rebuild(payload)) == body, seed


@pytest.mark.parametrize("log", [False, True], ids=["queue", "log"])
def test_payloads_of_generated_types_pass_the_connectors_in_memory(log: bool) -> None:
    connector = MemoryLog() if log else MemoryConnector()
    cases = {str(seed): draw_payload(seed) for seed in range(200)}
    connector.dispatch([Transaction(payload, id=name) for name, (_, payload) in cases.items()])
    received = [delivery.transaction for delivery in connector.fetch_transactions(200)]
    assert {each.id for each in received} == set(cases)
    assert all(PayloadReader(cases[each.id][0]).read(each) == cases[each.id][1] for each in received)


@pytest.mark.spec("CON-44")
@pytest.mark.parametrize("block", range(10))
def test_payloads_of_generated_types_pass_a_trial(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        payload_type, payload = draw_payload(seed)
        received: list[Any] = []

        @consumer(MemoryConnector("orders"), payload=payload_type)
        def charge(order: Any, received: list[Any] = received) -> None:
            received.append(order)

        harness = TaskHarness(charge, received=received)
        harness.send(Transaction(payload, id="order-7"))
        assert harness.run().acked == {"order-7": 1}, seed
        assert received == [payload], seed


class Place(Enum):
    HOME = (1, 2)
    WORK = "work"


class Color(Enum):
    RED = "red"
    BYTES = b"\xff"


class Row(NamedTuple):
    raw: bytes
    at: datetime


class Fields(TypedDict):
    raw: bytes
    sent: Annotated[int, Field(alias="Sent")]


@dataclasses.dataclass
class Item:
    rows: list[Row]
    number: Annotated[int, Field(alias="No")] = 0
    total: int = dataclasses.field(init=False, default=5)


class Node(BaseModel):
    raw: bytes
    children: list[Node] = []
    either: int | Node | None = None


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    at: datetime
    sizes: tuple[int, ...]
    place: Place
    id: UUID


class Names(BaseModel):
    a: int = Field(serialization_alias="A")
    b: int = Field(validation_alias="B", serialization_alias="b2")
    c: int = Field(validation_alias=AliasChoices("c1", AliasPath("c2", 0)), serialization_alias="c3")
    d: int = Field(validation_alias=AliasPath("d1", "d2"), serialization_alias="d3")
    e: int = Field(alias="E")


class InstanceOnly:
    """A type of a third party, which is read from JSON and nothing else."""

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        read = core_schema.no_info_after_validator_function(cls, core_schema.str_schema())
        return core_schema.json_or_python_schema(read, core_schema.is_instance_schema(cls))


NODE = Node(raw=b"a", children=[Node(raw=b"b", children=[Node(raw=b"\xff")])], either=Node(raw=b"c"))


@pytest.mark.parametrize(
    "payload_type, payload",
    [
        (bytes, b"\x00\xff"),
        (list[bytes | None], [b"a", None]),
        (Node, NODE),
        (Item, Item([Row(b"\xff", datetime.fromisoformat("2026-01-31"))], number=3)),
        (Fields, {"raw": b"\xff", "sent": 3}),
        (Strict, Strict(at=datetime.fromisoformat("2026-01-31"), sizes=(1,), place=Place.HOME, id=UUID(int=1))),
        (date | datetime, datetime.fromisoformat("2026-01-31T00:00:00")),
        (datetime | date, date(2026, 1, 31)),
        (int | Decimal, Decimal(5)),
        (int | bytes, b"\xd7m\xf8"),
        (Annotated[bytes, Tag("raw")] | int, b"\xff"),
        (list[date] | list[datetime], [datetime.fromisoformat("2026-01-31T00:00:00")]),
        (tuple[time, timedelta], (time(1), timedelta(1))),
        (list[Place], [Place.HOME, Place.WORK]),
        (dict[Color, int], {Color.BYTES: 1}),
        (Literal["red", Place.HOME, b"\xff"], b"\xff"),
        (Literal["red", Place.HOME, b"\xff"], Place.HOME),
        (Literal["red", Color.RED], "red"),
        (Annotated[Strict | None, BeforeValidator(lambda value: value)], None),
    ],
    ids=range(19),
)
def test_a_value_is_read_back_as_its_type(payload_type: Any, payload: Any) -> None:
    read = carry_as(payload_type, payload)
    assert (read, type(read)) == (payload, type(payload))


def test_fields_are_found_by_every_name_under_which_they_are_sent() -> None:
    names = Names(a=1, B=2, c1=3, d1={"d2": 4}, E=5)
    assert carry(names).payload == {"A": 1, "b2": 2, "c3": 3, "d3": 4, "E": 5}
    assert carry_as(Names, names) == names
    for payload in ({"a": 1, "B": 2, "c2": [3], "d1": {"d2": 4}, "E": 5}, {"A": 1, "b2": 2, "c1": 3, "d3": 4, "E": 5}):
        assert carry_as(Names, payload) == names


def test_what_only_json_can_hold_is_read_as_json() -> None:
    assert carry_as(InstanceOnly, "x").text == "x"


def test_objects_of_a_third_party_codec_are_read_as_they_are() -> None:
    class Blob:
        pass

    read = PayloadReader(Any | date).read(Transaction(blob := Blob(), id="order-7"))
    assert read is blob
    assert PayloadReader(bytes).read(Transaction(b"not base64", id="order-7")) == b"not base64"
    assert PayloadReader(Place).read(Transaction(Place.HOME, id="order-7")) is Place.HOME
    with pytest.raises(TransactionException, match="Input should be"):
        PayloadReader(Place).read(Transaction(blob, id="order-7"))


def test_a_type_that_needs_no_change_is_read_by_its_own_validator() -> None:
    class Order(BaseModel):
        id: int
        at: datetime
        note: str | int | None

    reader = PayloadReader(Order)
    order = carry({"id": 1, "at": "2026-01-31T00:00:00Z", "note": None})
    assert reader.read(order) == reader.read(order)
    assert reader._validate == TypeAdapter(Order).validator.validate_python


@pytest.mark.spec("CON-44")
@pytest.mark.parametrize(
    "payload_type, value, expected",
    [
        (bytes, "€", "payload: bytes_invalid_encoding"),
        (Node, {"raw": "YQ==", "children": [{"raw": 5}]}, "children.0.raw: Input should be a valid bytes"),
        (Strict | int, "x", "Strict: Input should be an object; int: Input should be a valid integer"),
        (Place, "secret", "payload: Input should be"),
    ],
)
def test_an_invalid_payload_is_a_business_failure_that_shows_no_value(
    payload_type: Any, value: Any, expected: str
) -> None:
    with pytest.raises(TransactionException, match=expected) as caught:
        carry_as(payload_type, value)
    error = caught.value
    assert (error.category, error.final, error.code) == (Category.BUSINESS, True, "invalid_payload")
    assert "secret" not in str(error)
    assert "€" not in str(error)


def test_a_model_may_refer_to_a_class_that_is_defined_later() -> None:
    class Order(BaseModel):
        line: Later

    reader = PayloadReader(Order)
    Order.model_rebuild(_types_namespace={"Later": Node})
    assert reader.read(carry({"line": {"raw": "YQ=="}})).line == Node(raw=b"a")


def test_an_async_task_receives_the_declared_type() -> None:
    received: list[Any] = []

    @consumer(MemoryConnector("orders"), payload=Node)
    async def charge(order: Node) -> None:
        await asyncio.sleep(0)
        received.append(order)

    harness = TaskHarness(charge)
    harness.send(Transaction(NODE, id="order-7"))
    assert harness.run().acked == {"order-7": 1}
    assert received == [NODE]


Later = Node
