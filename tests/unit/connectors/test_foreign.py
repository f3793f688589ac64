"""Foreign messages: their id is found, or they are put aside; it is never made up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.connectors.base import Later, UndecodableError
from ergon_framework.connectors.codec import MAX_DEPTH, JsonCodec, decode
from ergon_framework.connectors.foreign import ForeignCodec, header, pointer
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.decorators import consumer
from ergon_framework.transaction import Transaction

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def read(codec, payload, headers=(), source="orders"):
    return codec.decode(json.dumps(payload).encode(), dict(headers), source=source)


# -- where the id is ----------------------------------------------------------------------------------


@pytest.mark.spec("CNN-16")
@pytest.mark.parametrize(
    "rule, found",
    [
        (header("x-order"), "h-7"),
        (pointer("/order/id"), "7"),
        (pointer("/lines/1/sku"), "b"),
        (pointer("/a~1b/c~0d"), "odd"),
        (pointer("/~01"), "tilde"),
        (pointer("//"), "nameless"),
        (lambda payload, headers: f"{headers['x-order']}/{payload['order']['id']}", "h-7/7"),
    ],
)
def test_the_id_comes_from_a_header_a_json_pointer_or_a_function(rule, found):
    payload = {
        "order": {"id": 7},
        "lines": [{"sku": "a"}, {"sku": "b"}],
        "a/b": {"c~d": "odd"},
        "~1": "tilde",
        "": {"": "nameless"},
    }
    transaction = read(ForeignCodec(id=rule), payload, {"x-order": "h-7"})
    assert (transaction.id, transaction.source, transaction.payload) == (found, "orders", payload)


@pytest.mark.spec("CNN-16")
@given(st.text(min_size=1, max_size=20), st.integers(-(10**40), 10**40))
def test_a_pointer_finds_what_any_name_holds(name, value):
    path = "/" + name.replace("~", "~0").replace("/", "~1")
    payload = json.loads(json.dumps({name: [value]}))
    assert ForeignCodec(id=pointer(f"{path}/0"))._id(payload, {}) == value


@pytest.mark.spec("CNN-16")
def test_a_foreign_codec_without_an_id_rule_is_refused_with_words():
    with pytest.raises(ConfigurationError, match=r"need a rule for their id.*header\(.*pointer\("):
        ForeignCodec()


async def later(payload, headers): ...


@pytest.mark.parametrize("rule", ["order", 7, later, dict])
def test_what_is_no_rule_is_refused_at_start(rule):
    with pytest.raises(ConfigurationError, match="id must be header"):
        ForeignCodec(id=rule)
    if rule != "order":
        with pytest.raises(ConfigurationError, match="type must be header"):
            ForeignCodec(id=header("x"), type=rule)


@pytest.mark.parametrize("path", ["order/id", "/a~2", "/a~", 7, None])
def test_what_is_no_pointer_is_refused_at_start(path):
    with pytest.raises(ConfigurationError, match="no JSON pointer"):
        pointer(path)


@pytest.mark.parametrize("name", ["", None, 3])
def test_what_is_no_header_is_refused_at_start(name):
    with pytest.raises(ConfigurationError, match="name of a header"):
        header(name)


@pytest.mark.parametrize("text", ["", " a", "a\n", "x" * 257])
def test_a_type_that_does_not_fit_is_refused_at_start(text):
    with pytest.raises(ConfigurationError, match="type of foreign messages"):
        ForeignCodec(id=header("x"), type=text)


# -- a message without one ------------------------------------------------------------------------------


@pytest.mark.spec("CNN-16")
@pytest.mark.parametrize(
    "payload",
    [{}, {"order": None}, {"order": {"id": None}}, {"order": {"id": ""}}, [], "order", 7, None, {"order": [1]}],
)
def test_a_message_in_which_the_rule_finds_nothing_is_undecodable(payload):
    with pytest.raises(UndecodableError, match=r"pointer\('/order/id'\) finds no id"):
        read(ForeignCodec(id=pointer("/order/id")), payload)


@pytest.mark.parametrize("path", ["/lines/2", "/lines/01", "/lines/-", "/lines/-1", "/lines/x", "/lines/" + "9" * 5000])
def test_a_place_that_an_array_does_not_have_is_nothing(path):
    with pytest.raises(UndecodableError, match="finds no id"):
        read(ForeignCodec(id=pointer(path)), {"lines": ["a", "b"]})


@pytest.mark.parametrize(
    "value, told",
    [
        ("two words", "a text of 9 characters"),
        ("x" * 257, "a text of 257 characters"),
        ("größe", "a text of 5 characters"),
        (True, "a bool"),
        (1.0, "a float"),
        ({"no": 1}, "a dict"),
        ([1], "a list"),
        (10**100, "a int"),
    ],
)
def test_what_cannot_be_an_id_is_undecodable_and_not_quoted(value, told):
    with pytest.raises(UndecodableError, match=told) as caught:
        read(ForeignCodec(id=pointer("/id")), {"id": value})
    assert "1 to 256 visible ASCII characters" in str(caught.value)
    assert str(value) not in str(caught.value)


def test_a_function_that_fails_makes_the_message_undecodable_and_quotes_nothing():
    def by_order(payload, headers):
        raise KeyError(payload["secret"])

    with pytest.raises(UndecodableError, match=r"by_order for the id .* fails with KeyError") as caught:
        read(ForeignCodec(id=by_order), {"secret": "4711"})
    assert "4711" not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"NaN", b"[" * (MAX_DEPTH + 1), b'"' + b"x" * 100 + b'"'])
def test_the_limits_of_json_bodies_hold_for_foreign_ones(body):
    with pytest.raises(UndecodableError):
        ForeignCodec(id=header("x"), max_bytes=100).decode(body, {"x": "7"}, source="orders")


@pytest.mark.spec("CNN-16")
def test_the_stand_in_of_what_has_no_id_is_the_same_at_every_delivery():
    codec = ForeignCodec(id=header("x-order"))
    first, second = (decode(codec, b'{"a":1}', {"y": "1"}, source="orders") for _ in range(2))
    assert first.transaction.id == second.transaction.id
    assert first.transaction.payload == b'{"a":1}'


# -- the rest of the envelope ---------------------------------------------------------------------------


def test_key_type_tenant_and_correlation_have_rules_too():
    codec = ForeignCodec(
        id=pointer("/id"),
        key=pointer("/customer"),
        type=header("kind"),
        tenant=lambda payload, headers: "Käse & Co",
        correlation=pointer("/case"),
    )
    found = read(codec, {"id": 1, "customer": 12, "case": None}, {"kind": "order.placed"})
    assert (found.key, found.type, found.tenant, found.correlation) == ("12", "order.placed", "Käse & Co", None)
    assert read(ForeignCodec(id=pointer("/id"), type="order"), {"id": 1}).type == "order"
    assert read(ForeignCodec(id=pointer("/id")), {"id": 1}).type == ""


def test_a_key_that_does_not_fit_is_undecodable():
    with pytest.raises(UndecodableError, match="key of a foreign message finds a text of 2 characters"):
        read(ForeignCodec(id=pointer("/id"), key=pointer("/key")), {"id": 1, "key": "a\n"})


def test_the_trace_of_a_foreign_producer_is_continued():
    found = read(ForeignCodec(id=pointer("/id")), {"id": 1}, {"traceparent": PARENT, "x": "y"})
    assert found.trace == {"traceparent": PARENT}


def test_what_carries_our_headers_is_read_as_ours():
    ours = Transaction("order-7", {"id": "other"}, source="shop", key="k", type="order", attempts=2)
    codec = ForeignCodec(id=pointer("/id"), key=pointer("/id"), type="foreign")
    assert codec.decode(*JsonCodec().encode(ours)) == ours
    assert codec.decode(*codec.encode(ours)) == ours


# -- in a queue -----------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-16")
def test_foreign_messages_are_handled_under_their_id_and_those_without_one_are_dead_letters():
    orders = MemoryConnector("orders", codec=ForeignCodec(id=pointer("/order/id"), key=header("customer")))
    orders.receive(b'{"order": {"id": 7}}', {"customer": "c"})
    orders.receive(b'{"order": {}}', {"customer": "c"})
    orders.dispatch([Transaction("ours", {"order": {}})])
    seen = []

    @consumer(orders)
    def handle(order, transaction: Transaction):
        seen.append((transaction.id, transaction.key))

    report = handle.run()
    assert sorted(seen) == [("7", "c"), ("ours", None)]
    assert report.refused == {"undecodable": 1}
    [letter] = orders.dead_letters
    assert (letter.reason, letter.raw) == ("undecodable", b'{"order": {}}')


@pytest.mark.spec("CNN-16")
def test_a_foreign_message_that_comes_later_keeps_its_id():
    orders = MemoryConnector("orders", codec=ForeignCodec(id=header("x-order")))
    orders.receive(b"{}", {"x-order": "7"})
    seen = []

    @consumer(orders)
    def handle(order, transaction: Transaction):
        seen.append(transaction.id)
        if len(seen) == 1:
            return Later(0, attempts=1)
        return None

    handle.run()
    handle.run()
    assert seen == ["7", "7"]
