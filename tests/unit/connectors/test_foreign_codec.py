"""Third-party messages: their id is found, or they are dead-lettered; it is never invented."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.connectors.base import Defer, UndecodableError
from ergon_framework.connectors.codec import MAX_DEPTH, JsonCodec, decode
from ergon_framework.connectors.foreign_codec import ForeignCodec, from_header, from_json_pointer
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.decorators import consumer
from ergon_framework.transaction import Transaction

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def decode_payload(codec, payload, headers=(), source="orders"):
    return codec.decode(json.dumps(payload).encode(), dict(headers), source=source)


# -- where the id is ----------------------------------------------------------------------------------


@pytest.mark.spec("CNN-16")
@pytest.mark.parametrize(
    "rule, expected_id",
    [
        (from_header("x-order"), "h-7"),
        (from_json_pointer("/order/id"), "7"),
        (from_json_pointer("/lines/1/sku"), "b"),
        (from_json_pointer("/a~1b/c~0d"), "odd"),
        (from_json_pointer("/~01"), "tilde"),
        (from_json_pointer("//"), "nameless"),
        (lambda payload, headers: f"{headers['x-order']}/{payload['order']['id']}", "h-7/7"),
    ],
)
def test_the_id_comes_from_a_header_a_json_pointer_or_a_function(rule, expected_id):
    payload = {
        "order": {"id": 7},
        "lines": [{"sku": "a"}, {"sku": "b"}],
        "a/b": {"c~d": "odd"},
        "~1": "tilde",
        "": {"": "nameless"},
    }
    transaction = decode_payload(ForeignCodec(id=rule), payload, {"x-order": "h-7"})
    assert (transaction.id, transaction.source, transaction.payload) == (expected_id, "orders", payload)


@pytest.mark.spec("CNN-16")
@given(st.text(min_size=1, max_size=20), st.integers(-(10**40), 10**40))
def test_a_pointer_finds_the_value_of_any_name(name, value):
    path = "/" + name.replace("~", "~0").replace("/", "~1")
    payload = json.loads(json.dumps({name: [value]}))
    assert ForeignCodec(id=from_json_pointer(f"{path}/0"))._id(payload, {}) == value


@pytest.mark.spec("CNN-16")
def test_a_foreign_codec_without_an_id_rule_is_rejected_with_an_explanation():
    with pytest.raises(ConfigurationError, match=r"need a rule for their id.*from_header\(.*from_json_pointer\("):
        ForeignCodec()


async def async_rule(payload, headers): ...


@pytest.mark.parametrize("rule", ["order", 7, async_rule, dict])
def test_an_invalid_rule_is_rejected_at_start(rule):
    with pytest.raises(ConfigurationError, match="id must be from_header"):
        ForeignCodec(id=rule)
    if rule != "order":
        with pytest.raises(ConfigurationError, match="type must be from_header"):
            ForeignCodec(id=from_header("x"), type=rule)


@pytest.mark.parametrize("path", ["order/id", "/a~2", "/a~", 7, None])
def test_an_invalid_json_pointer_is_rejected_at_start(path):
    with pytest.raises(ConfigurationError, match="invalid JSON pointer"):
        from_json_pointer(path)


@pytest.mark.parametrize("name", ["", None, 3])
def test_an_invalid_header_name_is_rejected_at_start(name):
    with pytest.raises(ConfigurationError, match="name of a header"):
        from_header(name)


@pytest.mark.parametrize("text", ["", " a", "a\n", "x" * 257])
def test_an_invalid_type_is_rejected_at_start(text):
    with pytest.raises(ConfigurationError, match="type of third-party messages"):
        ForeignCodec(id=from_header("x"), type=text)


# -- a message without one ------------------------------------------------------------------------------


@pytest.mark.spec("CNN-16")
@pytest.mark.parametrize(
    "payload",
    [{}, {"order": None}, {"order": {"id": None}}, {"order": {"id": ""}}, [], "order", 7, None, {"order": [1]}],
)
def test_a_message_without_an_id_is_undecodable(payload):
    with pytest.raises(UndecodableError, match=r"from_json_pointer\('/order/id'\) finds no id"):
        decode_payload(ForeignCodec(id=from_json_pointer("/order/id")), payload)


@pytest.mark.parametrize("path", ["/lines/2", "/lines/01", "/lines/-", "/lines/-1", "/lines/x", "/lines/" + "9" * 5000])
def test_an_index_outside_an_array_finds_no_id(path):
    with pytest.raises(UndecodableError, match="finds no id"):
        decode_payload(ForeignCodec(id=from_json_pointer(path)), {"lines": ["a", "b"]})


@pytest.mark.parametrize(
    "value, description",
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
def test_an_invalid_id_is_undecodable_and_not_quoted(value, description):
    with pytest.raises(UndecodableError, match=description) as caught:
        decode_payload(ForeignCodec(id=from_json_pointer("/id")), {"id": value})
    assert "1 to 256 visible ASCII characters" in str(caught.value)
    assert str(value) not in str(caught.value)


def test_a_function_that_fails_makes_the_message_undecodable_and_quotes_nothing():
    def by_order(payload, headers):
        raise KeyError(payload["secret"])

    with pytest.raises(UndecodableError, match=r"by_order for the id .* fails with KeyError") as caught:
        decode_payload(ForeignCodec(id=by_order), {"secret": "4711"})
    assert "4711" not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"NaN", b"[" * (MAX_DEPTH + 1), b'"' + b"x" * 100 + b'"'])
def test_the_limits_of_json_bodies_apply_to_foreign_messages(body):
    with pytest.raises(UndecodableError):
        ForeignCodec(id=from_header("x"), max_bytes=100).decode(body, {"x": "7"}, source="orders")


@pytest.mark.spec("CNN-16")
def test_the_stand_in_of_a_message_without_an_id_is_the_same_at_every_delivery():
    codec = ForeignCodec(id=from_header("x-order"))
    first, second = (decode(codec, b'{"a":1}', {"y": "1"}, source="orders") for _ in range(2))
    assert first.transaction.id == second.transaction.id
    assert first.transaction.payload == b'{"a":1}'


# -- the rest of the envelope ---------------------------------------------------------------------------


def test_key_type_tenant_and_correlation_have_rules_too():
    codec = ForeignCodec(
        id=from_json_pointer("/id"),
        key=from_json_pointer("/customer"),
        type=from_header("kind"),
        tenant=lambda payload, headers: "Käse & Co",
        correlation=from_json_pointer("/case"),
    )
    transaction = decode_payload(codec, {"id": 1, "customer": 12, "case": None}, {"kind": "order.placed"})
    assert (transaction.key, transaction.type, transaction.tenant, transaction.correlation) == (
        "12",
        "order.placed",
        "Käse & Co",
        None,
    )
    assert decode_payload(ForeignCodec(id=from_json_pointer("/id"), type="order"), {"id": 1}).type == "order"
    assert decode_payload(ForeignCodec(id=from_json_pointer("/id")), {"id": 1}).type == ""


def test_an_invalid_key_is_undecodable():
    with pytest.raises(UndecodableError, match="key of a message finds a text of 2 characters"):
        decode_payload(
            ForeignCodec(id=from_json_pointer("/id"), key=from_json_pointer("/key")), {"id": 1, "key": "a\n"}
        )


def test_the_trace_of_a_foreign_producer_is_continued():
    transaction = decode_payload(
        ForeignCodec(id=from_json_pointer("/id")), {"id": 1}, {"traceparent": TRACEPARENT, "x": "y"}
    )
    assert transaction.trace == {"traceparent": TRACEPARENT}


def test_a_message_with_the_frameworks_headers_is_decoded_by_them():
    transaction = Transaction({"id": "other"}, id="order-7", source="shop", key="k", type="order", attempts=2)
    codec = ForeignCodec(id=from_json_pointer("/id"), key=from_json_pointer("/id"), type="foreign")
    assert codec.decode(*JsonCodec().encode(transaction)) == transaction
    assert codec.decode(*codec.encode(transaction)) == transaction


# -- in a queue -----------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-16")
def test_foreign_messages_are_handled_by_id_and_those_without_one_are_dead_lettered():
    orders = MemoryConnector(
        "orders", codec=ForeignCodec(id=from_json_pointer("/order/id"), key=from_header("customer"))
    )
    orders.inject(b'{"order": {"id": 7}}', {"customer": "c"})
    orders.inject(b'{"order": {}}', {"customer": "c"})
    orders.dispatch([Transaction({"order": {}}, id="ours")])
    seen = []

    @consumer(orders)
    def handle(order, transaction: Transaction):
        seen.append((transaction.id, transaction.key))

    report = handle.run()
    assert sorted(seen) == [("7", "c"), ("ours", None)]
    assert report.rejected == {"undecodable": 1}
    [letter] = orders.dead_letters
    assert (letter.reason, letter.raw) == ("undecodable", b'{"order": {}}')


@pytest.mark.spec("CNN-16")
def test_a_deferred_foreign_message_keeps_its_id():
    orders = MemoryConnector("orders", codec=ForeignCodec(id=from_header("x-order")))
    orders.inject(b"{}", {"x-order": "7"})
    seen = []

    @consumer(orders)
    def handle(order, transaction: Transaction):
        seen.append(transaction.id)
        if len(seen) == 1:
            return Defer(0, attempts=1)
        return None

    handle.run()
    handle.run()
    assert seen == ["7", "7"]
