"""Canonical JSON and digests for any value: one text per value, readable by any JSON parser."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.facts.identity import (
    MAX_SAFE_INTEGER,
    canonical_json,
    canonical_json_of_parsed,
    digest_parts,
    format_float_es,
    parse_strict_json,
)

STRINGS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER) | FLOATS | STRINGS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(STRINGS, inner, max_size=5))

#: Number::toString of ECMAScript: whole or with a point below 10^21 and from 10^-6 on, else one digit and a power.
ECMASCRIPT_NUMBER = re.compile(
    r"-?(0|[1-9]\d{0,20}|(0|[1-9]\d{0,20})\.\d*[1-9]|[1-9](\.\d*[1-9])?e(\+\d+|-\d+))"
).fullmatch


def shuffle_keys(value, random):
    if isinstance(value, dict):
        keys = list(value)
        random.shuffle(keys)
        return {key: shuffle_keys(value[key], random) for key in keys}
    return [shuffle_keys(item, random) for item in value] if isinstance(value, list) else value


def to_floats(value):
    """Return *value* with every number as a float: JSON has one number type."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, dict):
        return {key: to_floats(item) for key, item in value.items()}
    return [to_floats(item) for item in value]


@pytest.mark.spec("FAC-03")
@given(VALUES, st.randoms(use_true_random=False))
def test_key_order_and_whitespace_do_not_change_the_canonical_form(value, random):
    text = json.dumps(shuffle_keys(value, random), indent=1)
    assert canonical_json(parse_strict_json(text)) == canonical_json(value)


#: Where the library's encoder and RFC 8785 differ: astral keys, lone surrogates, powers of ten, fractions of zero.
IRREGULAR_STRINGS = st.sampled_from(
    ["\U0001f600", "\ufb33", "€", "e-5", "10.0", "1.0,", "é", "\x7f", "/", '"', "\\", "\u2028"]
)
IRREGULAR_VALUES = st.recursive(
    LEAVES | IRREGULAR_STRINGS | st.sampled_from([0.0, -0.0, 1.0, 1e15, 1e16, 1e21, 1e-5, 1e-7, 10.05, -3.0]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(STRINGS | IRREGULAR_STRINGS, inner, max_size=5),
)


@pytest.mark.spec("FAC-03")
@given(IRREGULAR_VALUES, st.booleans())
def test_the_fast_path_writes_the_same_canonical_form(value, escaped):
    parsed = parse_strict_json(json.dumps(value, ensure_ascii=escaped))
    assert canonical_json_of_parsed(parsed) == canonical_json(parsed)


@pytest.mark.spec("FAC-03")
@given(VALUES)
def test_any_json_parser_reads_the_same_value(value):
    assert to_floats(json.loads(canonical_json(value))) == to_floats(value)


@pytest.mark.spec("FAC-03")
@given(FLOATS)
def test_a_number_keeps_its_value_and_has_the_form_of_ecmascript(value):
    text = format_float_es(value)
    assert float(text) == value
    assert ECMASCRIPT_NUMBER(text), text
    is_plain = "e" not in text
    assert is_plain == (value == 0 or 1e-6 <= abs(value) < 1e21)


@pytest.mark.spec("FAC-03")
@given(FLOATS)
def test_no_shorter_text_means_the_same_number(value):
    digits = re.sub(r"e.*|[-.]", "", format_float_es(value)).strip("0")
    if len(digits) > 1:
        assert float(f"{value:.{len(digits) - 2}e}") != value or math.isinf(value)


@pytest.mark.spec("FAC-03")
@given(VALUES, VALUES)
def test_only_equal_values_share_a_digest(one, other):
    fields = {"from_zone": "a", "to_zone": "b", "subject": "s", "predicate": "p"}

    def compute_digest(value):
        return digest_parts(**fields, object_json=json.dumps(value))

    assert (compute_digest(one) == compute_digest(other)) == (_to_tagged(one) == _to_tagged(other))


def _to_tagged(value):
    """Return *value* such that 1 and True, which are equal in Python, differ."""
    if isinstance(value, dict):
        return {key: _to_tagged(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_tagged(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return (type(value).__name__, value)
    return ("number", float(value))
