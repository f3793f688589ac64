"""Payload types drawn from a seed, with values of them: models, dataclasses and dictionaries of nested fields."""

from __future__ import annotations

import dataclasses
import enum
import keyword
import random
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import pydantic.dataclasses
from pydantic import ConfigDict, Field, RootModel, create_model
from typing_extensions import TypedDict


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Unit(enum.StrEnum):
    KILO = "kg"
    GRAM = "g"


class Place(enum.Enum):
    HOME = (1, 2)
    WORK = (3, 4)


class Price(enum.Enum):
    LOW = Decimal("1.50")
    HIGH = Decimal("99.9")


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class PayloadType:
    """A type, a function that draws a value of it, and whether the values are hashable."""

    annotation: Any
    draw: Callable[[random.Random], Any]
    is_hashable: bool = True


def draw_timezone(rng):
    return rng.choice([UTC, timezone(timedelta(hours=5, minutes=45)), timezone(-timedelta(hours=9, minutes=30))])


def draw_datetime(rng):
    moment = datetime(rng.randint(2, 9998), 1, 1, tzinfo=rng.choice([None, draw_timezone(rng)]))
    return moment + timedelta(seconds=rng.randrange(31_000_000), microseconds=rng.choice([0, 1, 500_000, 999_999]))


def draw_time(rng):
    return time(
        rng.randrange(24), rng.randrange(60), rng.randrange(60), rng.choice([0, 7, 250_000]),
        tzinfo=rng.choice([None, draw_timezone(rng)]),
    )  # fmt: skip


def draw_decimal(rng):
    return Decimal((rng.randrange(2), [rng.randrange(10) for _ in range(rng.randint(1, 30))], rng.randint(-40, 20)))


def draw_text(rng):
    return "".join(rng.choice('abcäöü€😀 "\\/\n0123') for _ in range(rng.randrange(12)))


LEAVES = [
    PayloadType(str, draw_text),
    PayloadType(int, lambda rng: rng.choice([0, -1, 2**63, -(2**80), rng.randrange(1000)])),
    PayloadType(float, lambda rng: rng.choice([0.1, 1e300, -5e-324, float(rng.randrange(100)), rng.random()])),
    PayloadType(bool, lambda rng: rng.random() < 0.5),
    PayloadType(Decimal, draw_decimal),
    PayloadType(datetime, draw_datetime),
    PayloadType(date, lambda rng: date(1, 1, 1) + timedelta(rng.randrange(3_652_000))),
    PayloadType(time, draw_time),
    PayloadType(
        timedelta,
        lambda rng: (
            rng.choice([1, -1]) * timedelta(rng.choice([0, 1, 400, 10**6]), rng.randrange(86400), rng.choice([0, 5]))
        ),
    ),
    PayloadType(uuid.UUID, lambda rng: uuid.UUID(int=rng.getrandbits(128))),
    PayloadType(bytes, lambda rng: rng.randbytes(rng.randrange(12))),
    *(PayloadType(kind, lambda rng, kind=kind: rng.choice(list(kind))) for kind in (Color, Size, Unit, Place, Price)),
    PayloadType(Access, lambda rng: rng.choice([Access.READ, Access.WRITE, Access.READ | Access.WRITE])),
    PayloadType(Literal["a", 2, Color.RED], lambda rng: rng.choice(["a", 2, Color.RED])),
    PayloadType(Literal[b"\xff", "b"], lambda rng: rng.choice([b"\xff", "b"])),
]
KEYS = [leaf for leaf in LEAVES if leaf.annotation in (str, int, uuid.UUID, date, Decimal, bytes, Color, Unit, Size)]
#: Members of a union that differ in JSON.
UNIONS = [
    (date, datetime), (int, Decimal), (Decimal, float), (bytes, int), (int, timedelta), (time, date), (bool, uuid.UUID),
    (str, int), (list[int], Color), (bytes, list[bytes]),
]  # fmt: skip


def draw_type(rng, depth):
    """Return a type with at most *depth* levels of containers."""
    if depth == 0 or rng.random() < 0.35:
        return rng.choice(LEAVES)
    return rng.choice([make_list, make_tuple, make_pair, make_set, make_dict, make_optional, make_union, make_record])(
        rng, depth
    )


def make_list(rng, depth):
    item = draw_type(rng, depth - 1)
    return PayloadType(list[item.annotation], lambda rng: draw_items(item, rng), is_hashable=False)


def make_tuple(rng, depth):
    item = draw_type(rng, depth - 1)
    return PayloadType(tuple[item.annotation, ...], lambda rng: tuple(draw_items(item, rng)), item.is_hashable)


def make_pair(rng, depth):
    one, two = draw_type(rng, depth - 1), draw_type(rng, depth - 1)
    return PayloadType(
        tuple[one.annotation, two.annotation],
        lambda rng: (one.draw(rng), two.draw(rng)),
        one.is_hashable and two.is_hashable,
    )


def make_set(rng, depth):
    item = draw_type(rng, depth - 1)
    while not item.is_hashable:
        item = draw_type(rng, depth - 1)
    if rng.random() < 0.5:
        return PayloadType(set[item.annotation], lambda rng: set(draw_items(item, rng)), is_hashable=False)
    return PayloadType(frozenset[item.annotation], lambda rng: frozenset(draw_items(item, rng)))


