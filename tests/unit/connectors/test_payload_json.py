"""Canonical JSON of payloads: one encoding per value, and errors that name the path and the type."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import uuid
from collections import OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, localcontext
from enum import Enum, Flag, IntEnum, StrEnum
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pydantic.dataclasses
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, Json, RootModel, SecretStr, computed_field, field_serializer

from ergon_framework.connectors import payload_json
from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.connectors.foreign_codec import ForeignCodec, from_header
from ergon_framework.connectors.payload_json import MAX_DEPTH, PayloadError, encode_payload
from ergon_framework.transaction import Transaction


class Color(Enum):
    RED = "red"
    PAIR = (1, Decimal("2.50"))


class Size(IntEnum):
    LARGE = 2


class Unit(StrEnum):
    KILO = "kg"


class Access(Flag):
    READ = 1
    WRITE = 2


class Row(NamedTuple):
    id: int
    at: date


@dataclasses.dataclass(frozen=True)
class Item:
    name: str
    price: Decimal
    label: str = dataclasses.field(init=False, default="computed")


@pydantic.dataclasses.dataclass(frozen=True)
class CheckedItem:
    name: str = Field(alias="NAME")
    tags: frozenset[Row] = frozenset()


class Line(BaseModel):
    model_config = ConfigDict(frozen=True)

    raw: bytes
    at: datetime | None = None


class Order(BaseModel):
    id: int = Field(alias="Id", default=1)
    lines: set[Line] = Field(default_factory=set)
    hidden: str = Field(default="hidden", exclude=True)
    data: Json[list[int]] = Field(default_factory=list)

    @computed_field
    @property
    def count(self) -> int:
        return len(self.lines)


INDIA = timezone(timedelta(hours=5, minutes=30))


@pytest.mark.spec("CNN-03")
@pytest.mark.parametrize(
    "value, expected",
    [
        (Decimal("1.50"), '"1.50"'),
        (datetime(2026, 1, 31, 5, 30, tzinfo=INDIA), '"2026-01-31T00:00:00Z"'),
        (datetime.fromisoformat("2026-01-31T00:00:00.000005"), '"2026-01-31T00:00:00.000005"'),
        (date(26, 1, 31), '"0026-01-31"'),
        (time(5, 30), '"05:30:00"'),
        (time(5, 30, tzinfo=INDIA), '"00:00:00Z"'),
        (time(1, 0, 30, tzinfo=INDIA), '"00:00:30+04:30"'),
        (time(23, tzinfo=timezone(-timedelta(hours=2))), '"23:59:00-01:01"'),
        (timedelta(0), '"PT0S"'),
        (timedelta(days=400, hours=1, minutes=2, seconds=3, microseconds=40), '"P400DT1H2M3.00004S"'),
        (-timedelta(minutes=1), '"-PT1M"'),
        (timedelta.min, '"-P999999999D"'),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (b"\xff\xfe\xfd", '"//79"'),
        (bytearray(b"hi"), '"aGk="'),
        (memoryview(b"hi"), '"aGk="'),
        ({3, 1, 2}, "[1,2,3]"),
        (frozenset({"b", "a"}), '["a","b"]'),
        ((1, (2,)), "[1,[2]]"),
        (deque([1]), "[1]"),
        (Color.RED, '"red"'),
        (Color.PAIR, '[1,"2.50"]'),
        (Size.LARGE, "2"),
        (Unit.KILO, '"kg"'),
        (Access.READ | Access.WRITE, "3"),
        (Row(1, date(2026, 1, 31)), '[1,"2026-01-31"]'),
        (Item("a", Decimal(1)), '{"name":"a","price":"1"}'),
        (CheckedItem(NAME="a", tags={Row(1, date(2026, 1, 31))}), '{"NAME":"a","tags":[[1,"2026-01-31"]]}'),
        (CheckedItem(NAME="a"), '{"NAME":"a","tags":[]}'),
        (Order(Id=7, data="[1]"), '{"Id":7,"lines":[],"data":"[1]"}'),
        (RootModel[set[Line]]({Line(raw=b"a")}), '[{"raw":"YQ==","at":null}]'),
        (RootModel[bytes](b"a"), '"YQ=="'),
        (defaultdict(list, a=[1]), '{"a":[1]}'),
        (OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
        ({1: "a", 1.5: "b", True and "x": "c", None: "d"}, '{"1":"a","1.5":"b","x":"c","null":"d"}'),
        ({Unit.KILO: 1, uuid.UUID(int=1): 2}, '{"kg":1,"00000000-0000-0000-0000-000000000001":2}'),
        (
            {Color.RED: {b"a"}, Size.LARGE: ({date(2026, 1, 31): None},)},
            '{"red":["YQ=="],"2":[{"2026-01-31":null}]}',
        ),
        (ipaddress.ip_network("10.0.0.0/8"), '"10.0.0.0/8"'),
        (PurePosixPath("/a/b"), '"/a/b"'),
        (HttpUrl("http://example.com"), '"http://example.com/"'),
    ],
)
def test_every_value_has_one_encoding(value: Any, expected: str) -> None:
    assert encode_payload(value).decode() == expected
    assert JsonCodec().encode(Transaction(value, id="order-7"))[0].decode() == expected
    assert ForeignCodec(id=from_header("x")).encode(Transaction(value, id="order-7"))[0].decode() == expected


def test_fields_of_a_model_whose_sets_contain_models_are_written_one_by_one() -> None:
    order = Order(Id=7, lines={Line(raw=b"b"), Line(raw=b"a")})
    assert json.loads(encode_payload(order)) == {
        "Id": 7,
        "lines": [{"raw": "YQ==", "at": None}, {"raw": "Yg==", "at": None}],
        "data": [],
    }


def test_a_dataclass_whose_sets_contain_models_is_written_by_field() -> None:
    @pydantic.dataclasses.dataclass
    class Box:
        lines: frozenset[Line]

    assert encode_payload(Box(frozenset({Line(raw=b"a")}))) == b'{"lines":[{"raw":"YQ==","at":null}]}'


def test_the_context_of_decimal_does_not_change_an_encoding() -> None:
    with localcontext() as context:
        context.capitals = 0
        assert encode_payload(Decimal("1E+9")) == b'"1E+9"'


times = st.times() | st.builds(
    lambda moment, minutes: moment.replace(tzinfo=timezone(timedelta(minutes=minutes))),
    st.times(),
    st.integers(-1439, 1439),
)


@given(times, times)
def test_times_are_equal_where_their_encodings_are(one: time, two: time) -> None:
    assert (one == two) == (encode_payload(one) == encode_payload(two))


@given(times, st.integers(-1439, 1439))
def test_a_time_has_one_encoding_in_every_zone(moment: time, minutes: int) -> None:
    body = encode_payload(moment)
    again = time.fromisoformat(json.loads(body))
    assert again == moment
    assert encode_payload(again) == body


@given(st.sets(st.integers() | st.text() | st.tuples(st.integers(), st.binary())))
def test_equal_sets_have_equal_encodings(items: set[Any]) -> None:
    assert encode_payload(items) == encode_payload(frozenset(sorted(items, key=repr)))


class Failing(BaseModel):
    secret: int

    @field_serializer("secret")
    def fail(self, value: int) -> int:
        raise LookupError(f"4111{value}")


SECRET = "4111"


@pytest.mark.spec("CNN-03")
@pytest.mark.parametrize(
    "payload, problem",
    [
        ({"card": [SecretStr(SECRET)]}, "card.0 is a SecretStr, which has no JSON form"),
        (object(), "it is a object, which has no JSON form"),
        (Order, "it is a ModelMetaclass, which has no JSON form"),
        ([Item(SECRET, Decimal("NaN"))], "0.price is not a finite number"),
        ({"a": {(1, SECRET): 2}}, "a has a key of type tuple, which is not a single text in JSON"),
        ({"a": {Row(1, date(2026, 1, 31)): 2}}, "a has a key of type Row"),
        ({"a": {Color.PAIR: 2}}, "a has a key of type Color"),
        ({"a": {frozenset({SECRET}): 2}}, "a has a key of type frozenset"),
        ({"a": {object(): 2}}, "a has a key of type object"),
        ({"a": {Color.RED: 1, "red": 2}}, "a has two keys that are the same text in JSON"),
        ({"a": {float("nan"): 1}}, "a is a number that JSON cannot represent"),
        ([1, float("inf")], "1 is a number that JSON cannot represent"),
        (["\ud800"], "0 is a text with half a surrogate pair"),
        ({"at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))}, "at is outside the years 1 to 9999"),
        (time(1, tzinfo=timezone(timedelta(seconds=1))), "it has an offset that is not a whole number of minutes"),
        ({"s": {(SECRET, object())}}, r"s.\*.1 is a object"),
        ({"m": Failing(secret=1)}, r"m is a Failing that cannot be converted \(\w+\)"),
        ({"x" * 100: object()}, f"^{'x' * 40} is a object"),
    ],
)
def test_an_error_names_the_path_and_the_type_and_no_value(payload: Any, problem: str) -> None:
    with pytest.raises(PayloadError, match=problem) as caught:
        encode_payload(payload)
    with pytest.raises(UnencodableError, match="order-7") as wrapped:
        JsonCodec().encode(Transaction(payload, id="order-7"))
    assert str(caught.value) in str(wrapped.value)
    assert wrapped.value.__context__ is None
    assert SECRET not in f"{caught.value} {wrapped.value}"


def nest(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = (value,)
    return value


def test_the_limit_of_depth_counts_converted_values() -> None:
    JsonCodec().encode(Transaction(nest(frozenset({b"a"}), MAX_DEPTH - 1), id="order-7"))
    with pytest.raises(UnencodableError, match="nested more than 64 levels deep"):
        JsonCodec().encode(Transaction(nest(frozenset({b"a"}), MAX_DEPTH), id="order-7"))
    with pytest.raises(PayloadError, match=r"0\.0.*… is nested more than 64 levels deep"):
        encode_payload(nest(object(), MAX_DEPTH + 1))


def test_a_payload_that_contains_itself_is_an_error() -> None:
    payload: dict[str, Any] = {"at": datetime(2026, 1, 31, tzinfo=UTC)}
    payload["self"] = [payload]
    with pytest.raises(PayloadError, match="nested more than"):
        encode_payload(payload)


def test_plain_values_are_written_without_a_python_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_json, "_to_plain", None)
    monkeypatch.setattr(payload_json, "_find_converter", None)
    assert (
        encode_payload({"a": [1, 2.5, "x", None, True, (Size.LARGE, Unit.KILO)]})
        == b'{"a":[1,2.5,"x",null,true,[2,"kg"]]}'
    )
