"""The wire: what is written comes back, what is hostile does not get in, and nothing is shown."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ergon_framework.connectors.base import UndecodableError
from ergon_framework.connectors.codec import (
    WIRE,
    HeaderFormat,
    JsonCodec,
    UnencodableError,
    decode,
    encode_unchanged,
    read_not_before,
)
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.payload_json import MAX_DEPTH
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt
from ergon_framework.task.decorators import consumer
from ergon_framework.transaction import MAX_HISTORY, Transaction
from ergon_framework.worker.policies import ConsumerPolicy

CODEC = JsonCodec()
WIRE_SPEC_PATH = Path(__file__).parents[3] / "docs" / "spec" / "wire.md"
HEADERS = {"ergon-id": "order-7"}

visible = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=256)
texts = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=256).filter(
    lambda text: text == text.strip()
)
moments = st.floats(0, 4e9).map(lambda moment: round(moment, 6))
sentences = st.text(max_size=40)
attempts = st.builds(
    Attempt,
    attempt=st.integers(0, 99),
    category=st.sampled_from(Category),
    code=st.none() | sentences,
    error=sentences,
    at=moments,
    delay=st.none() | moments,
)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | sentences,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(sentences, inner, max_size=4),
    max_leaves=20,
)
transactions = st.builds(
    Transaction,
    payloads,
    id=visible,
    source=st.just("") | texts,
    type=st.just("") | texts,
    schema_version=st.integers(0, 999_999_999),
    key=st.none() | texts,
    tenant=st.none() | texts,
    correlation=st.none() | texts,
    causation=st.none() | visible,
    created_at=st.none() | moments,
    expires_at=st.none() | moments,
    attempts=st.integers(0, 999_999_999),
    not_before=st.none() | moments,
    priority=st.integers(-99_999_999, 999_999_999),
    history=st.lists(attempts, max_size=MAX_HISTORY).map(tuple),
    trace=st.dictionaries(st.sampled_from(["traceparent", "tracestate", "baggage"]), visible),
)


# -- round trip --------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-03")
@given(transactions)
def test_a_transaction_is_equal_after_a_round_trip(transaction):
    body, headers = CODEC.encode(transaction)
    assert CODEC.decode(body, headers) == transaction


@given(transactions)
def test_every_header_is_a_string_within_its_length(transaction):
    _, headers = CODEC.encode(transaction)
    max_lengths = {row.header: row.max_chars for row in WIRE}
    assert all(type(text) is str and 0 < len(text) <= max_lengths[header] for header, text in headers.items())


def test_default_values_are_not_written_as_headers():
    assert CODEC.encode(Transaction(id="order-7")) == (b"null", {"ergon-id": "order-7"})


def test_the_source_is_the_queue_where_no_header_names_one():
    assert CODEC.decode(b"1", HEADERS, source="orders").source == "orders"
    assert CODEC.decode(b"1", {**HEADERS, "ergon-source": "shop"}, source="orders").source == "shop"


def test_times_are_rfc_3339_in_utc():
    _, headers = CODEC.encode(Transaction(id="order-7", created_at=1767225599.25))
    assert headers["ergon-created-at"] == "2025-12-31T23:59:59.250000Z"


@pytest.mark.parametrize(
    "text", ["2025-12-31T23:59:59Z", "2025-12-31T23:59:59+00:00", "2025-12-31T23:59:59.000000000Z"]
)
def test_every_notation_of_utc_is_parsed(text):
    assert CODEC.decode(b"1", {**HEADERS, "ergon-expires-at": text}).expires_at == 1767225599.0


def test_the_last_ten_attempts_are_encoded():
    history = tuple(Attempt(attempt=number, category=Category.SYSTEM) for number in range(15))
    body, headers = CODEC.encode(Transaction(id="order-7", history=history))
    assert CODEC.decode(body, headers).history == history[-10:]


def test_a_history_that_is_too_long_loses_its_oldest():
    history = tuple(Attempt(attempt=number, category=Category.SYSTEM, error="ü" * 500) for number in range(10))
    body, headers = CODEC.encode(Transaction(id="order-7", history=history))
    decoded_history = CODEC.decode(body, headers).history
    assert 0 < len(decoded_history) < 10
    assert decoded_history == history[-len(decoded_history) :]


def test_unknown_headers_are_ignored():
    assert CODEC.decode(b"1", {**HEADERS, "x-death": "\x00", "ergon-future": "1"}).id == "order-7"


def test_only_w3c_trace_headers_are_encoded():
    _, headers = CODEC.encode(Transaction(id="order-7", trace={"traceparent": "00-a-b-01", "x-b3": "1"}))
    assert headers == {"ergon-id": "order-7", "traceparent": "00-a-b-01"}


@pytest.mark.parametrize("text", ["", " ", "a\nb", "x" * 513])
def test_an_invalid_trace_header_does_not_make_a_message_undecodable(text):
    assert CODEC.decode(b"1", {**HEADERS, "traceparent": text}).trace == {}


# -- hostile headers -----------------------------------------------------------------------------------

HOSTILE_HEADERS = {
    HeaderFormat.ID: ["", " ", "a b", "a\x00", "a\r\nergon-tenant: other", "\u200b", "é", "x" * 257],
    HeaderFormat.TEXT: ["", " x", "x ", "a\nb", "a\x7f", "\u2028", "\ud800", "x" * 257],
    HeaderFormat.COUNT: ["", "-1", "+1", "1.0", " 1", "1_0", "٣", "9" * 10, "9" * 5000, "nan"],
    HeaderFormat.INTEGER: ["", "-", "--1", "+1", "1.0", " 1", "1_0", "٣", "1-", "9" * 10, "nan"],
    HeaderFormat.TIME: [
        "",
        "now",
        "0",
        "2025-12-31",
        "2025-12-31T23:59:59",
        "2025-12-31T23:59:59+01:00",
        "2025-13-31T23:59:59Z",
        "2025-12-31T23:59:60Z",
        "0000-01-01T00:00:00Z",
        "٢025-12-31T23:59:59Z",
    ],
    HeaderFormat.HISTORY: [
        "",
        "{}",
        "1",
        "[1]",
        "[{}]",
        '[{"attempt": NaN, "category": "SYSTEM"}]',
        "[" * 16000,
        "x" * 16385,
    ],
}


@pytest.mark.spec("CNN-05")
@pytest.mark.parametrize(
    "header,text", [(row.header, text) for row in WIRE for text in HOSTILE_HEADERS.get(row.format, ())]
)
def test_a_hostile_header_is_undecodable(header, text):
    with pytest.raises(UndecodableError, match=header):
        CODEC.decode(b"1", {**HEADERS, header: text})


@pytest.mark.parametrize("value", [None, b"order-7", 7, ["order-7"]])
def test_a_header_that_is_not_a_string_is_undecodable(value):
    with pytest.raises(UndecodableError, match="ergon-id"):
        CODEC.decode(b"1", {"ergon-id": value})


def test_without_an_id_there_is_no_transaction():
    with pytest.raises(UndecodableError, match="ergon-id"):
        CODEC.decode(b"1", {})


# -- hostile bodies ------------------------------------------------------------------------------------

HOSTILE_BODIES = {
    "nothing": b"",
    "half a document": b'{"a": ',
    "two documents": b"1 2",
    "not utf-8": b'"\xff"',
    "utf-16": '"a"'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf1",
    "NaN": b"[NaN]",
    "infinity": b"-Infinity",
    "beyond a float": b"1e999",
    "beyond an integer": b"9" * 5000,
    "half a surrogate pair": b'"\\ud800"',
    "nested too deep": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    "nested without end": b'{"a":' * 100_000,
    "a control character": b'"\n"',
}


@pytest.mark.spec("CNN-05")
@pytest.mark.parametrize("body", HOSTILE_BODIES.values(), ids=HOSTILE_BODIES)
def test_a_hostile_body_is_undecodable(body):
    with pytest.raises(UndecodableError, match=str(len(body))):
        CODEC.decode(body, HEADERS)


@given(st.binary(max_size=200))
@example(b'"' + b'\\"' * 50)
def test_bytes_either_decode_to_an_encodable_transaction_or_are_undecodable(body):
    try:
        transaction = CODEC.decode(body, HEADERS)
    except UndecodableError:
        return
    encoded, headers = CODEC.encode(transaction)
    assert CODEC.decode(encoded, headers) == transaction


def test_depth_counts_brackets_except_those_in_strings():
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert CODEC.decode(deepest, HEADERS)
    text = '[{"\\"' * 200
    wide = [[text]] * 200
    assert CODEC.decode(json.dumps(wide).encode(), HEADERS).payload == wide


def test_a_large_hostile_body_is_rejected_in_linear_time():
    quotes = b'"' + b'\\"' * 100_000 + b"[" * 65 + b"\\"
    started_at = time.perf_counter()
    with pytest.raises(UndecodableError):
        CODEC.decode(quotes, HEADERS)
    # Looking from every quote to the end would take far longer.
    assert time.perf_counter() - started_at < 5


def test_each_codec_has_its_own_size_limit():
    small = JsonCodec(max_bytes=10)
    assert small.decode(b'"12345678"', HEADERS).payload == "12345678"
    with pytest.raises(UndecodableError, match="is 11 bytes, the maximum is 10"):
        small.decode(b'"123456789"', HEADERS)
    with pytest.raises(UnencodableError, match="is 11 bytes, the maximum is 10"):
        small.encode(Transaction("123456789", id="order-7"))
    assert JsonCodec().max_bytes == 1024 * 1024


def test_max_bytes_must_be_at_least_one():
    with pytest.raises(ValueError, match="max_bytes"):
        JsonCodec(max_bytes=0)


@pytest.mark.spec("CON-26")
@pytest.mark.parametrize("body", [b'{"card": "4111', b'"4111\xff"', b'["4111", NaN]', b"4111" * 2000])
def test_an_error_shows_no_payload_not_even_through_its_causes(body):
    with pytest.raises(UndecodableError) as caught:
        CODEC.decode(body, HEADERS)
    error = caught.value
    assert "4111" not in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None
    assert error.final


# -- what cannot be written --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [float("nan"), float("inf"), object(), {"a": 1j}, "\ud800", {(1, 2): 3}],
    ids=["nan", "inf", "object", "complex", "half a pair", "a tuple as key"],
)
def test_a_payload_that_json_cannot_represent_is_unencodable(payload):
    with pytest.raises(UnencodableError, match="order-7") as caught:
        CODEC.encode(Transaction(payload, id="order-7"))
    assert caught.value.__context__ is None


class BytesCodec(JsonCodec):
    """A codec of a third party whose payloads are bytes."""

    def encode(self, transaction):
        return bytes(transaction.payload), super().encode(transaction.replace(payload=None))[1]

    def decode(self, body, headers, *, source=""):
        return super().decode(b"null", headers, source=source).replace(payload=body)


def test_the_body_of_an_undecodable_message_is_not_encoded_as_a_value():
    undecodable = decode(CODEC, b"not JSON", {}, source="orders").transaction
    with pytest.raises(UnencodableError, match="could not be decoded"):
        encode_unchanged(CODEC, undecodable)
    assert encode_unchanged(CODEC, Transaction({"a": 1}, id="order-7")) == (b'{"a":1}', HEADERS)
    assert encode_unchanged(BytesCodec(), undecodable)[0] == b"not JSON"


def test_a_payload_that_contains_itself_is_unencodable():
    payload: list = []
    payload.append(payload)
    with pytest.raises(UnencodableError):
        CODEC.encode(Transaction(payload, id="order-7"))


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "x" * 257},
        {"id": "a b"},
        {"key": ""},
        {"tenant": "a\nb"},
        {"schema_version": -1},
        {"schema_version": 1.5},
        {"attempts": True},
        {"created_at": float("nan")},
        {"created_at": float("inf")},
        {"expires_at": 1e15},
        {"history": (Attempt(attempt=0, category=Category.SYSTEM, at=float("nan")),)},
    ],
    ids=repr,
)
def test_fields_that_could_not_be_decoded_are_unencodable(fields):
    with pytest.raises(UnencodableError, match=next(iter(fields))):
        CODEC.encode(Transaction(**{"id": "order-7"} | fields))


# -- stand-ins ---------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-05")
def test_the_stand_in_of_an_undecodable_message_has_its_bytes_and_a_stable_id():
    first, second = (decode(CODEC, b"\xff", {"a": "b"}, source="orders") for _ in range(2))
    other = decode(CODEC, b"\xfe", {"a": "b"}, source="orders")
    assert first.transaction.payload == b"\xff"
    assert first.transaction.id == second.transaction.id != other.transaction.id
    assert first.transaction.source == "orders"
    assert isinstance(first.error, UndecodableError)


def test_the_stand_in_keeps_a_valid_id():
    assert decode(CODEC, b"\xff", HEADERS, source="").transaction.id == "order-7"
    assert decode(CODEC, b"1", {"ergon-id": "a b"}, source="").transaction.id.startswith("undecodable-")


def test_an_error_in_a_codec_makes_the_message_undecodable():
    class FailingCodec(JsonCodec):
        def decode(self, body, headers, *, source=""):
            return {}["4111"]

    stand_in = decode(FailingCodec(), b"4111", HEADERS, source="")
    assert "KeyError" in str(stand_in.error)
    assert "4111" not in str(stand_in.error)


# -- the spec ----------------------------------------------------------------------------------------------


def test_the_documented_header_table_equals_the_table_in_code():
    rows = [line.strip("|\n ").split("|") for line in WIRE_SPEC_PATH.read_text().splitlines() if line.startswith("| `")]
    documented = [tuple(cell.strip(" `") for cell in row[:4]) for row in rows]
    assert documented == [(row.field, row.header, row.format.value, str(row.max_chars)) for row in WIRE]


def test_every_field_of_a_transaction_but_the_payload_has_a_header():
    assert {row.field for row in WIRE} == set(Transaction.__mro__[1].__slots__) - {"payload"}


def test_the_value_of_an_absent_header_is_the_transaction_default():
    bare = Transaction(id="order-7")
    assert all(getattr(bare, row.field) == row.default for row in WIRE if row.field not in ("id", "trace"))


# -- the short ways -------------------------------------------------------------------------------

SECONDS = ["2026-11-16T08:40:02", "1969-12-31T23:59:59", "9999-12-31T23:59:59"]
FRACTIONS = ["", ".0", ".5", ".123456", ".1234567", ".999999999"]


@pytest.mark.parametrize("zone", ["Z", "+00:00"])
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("second", SECONDS)
def test_times_are_parsed_like_datetime_fromisoformat(second, fraction, zone):
    text = second + fraction + zone
    created_at = CODEC.decode(b"1", HEADERS | {"ergon-created-at": text}).created_at
    assert created_at == datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize("second", [*SECONDS, "2026-13-16T08:40:02", "2026-11-16T24:00:00"])
@pytest.mark.parametrize(
    "suffix", ["", "z", "+01:00", ".Z", ".Z5", ".1", ".1z", ".1ZZ", ".1 Z", ".-1Z", ".1_0Z", ".\u0661Z", ".1234567890Z"]
)
def test_an_invalid_time_is_undecodable(second, suffix):
    with pytest.raises(UndecodableError, match="is not a time"):
        CODEC.decode(b"1", HEADERS | {"ergon-created-at": second + suffix})


@pytest.mark.parametrize(
    "second", ["2026-13-16T08:40:02", "2026-11-16T24:00:00", "2026-11-16 08:40:02", "20261116T084002", "2026-W47-1", ""]
)
def test_an_invalid_time_with_a_fraction_is_undecodable(second):
    for fraction in FRACTIONS:
        with pytest.raises(UndecodableError, match="is not a time"):
            CODEC.decode(b"1", HEADERS | {"ergon-created-at": f"{second}{fraction}Z"})


@pytest.mark.parametrize("body", [b" 1", b"1 ", b"\n[1]\n", b'\t{"a": 1}\r\n'])
def test_whitespace_around_a_body_is_ignored(body):
    assert CODEC.decode(body, HEADERS).payload == json.loads(body)


@pytest.mark.parametrize("body", [b"", b" ", b"1 2", b"[1]]", b"{}x", b"nul", b'"a', b"\xa01"])
def test_a_body_that_is_not_exactly_one_json_value_is_undecodable(body):
    with pytest.raises(UndecodableError):
        CODEC.decode(body, HEADERS)


@pytest.mark.spec("SEC-23")
@pytest.mark.parametrize(
    "body", [b'{"a": 1, "a": 2}', b'[{"b": {"a": 1, "c": 0, "\\u0061": 1}}]'], ids=["plain", "escaped"]
)
def test_a_repeated_key_of_a_body_is_undecodable(body):
    with pytest.raises(UndecodableError, match="has a duplicate key in an object"):
        JsonCodec().decode(body, {"ergon-id": "order-1"})


@pytest.mark.spec("SEC-23")
@pytest.mark.parametrize(
    "name, text",
    [
        ("ergon-history", '[{"attempt": 1, "attempt": 9, "category": "SYSTEM", "error": "x"}]'),
        ("ergon-deferral", '{"count": 1, "count": 9, "since": 1.0, "at": 1.0, "until": 2.0}'),
    ],
)
def test_a_repeated_key_of_a_header_is_undecodable(name, text):
    with pytest.raises(UndecodableError, match=f"header '{name}'"):
        JsonCodec().decode(b"{}", {"ergon-id": "order-1", name: text})


@pytest.mark.spec("SEC-23")
@pytest.mark.invariant
def test_a_message_with_a_repeated_key_is_a_dead_letter_with_its_bytes():
    orders = MemoryConnector("orders", codec=JsonCodec())
    orders.inject(b'{"amount": 1, "amount": 900}', {"ergon-id": "order-1"})
    handled = []

    @consumer(orders)
    def charge(order):
        handled.append(order)

    charge.run(ConsumerPolicy())
    (record,) = orders.dead_letters
    assert handled == []
    assert (record.reason, record.raw) == ("undecodable", b'{"amount": 1, "amount": 900}')


@pytest.mark.parametrize(
    "headers, not_before",
    [
        ({}, None),
        ({"ergon-not-before": "2025-12-31T23:59:59.250000Z"}, 1767225599.25),
        ({"ergon-not-before": "soon"}, None),
        ({"ergon-not-before": 7}, None),
    ],
)
def test_the_earliest_time_of_a_delivery_is_read_from_the_headers_alone(headers, not_before):
    assert read_not_before(headers) == not_before


@pytest.mark.parametrize("priority", [True, 1.5, 10**9])
def test_a_priority_that_the_header_cannot_hold_is_not_encoded(priority):
    transaction = Transaction(id="order-7")
    # The constructor rejects the wrong types already; a subclass may not.
    object.__setattr__(transaction, "priority", priority)
    with pytest.raises(UnencodableError, match="priority of transaction 'order-7' does not fit"):
        CODEC.encode(transaction)