def make_dict(rng, depth):
    key, item = rng.choice(KEYS), draw_type(rng, depth - 1)
    return PayloadType(
        dict[key.annotation, item.annotation],
        lambda rng: {key.draw(rng): item.draw(rng) for _ in range(rng.randrange(3))},
        is_hashable=False,
    )


def make_optional(rng, depth):
    item = draw_type(rng, depth - 1)
    return PayloadType(item.annotation | None, lambda rng: rng.choice([None, item.draw(rng)]), item.is_hashable)


def make_union(rng, _depth):
    members = list(rng.choice(UNIONS))
    rng.shuffle(members)
    draws = {leaf.annotation: leaf.draw for leaf in LEAVES}
    draws |= {list[int]: lambda rng: [1, 2], list[bytes]: lambda rng: [rng.randbytes(3)]}
    return PayloadType(
        members[0] | members[1],
        lambda rng: draws[rng.choice(members)](rng),
        is_hashable=not any(hasattr(member, "__origin__") for member in members),
    )


def draw_items(item, rng):
    return [item.draw(rng) for _ in range(rng.randrange(4))]


# -- types with fields -----------------------------------------------------------------------------------


def draw_fields(rng, depth):
    names = rng.sample(["id", "total", "lines", "at", "type", "schema", "config", "mode", "größe"], rng.randint(1, 4))
    return {name: draw_type(rng, depth - 1) for name in names if not keyword.iskeyword(name)}


def make_record(rng, depth):
    maker = rng.choice(
        [make_dataclass, make_model, make_root_model, make_typed_dict, make_named_tuple, make_pydantic_dataclass]
    )
    return maker(rng, depth)


def build(kind, fields, *, is_hashable=False):
    return PayloadType(
        kind,
        lambda rng: kind(**{name: field.draw(rng) for name, field in fields.items()}),
        is_hashable and all(field.is_hashable for field in fields.values()),
    )


def make_dataclass(rng, depth):
    fields, is_frozen = draw_fields(rng, depth), rng.random() < 0.5
    annotations = [(name, field.annotation) for name, field in fields.items()]
    kind = dataclasses.make_dataclass("Order", annotations, frozen=is_frozen, slots=rng.random() < 0.5)
    return build(kind, fields, is_hashable=is_frozen)


def make_pydantic_dataclass(rng, depth):
    fields = draw_fields(rng, depth)
    namespace = {"__annotations__": {name: field.annotation for name, field in fields.items()}, "__module__": __name__}
    config = ConfigDict(alias_generator=str.upper, validate_by_name=True) if rng.random() < 0.3 else ConfigDict()
    kind = pydantic.dataclasses.dataclass(type("CheckedOrder", (), namespace), frozen=True, config=config)
    return build(kind, fields, is_hashable=True)


def make_model(rng, depth):
    fields, is_frozen = draw_fields(rng, depth), rng.random() < 0.5
    config = ConfigDict(frozen=is_frozen, strict=rng.random() < 0.3, populate_by_name=True, protected_namespaces=())
    makers = [
        lambda name: Field(),
        lambda name: Field(alias=name.title()),
        lambda name: Field(serialization_alias=f"{name}-sent"),
        lambda name: Field(validation_alias=f"{name}-read", serialization_alias=f"{name}-sent"),
    ]
    definitions = {f"{name}_": (field.annotation, rng.choice(makers)(name)) for name, field in fields.items()}
    kind = create_model("OrderModel", __config__=config, **definitions)
    return build(kind, {f"{name}_": field for name, field in fields.items()}, is_hashable=is_frozen)


def make_root_model(rng, depth):
    item = draw_type(rng, depth - 1)
    kind = RootModel[item.annotation]
    return PayloadType(kind, lambda rng: kind(item.draw(rng)), is_hashable=False)


def make_typed_dict(rng, depth):
    fields = draw_fields(rng, depth)
    kind = TypedDict("OrderFields", {name: field.annotation for name, field in fields.items()})
    kind.__module__ = __name__
    return build(kind, fields)


def make_named_tuple(rng, depth):
    fields = draw_fields(rng, depth)
    kind = NamedTuple("OrderRow", [(name, field.annotation) for name, field in fields.items()])
    return build(kind, fields, is_hashable=True)


def draw_payload(seed):
    """Return a type with fields, nested up to four levels, and a value of it."""
    rng = random.Random(seed)
    payload_type = make_record(rng, 4)
    return payload_type.annotation, payload_type.draw(rng)


def rebuild(value):  # noqa: PLR0911 - a return for each type
    """Return a value that equals *value* and was made otherwise: another time zone, sets filled in another order."""
    match value:
        case datetime() if value.tzinfo is not None:
            return value.astimezone(timezone(timedelta(hours=-3)))
        case set() | frozenset():
            return type(value)(reversed([rebuild(each) for each in value]))
        case dict():
            return {rebuild(key): rebuild(each) for key, each in value.items()}
        case list():
            return [rebuild(each) for each in value]
        case tuple():
            items = [rebuild(each) for each in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        case pydantic.BaseModel():
            return value.model_copy(update={name: rebuild(each) for name, each in value})
        case _ if dataclasses.is_dataclass(value):
            changes = {field.name: rebuild(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return dataclasses.replace(value, **changes)
        case _:
            return value
