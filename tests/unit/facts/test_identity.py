"""Canonical JSON, digests and ids: the vectors of RFC 8785 and our own."""

from __future__ import annotations

import struct
import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from enum import IntEnum

import pytest

from ergon_framework.errors import Category
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.identity import (
    MAX_NESTING_DEPTH,
    business_id,
    canonical_json,
    canonical_json_of_parsed,
    digest_parts,
    event_id,
    format_float_es,
    parse_strict_json,
    uuid5_id,
)

#: Appendix B of RFC 8785: the bits of a double, and how it is written.
NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}


@pytest.mark.spec("FAC-03")
@pytest.mark.parametrize("bits, written", NUMBERS.items())
def test_numbers_are_written_as_ecmascript_does(bits, written):
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert format_float_es(value) == canonical_json(value) == written


@pytest.mark.spec("FAC-03")
def test_the_example_of_the_rfc_is_reproduced():
    text = (
        '{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],'
        '"string": "\\u20ac$\\u000F\\u000aA\'\\u0042\\u0022\\u005c\\\\\\"\\/","literals": [null, true, false]}'
    )
    assert canonical_json(parse_strict_json(text)) == (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )


@pytest.mark.spec("FAC-03")
def test_keys_are_ordered_by_their_code_units():
    keys = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    written = canonical_json(dict.fromkeys(keys, 0))
    assert list(parse_strict_json(written)) == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


@pytest.mark.spec("FAC-03")
def test_characters_are_escaped_as_the_rfc_says_and_no_others():
    assert canonical_json('\b\t\n\f\r"\\\x00\x1f\x7f\u2028/é') == '"\\b\\t\\n\\f\\r\\"\\\\\\u0000\\u001f\x7f\u2028/é"'


class Colour(IntEnum):
    RED = 3


def test_subclasses_are_written_by_their_value():
    class Odd(float):
        def __repr__(self):
            return "odd"

    assert canonical_json([Colour.RED, Odd(1.5), True, (1, 2)]) == "[3,1.5,true,[1,2]]"


@pytest.mark.parametrize("value", [2**53, -(2**53), 0, -1])
def test_whole_numbers_up_to_the_limit_are_exact(value):
    assert parse_strict_json(canonical_json(value)) == value


@pytest.mark.parametrize(
    "value, message",
    [
        (2**53 + 1, "outside ±2^53"),
        (-(2**53) - 1, "outside ±2^53"),
        pytest.param(10**5000, "bits is outside ±2^53", id="5001 digits"),
        (float("nan"), "not a JSON number"),
        (float("inf"), "not a JSON number"),
        (-float("inf"), "not a JSON number"),
        ("half \ud800", "half of a surrogate pair"),
        ({"\udc00": 1}, "half of a surrogate pair"),
        ({1: 2}, "keys of a JSON object must be text"),
        (object(), "JSON has no object"),
        (b"bytes", "JSON has no bytes"),
        ({1, 2}, "JSON has no set"),
    ],
)
def test_a_value_without_a_canonical_form_is_rejected(value, message):
    with pytest.raises(InvalidFactError, match=message.replace("^", r"\^")) as caught:
        canonical_json(value)
    assert caught.value.final
    assert caught.value.category is Category.BUSINESS


@pytest.mark.parametrize(
    "text, message",
    [
        ("9007199254740993", "integer 9007199254740993 is outside"),
        ("-9007199254740993", "outside ±2.53"),
        pytest.param("1" * 100_000, "outside ±2.53", id="100,000 digits"),
        ("1e400", "number 1e400 is outside"),
        ("NaN", "NaN is not a JSON number"),
        ("-Infinity", "not a JSON number"),
        ('{"a": 1, "b": 2, "a": 1}', "'a' occurs twice"),
        ("{", "invalid JSON"),
        ("", "invalid JSON"),
        ("1 2", "invalid JSON"),
        pytest.param("[" * 200_000, "levels deep|not JSON", id="200,000 levels"),
        (b"{}", "not bytes"),
    ],
)
def test_ambiguous_json_is_rejected(text, message):
    with pytest.raises(InvalidFactError, match=message):
        parse_strict_json(text)


def test_nesting_has_a_limit():
    def nest(depth):
        value = 1
        for _ in range(depth):
            value = [value]
        return value

    assert canonical_json(nest(MAX_NESTING_DEPTH)).startswith("[" * MAX_NESTING_DEPTH)
    with pytest.raises(InvalidFactError, match="more than 64 levels"):
        canonical_json(nest(MAX_NESTING_DEPTH + 1))
    # As deep in a digest as by itself.
    text = canonical_json(nest(MAX_NESTING_DEPTH))
    assert digest_parts(from_zone="a", to_zone="b", subject="s", predicate="p", object_json=text).startswith("sha256:")


@pytest.mark.spec("FAC-03")
@pytest.mark.parametrize(
    "text, written",
    [
        # By code units the pair of U+1F600 comes before U+FB33; by characters it would come behind it.
        ('{"\ufb33": 1, "\U0001f600": 2}', '{"\U0001f600":2,"\ufb33":1}'),
        ('{"b": "é", "a": 12.50}', '{"a":12.5,"b":"é"}'),
        ("[12.0, -0.0, 1E5, 1e-7, 10.05]", "[12,0,100000,1e-7,10.05]"),
        ("[1e21, 1e16]", "[1e+21,10000000000000000]"),
        ('["12.0", "1e-7"]', '["12.0","1e-7"]'),
        ("[" * 64 + "]" * 64, "[" * 64 + "]" * 64),
    ],
)
def test_parsed_json_has_the_common_canonical_form(text, written):
    assert canonical_json_of_parsed(parse_strict_json(text)) == canonical_json(parse_strict_json(text)) == written


@pytest.mark.spec("FAC-03")
@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 66 + "]" * 66, "more than 64 levels"),
        ("[" * 500 + "]" * 500, "more than 64 levels"),
        (r'{"half": "\ud800"}', "half of a surrogate pair"),
        (r'{"\udc00": 1}', "half of a surrogate pair"),
    ],
)
def test_parsed_json_without_a_canonical_form_is_rejected(text, message):
    with pytest.raises(InvalidFactError, match=message):
        canonical_json_of_parsed(parse_strict_json(text))


FACT_FIELDS = {
    "from_zone": "Plant A",
    "to_zone": "Enterprise",
    "subject": "work_order:WO-2026-001",
    "predicate": "released",
    "object_json": '{"total": 12.50, "lines": [1, 2]}',
}


@pytest.mark.spec("FAC-03")
def test_the_digest_is_that_of_the_published_vector():
    expected = "sha256:30bdebb6ab2f9796ad8f60fe9fa2d585ff6626d018f5104e1ca92a6836a91b20"
    assert digest_parts(**FACT_FIELDS) == expected
    assert digest_parts(**FACT_FIELDS | {"object_json": '{"lines":[1,2.0],"total":1.25e1}'}) == expected


@pytest.mark.spec("FAC-03")
@pytest.mark.parametrize("field", FACT_FIELDS)
def test_every_field_is_in_the_digest(field):
    assert digest_parts(**FACT_FIELDS | {field: '"other"'}) != digest_parts(**FACT_FIELDS)


@pytest.mark.spec("FAC-08")
def test_ids_are_those_of_the_published_vectors():
    moment = datetime(2026, 3, 6, 8, 10, tzinfo=UTC)
    assert business_id("work_order_created", "WO", "12345") == (
        "dfc93e93947ca1b3f99fa2bdedd61ece51a04b6c19e33f4b6cb5412e4e2efd8b"
    )
    assert business_id("ab", "c") == "601d5476e2ccfe2c87a2bba7a322659734a05749d5b5aa781f513e4912db0d5f"
    assert business_id("a", "bc") == "3fafa1cf2f19a7c1129beb20cf0983f73a489a221fc0dd2f16d1be292d089205"
    assert uuid5_id("plant-a", "WO:12345:created") == "3f2ef916-eda7-5dfb-865d-0d2c7e310258"
    assert uuid5_id(uuid.NAMESPACE_URL, "WO:12345:created") == "afb02b10-0cd5-573c-8e53-797d79be73c7"
    assert event_id("WO", "12345", "created", moment) == (
        "144cc8321b9b4afc3d436a46e596cef95911d2fa762fccf95be9bad1946af417"
    )
    assert event_id("WO", "12345", "created", date(2026, 3, 6)) == (
        "d64cbf086667869d8c54aca4ee5f282175fb98162e75711889513ff4489f51c5"
    )


@pytest.mark.spec("FAC-08")
def test_a_text_namespace_is_the_uuid5_of_that_text():
    inner = uuid.uuid5(uuid.NAMESPACE_DNS, "plant-a")
    assert uuid5_id("plant-a", "x") == uuid5_id(inner, "x") == str(uuid.uuid5(inner, "x"))


@pytest.mark.spec("FAC-08")
def test_one_moment_is_one_id_in_every_time_zone():
    moment = datetime(2026, 3, 6, 8, 10, 0, 5, tzinfo=UTC)
    east = moment.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert event_id("WO", "1", "created", moment) == event_id("WO", "1", "created", east)
    assert event_id("WO", "1", "created", moment) != event_id("WO", "1", "created", moment.replace(microsecond=6))


@pytest.mark.parametrize(
    "make, message",
    [
        (business_id, "at least one field"),
        (lambda: business_id("a", 7), "must be str, not int: 7"),
        (lambda: business_id("\ud800"), "surrogate"),
        (lambda: uuid5_id("plant", None), "must be str, not NoneType: None"),
        (lambda: event_id("a", "b", "c", datetime(2026, 3, 6)), "no time zone"),  # noqa: DTZ001 - that is the point
        (lambda: event_id("a", "b", "c", 1741248600000), "a datetime or a date, not int"),
    ],
)
def test_invalid_fields_of_an_id_are_rejected(make, message):
    with pytest.raises(InvalidFactError, match=message):
        make()
